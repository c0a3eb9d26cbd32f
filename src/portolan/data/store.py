"""The token store: one folder of Arrow IPC shards per cell, counted from its own metadata.

A shard holds one record batch with a row per document: `id` (16 bytes), `source` (index into the
cell's list of sources) and `tokens` (a list, whose offsets are the document table and whose values
are the payload). Files are read through memory maps; nothing is copied until it is asked for.
"""

import bisect
import itertools
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from portolan.errors import PortolanError
from portolan.files import read_json, sha256_file

FORMAT = "portolan-tokens"
FORMAT_VERSION = 1
STEP_NAME = "store"
COUNT_TOKENS = 1 << 22
REWRITE = "delete this folder and write the store again"


class StoreError(PortolanError):
    """A token store that is incomplete, damaged or not the one expected."""


def logical_digest(
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
        return logical_digest(self.ids, self.sources, self.offsets, self.tokens)


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

    def count_sources(self) -> dict[str, tuple[int, int]]:
        """(documents, tokens) of each source of the cell, from the document tables."""
        documents = np.zeros(len(self.sources), np.int64)
        tokens = np.zeros(len(self.sources), np.int64)
        for shard in self.shards:
            documents += np.bincount(shard.sources, minlength=len(self.sources))
            np.add.at(tokens, shard.sources, np.diff(shard.offsets))
        counts = zip(documents.tolist(), tokens.tolist(), strict=True)
        return dict(zip(self.sources, counts, strict=True))

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
