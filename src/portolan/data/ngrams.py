"""XXH3-64 of every window of n consecutive tokens, for many texts at once.

Windows overlap, so none is copied: each is a view into the bytes of all texts, and one call hashes
them all. That costs about 20 ns a window where a Python loop costs 300.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars
import polars_hash  # noqa: F401  registers the name space `nchash`
import pyarrow as pa

BATCH_CHARACTERS = 4 << 20
_VIEW_WORDS, _INLINE_BYTES = 4, 12
_SPACE, _NEWLINE = 0x20, 0x0A


@dataclass(frozen=True)
class Windows:
    """hashes uint64[w] of the windows of all texts; those of text i are offsets[i:i+2]."""

    hashes: np.ndarray
    offsets: np.ndarray

    def of(self, text: int) -> np.ndarray:
        """Hashes of one text, in the order of its windows."""
        return self.hashes[self.offsets[text] : self.offsets[text + 1]]

    def distinct(self, text: int) -> np.ndarray:
        """Sorted distinct hashes of one text."""
        ordered = np.sort(self.of(text))
        first = np.ones(len(ordered), bool)
        np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
        return ordered[first]


@dataclass(frozen=True)
class Tokens:
    """Where the tokens of some texts lie in `content`, their UTF-8 bytes end to end.

    starts, ends: int64[t], bytes of each token; offsets: int64[d+1], tokens of text i are
    offsets[i:i+2].
    """

    content: bytes
    starts: np.ndarray
    ends: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of_words(cls, texts: Sequence[str]) -> "Tokens":
        """Words of texts whose words are joined by one space, and nothing else."""
        content = "\n".join(texts).encode()
        codes = np.frombuffer(content, np.uint8)
        is_end = codes == _NEWLINE
        breaks = np.flatnonzero(is_end | (codes == _SPACE))
        starts = np.concatenate([np.zeros(1, np.int64), breaks + 1])
        ends = np.append(breaks, len(codes))
        last = np.append(is_end[breaks], True)
        counts = np.diff(np.flatnonzero(last), prepend=-1)
        return cls._without_empty(content, starts, ends, counts, len(texts))

    @classmethod
    def of_characters(cls, texts: Sequence[str]) -> "Tokens":
        """Every character of texts without line ends is a token."""
        content = "\n".join(texts).encode()
        codes = np.frombuffer(content, np.uint8)
        begins = np.flatnonzero((codes & 0xC0) != 0x80)
        ends = np.append(begins[1:], len(codes))[: len(begins)]
        is_text = codes[begins] != _NEWLINE
        counts = np.diff(np.flatnonzero(np.append(~is_text, True)), prepend=-1) - 1
        return cls(content, begins[is_text], ends[is_text], _offsets(counts[: len(texts)]))

    @classmethod
    def _without_empty(
        cls, content: bytes, starts: np.ndarray, ends: np.ndarray, counts: np.ndarray, size: int
    ) -> "Tokens":
        """An empty text has one token of no bytes so far: take it away."""
        counts = counts[:size].copy()
        if (is_empty := starts == ends).any():
            counts[np.repeat(np.arange(size), counts)[is_empty[: counts.sum()]]] -= 1
            starts, ends = starts[~is_empty], ends[~is_empty]
        return cls(content, starts, ends, _offsets(counts))

    @property
    def counts(self) -> np.ndarray:
        """Number of tokens of each text, int64[d]."""
        return np.diff(self.offsets)

    def windows(self, size: int, *, short_whole: bool) -> Windows:
        """Hashes of all windows of `size` tokens, as they stand in the text.

        A text of fewer tokens has one window, all of it, if `short_whole`, else none.
        """
        counts = self.counts
        fits = counts >= size
        windows = np.where(fits, counts - size + 1, short_whole & (counts > 0))
        offsets = _offsets(windows)
        shift = self.offsets[:-1] - offsets[:-1]
        first = np.arange(offsets[-1]) + np.repeat(shift, windows)
        last = np.minimum(first + size - 1, np.repeat(self.offsets[1:], windows) - 1)
        return Windows(hash_slices(self.content, self.starts[first], self.ends[last]), offsets)


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def hash_slices(content: bytes, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """XXH3-64 of content[starts[i]:ends[i]] for every i, uint64[n]. At most 2 GiB of content."""
    lengths = ends - starts
    padded = np.frombuffer(content + bytes(_INLINE_BYTES), np.uint8)
    heads = np.lib.stride_tricks.sliding_window_view(padded, _INLINE_BYTES)
    views = np.zeros((len(starts), _VIEW_WORDS), np.int32)
    views[:, 0] = lengths
    # A view holds a slice of at most 12 bytes itself, of a longer one the head and the place.
    is_short = lengths <= _INLINE_BYTES
    if is_short.any():
        inline = heads[starts[is_short]]
        inline = np.where(np.arange(_INLINE_BYTES) < lengths[is_short, None], inline, 0)
        views[is_short, 1:] = np.ascontiguousarray(inline, np.uint8).view(np.int32)
    is_long = ~is_short
    prefixes = np.ascontiguousarray(heads[:, :4][starts[is_long]])
    views[is_long, 1] = prefixes.view(np.int32)[:, 0]
    views[is_long, 3] = starts[is_long]
    buffers = [None, pa.py_buffer(views), pa.py_buffer(content)]
    slices = pa.Array.from_buffers(pa.binary_view(), len(starts), buffers)
    return _hash(polars.Series("x", slices))


def hash_rows(rows: np.ndarray) -> np.ndarray:
    """XXH3-64 of the bytes of each row of a matrix, uint64[n]."""
    rows = np.ascontiguousarray(rows)
    width = rows.shape[1] * rows.itemsize
    starts = np.arange(len(rows), dtype=np.int64) * width
    return hash_slices(rows.tobytes(), starts, starts + width)


def hash_values(values: pa.Array) -> np.ndarray:
    """XXH3-64 of each string or bytes of an Arrow array, uint64[n]."""
    return _hash(polars.Series("x", values))


def hash_strings(texts: Sequence[str]) -> np.ndarray:
    """XXH3-64 of the UTF-8 bytes of each text, uint64[n]."""
    return _hash(polars.Series("x", texts, dtype=polars.String))


def _hash(values: "polars.Series") -> np.ndarray:
    expression = polars.col("x").nchash.xxh3_64()  # pyright: ignore
    return values.rename("x").to_frame().select(expression).to_series().to_numpy()


def batches(lengths: Sequence[int], max_characters: int = BATCH_CHARACTERS) -> list[slice]:
    """Cut texts of given lengths into runs of about `max_characters`, at least one text each."""
    runs, begin, size = [], 0, 0
    for index, length in enumerate(lengths):
        if index > begin and size + length > max_characters:
            runs.append(slice(begin, index))
            begin, size = index, 0
        size += length
    if begin < len(lengths):
        runs.append(slice(begin, len(lengths)))
    return runs
