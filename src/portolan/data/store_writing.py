"""Writing a token store: documents of each cell, tokenised, in the order of their ids."""

import hashlib
import heapq
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from portolan.data.store import (
    FORMAT,
    FORMAT_VERSION,
    STEP_NAME,
    StoreError,
    TokenStore,
    logical_digest,
)
from portolan.data.tokenizer import DocumentTokenizer
from portolan.files import sha256_file

if TYPE_CHECKING:
    from portolan.data.documents import Stage

DEFAULT_SHARD_TOKENS = 1 << 26
LARGEST_UINT16_VOCABULARY = 1 << 16
# A batch for the tokenizer ends at whichever comes first.
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 4 << 20


class ShardPart(NamedTuple):
    """Row groups [begin, end) of a Parquet shard; no end means all of them."""

    path: Path
    begin: int = 0
    end: int | None = None


SourceShards = tuple[str, Sequence[ShardPart]]


class Document(NamedTuple):
    """One input document: id of 32 hex digits, index of its source, text."""

    document_id: str
    source: int
    text: str


def cells_of_sources(
    sources: Sequence[tuple[str, Sequence[Path]]],
) -> dict[str, list[SourceShards]]:
    """One cell a source, named by its key."""
    return {key: [(key, [ShardPart(path) for path in paths])] for key, paths in sources}


def payload_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16 up to 65,536 tokens, else uint32, little-endian."""
    return np.dtype("<u2" if vocab_size <= LARGEST_UINT16_VOCABULARY else "<u4")


def store_stage(
    cells: Mapping[str, Sequence[SourceShards]],
    tokenizer: DocumentTokenizer,
    *,
    inputs: Sequence[str],
    choices: Mapping[str, Any] | None = None,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
) -> "Stage":
    """Identity of the step: everything that changes the bytes, and the keys of its inputs.

    `choices` are lists that a person made and that the store must state, exempt sources for one.
    """
    from portolan.data.documents import Stage

    params = {
        "bos": tokenizer.policy.bos,
        "cells": {name: [key for key, _ in sources] for name, sources in cells.items()},
        "choices": dict(choices or {}),
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
    choices: Mapping[str, Any] | None = None,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
) -> "TokenStore":
    """Tokenise Parquet documents into `parent/store_<key>`, or open it if it is complete.

    Each cell lists (source key, parts of shards) with columns `id` and `text`, ids increasing
    within a source. `inputs` are the keys of the stages that wrote them.
    """
    from portolan.data.documents import run_stage

    stage = store_stage(cells, tokenizer, inputs=inputs, choices=choices, shard_tokens=shard_tokens)

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


def _read_source(source: int, key: str, shards: Sequence[ShardPart]) -> Iterator[Document]:
    """Stream the documents of one source, requiring increasing ids."""
    import pyarrow.parquet as pq

    previous = ""
    for shard in shards:
        with pq.ParquetFile(shard.path) as file:
            groups = list(range(file.num_row_groups))[shard.begin : shard.end]
            for batch in file.iter_batches(BATCH_DOCUMENTS, groups, ["id", "text"]):
                ids = batch.column("id").to_pylist()
                texts = batch.column("text").to_pylist()
                for document_id, text in zip(ids, texts, strict=True):
                    if document_id <= previous:
                        raise StoreError(
                            f"source {key}: id {document_id} in {shard.path.name} "
                            f"follows {previous}",
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
        "digest": logical_digest(ids, sources, offsets, tokens),
        "name": name,
        "rows": len(lengths),
        "sha256": sha256_file(root / name),
        "status": "complete",
        "tokens": len(tokens),
    }
