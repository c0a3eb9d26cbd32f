"""Words of texts, their hashes, and counts of features made from them."""

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray
from scipy import sparse

LONG_WORD, GRAM = 12, 4
BATCH_CHARACTERS = 1 << 20
_WORD = re.compile(r"\w+")
_ASCII_WORDS = bytes(
    ord(chr(code).lower()) if code < 128 and _WORD.fullmatch(chr(code)) else 32
    for code in range(256)
)
"""Lower case of every ASCII character that may stand in a word, and a space for all others."""

Counts = sparse.csr_array
"""How often each feature stands in each document: float64[documents, features], indices sorted."""


def separate_words(text: str) -> bytes:
    """The words (`\\w+`) of a casefolded text in UTF-8 with white space between them."""
    if text.isascii():
        return text.encode().translate(_ASCII_WORDS)
    return " ".join(_WORD.findall(text.casefold())).encode()


class Words(NamedTuple):
    """Words of n texts.

    vocabulary: the distinct words, UTF-8; indices int64[w] into it, in order of text;
    texts int64[w]: the text each stands in.
    """

    vocabulary: list[bytes]
    indices: NDArray[np.int64]
    texts: NDArray[np.int64]

    def hashes(self) -> NDArray[np.uint64]:
        """XXH3-64 of the distinct words."""
        hashed = (xxhash.xxh3_64_intdigest(word) for word in self.vocabulary)
        return np.fromiter(hashed, np.uint64, len(self.vocabulary))


def split_words(texts: Sequence[str]) -> Words:
    """The words of some texts, in order."""
    separated = pa.array([separate_words(text) for text in texts], pa.binary())
    lists = pc.ascii_split_whitespace(separated.cast(pa.large_string()))  # pyright: ignore
    flat = lists.flatten()
    holders = np.repeat(np.arange(len(texts)), np.diff(np.asarray(lists.offsets, np.int64)))
    # Space at the ends of a text leaves empty strings behind.
    real = np.asarray(pc.binary_length(flat)) > 0  # pyright: ignore
    encoded = flat.filter(pa.array(real)).cast(pa.large_binary()).dictionary_encode()
    indices = np.asarray(encoded.indices).astype(np.int64)
    return Words(encoded.dictionary.to_pylist(), indices, holders[real])


def hash_parts(words: Words) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Hashes of the parts of all words of texts, uint64[p], and the text int64[p] of each part.

    A word is its own part; one of more than 12 characters has its character 4-grams instead.
    """
    hashes = words.hashes()
    grams = [_hash_grams(word) if len(word) > LONG_WORD else () for word in words.vocabulary]
    counts = np.array([max(1, len(of_word)) for of_word in grams], np.int64)
    parts = np.repeat(hashes, counts)
    long = np.repeat(np.array([bool(of_word) for of_word in grams], bool), counts)
    parts[long] = np.array([gram for of_word in grams for gram in of_word], np.uint64)
    ends = np.cumsum(counts)
    repeats = counts[words.indices]
    offset = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    places = np.repeat((ends - counts)[words.indices], repeats) + offset
    return parts[places], np.repeat(words.texts, repeats)


@functools.lru_cache(maxsize=1 << 17)
def _hash_grams(word: bytes) -> tuple[int, ...]:
    """Hashes of the character 4-grams of a long word; none of a short one."""
    characters = word.decode()
    if len(characters) <= LONG_WORD:
        return ()
    grams = (characters[i : i + GRAM] for i in range(len(characters) - GRAM + 1))
    return tuple(xxhash.xxh3_64_intdigest(gram.encode()) for gram in grams)


def count_by_text(
    texts: NDArray[np.int64], features: NDArray[np.int64], num_texts: int, num_features: int
) -> Counts:
    """Count (text, feature) pairs that are given one by one."""
    pairs, counts = np.unique(texts * num_features + features, return_counts=True)
    bounds = np.searchsorted(pairs, np.arange(num_texts + 1) * num_features)
    shape = (num_texts, num_features)
    return sparse.csr_array((counts.astype(np.float64), pairs % num_features, bounds), shape)


def holders_of(counts: Counts) -> NDArray[np.int64]:
    """The document int64[nnz] of every count that is stored."""
    return np.repeat(np.arange(len(counts.indptr) - 1), np.diff(counts.indptr))


def damped_counts(counts: Counts) -> Counts:
    """1 + ln of every count."""
    # From a table: a vectorised logarithm may round differently at the end of an array.
    highest = int(counts.data.max(initial=1))
    table = 1.0 + np.log(np.arange(1, highest + 1))
    damped = counts.copy()
    damped.data = table[counts.data.astype(np.int64) - 1]
    return damped


def batches(texts: Sequence[str]) -> list[slice]:
    """Slices of texts of about a million characters each, which bounds the memory of counting."""
    slices, begin, size = [], 0, 0
    for number, text in enumerate(texts):
        if size and size + len(text) > BATCH_CHARACTERS:
            slices.append(slice(begin, number))
            begin, size = number, 0
        size += len(text)
    return [*slices, slice(begin, len(texts))] if texts else []
