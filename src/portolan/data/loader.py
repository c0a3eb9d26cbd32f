"""Batches of a run from a token store: the step number is the whole state."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from portolan.data.mixing import BLOCK_TOKENS
from portolan.data.mixture import Mixture, check_mixture
from portolan.data.order import (
    DEFAULT_WINDOW_BLOCKS,
    Geometry,
    Location,
    Locations,
    SequenceOrder,
)
from portolan.data.store import TokenStore
from portolan.errors import UsageError

ALL_ROWS = slice(0, None)
DEFAULT_PREFETCH_BATCHES = 64
DEFAULT_PREFETCH_THREADS = 1


class TokenBatch(NamedTuple):
    """Rows of a step: tokens int32[B, L], segments int32[B, L], weights float32[B, L].

    Segments count the documents of a row from 0. The label of a position is the next token; its
    weight is 0 at the end of a row and where the next token begins another document.
    """

    tokens: NDArray[np.int32]
    segments: NDArray[np.int32]
    weights: NDArray[np.float32]


class RowDocument(NamedTuple):
    """Part of a document in a row: tokens [start, stop) of the row."""

    source: str
    document_id: str
    epoch: int
    start: int
    stop: int


class BatchRow(NamedTuple):
    """A row of a batch and the documents behind it."""

    row: int
    cell: str
    epoch: int
    sequence: int
    documents: list[RowDocument]


def label_weights(segments: NDArray[np.int32]) -> NDArray[np.float32]:
    """Weight 1 where the next token belongs to the same document, float32[B, L]."""
    weights = np.zeros(segments.shape, np.float32)
    weights[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, :-1] >= 0)
    return weights


class Loader:
    """Batches of a run, by step.

    Args:
        store: the tokens; the mixture must have been made for it.
        mixture: counts per cell and phase.
        batch: sequences a step.
        seed: the data seed.
        reshuffle: "fixed" repeats a cell in the same order, "per_epoch" in a new one.
        prefixes: sequences of each cell that may be read (simulated epoching), else all.
        geometry: batch and row length by step, in place of `batch`, when they change.
    """

    def __init__(
        self,
        store: TokenStore,
        mixture: Mixture,
        *,
        batch: int = 0,
        seed: int,
        reshuffle: Literal["fixed", "per_epoch"] = "fixed",
        prefixes: Mapping[str, int] | None = None,
        geometry: Sequence[Geometry] = (),
        window_blocks: int = DEFAULT_WINDOW_BLOCKS,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        check_mixture(
            mixture,
            tokenizer_digest=store.tokenizer_digest,
            store_digest=store.digest,
            store_tokens=store.tokens_by_cell,
        )
        if (batch > 0) == bool(geometry):
            raise UsageError(f"batch is {batch} and geometry {geometry}: give one of them")
        self.store = store
        self.order = SequenceOrder(
            mixture,
            geometry or [Geometry(0, batch, mixture.sequence_length)],
            seed=seed,
            reshuffle=reshuffle,
            prefixes=prefixes,
            window_blocks=window_blocks,
            block_tokens=block_tokens,
        )
        self._cells = [store.cells[name] for name in self.order.cell_names]

    def locate(self, step: int, row: int) -> Location:
        """Cell, epoch and sequence at a row of the batch of a step."""
        return self.order.locate(step, row)

    def locate_many(self, indices: NDArray[np.integer[Any]]) -> Locations:
        """Cells, epochs and sequences of global sequence indices int64[n]."""
        return self.order.locate_many(indices)

    def _rows(self, step: int, rows: slice = ALL_ROWS) -> Locations:
        batch = self.order.batch_sequences(step)
        stop = batch if rows.stop is None else rows.stop
        if not 0 <= rows.start < stop <= batch:
            raise UsageError(
                f"rows {rows.start} to {stop} are not in a batch of {batch} sequences",
                remedy="the devices of a batch must divide its sequences",
            )
        first = self.order.first_index(step)
        return self.order.locate_many(np.arange(first + rows.start, first + stop, dtype=np.int64))

    def batch(self, step: int, rows: slice = ALL_ROWS) -> TokenBatch:
        """The batch of a step, or the rows of it that a host needs."""
        length = self.order.geometry_at(step).sequence_length
        found = self._rows(step, rows)
        tokens = np.empty((len(found.cells), length), np.int32)
        segments = np.empty_like(tokens)
        for row, (cell, sequence) in enumerate(zip(found.cells, found.sequences, strict=True)):
            self._cells[cell].read_row(int(sequence) * length, tokens[row], segments[row])
        return TokenBatch(tokens, segments, label_weights(segments))

    def batches(
        self,
        start: int,
        stop: int,
        *,
        rows: slice = ALL_ROWS,
        buffer: int = DEFAULT_PREFETCH_BATCHES,
    ) -> Iterator[tuple[int, TokenBatch]]:
        """(step, batch or its rows) for start <= step < stop, read ahead in a thread."""
        return prefetch(self, start, stop, buffer, rows=rows)

    def show_batch(self, step: int) -> list[BatchRow]:
        """The documents behind every row of the batch of a step."""
        length = self.order.geometry_at(step).sequence_length
        rows = []
        for row, (cell, epoch, sequence) in enumerate(
            zip(*(values.tolist() for values in self._rows(step)), strict=True)
        ):
            spans = self._cells[cell].documents(sequence * length, (sequence + 1) * length)
            documents = [
                RowDocument(s.source, s.document_id, epoch, s.start, s.stop) for s in spans
            ]
            rows.append(BatchRow(row, self._cells[cell].name, epoch, sequence, documents))
        return rows

    def batch_digest(self, step: int) -> str:
        """SHA-256 that identifies a global batch without reading it.

        Covers the store digest, the row length and (cell, epoch, sequence) of every row, so that
        equal digests mean equal tokens; it does not depend on the number of hosts.
        """
        length = self.order.geometry_at(step).sequence_length
        digest = hashlib.sha256(f"{self.store.digest}:{length}\n".encode())
        for cell, epoch, sequence in zip(
            *(values.tolist() for values in self._rows(step)), strict=True
        ):
            digest.update(f"{self._cells[cell].name}:{epoch}:{sequence}\n".encode())
        return digest.hexdigest()


class StepSource:
    """Batches of consecutive steps with random access, the form that grain reads from."""

    def __init__(self, loader: Loader, start: int, stop: int, *, rows: slice = ALL_ROWS) -> None:
        self.loader, self.start, self.stop = loader, start, stop
        self.rows = rows

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __getitem__(self, index: Any) -> tuple[int, TokenBatch]:
        step = self.start + int(index)
        return step, self.loader.batch(step, self.rows)


def prefetch(
    loader: Loader,
    start_step: int,
    end_step: int,
    buffer: int = DEFAULT_PREFETCH_BATCHES,
    *,
    rows: slice = ALL_ROWS,
    num_threads: int = DEFAULT_PREFETCH_THREADS,
) -> Iterator[tuple[int, TokenBatch]]:
    """Yield (step, batch) in order while grain reads up to `buffer` batches ahead in threads.

    Args:
        buffer: batches ahead; 0 reads in the calling thread.
        rows: those of each batch that are read.
        num_threads: readers; the order of the batches does not depend on it.
    """
    source = StepSource(loader, start_step, end_step, rows=rows)
    if buffer < 1 or len(source) < 2:
        yield from (source[index] for index in range(len(source)))
        return
    import grain

    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=buffer)
    iterator = iter(grain.MapDataset.source(source).to_iter_dataset(options))
    try:
        for step, batch in iterator:
            yield step, TokenBatch(*batch)
    finally:
        iterator.close()
