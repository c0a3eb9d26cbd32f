"""Stage folders: Parquet shards, their digests, and the manifest that makes a stage complete."""

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from portolan.canonical import step_key
from portolan.files import PARTIAL_SUFFIX, fsync_directory, read_json, sha256_file, storage_errors

MANIFEST = "manifest.json"
ROW_GROUP_DOCUMENTS = 8192
ROW_GROUP_TEXT_BYTES = 64 << 20
COMPLETE, EMPTY, FAILED = "complete", "empty", "failed"
# Records of finished tasks and what they hand on, inside the partial folder of a resumable stage.
WORK = ".work"

DOCUMENT_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("source_id", pa.string()),
        pa.field("license", pa.string()),
        pa.field("path", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("extra", pa.string()),
    ]
)


def document_id(text: str) -> str:
    """XXH3-128 of the UTF-8 bytes of normalised text, 32 lower-case hex digits."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def shard_of(identifier: str, num_shards: int) -> int:
    """Shard of a document: floor(hi64(id) * M / 2^64), so ids rise from shard to shard."""
    return (int(identifier[:16], 16) * num_shards) >> 64


def shard_name(index: int, num_shards: int) -> str:
    """File name of shard `index` of `num_shards`."""
    return f"part-{index:05d}-of-{num_shards:05d}.parquet"


def source_folder_name(key: str) -> str:
    """Folder name of a source: `~` stands for `/`, which no key can hold."""
    return key.replace("/", "~")


class _ColumnDigest:
    """Running hashes of one column, and of its children if it is nested."""

    def __init__(self, kind: pa.DataType) -> None:
        self.states = [xxhash.xxh3_128() for _ in range(3)]
        fields = [kind.field(index) for index in range(kind.num_fields)]
        self.children = [_ColumnDigest(field.type) for field in fields]

    def update(self, chunk: Any) -> None:
        """Add the values of an Arrow array."""
        validity, lengths, values = self.states
        validity.update(np.asarray(chunk.is_valid().cast(pa.uint8())).tobytes())
        kind = chunk.type
        if pa.types.is_struct(kind):
            for child, column in zip(self.children, chunk.flatten(), strict=True):
                child.update(column)
        elif pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
            counts = pc.list_value_length(chunk).fill_null(0).cast(pa.int64())  # pyright: ignore
            lengths.update(np.asarray(counts).tobytes())
            self.children[0].update(pc.list_flatten(chunk))  # pyright: ignore
        elif _has_bytes(kind):
            if pa.types.is_fixed_size_binary(kind):
                chunk = chunk.cast(pa.binary())
            filled = chunk.fill_null("" if pa.types.is_string(kind) else b"")
            counts = pc.binary_length(filled).cast(pa.int64())  # pyright: ignore
            lengths.update(np.asarray(counts).tobytes())
            offsets = np.frombuffer(filled.buffers()[1], np.int32)
            begin, end = offsets[filled.offset], offsets[filled.offset + len(filled)]
            if end > begin:
                values.update(memoryview(filled.buffers()[2])[begin:end])
        else:
            filled = chunk.cast(pa.uint8()) if pa.types.is_boolean(kind) else chunk
            values.update(np.asarray(filled.fill_null(0)).tobytes())

    def parts(self) -> Iterator[bytes]:
        """Digests of the states, those of the children last."""
        yield from (state.digest() for state in self.states)
        for child in self.children:
            yield from child.parts()


def _has_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_string(kind) or types.is_binary(kind) or types.is_fixed_size_binary(kind)


class TableDigest:
    """XXH3-128 over the Arrow column buffers of a table in a fixed schema.

    Per column three running hashes: validity (a byte a row), lengths of strings and lists (int64
    little-endian), values (bytes or fixed-width little-endian; null counts as empty or zero); then
    those of its children. The result does not depend on batches, offsets or dictionary encoding.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.columns = [_ColumnDigest(field.type) for field in schema]

    def update(self, table: pa.Table) -> None:
        """Add the rows of `table`, whose columns are those of the schema in order."""
        for column, name in zip(self.columns, self.schema.names, strict=True):
            for chunk in table.column(name).chunks:
                column.update(chunk)

    def hexdigest(self) -> str:
        """Digest of everything so far, 32 hex digits."""
        total = xxhash.xxh3_128(
            ";".join(f"{field.name}:{field.type}" for field in self.schema).encode()
        )
        for column in self.columns:
            for part in column.parts():
                total.update(part)
        return total.hexdigest()


class ShardWriter:
    """Writes one Parquet shard with settings that make its bytes a function of its rows.

    The file has a hidden name until it is whole: two writers of one shard cannot mix their bytes.
    """

    def __init__(self, folder: Path, name: str, schema: pa.Schema) -> None:
        self.path, self.name, self.schema = folder / name, name, schema
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.partial = hidden_path(self.path)
        self.digest, self.num_rows, self.text_bytes = TableDigest(schema), 0, 0
        self.writer = pq.ParquetWriter(
            self.partial,
            schema,
            compression="zstd",
            compression_level=3,
            use_dictionary=[name for name in ("license",) if name in schema.names],  # pyright: ignore
            write_statistics=["id"],  # pyright: ignore
            version="2.6",
            data_page_version="1.0",
            data_page_size=1 << 20,
        )

    def write(self, table: pa.Table) -> None:
        """Write one row group."""
        # Page boundaries depend on chunks: one chunk, so that they depend on the rows alone.
        table = table.select(self.schema.names).cast(self.schema).combine_chunks()
        self.digest.update(table)
        self.num_rows += table.num_rows
        if "text" in self.schema.names:
            self.text_bytes += pc.sum(pc.binary_length(table["text"])).as_py() or 0  # pyright: ignore
        self.writer.write_table(table, row_group_size=max(1, table.num_rows))

    def close(self) -> dict[str, Any]:
        """Finish the file, make it durable, return its manifest entry."""
        self.writer.close()
        with self.partial.open("rb") as file:
            os.fsync(file.fileno())
        self.partial.replace(self.path)
        return {
            "name": self.name,
            "rows": self.num_rows,
            "bytes": self.path.stat().st_size,
            "text_bytes": self.text_bytes,
            "sha256": sha256_file(self.path),
            "digest": self.digest.hexdigest(),
            "status": COMPLETE if self.num_rows else EMPTY,
        }

    def discard(self) -> None:
        """Remove what was written of a shard that will not be finished."""
        with contextlib.suppress(Exception):
            self.writer.close()
        self.partial.unlink(missing_ok=True)


def hidden_path(path: Path) -> Path:
    """A name beside `path` that no other process uses and that `remove_partial` knows."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}{PARTIAL_SUFFIX}")


def write_shard(
    folder: Path, name: str, schema: pa.Schema, tables: Iterable[pa.Table]
) -> dict[str, Any]:
    """Write a whole shard, a row group a table, and return its manifest entry."""
    writer = ShardWriter(folder, name, schema)
    try:
        for table in tables:
            if table.num_rows:
                writer.write(table)
        return writer.close()
    except BaseException:
        writer.discard()
        raise


def row_group_bounds(
    text_bytes: np.ndarray, max_bytes: int = ROW_GROUP_TEXT_BYTES
) -> list[tuple[int, int]]:
    """Cut rows with text lengths int64[n] into groups of at most 8,192 rows and 64 MiB of text."""
    bounds, begin = [], 0
    cumulative = np.concatenate([[0], np.cumsum(text_bytes)])
    while begin < len(text_bytes):
        limit = cumulative[begin] + max_bytes
        end = int(np.searchsorted(cumulative, limit, side="right")) - 1
        end = min(max(end, begin + 1), begin + ROW_GROUP_DOCUMENTS, len(text_bytes))
        bounds.append((begin, end))
        begin = end
    return bounds


def read_tables(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """The row groups of a shard, one after the other."""
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, columns=None if columns is None else list(columns))


@dataclass(frozen=True)
class Stage:
    """Identity of a step: what decides its bytes, and nothing else."""

    name: str
    version: int
    params: Mapping[str, Any]
    inputs: tuple[str, ...] = ()
    label: str = ""
    key: str = field(init=False)

    def __post_init__(self) -> None:
        key = step_key(self.name, self.version, dict(self.params), list(self.inputs))
        object.__setattr__(self, "key", key)

    @property
    def folder_name(self) -> str:
        """`label_key`."""
        return f"{source_folder_name(self.label or self.name)}_{self.key}"


def open_stage(folder: Path, key: str) -> dict[str, Any] | None:
    """Manifest of a complete stage, or None if it is missing, another's, or lacks a shard."""
    try:
        manifest = read_json(folder / MANIFEST)
        if manifest["key"] != key:
            return None
        for shard in manifest["shards"]:
            if shard.get("status") == FAILED:
                return None
            if (folder / shard["name"]).stat().st_size != shard["bytes"]:
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest


def check_shards(folder: Path) -> list[str]:
    """Names of shards whose SHA-256 differs from the manifest or that are missing."""
    damaged = []
    for shard in read_json(folder / MANIFEST)["shards"]:
        path = folder / shard["name"]
        if not path.is_file() or sha256_file(path) != shard["sha256"]:
            damaged.append(shard["name"])
    return damaged


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def run_stage(
    parent: Path,
    stage: Stage,
    build: Callable[[Path], tuple[list[dict[str, Any]], dict[str, Any]]],
    *,
    resumable: bool = False,
) -> tuple[Path, dict[str, Any], bool]:
    """Run `build(folder)` unless its result exists; return folder, manifest, whether it was there.

    The folder is built beside its place under a hidden name and renamed last, so a process killed
    at any moment leaves nothing that a second run would trust. `build` returns the shard entries
    and further fields of the manifest. A resumable build finds in its folder what an earlier run
    left there, keeps its records under `WORK`, and decides itself what of it is whole. The folder
    is absolute: tasks may read it in a process with another current folder.
    """
    parent = parent.absolute()
    final = parent / stage.folder_name
    if (manifest := open_stage(final, stage.key)) is not None:
        return final, manifest, True
    with storage_errors(parent):
        partial = parent / f".{stage.folder_name}{PARTIAL_SUFFIX}"
        if not resumable:
            shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True, exist_ok=True)
        try:
            if (manifest := open_stage(partial, stage.key)) is None:
                shards, fields = build(partial)
                manifest = {**stage_fields(stage), "shards": shards, **fields}
                for directory in {(partial / shard["name"]).parent for shard in shards}:
                    fsync_directory(directory)
                _write_durably(partial / MANIFEST, manifest_bytes(manifest))
            shutil.rmtree(partial / WORK, ignore_errors=True)
            fsync_directory(partial)
            if final.exists():
                shutil.rmtree(final)
            partial.replace(final)
            fsync_directory(parent)
        except BaseException:
            if not resumable:
                shutil.rmtree(partial, ignore_errors=True)
            raise
    return final, manifest, False


def stage_fields(stage: Stage) -> dict[str, Any]:
    """What the manifest of a stage says about its identity."""
    return {
        "name": stage.name,
        "version": stage.version,
        "key": stage.key,
        "label": stage.label or stage.name,
        "params": dict(stage.params),
        "inputs": list(stage.inputs),
    }


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """Indented JSON with sorted keys and a final newline."""
    text = json.dumps(manifest, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def manifest_digest(folder: Path) -> str:
    """SHA-256 of a stage's manifest, which names the digest of every shard."""
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()


def remove_partial(corpus: Path, *, resumable: bool = False) -> None:
    """Delete folders and files that a killed run left behind; complete ones are never touched.

    Folders with finished tasks in them stay, so that the next run goes on there, unless
    `resumable`: after a complete run they belong to settings that nobody uses any more.
    """
    name = f".*{PARTIAL_SUFFIX}"
    for partial in sorted([*corpus.glob(name), *corpus.glob(f"*/{name}")]):
        if not partial.is_dir():
            partial.unlink(missing_ok=True)
        elif resumable or not (partial / WORK).is_dir():
            shutil.rmtree(partial, ignore_errors=True)
