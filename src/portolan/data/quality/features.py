"""What the scorer sees of a document: its vector, its words in three windows, its length."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from portolan.data.embedding.quantization import dequantize
from portolan.data.embedding.words import (
    batches,
    count_by_text,
    damped_counts,
    holders_of,
    split_words,
)

NUM_WORD_FEATURES = 1 << 14
WINDOW_CHARACTERS = 2048
"""About 512 tokens."""
# Large, so that a penalty on all weights leaves the constant almost free.
CONSTANT = 10.0

Features = sparse.csr_array
"""float64[documents, d + 2^14 + 2], indices sorted: vector, words, scaled ln characters, 10."""


def windows_of(text: str) -> list[str]:
    """Beginning, middle and end of a text, 2,048 characters each; all of a shorter text."""
    if len(text) <= WINDOW_CHARACTERS:
        return [text]
    last = len(text) - WINDOW_CHARACTERS
    return [text[begin : begin + WINDOW_CHARACTERS] for begin in (0, last // 2, last)]


def count_words(texts: Sequence[str]) -> sparse.csr_array:
    """Mean over a text's windows of its hashed word counts 1 + ln tf, of length 1 each."""
    parts = [windows_of(text) for text in texts]
    owners = np.repeat(np.arange(len(texts)), [len(windows) for windows in parts])
    words = split_words([window for windows in parts for window in windows])
    features = (words.hashes() & np.uint64(NUM_WORD_FEATURES - 1)).astype(np.int64)
    counts = damped_counts(
        count_by_text(words.texts, features[words.indices], len(owners), NUM_WORD_FEATURES)
    )
    squares = sparse.csr_array((counts.data**2, counts.indices, counts.indptr), counts.shape)
    lengths = np.sqrt(squares @ np.ones(NUM_WORD_FEATURES))
    counts.data /= lengths[holders_of(counts)]
    shares = 1.0 / np.bincount(owners, minlength=len(texts))[owners]
    mean = sparse.csr_array((shares, (owners, np.arange(len(owners)))), (len(texts), len(owners)))
    result = sparse.csr_array(mean @ counts)
    result.sort_indices()
    return result


def length_of(text: str) -> float:
    """Natural logarithm of the number of characters."""
    return math.log(max(1, len(text)))


def make_features(
    texts: Sequence[str], codes: NDArray[np.int8], mean_length: float, scale_length: float
) -> Features:
    """Features of documents with vectors int8[n, d]."""
    words = sparse.vstack([count_words(texts[batch]) for batch in batches(texts)])
    lengths = np.array([(length_of(text) - mean_length) / scale_length for text in texts])
    last = np.stack([lengths, np.full(len(texts), CONSTANT)], axis=1)
    joined = sparse.hstack([sparse.csr_array(dequantize(codes)), words, sparse.csr_array(last)])
    features = sparse.csr_array(joined)
    features.sort_indices()
    return features


def apply_weights(features: Features, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Products float64[n, outputs] with weights float64[features, outputs].

    A document's terms are summed one after the other in the order of the features, so its values
    do not depend on the documents beside it.
    """
    return features @ weights
