"""The token store: one folder of Arrow IPC shards per cell, counted from its own metadata.

A shard holds one record batch with a row per document: `id` (16 bytes), `source` (index into the
cell's list of sources) and `tokens` (a list, whose offsets are the document table and whose values
are the payload). Files are read through memory maps; nothing is copied until it is asked for.
"""

import bisect
import hashlib
import heapq
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from portolan.data.tokenizer import DocumentTokenizer
from portolan.errors import PortolanError
from portolan.files import read_json, sha256_file

if TYPE_CHECKING:
    from portolan.data.documents import Stage

FORMAT = "portolan-tokens"
FORMAT_VERSION = 1
STEP_NAME = "store"
DEFAULT_SHARD_TOKENS = 1 << 26
LARGEST_UINT16_VOCABULARY = 1 << 16
# A batch for the tokenizer ends at whichever comes first.
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 4 << 20
COUNT_TOKENS = 1 << 22
REWRITE = "delete this folder and write the store again"
SourceShards = tuple[str, Sequence[Path]]


class StoreError(PortolanError):
    """A token store that is incomplete, damaged or not the one expected."""


class Document(NamedTuple):
    """One input document: id of 32 hex digits, index of its source, text."""

    document_id: str
    source: int
    text: str


def cells_of_sources(sources: Sequence[SourceShards]) -> dict[str, list[SourceShards]]:
    """One cell a source, named by its key."""
    return {key: [(key, shards)] for key, shards in sources}


def payload_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16 up to 65,536 tokens, else uint32, little-endian."""
    return np.dtype("<u2" if vocab_size <= LARGEST_UINT16_VOCABULARY else "<u4")


def store_stage(
    cells: Mapping[str, Sequence[SourceShards]],
    tokenizer: DocumentTokenizer,
    *,
    inputs: Sequence[str],
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
) -> "Stage":
    """Identity of the step: everything that changes the bytes, and the keys of its inputs."""
    from portolan.data.documents import Stage

    params = {
        "bos": tokenizer.policy.bos,
        "cells": {name: [key for key, _ in sources] for name, sources in cells.items()},
        "eos": tokenizer.policy.eos,
        "shard_tokens": shard_tokens,
        "tokenizer": tokenizer.digest,
    }
    return Stage(STEP_NAME, FORMAT_VERSION, params, tuple(inputs))


def write_store(
    parent: Path,
    cells: Mapping[str, Sequence[SourceShards]],
    tokenizer: DocumentTokenizer,
    *,
    inputs: Sequence[str],
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
) -> "TokenStore":
    """Tokenise Parquet documents into `parent/store_<key>`, or open it if it is complete.

    Each cell lists (source key, shard paths) with columns `id` and `text`, ids increasing within a
    source. `inputs` are the keys of the stages that wrote them.
    """
    from portolan.data.documents import run_stage

    stage = store_stage(cells, tokenizer, inputs=inputs, shard_tokens=shard_tokens)

    def build(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        written = [
            _write_cell(folder, name, cells[name], tokenizer, shard_tokens)
            for name in sorted(cells, key=str.encode)
        ]
        return [shard for _, shards in written for shard in shards], _fields(tokenizer, written)

    return TokenStore(run_stage(parent, stage, build)[0])


CellEntry = tuple[dict[str, Any], list[dict[str, Any]]]


def _fields(tokenizer: DocumentTokenizer, cells: Sequence[CellEntry]) -> dict[str, Any]:
    """Manifest fields beside the shards; `store_digest` covers content, not file encoding."""
    identity = {
        "bos": tokenizer.policy.bos,
        "cells": [
            [cell["name"], cell["sources"], [shard["digest"] for shard in shards]]
            for cell, shards in cells
        ],
        "eos": tokenizer.policy.eos,
        "format_version": FORMAT_VERSION,
        "tokenizer": tokenizer.digest,
    }
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return {
        "bos_id": tokenizer.bos_id,
        "cells": [cell for cell, _ in cells],
        "documents": sum(cell["documents"] for cell, _ in cells),
        "dtype": payload_dtype(tokenizer.vocab_size).str,
        "eos_id": tokenizer.eos_id,
        "pad_id": tokenizer.pad_id,
        "store_digest": hashlib.sha256(text.encode()).hexdigest(),
        "text_bytes": sum(cell["text_bytes"] for cell, _ in cells),
        "tokens": sum(cell["tokens"] for cell, _ in cells),
        "vocab_size": tokenizer.vocab_size,
    }


def _read_source(source: int, key: str, shards: Sequence[Path]) -> Iterator[Document]:
    """Stream the documents of one source, requiring increasing ids."""
    import pyarrow.parquet as pq

    previous = ""
    for shard in shards:
        with pq.ParquetFile(shard) as file:
            for batch in file.iter_batches(batch_size=BATCH_DOCUMENTS, columns=["id", "text"]):
                ids = batch.column("id").to_pylist()
                texts = batch.column("text").to_pylist()
                for document_id, text in zip(ids, texts, strict=True):
                    if document_id <= previous:
                        raise StoreError(
                            f"source {key}: id {document_id} in {shard.name} follows {previous}",
                            remedy="normalise the source: its documents must be sorted by id",
                        )
                    previous = document_id
                    yield Document(document_id, source, text)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if len(batch) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@dataclass
class _OpenShard:
    """Documents gathered for the shard that is being written."""

    ids: list[str] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    tokens: list[NDArray[Any]] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, document: Document, tokens: NDArray[Any]) -> None:
        """Append one document."""
        self.ids.append(document.document_id)
        self.sources.append(document.source)
        self.tokens.append(tokens)
        self.num_tokens += len(tokens)


def _write_cell(
    root: Path,
    name: str,
    sources: Sequence[SourceShards],
    tokenizer: DocumentTokenizer,
    shard_tokens: int,
) -> CellEntry:
    """Write one cell in the order (id, source key); return its manifest entry and shards."""
    from portolan.data.documents import COMPLETE, EMPTY, source_folder_name

    ordered = sorted(sources, key=lambda source: source[0].encode())
    folder = f"cell={source_folder_name(name)}"
    (root / folder).mkdir()
    streams = [_read_source(i, key, shards) for i, (key, shards) in enumerate(ordered)]
    shards: list[dict[str, Any]] = []
    text_bytes, current = 0, _OpenShard()
    for batch in _batches(heapq.merge(*streams)):
        texts = [document.text for document in batch]
        text_bytes += sum(len(text.encode()) for text in texts)
        for document, tokens in zip(batch, tokenizer.encode_documents(texts), strict=True):
            if not len(tokens):
                raise StoreError(
                    f"cell {name}: document {document.document_id} has no tokens",
                    remedy="drop empty texts before tokenising, or use a BOS or EOS policy",
                )
            if current.ids and current.num_tokens + len(tokens) > shard_tokens:
                shards.append(_write_shard(root, folder, len(shards), name, current, tokenizer))
                current = _OpenShard()
            current.add(document, tokens.astype(payload_dtype(tokenizer.vocab_size)))
    if current.ids:
        shards.append(_write_shard(root, folder, len(shards), name, current, tokenizer))
    entry = {
        "documents": sum(shard["rows"] for shard in shards),
        "folder": folder,
        "name": name,
        "sources": [key for key, _ in ordered],
        "status": COMPLETE if shards else EMPTY,
        "text_bytes": text_bytes,
        "tokens": sum(shard["tokens"] for shard in shards),
    }
    return entry, shards


def _write_shard(
    root: Path,
    folder: str,
    index: int,
    cell: str,
    documents: _OpenShard,
    tokenizer: DocumentTokenizer,
) -> dict[str, Any]:
    import pyarrow as pa

    name = f"{folder}/tokens-{index:05d}.arrow"
    dtype = payload_dtype(tokenizer.vocab_size)
    lengths = np.array([len(tokens) for tokens in documents.tokens], np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    tokens = np.concatenate(documents.tokens)
    tokenizer.check_boundaries(tokens, offsets, place=name)
    ids = b"".join(bytes.fromhex(document_id) for document_id in documents.ids)
    sources = np.array(documents.sources, "<u2")
    metadata = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "cell": cell,
        "shard": str(index),
        "dtype": dtype.str,
        "tokenizer_digest": tokenizer.digest,
        "bos": tokenizer.policy.bos,
        "eos": tokenizer.policy.eos,
        "num_documents": str(len(lengths)),
        "num_tokens": str(len(tokens)),
    }
    columns = {
        "id": pa.Array.from_buffers(pa.binary(16), len(lengths), [None, pa.py_buffer(ids)]),
        "source": pa.array(sources),
        "tokens": pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(tokens)),
    }
    fields = [pa.field(key, array.type, nullable=False) for key, array in columns.items()]
    schema = pa.schema(fields, metadata)
    batch = pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)
    with (root / name).open("wb") as file:
        with pa.ipc.new_file(file, schema) as writer:
            writer.write_batch(batch)
        file.flush()
        os.fsync(file.fileno())
    return {
        "bytes": (root / name).stat().st_size,
        "cell": cell,
        "digest": _logical_digest(ids, sources, offsets, tokens),
        "name": name,
        "rows": len(lengths),
        "sha256": sha256_file(root / name),
        "status": "complete",
        "tokens": len(tokens),
    }


def _logical_digest(
    ids: Any, sources: NDArray[Any], offsets: NDArray[Any], tokens: NDArray[Any]
) -> str:
    """XXH3-128 over the column buffers in schema order, little-endian."""
    import xxhash

    digest = xxhash.xxh3_128()
    for buffer in (ids, sources, offsets, tokens):
        digest.update(memoryview(buffer).cast("B"))  # pyright: ignore
    return digest.hexdigest()


class Shard:
    """One memory-mapped shard, checked when opened: its counts come from its own metadata.

    `tokens` uint16 or uint32[num_tokens], `offsets` int64[num_documents + 1], `sources`
    uint16[num_documents], `ids` uint8[num_documents, 16]; all are views of the file.
    """

    def __init__(self, path: Path, entry: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        import pyarrow as pa

        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            metadata = {k.decode(): v.decode() for k, v in (reader.schema.metadata or {}).items()}
            batch = reader.get_batch(0)
        except (OSError, pa.ArrowInvalid) as error:
            raise StoreError(f"{path}: {error}", remedy=REWRITE) from error
        lists = batch.column("tokens")
        self.path = path
        self.tokens: NDArray[Any] = np.asarray(lists.values)
        self.offsets: NDArray[np.int64] = np.asarray(lists.offsets)
        self.sources: NDArray[np.uint16] = np.asarray(batch.column("source"))
        identifiers = np.frombuffer(batch.column("id").buffers()[1], np.uint8)
        self.ids = identifiers[: 16 * batch.num_rows].reshape(-1, 16)
        self.num_documents = int(metadata.get("num_documents", -1))
        self.num_tokens = int(metadata.get("num_tokens", -1))
        params = manifest["params"]
        checks = {
            "format": (metadata.get("format"), FORMAT),
            "cell": (metadata.get("cell"), entry["cell"]),
            "dtype": (metadata.get("dtype"), self.tokens.dtype.str),
            "tokenizer digest": (metadata.get("tokenizer_digest"), params["tokenizer"]),
            "bos policy": (metadata.get("bos"), params["bos"]),
            "eos policy": (metadata.get("eos"), params["eos"]),
            "documents": (self.num_documents, batch.num_rows),
            "documents of the manifest": (self.num_documents, entry["rows"]),
            "tokens": (self.num_tokens, len(self.tokens)),
            "tokens of the manifest": (self.num_tokens, entry["tokens"]),
            "last offset": (self.num_tokens, int(self.offsets[-1])),
            "record batches": (reader.num_record_batches, 1),
        }
        wrong = [f"{name} {a!r} is not {b!r}" for name, (a, b) in checks.items() if a != b]
        if wrong:
            raise StoreError(f"{path}: {'; '.join(wrong)}", remedy=REWRITE)

    def logical_digest(self) -> str:
        """Digest of the content, independent of the file's encoding."""
        return _logical_digest(self.ids, self.sources, self.offsets, self.tokens)


class DocumentSpan(NamedTuple):
    """Part of a document inside a token range: `start` and `stop` count from the range's start."""

    source: str
    document_id: str
    start: int
    stop: int


class CellTokens:
    """The documents of a cell laid end to end, over its shards."""

    def __init__(self, folder: Path, entry: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        self.name: str = entry["name"]
        self.sources: list[str] = entry["sources"]
        self.shards = [
            Shard(folder / shard["name"], shard, manifest)
            for shard in manifest["shards"]
            if shard["cell"] == self.name
        ]
        self.text_bytes: int = entry["text_bytes"]
        self.num_documents = sum(shard.num_documents for shard in self.shards)
        counts = [shard.num_tokens for shard in self.shards]
        self.shard_starts = [0, *itertools.accumulate(counts)]
        self.num_tokens: int = self.shard_starts[-1]
        if (self.num_documents, self.num_tokens) != (entry["documents"], entry["tokens"]):
            raise StoreError(
                f"cell {self.name}: shards hold {self.num_documents} documents and "
                f"{self.num_tokens} tokens, the manifest says {entry['documents']} and "
                f"{entry['tokens']}",
                remedy=REWRITE,
            )

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[Shard, int, int, int]]:
        """Shards that hold [start, stop): shard, range inside it, offset inside the result."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"cell {self.name} has {self.num_tokens} tokens: [{start}, {stop})")
        index = bisect.bisect_right(self.shard_starts, start) - 1
        position = start
        while position < stop:
            first, end = self.shard_starts[index], min(stop, self.shard_starts[index + 1])
            if end > position:
                yield self.shards[index], position - first, end - first, position - start
            position, index = max(position, end), index + 1

    def read_row(self, start: int, tokens: NDArray[np.int32], segments: NDArray[np.int32]) -> None:
        """Fill `tokens` with the tokens from `start` on, `segments` with documents from 0 up."""
        segments[:] = 0
        for shard, low, high, at in self._pieces(start, start + len(tokens)):
            tokens[at : at + high - low] = shard.tokens[low:high]
            first = int(np.searchsorted(shard.offsets, low, side="left"))
            last = int(np.searchsorted(shard.offsets, high, side="left"))
            segments[shard.offsets[first:last] - low + at] = 1
        segments[0] = 0
        np.cumsum(segments, out=segments)

    def documents(self, start: int, stop: int) -> list[DocumentSpan]:
        """Documents behind the tokens [start, stop), in order."""
        spans = []
        for shard, low, high, at in self._pieces(start, stop):
            row = int(np.searchsorted(shard.offsets, low, side="right")) - 1
            while row < shard.num_documents and shard.offsets[row] < high:
                begin, end = max(low, shard.offsets[row]), min(high, shard.offsets[row + 1])
                name = shard.ids[row].tobytes().hex()
                source = self.sources[int(shard.sources[row])]
                spans.append(DocumentSpan(source, name, int(begin - low + at), int(end - low + at)))
                row += 1
        return spans

    def count_tokens(self, vocab_size: int) -> NDArray[np.int64]:
        """Occurrences of every token, int64[V]."""
        counts = np.zeros(vocab_size, np.int64)
        for shard in self.shards:
            for start in range(0, shard.num_tokens, COUNT_TOKENS):
                piece = shard.tokens[start : start + COUNT_TOKENS]
                counts += np.bincount(piece, minlength=vocab_size)
        return counts


class TokenStore:
    """A complete token store, opened by its folder; cells in byte order of their names."""

    def __init__(self, folder: Path) -> None:
        from portolan.data.documents import MANIFEST, open_stage

        self.folder = folder
        try:
            manifest = read_json(folder / MANIFEST)
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{folder} has no readable manifest: {error}", remedy=REWRITE
            ) from error
        if manifest.get("name") != STEP_NAME or open_stage(folder, manifest["key"]) is None:
            raise StoreError(
                f"{folder} is not a complete token store: a shard is missing or cut short",
                remedy=REWRITE,
            )
        self.manifest: dict[str, Any] = manifest
        self.key: str = manifest["key"]
        self.digest: str = manifest["store_digest"]
        self.tokenizer_digest: str = manifest["params"]["tokenizer"]
        self.vocab_size: int = manifest["vocab_size"]
        self.pad_id: int = manifest["pad_id"]

    @cached_property
    def cells(self) -> dict[str, CellTokens]:
        """Cells by name; opening maps every shard and checks its counts."""
        return {
            entry["name"]: CellTokens(self.folder, entry, self.manifest)
            for entry in self.manifest["cells"]
        }

    @property
    def tokens_by_cell(self) -> dict[str, int]:
        """Tokens of each cell, from the metadata of its shards."""
        return {name: cell.num_tokens for name, cell in self.cells.items()}

    def verify(self) -> None:
        """Read everything and compare SHA-256 and logical digests.

        Raises:
            StoreError: names the first shard that differs.
        """
        entries = {entry["name"]: entry for entry in self.manifest["shards"]}
        for cell in self.cells.values():
            for shard in cell.shards:
                entry = entries[shard.path.relative_to(self.folder).as_posix()]
                same = sha256_file(shard.path) == entry["sha256"]
                if not same or shard.logical_digest() != entry["digest"]:
                    raise StoreError(f"{shard.path} is damaged: digests differ", remedy=REWRITE)
