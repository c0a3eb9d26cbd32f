"""MinHash signatures and their bands.

The default signatures are rensa's (fast similarity sketching, 32 bits a slot); the reference is
multiply-and-shift over 128-bit odd constants in NumPy, as in the public run. Both are functions of
the set of shingle hashes and of a fixed seed. Which one proposed a pair does not decide a removal.
"""

import itertools
from collections.abc import Callable
from functools import cache
from typing import Literal

import numpy as np

from portolan.data.ngrams import Windows, hash_rows

Signature = Literal["rensa", "reference"]
SEED = 42
RENSA_VERSION = "0.5.0"
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_CHUNK = 512


@cache
def constants(count: int, seed: int = SEED) -> tuple[np.ndarray, np.ndarray]:
    """High and low halves, uint64[count] each, of odd 128-bit constants drawn from PCG64(seed)."""
    raw = np.random.PCG64(seed).random_raw(2 * count)
    return raw[0::2].copy(), raw[1::2] | np.uint64(1)


def permute(hashes: np.ndarray, high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """g(h) = floor((h c mod 2^128) / 2^64) for every constant and hash, uint64[constants, hashes].

    The product modulo 2^128 needs the high half of h times lo(c), and h times hi(c) modulo 2^64.
    """
    h0, h1 = hashes & _LOW, hashes >> _HALF
    c0, c1 = (low & _LOW)[:, None], (low >> _HALF)[:, None]
    middle = h1 * c0
    middle += (h0 * c0) >> _HALF
    cross = h0 * c1
    cross += middle & _LOW
    result = h1 * c1
    result += middle >> _HALF
    result += cross >> _HALF
    result += hashes * high[:, None]
    return result


def reference_signatures(shingles: Windows, permutations: int, seed: int = SEED) -> np.ndarray:
    """Least permuted hash of each text, uint64[texts, permutations]; all ones without shingle."""
    high, low = constants(permutations, seed)
    num_texts = len(shingles.offsets) - 1
    signatures = np.full((num_texts, permutations), np.uint64(2**64 - 1))
    for text in range(num_texts):
        hashes = shingles.distinct(text)
        for begin in range(0, len(hashes), _CHUNK):
            smallest = permute(hashes[begin : begin + _CHUNK], high, low).min(axis=1)
            np.minimum(signatures[text], smallest, out=signatures[text])
    return signatures


def rensa_signatures(shingles: Windows, permutations: int, seed: int = SEED) -> np.ndarray:
    """rensa's R-MinHash of each text, uint64[texts, permutations] (the values have 32 bits)."""
    import rensa

    if not len(shingles.offsets) > 1:
        return np.zeros((0, permutations), np.uint64)
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(  # pyright: ignore
        shingles.hashes, shingles.offsets.astype(np.uint64), permutations, seed
    )
    values = itertools.chain.from_iterable(matrix.to_rows())
    count = (len(shingles.offsets) - 1) * permutations
    return np.fromiter(values, np.uint64, count).reshape(-1, permutations)


SIGNATURES: dict[Signature, Callable[[Windows, int], np.ndarray]] = {
    "rensa": rensa_signatures,
    "reference": reference_signatures,
}


def bucket_ids(signatures: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """XXH3-64 of band index (uint32) and the band's rows (uint64, all little-endian).

    The index keeps equal bytes in different bands apart. Returns uint64[texts, bands].
    """
    num_texts = len(signatures)
    content = np.empty((num_texts, bands, 4 + 8 * rows), np.uint8)
    content[:, :, :4] = np.arange(bands, dtype="<u4").view(np.uint8).reshape(bands, 4)
    values = np.ascontiguousarray(signatures[:, : bands * rows], "<u8")
    content[:, :, 4:] = values.view(np.uint8).reshape(num_texts, bands, 8 * rows)
    return hash_rows(content.reshape(num_texts * bands, 4 + 8 * rows)).reshape(num_texts, bands)


def candidate_probability(jaccard: float, bands: int, rows: int) -> float:
    """Chance that two texts of a given Jaccard similarity share a bucket: 1 - (1 - s^r)^b."""
    return 1.0 - (1.0 - jaccard**rows) ** bands
