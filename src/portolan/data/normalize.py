"""Normalising: raw documents in, id-sorted Parquet shards out, every drop counted with a reason."""

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from portolan.data.documents import (
    DOCUMENT_SCHEMA,
    Stage,
    row_group_bounds,
    run_stage,
    shard_name,
    shard_of,
    write_shard,
)
from portolan.data.installed import read_description, read_docstrings, read_topics
from portolan.data.readers import (
    EMPTY,
    INVALID_UNICODE,
    TOO_LONG,
    Drop,
    InputFile,
    RawDocument,
    ReadOptions,
    read_jsonl,
    read_parquet,
    read_text,
)
from portolan.data.sources import MAX_WHITESPACE, Source
from portolan.data.workers import WorkerPool
from portolan.errors import UsageError

VERSION = 1
INPUT_BYTES_PER_SHARD = 256 << 20
TASK_BYTES, TASK_FILES = 4 << 20, 256
SPOOL_BYTES, SPOOL_ROWS = 16 << 20, 8192
MAX_EXAMPLES = 3
NOT_CHOSEN, CONTENT_KEY_DUP, SOURCE_DUP = "not_chosen", "content_key_dup", "source_dup"
LICENSE_REFUSED = "license_refused"
READERS: dict[str, Callable[[InputFile, ReadOptions], Iterator[RawDocument | Drop]]] = {
    "text": read_text,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "docstrings": read_docstrings,
    "topics": read_topics,
    "description": read_description,
}

SPOOL_SCHEMA = pa.schema(
    [
        *DOCUMENT_SCHEMA,
        pa.field("shard", pa.int32()),
        pa.field("num_bytes", pa.int64()),
        pa.field("rank", pa.uint64()),
        pa.field("content_key", pa.string()),
    ]
)
DUPLICATE_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("source_id", pa.string()),
        pa.field("path", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
    ]
)
# A run of more than 128 characters covers at least 16 of every 8th character.
_SAMPLED_RUN = re.compile(r"\s{16}")
_LONG_RUN = re.compile(rf"(\s{{{MAX_WHITESPACE}}})\s+")


def cut_whitespace(text: str) -> tuple[str, bool]:
    """Cut every whitespace run (`str.isspace`) over 128 characters to its first 128.

    128 is the longest run that the Llama 3 tokenizer folds into one token; runs of megabytes stop
    tokenizers (marin-community/marin issue 4588).
    """
    if len(text) <= MAX_WHITESPACE or not _SAMPLED_RUN.search(text[:: MAX_WHITESPACE // 16]):
        return text, False
    shorter = _LONG_RUN.sub(r"\1", text)
    return shorter, len(shorter) != len(text)


def location_rank(seed: int, key: str, location: str) -> int:
    """XXH3-64 of `seed:source:location`: the order in which a capped source takes documents."""
    return xxhash.xxh3_64_intdigest(f"{seed}:{key}:{location}".encode())


@dataclass(frozen=True)
class Task:
    """Some files of a source, read by one worker into one spool file."""

    index: int
    files: tuple[InputFile, ...]
    key: str
    options: ReadOptions
    seed: int
    num_shards: int
    spool: str


@dataclass
class TaskResult:
    """What a task read: drops by reason with places, documents cut, and sizes in bytes by rank."""

    spool: str
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    whitespace_cut: int = 0
    sizes: list[tuple[int, int]] = field(default_factory=list)

    def drop(self, drop: Drop) -> None:
        """Count a drop."""
        self.dropped[drop.reason] += 1
        self.examples.setdefault(drop.reason, []).append(f"{drop.path}#{drop.row}")
        if len(self.examples[drop.reason]) > 64:
            self.examples[drop.reason] = sorted(self.examples[drop.reason])[:MAX_EXAMPLES]


def normalize_task(task: Task) -> TaskResult:
    """Read, normalise and spool the documents of a task. Holds at most about 32 MiB of text."""
    result, reader = TaskResult(task.spool), READERS[task.options.kind]
    rows: list[tuple[Any, ...]] = []
    spooled_bytes = 0
    with pa.OSFile(task.spool, "wb") as sink, pa.ipc.new_file(sink, SPOOL_SCHEMA) as writer:
        for file in task.files:
            for item in reader(file, task.options):
                row = item if isinstance(item, Drop) else _normalize(item, task, result)
                if isinstance(row, Drop):
                    result.drop(row)
                    continue
                rows.append(row)
                spooled_bytes += row[8]
                if spooled_bytes >= SPOOL_BYTES or len(rows) >= SPOOL_ROWS:
                    _flush(writer, rows)
                    spooled_bytes = 0
        _flush(writer, rows)
    return result


def _normalize(document: RawDocument, task: Task, result: TaskResult) -> tuple[Any, ...] | Drop:
    text, was_cut = cut_whitespace(document.text)
    if not text or text.isspace():
        return Drop(EMPTY, document.path, document.row)
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        return Drop(INVALID_UNICODE, document.path, document.row)
    if len(encoded) > task.options.max_document_bytes:
        return Drop(TOO_LONG, document.path, document.row)
    identifier = xxhash.xxh3_128_hexdigest(encoded)
    location = document.path
    if not task.options.one_document_a_file:
        location = f"{document.path}#{document.row}"
    rank = location_rank(task.seed, task.key, location)
    result.whitespace_cut += was_cut
    result.sizes.append((rank, len(encoded)))
    return (
        identifier,
        text,
        document.source_id,
        document.license,
        document.path,
        document.row,
        document.extra,
        shard_of(identifier, task.num_shards),
        len(encoded),
        rank,
        document.content_key,
    )


def _flush(writer: Any, rows: list[tuple[Any, ...]]) -> None:
    """Write one record batch a shard, so that a shard can be read back without the others."""
    by_shard: dict[int, list[tuple[Any, ...]]] = {}
    for row in rows:
        by_shard.setdefault(row[7], []).append(row)
    for shard in sorted(by_shard):
        columns = zip(*by_shard[shard], strict=True)
        arrays = [pa.array(c, f.type) for c, f in zip(columns, SPOOL_SCHEMA, strict=True)]
        writer.write_batch(pa.record_batch(arrays, schema=SPOOL_SCHEMA))
    rows.clear()


class Budget:
    """Greedy choice in hash order: takes what still fits, full at 99 % of the bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.used = max_bytes, 0

    @property
    def is_full(self) -> bool:
        """True when so little is left that looking on would only favour short documents."""
        return self.used * 100 >= self.max_bytes * 99

    def takes(self, num_bytes: int) -> bool:
        """Take a document if it fits."""
        if self.is_full or self.used + num_bytes > self.max_bytes:
            return False
        self.used += num_bytes
        return True


def plan_tasks(source: Source, seed: int, num_shards: int, spool: Path) -> list[Task]:
    """Cut a source into tasks of about 4 MiB, independent of the number of workers.

    A capped source of one document a file is read in hash order, so that reading may stop early.
    """
    files = list(source.files)
    if source.settings.max_bytes is not None and source.options.one_document_a_file:
        files.sort(key=lambda file: (location_rank(seed, source.key, file.path), file.path))
    groups: list[list[InputFile]] = []
    size = 0
    for file in files:
        if not groups or size + file.size > TASK_BYTES or len(groups[-1]) >= TASK_FILES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return [
        Task(
            index,
            tuple(group),
            source.key,
            source.options,
            seed,
            num_shards,
            str(spool / f"task-{index:06d}.arrow"),
        )
        for index, group in enumerate(groups)
    ]


def hash_lines(lines: Iterable[str]) -> str:
    """XXH3-128 of lines."""
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())


def normalize_stage(source: Source, seed: int) -> Stage:
    """Step of one source: everything that changes its bytes, and no path of this machine."""
    settings, options = source.settings, source.options
    params = {
        "source": source.key,
        "reader": options.kind,
        "revision": source.revision,
        "files": hash_lines(
            f"{file.path}\0{file.size}\0{file.license or ''}" for file in source.files
        ),
        "refused": hash_lines(file.path for file in source.refused),
        "text_field": options.text_field,
        "id_field": options.id_field,
        "content_key": list(options.content_key),
        "max_bytes": settings.max_bytes,
        "seed": None if settings.max_bytes is None else seed,
        "max_document_bytes": options.max_document_bytes,
        "max_whitespace": MAX_WHITESPACE,
        "input_bytes_per_shard": INPUT_BYTES_PER_SHARD,
    }
    return Stage("normalise", VERSION, params, label=source.key)


def normalize_source(
    source: Source, seed: int, documents_folder: Path, workers: WorkerPool
) -> tuple[Path, dict[str, Any], bool]:
    """Normalise one source into its stage folder, unless that is complete already.

    Returns the folder, its manifest, and whether it was there. Memory: tasks in flight, then an
    index of the source (about 150 bytes a document) and one row group.

    Raises:
        UsageError: a file is damaged or lacks a column, or nothing remains of the source.
    """

    def build(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return _build(source, seed, folder, workers)

    return run_stage(documents_folder, normalize_stage(source, seed), build)


def _build(
    source: Source, seed: int, folder: Path, workers: WorkerPool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    num_shards = max(1, sum(file.size for file in source.files) // INPUT_BYTES_PER_SHARD)
    spool = folder / "spool"
    spool.mkdir()
    tasks = plan_tasks(source, seed, num_shards, spool)
    results, num_unread = _run_tasks(source, tasks, workers)
    dropped = sum((result.dropped for result in results), Counter())
    dropped[NOT_CHOSEN] += num_unread
    dropped[LICENSE_REFUSED] += len(source.refused) * (source.settings.kind == "installed")
    examples = _merge_examples(source, results)
    index = read_index([result.spool for result in results])
    num_read = index.height + sum(dropped.values())
    index, duplicates = reduce_index(index, source.settings.max_bytes, dropped)
    if not index.height and source.files:
        raise _nothing_left(source, num_read, dropped, examples)
    if source.options.id_field and index["source_id"].null_count() == index.height:
        raise UsageError(
            f"source {source.key!r}: no document has the field {source.options.id_field!r}",
            remedy="correct id_field of this source, or remove it",
        )
    shards = _write_shards(folder, index, duplicates, [r.spool for r in results], num_shards)
    shutil.rmtree(spool)
    fields = {
        "source": source.key,
        "status": "complete" if index.height else "empty",
        "counts": {
            "read": num_read,
            "dropped": {name: dropped[name] for name in sorted(dropped) if dropped[name]},
            "kept": index.height,
            "kept_text_bytes": int(index["num_bytes"].sum()),
            "whitespace_cut": sum(result.whitespace_cut for result in results),
            "input_files": len(source.files),
            "input_bytes": sum(file.size for file in source.files),
        },
        "examples": examples,
    }
    return shards, fields


def _run_tasks(
    source: Source, tasks: Sequence[Task], workers: WorkerPool
) -> tuple[list[TaskResult], int]:
    """Results in task order, and the number of files that a full budget left unread."""
    max_bytes = source.settings.max_bytes
    if max_bytes is None or not source.options.one_document_a_file:
        return list(workers.map(normalize_task, tasks)), 0
    budget, results, num_read = Budget(max_bytes), [], 0
    for task, result in zip(tasks, workers.map(normalize_task, tasks), strict=False):
        results.append(result)
        num_read += len(task.files)
        for _, num_bytes in result.sizes:
            budget.takes(num_bytes)
        if budget.is_full:
            break
    return results, len(source.files) - num_read


def _merge_examples(source: Source, results: Sequence[TaskResult]) -> dict[str, list[str]]:
    merged: dict[str, list[str]] = {}
    for result in results:
        for reason, places in result.examples.items():
            merged.setdefault(reason, []).extend(places)
    if source.refused and source.settings.kind == "installed":
        merged[LICENSE_REFUSED] = [f"{file.path}#0" for file in source.refused]
    return {reason: sorted(merged[reason])[:MAX_EXAMPLES] for reason in sorted(merged)}


def _nothing_left(
    source: Source, num_read: int, dropped: Counter[str], examples: dict[str, list[str]]
) -> UsageError:
    reasons = ", ".join(f"{dropped[name]} {name}" for name in sorted(dropped) if dropped[name])
    places = next((place for name in sorted(examples) for place in examples[name]), "")
    return UsageError(
        f"source {source.key!r}: nothing remains of {num_read} documents ({reasons or 'none read'}"
        + (f"; for example {places})" if places else ")"),
        remedy="check path, kind and text_field of this source; max_document_bytes or max_bytes "
        "may be too small for it",
    )


def read_index(spools: Sequence[str]) -> Any:
    """Table of every spooled document without its text, with the place of its row in the spools."""
    import polars

    columns = [name for name in SPOOL_SCHEMA.names if name not in ("text", "license", "extra")]
    schema = pa.schema(
        [SPOOL_SCHEMA.field(name) for name in columns]
        + [pa.field("batch", pa.int32()), pa.field("position", pa.int32())]
    )
    batches: list[pa.RecordBatch] = []
    for spool in spools:
        with pa.memory_map(spool) as source, pa.ipc.open_file(source) as file:
            for number in range(file.num_record_batches):
                batch = file.get_batch(number).select(columns)
                place = np.full(len(batch), len(batches), np.int32)
                position = np.arange(len(batch), dtype=np.int32)
                arrays = [*batch.columns, pa.array(place), pa.array(position)]
                batches.append(pa.record_batch(arrays, schema=schema))
    return polars.DataFrame(polars.from_arrow(pa.Table.from_batches(batches, schema)))


def reduce_index(index: Any, max_bytes: int | None, dropped: Counter[str]) -> tuple[Any, Any]:
    """Apply the byte cap, then one row a content key, then one row an id; count what goes.

    Of equal rows the first by (path, row) stays. Returns the kept rows sorted by shard and id, and
    the duplicates.
    """
    import polars

    if max_bytes is not None:
        index = index.sort("rank", "path", "row")
        budget = Budget(max_bytes)
        taken = [budget.takes(num_bytes) for num_bytes in index["num_bytes"]]
        dropped[NOT_CHOSEN] += len(taken) - sum(taken)
        index = index.filter(polars.Series(taken, dtype=polars.Boolean))
    index = index.sort("path", "row")
    unkeyed = polars.col("content_key").is_null()
    first_of_key = unkeyed | polars.col("content_key").is_first_distinct()
    key_duplicates = index.filter(~first_of_key).with_columns(reason=polars.lit(CONTENT_KEY_DUP))
    index = index.filter(first_of_key).sort("shard", "id", "path", "row")
    first_of_id = polars.col("id").is_first_distinct()
    id_duplicates = index.filter(~first_of_id).with_columns(reason=polars.lit(SOURCE_DUP))
    dropped[CONTENT_KEY_DUP] += key_duplicates.height
    dropped[SOURCE_DUP] += id_duplicates.height
    duplicates = polars.concat([key_duplicates, id_duplicates]).sort("shard", "id", "path", "row")
    return index.filter(first_of_id), duplicates


def _write_shards(
    folder: Path, index: Any, duplicates: Any, spools: Sequence[str], num_shards: int
) -> list[dict[str, Any]]:
    import polars

    with SpoolReader(spools) as reader:
        shards = []
        for shard in range(num_shards):
            name = shard_name(shard, num_shards)
            rows = index.filter(polars.col("shard") == shard)
            shards.append(write_shard(folder, name, DOCUMENT_SCHEMA, reader.tables(rows)))
            lost = duplicates.filter(polars.col("shard") == shard)
            table = lost.select(DUPLICATE_SCHEMA.names).to_arrow(
                compat_level=polars.CompatLevel.oldest()
            )
            groups = (table.slice(begin, 8192) for begin in range(0, len(table), 8192))
            shards.append(write_shard(folder, f"dups/{name}", DUPLICATE_SCHEMA, groups))
    return shards


class SpoolReader:
    """Random access to spooled documents through memory maps."""

    def __init__(self, spools: Sequence[str]) -> None:
        self.files = [pa.ipc.open_file(pa.memory_map(spool)) for spool in spools]
        self.places = [
            (file, number) for file in self.files for number in range(file.num_record_batches)
        ]

    def __enter__(self) -> "SpoolReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.places.clear()
        self.files.clear()

    def tables(self, rows: Any) -> Iterator[pa.Table]:
        """Documents of `rows` in their order, a row group at a time."""
        batches, positions = rows["batch"].to_numpy(), rows["position"].to_numpy()
        for begin, end in row_group_bounds(rows["num_bytes"].to_numpy()):
            wanted, places = batches[begin:end], positions[begin:end]
            order = np.argsort(wanted, kind="stable")
            pieces = []
            for number in np.unique(wanted):
                file, local = self.places[number]
                batch = file.get_batch(local).select(DOCUMENT_SCHEMA.names)
                chosen = pa.array(places[order][wanted[order] == number])
                pieces.append(pa.Table.from_batches([batch.take(chosen)]))
            table = pa.concat_tables(pieces).combine_chunks()
            back = np.empty(len(order), np.int64)
            back[order] = np.arange(len(order))
            yield table.take(pa.array(back)).cast(DOCUMENT_SCHEMA)
