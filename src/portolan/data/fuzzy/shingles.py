"""Cleaned text and its shingles: what MinHash sees of a document."""

import string
from collections.abc import Sequence
from typing import Literal

from portolan.data.ngrams import Tokens, Windows

Unit = Literal["word", "char"]
PUNCTUATION = string.punctuation.encode()
MIN_UNSEGMENTED_CHARACTERS = 64
"""Longer texts of fewer words than a shingle have no spaces where others have: `unsegmented`."""


def clean(text: str) -> str:
    """Lower case, without the 32 ASCII punctuation characters, words joined by one space."""
    return " ".join(text.lower().encode().translate(None, PUNCTUATION).decode().split())


def lay_out(cleaned: Sequence[str], unit: Unit) -> Tokens:
    """Units of cleaned texts: their words or their characters."""
    return Tokens.of_words(cleaned) if unit == "word" else Tokens.of_characters(cleaned)


def shingle_hashes(cleaned: Sequence[str], unit: Unit, size: int) -> Windows:
    """XXH3-64 of every shingle of `size` units; a shorter text is one shingle, an empty one none.

    Both `unit` and `size` must be said: "5-grams" of words and of characters differ by a factor of
    ten in what they call similar.
    """
    return lay_out(cleaned, unit).windows(size, short_whole=True)
