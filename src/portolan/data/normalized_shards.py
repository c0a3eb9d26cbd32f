"""From spooled documents to shards: the byte cap, content keys and equal ids inside a source."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from portolan.data.documents import (
    DOCUMENT_SCHEMA,
    ROW_GROUP_DOCUMENTS,
    WORK,
    ShardWriter,
    shard_name,
    write_shard,
)
from portolan.data.engine.exchange import partition_of
from portolan.data.engine.segments import merge_partition, segments_name
from portolan.data.engine.streams import rebatch

NOT_CHOSEN, CONTENT_KEY_DUP, SOURCE_DUP = "not_chosen", "content_key_dup", "source_dup"
KEYS_PER_PASS = 4_000_000
KEPT_ROW, UNCHOSEN_ROW, KEY_DUP_ROW = range(3)
# Of equal ids the first in this order stays.
SPOOL_ORDER = ("id", "path", "row")
SPOOL_SCHEMA = pa.schema(
    [
        *DOCUMENT_SCHEMA,
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("num_bytes", pa.int64(), nullable=False),
        pa.field("rank", pa.uint64(), nullable=False),
        pa.field("content_key", pa.string()),
        pa.field("number", pa.int32(), nullable=False),
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


def read_spool(folder: Path, number: int, columns: Sequence[str]) -> Any:
    """Some columns of all documents that a task spooled, without reading the others."""
    import polars

    indices = sorted(SPOOL_SCHEMA.get_field_index(name) for name in columns)
    options = pa.ipc.IpcReadOptions(included_fields=indices)
    with (
        pa.OSFile(str(folder / segments_name(number)), "rb") as source,
        pa.ipc.open_file(source, options=options) as file,
    ):
        return polars.DataFrame(polars.from_arrow(file.read_all()))


def choose_rows(
    folder: Path, num_spooled: Sequence[int], max_bytes: int | None, has_content_key: bool
) -> Counter[str]:
    """Decide which spooled rows the byte cap leaves out and which repeat a content key.

    `num_spooled` counts the rows of each task. Of rows with one content key the first by (path,
    row) stays. Writes a code for each row, uint8, beside the spool and counts the drops. Memory:
    one byte a document; about 100 bytes a document of a capped source, or of 4 million keys.
    """
    import polars

    codes = [np.full(rows, KEPT_ROW, np.uint8) for rows in num_spooled]
    dropped = Counter[str]()
    if max_bytes is not None:
        frame = _read_all(folder, codes, ["rank", "path", "row", "num_bytes", "number"])
        frame = frame.sort("rank", "path", "row")
        budget = Budget(max_bytes)
        taken = [budget.takes(num_bytes) for num_bytes in frame["num_bytes"]]
        frame = frame.filter(~polars.Series(taken, dtype=polars.Boolean))
        dropped[NOT_CHOSEN] += _mark(codes, frame, UNCHOSEN_ROW)
    if has_content_key:
        num_passes = 1 + sum(num_spooled) // KEYS_PER_PASS
        for number in range(num_passes):
            columns = ["path", "row", "content_key", "number"]
            frame = _read_all(folder, codes, columns, (number, num_passes))
            first = polars.col("content_key").is_first_distinct()
            dropped[CONTENT_KEY_DUP] += _mark(
                codes, frame.sort("path", "row").filter(~first), KEY_DUP_ROW
            )
    if max_bytes is not None or has_content_key:
        for number, code in enumerate(codes):
            with _codes_path(folder, number).open("wb") as file:
                np.save(file, code)
    return dropped


def _read_all(
    folder: Path,
    codes: Sequence[np.ndarray],
    columns: Sequence[str],
    keys: tuple[int, int] | None = None,
) -> Any:
    """Kept rows of all tasks; `keys` = (p, n) asks for the p-th of n sets of content keys."""
    import polars

    frames = []
    for file, code in enumerate(codes):
        frame = read_spool(folder, file, columns).with_columns(file=polars.lit(file, polars.Int32))
        keep = code[frame["number"].to_numpy()] == KEPT_ROW
        frame = frame.filter(polars.Series(keep, dtype=polars.Boolean))
        if keys is not None:
            frame = frame.filter(polars.col("content_key").is_not_null())
            values = frame["content_key"].to_arrow().cast(pa.string())
            within = partition_of(values, keys[1]) == keys[0]
            frame = frame.filter(polars.Series(within, dtype=polars.Boolean))
        frames.append(frame)
    return polars.concat(frames)


def _mark(codes: Sequence[np.ndarray], frame: Any, code: int) -> int:
    """Set the code of the rows of a frame; return their number."""
    for (file,), rows in frame.group_by("file"):
        codes[file][rows["number"].to_numpy()] = code
    return frame.height


def _codes_path(folder: Path, number: int) -> Path:
    return folder / WORK / f"codes-{number:06d}.npy"


def merge_shard(
    folder: Path, shard: int, num_shards: int, has_codes: bool, num_bytes: int, task_bytes: int
) -> dict[str, Any]:
    """The task: write the documents of one shard, and its duplicates under `dups/`."""
    name = shard_name(shard, num_shards)
    counts = Counter[str]()
    tables = merge_partition(
        folder,
        shard,
        by=SPOOL_ORDER,
        num_bytes=num_bytes,
        task_bytes=task_bytes,
        prepare=partial(_add_codes, folder, has_codes),
    )
    duplicates = _DuplicateWriter(folder, f"dups/{name}")
    try:
        kept = rebatch(_first_of_ids(tables, duplicates, counts), sizes=_text_bytes)
        entry = write_shard(folder, name, DOCUMENT_SCHEMA, kept)
        return {"files": [entry, duplicates.close()], "counts": dict(counts)}
    except BaseException:
        duplicates.writer.discard()
        raise


def _text_bytes(table: pa.Table) -> np.ndarray:
    return np.asarray(pc.binary_length(table["text"]))  # pyright: ignore


def _add_codes(folder: Path, has_codes: bool, number: int, table: pa.Table) -> pa.Table:
    """Add the codes of the rows that a task spooled, and drop what the byte cap left out."""
    if not has_codes:
        return table.append_column("code", pa.array(np.full(table.num_rows, KEPT_ROW, np.uint8)))
    codes = np.load(_codes_path(folder, number), mmap_mode="r")[np.asarray(table["number"])]
    table = table.append_column("code", pa.array(codes))
    return table.filter(pa.array(codes != UNCHOSEN_ROW))


def _first_of_ids(
    tables: Iterable[pa.Table], duplicates: "_DuplicateWriter", counts: Counter[str]
) -> Iterator[pa.Table]:
    """The first row of every id, of those whose content key is not a repetition."""
    previous = None
    for table in tables:
        codes = np.asarray(table["code"])
        places = np.flatnonzero(codes == KEPT_ROW)
        ids = table["id"].take(pa.array(places)).combine_chunks()
        if len(ids):
            repeated = np.empty(len(ids), bool)
            repeated[0] = ids[0].as_py() == previous
            repeated[1:] = np.asarray(pc.equal(ids[1:], ids[:-1]))  # pyright: ignore
            previous, places = ids[-1].as_py(), places[~repeated]
        if len(places) < table.num_rows:
            kept = np.zeros(table.num_rows, bool)
            kept[places] = True
            reasons = np.where(codes == KEY_DUP_ROW, CONTENT_KEY_DUP, SOURCE_DUP)[~kept]
            lost = table.filter(pa.array(~kept))
            duplicates.add(lost.append_column("reason", pa.array(reasons, pa.string())))
            counts[SOURCE_DUP] += int((reasons == SOURCE_DUP).sum())
            table = table.filter(pa.array(kept))
        counts["kept"] += table.num_rows
        counts["kept_text_bytes"] += int(_text_bytes(table).sum())
        counts["without_source_id"] += table["source_id"].null_count
        yield table.select(DOCUMENT_SCHEMA.names).cast(DOCUMENT_SCHEMA)


class _DuplicateWriter:
    """Takes duplicates as they come and writes them in groups of 8,192."""

    def __init__(self, folder: Path, name: str) -> None:
        self.writer = ShardWriter(folder, name, DUPLICATE_SCHEMA)
        self.rest = DUPLICATE_SCHEMA.empty_table()

    def add(self, table: pa.Table) -> None:
        table = table.select(DUPLICATE_SCHEMA.names).cast(DUPLICATE_SCHEMA)
        self.rest = pa.concat_tables([self.rest, table])
        while self.rest.num_rows >= ROW_GROUP_DOCUMENTS:
            self.writer.write(self.rest.slice(0, ROW_GROUP_DOCUMENTS).combine_chunks())
            self.rest = self.rest.slice(ROW_GROUP_DOCUMENTS)

    def close(self) -> dict[str, Any]:
        if self.rest.num_rows:
            self.writer.write(self.rest.combine_chunks())
        return self.writer.close()
