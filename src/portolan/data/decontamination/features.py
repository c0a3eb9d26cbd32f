"""What decontamination compares: folded paragraphs, their 13-token windows, and short items."""

import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from portolan.data.ngrams import Tokens, Windows, hash_slices

Fold = Literal["nfkc", "none"]
NgramHash = Literal["xxh3", "blake2b"]
WINDOW_TOKENS = 13
MIN_SHORT_TOKENS = 3
"""Items of 3 to 12 tokens, each with a letter, match a whole paragraph or nothing."""


def fold_text(text: str, fold: Fold) -> str:
    """NFKC and case folding, or the text as it is."""
    if fold == "none":
        return text
    return (text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold()


def paragraphs(text: str, fold: Fold) -> list[str]:
    """Lines of a folded text that have tokens, which one space joins."""
    joined = (" ".join(line.split()) for line in fold_text(text, fold).split("\n"))
    return [line for line in joined if line]


@dataclass(frozen=True)
class Laid:
    """Tokens of several documents, and where their paragraphs begin.

    tokens: one text a document, its paragraphs joined by one space; begins int64[p+1]: first token
    of each paragraph; first_paragraph int64[d+1]: paragraphs of document i are [i:i+2].
    """

    tokens: Tokens
    begins: np.ndarray
    first_paragraph: np.ndarray

    @classmethod
    def of(cls, documents: Sequence[Sequence[str]]) -> "Laid":
        """Lay out documents, each given by its paragraphs."""
        lines = Tokens.of_words([line for document in documents for line in document])
        counts = np.array([len(document) for document in documents], np.int64)
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        content = lines.content.replace(b"\n", b" ")
        tokens = Tokens(content, lines.starts, lines.ends, lines.offsets[first])
        return cls(tokens, lines.offsets, first)

    def windows(self, hashing: NgramHash) -> Windows:
        """Hashes of the 13-token windows of each document, across its paragraphs."""
        if hashing == "xxh3":
            return self.tokens.windows(WINDOW_TOKENS, short_whole=False)
        places = self.tokens.windows(WINDOW_TOKENS, short_whole=False)
        shift = np.repeat(self.tokens.offsets[:-1] - places.offsets[:-1], np.diff(places.offsets))
        first = np.arange(len(shift)) + shift
        hashes = _blake2b(
            self.tokens.content,
            self.tokens.starts[first],
            self.tokens.ends[first + WINDOW_TOKENS - 1],
        )
        return Windows(hashes, places.offsets)

    def short_paragraphs(self, hashing: NgramHash) -> tuple[np.ndarray, np.ndarray]:
        """Indices int64[n] and hashes uint64[n] of the paragraphs of 3 to 12 tokens."""
        counts = np.diff(self.begins)
        found = np.flatnonzero((counts >= MIN_SHORT_TOKENS) & (counts < WINDOW_TOKENS))
        starts = self.tokens.starts[self.begins[found]]
        ends = self.tokens.ends[self.begins[found + 1] - 1]
        hashes = hash_slices if hashing == "xxh3" else _blake2b
        return found, hashes(self.tokens.content, starts, ends)


def _blake2b(content: bytes, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """BLAKE2b of 8 bytes, read big-endian, of each slice: the hash of the public run."""
    digests = (
        hashlib.blake2b(content[begin:end], digest_size=8).digest()
        for begin, end in zip(starts.tolist(), ends.tolist(), strict=True)
    )
    return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)


def is_short_item(passage: Sequence[str]) -> bool:
    """True for 3 to 12 tokens, each with a letter: numbers and single words match anywhere."""
    has_letters = all(any(char.isalpha() for char in token) for token in passage)
    return MIN_SHORT_TOKENS <= len(passage) < WINDOW_TOKENS and has_letters
