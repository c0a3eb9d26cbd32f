"""Normalising: raw documents in, id-sorted Parquet shards out, every drop counted with a reason."""

import contextlib
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from portolan.data.documents import Stage, shard_of
from portolan.data.engine import Engine
from portolan.data.engine.executors import in_order
from portolan.data.engine.segments import write_index, write_runs
from portolan.data.engine.tasks import Task, build_stage, iterate_tasks, run_tasks
from portolan.data.installed import read_description, read_docstrings, read_topics
from portolan.data.normalized_shards import (
    NOT_CHOSEN,
    SOURCE_DUP,
    SPOOL_ORDER,
    SPOOL_SCHEMA,
    Budget,
    choose_rows,
    merge_shard,
    read_spool,
)
from portolan.data.readers import (
    EMPTY,
    INVALID_UNICODE,
    LICENSE_REFUSED,
    TOO_LONG,
    Drop,
    InputFile,
    RawDocument,
    ReadOptions,
    read_jsonl,
    read_parquet,
    read_records,
    read_text,
)
from portolan.data.sources import MAX_WHITESPACE, Source
from portolan.errors import UsageError

VERSION = 1
INPUT_BYTES_PER_SHARD = 256 << 20
# Tasks of a large source grow, so that the files between the tasks stay few.
TASK_BYTES, LARGE_TASK_BYTES, TASK_FILES = 4 << 20, 128 << 20, 256
TASKS_OF_LARGE_SOURCE = 256
SPOOL_BYTES, SPOOL_ROWS = 16 << 20, 8192
MAX_EXAMPLES = 3
READERS: dict[str, Callable[[InputFile, ReadOptions], Iterator[RawDocument | Drop]]] = {
    "text": read_text,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "huggingface": read_records,
    "docstrings": read_docstrings,
    "topics": read_topics,
    "description": read_description,
}

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
class Reading:
    """How the files of a source become rows: what every task of it needs to know."""

    key: str
    options: ReadOptions
    seed: int
    num_shards: int


class _Tally:
    """What a task read: drops by reason with places, documents with whitespace cut."""

    def __init__(self) -> None:
        self.dropped = Counter[str]()
        self.examples: dict[str, list[str]] = {}
        self.spooled = self.whitespace_cut = 0

    def drop(self, drop: Drop) -> None:
        """Count a drop."""
        self.dropped[drop.reason] += 1
        self.examples.setdefault(drop.reason, []).append(f"{drop.path}#{drop.row}")
        if len(self.examples[drop.reason]) > 64:
            self.examples[drop.reason] = sorted(self.examples[drop.reason])[:MAX_EXAMPLES]


def read_files(
    folder: Path, number: int, files: Sequence[InputFile], reading: Reading, task_bytes: int
) -> dict[str, Any]:
    """The task: read, normalise and spool the documents of some files."""
    tally = _Tally()
    record = write_runs(
        folder,
        number,
        SPOOL_SCHEMA,
        _read_tables(files, reading, tally),
        by=SPOOL_ORDER,
        partitions=reading.num_shards,
        partition_of=lambda table: np.asarray(table["shard"]),
        task_bytes=task_bytes,
    )
    return {
        **record,
        "documents": tally.spooled + tally.dropped.total(),
        "spooled": tally.spooled,
        "dropped": dict(tally.dropped),
        "examples": tally.examples,
        "whitespace_cut": tally.whitespace_cut,
    }


def _read_tables(files: Sequence[InputFile], reading: Reading, tally: _Tally) -> Iterator[pa.Table]:
    reader = READERS[reading.options.kind]
    rows: list[tuple[Any, ...]] = []
    num_bytes = 0
    for file in files:
        for item in reader(file, reading.options):
            row = item if isinstance(item, Drop) else _normalize(item, reading, tally)
            if isinstance(row, Drop):
                tally.drop(row)
                continue
            rows.append(row)
            num_bytes += row[8]
            if num_bytes >= SPOOL_BYTES or len(rows) >= SPOOL_ROWS:
                yield _table(rows)
                rows, num_bytes = [], 0
    if rows:
        yield _table(rows)


def _table(rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    columns = zip(*rows, strict=True)
    arrays = [pa.array(c, f.type) for c, f in zip(columns, SPOOL_SCHEMA, strict=True)]
    return pa.table(arrays, schema=SPOOL_SCHEMA)


def _normalize(document: RawDocument, reading: Reading, tally: _Tally) -> tuple[Any, ...] | Drop:
    text, was_cut = cut_whitespace(document.text)
    if not text or text.isspace():
        return Drop(EMPTY, document.path, document.row)
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        return Drop(INVALID_UNICODE, document.path, document.row)
    if len(encoded) > reading.options.max_document_bytes:
        return Drop(TOO_LONG, document.path, document.row)
    identifier = xxhash.xxh3_128_hexdigest(encoded)
    location = document.path
    if not reading.options.one_document_a_file:
        location = f"{document.path}#{document.row}"
    tally.whitespace_cut += was_cut
    tally.spooled += 1
    return (
        identifier,
        text,
        document.source_id,
        document.license,
        document.path,
        document.row,
        document.extra,
        shard_of(identifier, reading.num_shards),
        len(encoded),
        location_rank(reading.seed, reading.key, location),
        document.content_key,
        tally.spooled - 1,
    )


def plan_tasks(source: Source, reading: Reading, task_bytes: int) -> list[Task]:
    """Cut a source into tasks of about 4 MiB, larger ones if it is larger than 1 GiB.

    The cut depends on the files alone. A capped source of one document a file is read in hash
    order, so that reading may stop early.
    """
    files, largest = list(source.files), TASK_BYTES
    if _stops_early(source):
        files.sort(key=lambda file: (location_rank(reading.seed, source.key, file.path), file.path))
    else:
        num_bytes = sum(file.size for file in files)
        largest = min(max(TASK_BYTES, num_bytes // TASKS_OF_LARGE_SOURCE), LARGE_TASK_BYTES)
    groups: list[list[InputFile]] = []
    size = 0
    for file in files:
        if not groups or size + file.size > largest or len(groups[-1]) >= TASK_FILES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return [
        Task(
            f"read-{number:06d}",
            read_files,
            (number, tuple(group), reading, task_bytes),
            bytes=sum(file.size for file in group),
            identity=hash_lines(file.path for file in group),
        )
        for number, group in enumerate(groups)
    ]


def _stops_early(source: Source) -> bool:
    return source.settings.max_bytes is not None and source.options.one_document_a_file


def hash_lines(lines: Iterable[str]) -> str:
    """XXH3-128 of lines."""
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())


def normalize_stage(source: Source, seed: int) -> Stage:
    """Step of one source: everything that changes its bytes, and no path of this machine."""
    settings, options = source.settings, source.options
    params = {
        "source": source.key,
        "reader": options.kind,
        "content": source.content,
        "files": hash_lines(
            f"{file.path}\0{file.size}\0{file.license or ''}" for file in source.files
        ),
        "refused": hash_lines(file.path for file in source.refused),
        "text_field": options.text_field,
        "id_field": options.id_field,
        "content_key": list(options.content_key),
        "license_field": options.license_field,
        "license_classes": list(options.license_classes),
        "max_bytes": settings.max_bytes,
        "seed": None if settings.max_bytes is None else seed,
        "max_document_bytes": options.max_document_bytes,
        "max_whitespace": MAX_WHITESPACE,
        "input_bytes_per_shard": INPUT_BYTES_PER_SHARD,
    }
    return Stage("normalise", VERSION, params, label=source.key)


def normalize_source(
    engine: Engine, source: Source, seed: int, documents_folder: Path
) -> tuple[Path, dict[str, Any], bool]:
    """Normalise one source into its stage folder, unless that is complete already.

    Returns the folder, its manifest, and whether it was there. Memory: the task budget of the
    engine, and here what `choose_rows` says.

    Raises:
        UsageError: a file is damaged or lacks a column, or nothing remains of the source.
    """
    stage = normalize_stage(source, seed)

    def build(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return _build(engine, stage, source, seed, folder)

    dataset, skipped = build_stage(documents_folder, stage, build)
    return dataset.folder, dict(dataset.manifest), skipped


def _build(
    engine: Engine, stage: Stage, source: Source, seed: int, folder: Path
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    num_bytes = sum(file.size for file in source.files)
    num_shards = max(1, num_bytes // INPUT_BYTES_PER_SHARD)
    reading = Reading(source.key, source.options, seed, num_shards)
    records, num_unread = _read(engine, stage, source, reading, folder)
    dropped = sum((Counter(record["dropped"]) for record in records), Counter[str]())
    dropped[NOT_CHOSEN] += num_unread
    dropped[LICENSE_REFUSED] += len(source.refused) * (source.settings.kind == "installed")
    examples = _merge_examples(source, records)
    num_spooled = [record["spooled"] for record in records]
    num_read = sum(num_spooled) + dropped.total()
    max_bytes, has_key = source.settings.max_bytes, bool(source.options.content_key)
    dropped.update(choose_rows(folder, num_spooled, max_bytes, has_key))
    has_codes = max_bytes is not None or has_key
    merged = _merge(engine, stage, folder, records, num_shards, has_codes)
    counts = sum((Counter(record["counts"]) for record in merged), Counter[str]())
    dropped[SOURCE_DUP] += counts[SOURCE_DUP]
    if not counts["kept"] and source.files:
        shutil.rmtree(folder)
        raise _nothing_left(source, num_read, dropped, examples)
    if source.options.id_field and counts["without_source_id"] == counts["kept"]:
        shutil.rmtree(folder)
        raise UsageError(
            f"source {source.key!r}: no document has the field {source.options.id_field!r}",
            remedy="correct id_field of this source, or remove it",
        )
    fields = {
        "source": source.key,
        "status": "complete" if counts["kept"] else "empty",
        "counts": {
            "read": num_read,
            "dropped": {name: dropped[name] for name in sorted(dropped) if dropped[name]},
            "kept": counts["kept"],
            "kept_text_bytes": counts["kept_text_bytes"],
            "whitespace_cut": sum(record["whitespace_cut"] for record in records),
            "input_files": len(source.files),
            "input_bytes": num_bytes,
        },
        "examples": examples,
    }
    return [file for record in merged for file in record["files"]], fields


def _read(
    engine: Engine, stage: Stage, source: Source, reading: Reading, folder: Path
) -> tuple[list[dict[str, Any]], int]:
    """Records in task order, and the number of files that a full budget left unread."""
    tasks = plan_tasks(source, reading, engine.task_bytes)
    if not _stops_early(source):
        return run_tasks(engine, stage, folder, "read", tasks), 0
    assert source.settings.max_bytes is not None
    budget, records, num_read = Budget(source.settings.max_bytes), [], 0
    with contextlib.closing(iterate_tasks(engine, stage, folder, "read", tasks)) as finished:
        for number, record in enumerate(in_order(finished)):
            records.append(record)
            num_read += len(tasks[number].arguments[1])
            spooled = read_spool(folder, number, ["rank", "path", "num_bytes"])
            for num_bytes in spooled.sort("rank", "path")["num_bytes"]:
                budget.takes(num_bytes)
            if budget.is_full:
                break
    return records, len(source.files) - num_read


def _merge(
    engine: Engine,
    stage: Stage,
    folder: Path,
    records: Sequence[dict[str, Any]],
    num_shards: int,
    has_codes: bool,
) -> list[dict[str, Any]]:
    """Write the shards."""
    rows, num_bytes = write_index(folder, records, num_shards)
    tasks = [
        Task(
            f"write-{shard:05d}",
            merge_shard,
            (shard, num_shards, has_codes, num_bytes[shard], engine.task_bytes),
            rows[shard],
            num_bytes[shard],
        )
        for shard in range(num_shards)
    ]
    return run_tasks(engine, stage, folder, "write", tasks)


def _merge_examples(source: Source, records: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    merged: dict[str, list[str]] = {}
    for record in records:
        for reason, places in record["examples"].items():
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
