"""Which sequence of which cell is read at which place of a run: arithmetic on the step number.

Nothing here is state. Sequence g of a run lies in mixture block g // Z; a keyed permutation of the
block's slots chooses the cell, the counts of all earlier blocks give the position in that cell,
and the cell's keyed block shuffle turns the position into a sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from portolan.data.mixing import BLOCK_TOKENS, fold, mix64, permute, shuffle_blocks
from portolan.data.mixture import Mixture, MixtureError, sort_names

DEFAULT_WINDOW_BLOCKS = 8
# Long requests are worked through in pieces, which bounds the memory of intermediate arrays.
PIECE_LENGTH = 1 << 16
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Geometry:
    """Sequences a step and tokens a sequence from `start_step` on."""

    start_step: int
    batch_sequences: int
    sequence_length: int


def count_sequences(geometry: Sequence[Geometry], step: int) -> int:
    """Number of sequences before `step`: the sum over the batch sizes used until then."""
    ends = [*(item.start_step for item in geometry[1:]), step]
    return sum(
        max(0, min(end, step) - item.start_step) * item.batch_sequences
        for item, end in zip(geometry, ends, strict=True)
    )


class Location(NamedTuple):
    """A sequence of a cell, and how often the cell has been read through before it."""

    cell: str
    epoch: int
    sequence: int


class Locations(NamedTuple):
    """Indices of cells (in byte order of their names), epochs and sequences, each int64[n]."""

    cells: Indices
    epochs: Indices
    sequences: Indices


@dataclass(frozen=True)
class _Stretch:
    """Blocks from `start_block` on that share a row length; `base`: each cell's position there."""

    start_block: int
    sequence_length: int
    block_sequences: int
    num_sequences: Indices
    base: Indices


def cell_key(seed: int, name: str) -> int:
    """Shuffle key of a cell. It depends on the name only, so new cells do not move old ones."""
    import xxhash

    return mix64(fold(seed, 1) ^ xxhash.xxh3_64_intdigest(name.encode()))


class SequenceOrder:
    """The order of the sequences of a run.

    Args:
        mixture: counts per phase; phases must start at whole mixture blocks.
        geometry: batch and row length by step; row lengths must divide `block_tokens`.
        seed: the data seed.
        reshuffle: "fixed" repeats a cell in the same order, "per_epoch" in a new one.
        prefixes: sequences of each cell that may be read (simulated epoching), else all.
        window_blocks: blocks among which sequences are shuffled.
        block_tokens: tokens of a block that is read as a whole.
    """

    def __init__(
        self,
        mixture: Mixture,
        geometry: Sequence[Geometry],
        *,
        seed: int,
        reshuffle: Literal["fixed", "per_epoch"] = "fixed",
        prefixes: Mapping[str, int] | None = None,
        window_blocks: int = DEFAULT_WINDOW_BLOCKS,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        if reshuffle not in ("fixed", "per_epoch"):
            raise MixtureError(f"reshuffle is {reshuffle!r}", remedy='use "fixed" or "per_epoch"')
        self.mixture, self.geometry = mixture, tuple(geometry)
        self.seed, self.reshuffle = seed, reshuffle
        self.window_blocks, self.block_tokens = window_blocks, block_tokens
        self.cell_names = mixture.cell_names
        self.block = mixture.block_sequences
        self._check_geometry()
        self._geometry_starts = [self.first_index(item.start_step) for item in self.geometry]
        self._keys = np.array([cell_key(seed, name) for name in self.cell_names], np.uint64)
        self._counts = np.stack([mixture.block_counts(i) for i in range(len(mixture.phases))])
        self._phase_blocks = np.array(
            [self._block_of_start(phase.start_step) for phase in mixture.phases], np.int64
        )
        self._ranges = np.cumsum(np.pad(self._counts, ((0, 0), (1, 0))), axis=1)
        lengths = np.diff(self._phase_blocks)[:, None]
        self._before = np.cumsum(np.pad(lengths * self._counts[:-1], ((1, 0), (0, 0))), axis=0)
        self._prefixes = self._check_prefixes(prefixes)
        self._stretches = self._make_stretches()
        self._stretch_blocks = np.array([s.start_block for s in self._stretches], np.int64)

    def _check_geometry(self) -> None:
        starts = [item.start_step for item in self.geometry]
        if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
            raise MixtureError(f"geometry starts at steps {starts}: need 0 first, then increasing")
        if len({item.sequence_length for item in self.geometry}) > 1:
            for item in self.geometry:
                if self.block_tokens % item.sequence_length:
                    raise MixtureError(
                        f"row length {item.sequence_length} does not divide {self.block_tokens}",
                        remedy="change between row lengths that are powers of two",
                    )
        if self.geometry[0].sequence_length != self.mixture.sequence_length:
            raise MixtureError(
                f"the mixture is for rows of {self.mixture.sequence_length} tokens, the run begins "
                f"with {self.geometry[0].sequence_length}"
            )

    def first_index(self, step: int) -> int:
        """Number of sequences before `step`: the sum over the batch sizes used until then."""
        return count_sequences(self.geometry, step)

    def batch_sequences(self, step: int) -> int:
        """Sequences of the batch of a step."""
        return self.geometry_at(step).batch_sequences

    def geometry_at(self, step: int) -> Geometry:
        """Batch and row length in force at a step."""
        if step < 0:
            raise IndexError(f"step {step} is negative")
        return [item for item in self.geometry if item.start_step <= step][-1]

    def _block_of_start(self, start_step: int) -> int:
        index = self.first_index(start_step)
        if index % self.block:
            raise MixtureError(
                f"step {start_step} begins inside a mixture block of {self.block} sequences",
                remedy="start phases at the steps that the mixture planner proposes",
            )
        return index // self.block

    def _check_prefixes(self, prefixes: Mapping[str, int] | None) -> Indices | None:
        if prefixes is None:
            return None
        if len({item.sequence_length for item in self.geometry}) > 1:
            raise MixtureError("simulated epoching needs one row length for the whole run")
        if sort_names(prefixes) != self.cell_names:
            raise MixtureError("simulated epoching must name every cell of the mixture")
        return np.array([prefixes[name] for name in self.cell_names], np.int64)

    def _used_before(self, block: int) -> Indices:
        """Sequences of each cell in the mixture blocks before `block`."""
        phase = int(np.searchsorted(self._phase_blocks, block, side="right")) - 1
        return self._before[phase] + (block - self._phase_blocks[phase]) * self._counts[phase]

    def _stretch(self, start_block: int, length: int, base: Indices) -> _Stretch:
        tokens = [self.mixture.cells[name] for name in self.cell_names]
        num_sequences = np.array([count // length for count in tokens], np.int64)
        readable = num_sequences if self._prefixes is None else self._prefixes
        later = self._counts[self._phase_blocks >= start_block].sum(axis=0)
        later += self._counts[np.searchsorted(self._phase_blocks, start_block, side="right") - 1]
        over = [n for n, size, most in self._zip(readable, num_sequences) if size > most]
        if over:
            raise MixtureError(f"prefixes of cells {over} are longer than the cells")
        empty = [n for n, size, used in self._zip(readable, later) if used and not size]
        if empty:
            raise MixtureError(
                f"cells {empty} have a weight and no sequence of {length} tokens to read",
                remedy="give them weight 0, or use shorter rows",
            )
        return _Stretch(
            start_block, length, max(1, self.block_tokens // length), num_sequences, base
        )

    def _zip(self, first: Indices, second: Indices) -> list[tuple[str, int, int]]:
        return list(zip(self.cell_names, first.tolist(), second.tolist(), strict=True))

    def _make_stretches(self) -> list[_Stretch]:
        first = self.geometry[0].sequence_length
        stretches = [self._stretch(0, first, np.zeros(len(self.cell_names), np.int64))]
        for item in self.geometry[1:]:
            last = stretches[-1]
            if item.sequence_length != last.sequence_length:
                block = self._block_of_start(item.start_step)
                used = self._used_before(block) - self._used_before(last.start_block)
                base = self._rebase(last, last.base + used, item.sequence_length)
                stretches.append(self._stretch(block, item.sequence_length, base))
        return stretches

    def _rebase(self, last: _Stretch, positions: Indices, length: int) -> Indices:
        """Positions in rows of `length` after a change of row length.

        Every cell moves up to the end of its shuffle window (from the incomplete last block: to
        the next epoch). Windows hold the same tokens under both lengths, so nothing is repeated.
        """
        sizes = np.maximum(last.num_sequences, 1)
        epochs, inside = np.divmod(positions, sizes)
        in_blocks = last.num_sequences // last.block_sequences * last.block_sequences
        window = last.block_sequences * self.window_blocks
        moved = np.minimum(-(-inside // window) * window, in_blocks)
        tail = inside > in_blocks
        epochs, moved = epochs + tail, np.where(tail, 0, moved)
        tokens = np.array([self.mixture.cells[name] for name in self.cell_names], np.int64)
        return epochs * (tokens // length) + moved * last.sequence_length // length

    def locate(self, step: int, row: int) -> Location:
        """Sequence at a row of the batch of a step."""
        if not 0 <= row < self.batch_sequences(step):
            raise IndexError(f"row {row} of a batch of {self.batch_sequences(step)}")
        found = self.locate_many(np.array([self.first_index(step) + row], np.int64))
        cell, epoch, sequence = (int(values[0]) for values in found)
        return Location(self.cell_names[cell], epoch, sequence)

    def locate_many(self, indices: NDArray[np.integer[Any]]) -> Locations:
        """Cells, epochs and sequences of global sequence indices int64[n]."""
        indices = np.asarray(indices, np.int64).reshape(-1)
        if len(indices) and indices.min() < 0:
            raise IndexError("sequence indices must not be negative")
        result = Locations(*(np.empty(len(indices), np.int64) for _ in range(3)))
        for start in range(0, len(indices), PIECE_LENGTH):
            piece = slice(start, start + PIECE_LENGTH)
            self._locate_piece(indices[piece], Locations(*(values[piece] for values in result)))
        return result

    def _locate_piece(self, indices: Indices, result: Locations) -> None:
        blocks = indices // self.block
        slots = indices - blocks * self.block
        slots = permute(self.block, fold(fold(self.seed, 0), blocks), slots).astype(np.int64)
        phases = np.searchsorted(self._phase_blocks, blocks, side="right") - 1
        for phase in _distinct(phases):
            chosen = phases == phase
            result.cells[chosen] = (
                np.searchsorted(self._ranges[phase], slots[chosen], side="right") - 1
            )
        cells = result.cells
        positions = slots - self._ranges[phases, cells]
        positions += self._before[phases, cells]
        positions += (blocks - self._phase_blocks[phases]) * self._counts[phases, cells]
        stretches = np.searchsorted(self._stretch_blocks, blocks, side="right") - 1
        for index in _distinct(stretches):
            chosen = slice(None) if len(self._stretches) == 1 else stretches == index
            epochs, sequences = self._shuffle(
                self._stretches[index], cells[chosen], positions[chosen]
            )
            result.epochs[chosen], result.sequences[chosen] = epochs, sequences

    def _shuffle(
        self, stretch: _Stretch, cells: Indices, positions: Indices
    ) -> tuple[Indices, Indices]:
        offset = stretch.base - self._used_before(stretch.start_block)
        positions = positions + offset[cells]
        sizes = stretch.num_sequences[cells]
        readable = sizes if self._prefixes is None else self._prefixes[cells]
        epochs, inside = np.divmod(positions, readable)
        keys = self._keys[cells]
        if self.reshuffle == "per_epoch" and (again := epochs > 0).any():
            epoch_keys = fold(keys[again], epochs[again])
            if self._prefixes is None:
                keys[again] = epoch_keys
            else:
                inside[again] = permute(readable[again], epoch_keys, inside[again])
        sequences = shuffle_blocks(
            sizes,
            keys,
            inside,
            block_sequences=stretch.block_sequences,
            window_blocks=self.window_blocks,
        )
        return epochs, sequences.astype(np.int64)


def _distinct(values: Indices) -> list[int]:
    """Distinct small integers of an array, increasing."""
    if not len(values):
        return []
    low, high = int(values.min()), int(values.max())
    return [low] if low == high else [int(value) for value in np.unique(values)]
