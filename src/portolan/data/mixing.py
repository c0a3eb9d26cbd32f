"""Keyed integer mixing and permutations: the order of the data as a pure function of an index.

Arithmetic is unsigned 64-bit, modulo 2^64. Functions take Python integers or NumPy arrays; a call
with integers only returns an integer, any array makes the result a uint64 array.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = int | NDArray[np.integer[Any]]
Words = NDArray[np.uint64]

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
FIRST_MULTIPLIER = 0xBF58476D1CE4E5B9
SECOND_MULTIPLIER = 0x94D049BB133111EB
NUM_FEISTEL_ROUNDS = 6
BLOCK_TOKENS = 1 << 20
WORD_MASK = (1 << 64) - 1
# Long inputs are worked through in pieces that stay in the cache of one core.
PIECE_LENGTH = 1 << 14
MAX_SIZE = 1 << 53


def _mix_in_place(words: Words, scratch: Words) -> Words:
    """Finalise `words` in place; `scratch` has the same shape."""
    for shift, multiplier in ((30, FIRST_MULTIPLIER), (27, SECOND_MULTIPLIER)):
        np.right_shift(words, np.uint64(shift), out=scratch)
        np.bitwise_xor(words, scratch, out=words)
        np.multiply(words, np.uint64(multiplier), out=words)
    np.right_shift(words, np.uint64(31), out=scratch)
    return np.bitwise_xor(words, scratch, out=words)


def as_words(values: Integers) -> Words:
    """Copy to a uint64 array of at least one dimension."""
    if isinstance(values, int):
        return np.array([values & WORD_MASK], np.uint64)
    return np.atleast_1d(np.asarray(values)).astype(np.uint64, copy=True)


def mix64(z: Any) -> Any:
    """Finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection of 64-bit words."""
    if isinstance(z, int):
        z &= WORD_MASK
        z = ((z ^ (z >> 30)) * FIRST_MULTIPLIER) & WORD_MASK
        z = ((z ^ (z >> 27)) * SECOND_MULTIPLIER) & WORD_MASK
        return z ^ (z >> 31)
    words = as_words(z)
    return _mix_in_place(words, np.empty_like(words))


def fold(key: Any, index: Any) -> Any:
    """Derive the key number `index` from `key`: mix64(key + gamma * (index + 1))."""
    if isinstance(key, int) and isinstance(index, int):
        return mix64(key + GOLDEN_GAMMA * (index + 1))
    words = as_words(index)
    words += np.uint64(1)
    words *= np.uint64(GOLDEN_GAMMA)
    words = words + as_words(key)
    return _mix_in_place(words, np.empty_like(words))


def permute(size: Any, key: Any, index: Any) -> Words:
    """Position of `index` in the keyed permutation of 0 .. size-1.

    A balanced Feistel network of 6 rounds on the next even number of bits, with cycle walking: no
    table, the same cost at any size. Arguments broadcast; every index must be below its size.
    """
    sizes, keys, indices = np.broadcast_arrays(as_words(size), as_words(key), as_words(index))
    if np.any(indices >= sizes) or np.any(sizes > np.uint64(MAX_SIZE)):
        raise ValueError("permute: an index is not below its size, or a size is over 2**53")
    result = np.empty(indices.shape, np.uint64)
    flat = (result.reshape(-1), sizes.reshape(-1), keys.reshape(-1), indices.reshape(-1))
    for start in range(0, result.size, PIECE_LENGTH):
        out, size, key, index = (array[start : start + PIECE_LENGTH] for array in flat)
        out[:] = _permute_piece(size, key, index)
    return result


def _one_if_constant(words: Words) -> Words:
    return words[:1] if (words == words[0]).all() else words


def _permute_piece(sizes: Words, keys: Words, indices: Words) -> Words:
    """Permute one short vector; constant sizes and keys are handled once for all elements."""
    sizes, keys = _one_if_constant(sizes), _one_if_constant(keys)
    # frexp gives the number of bits of size - 1, exactly because sizes stay below 2^53.
    bits = np.maximum(np.frexp((sizes - np.uint64(1)).astype(np.float64))[1], 2)
    half_bits = ((bits + 1) >> 1).astype(np.uint64)
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    per_element = [sizes, half_bits, mask, *(fold(keys, j) for j in range(NUM_FEISTEL_ROUNDS))]
    result = _feistel(indices, *per_element[1:])
    walking = np.flatnonzero(result >= sizes)
    outside = walking
    while len(walking):
        per_element = [array if len(array) == 1 else array[outside] for array in per_element]
        values = _feistel(result[walking], *per_element[1:])
        result[walking] = values
        outside = np.flatnonzero(values >= per_element[0])
        walking = walking[outside]
    return result


def _feistel(values: Words, half_bits: Words, mask: Words, *rounds: Words) -> Words:
    left = values >> half_bits
    right = values & mask
    mixed, scratch = np.empty_like(values), np.empty_like(values)
    for round_keys in rounds:
        np.bitwise_xor(right, round_keys, out=mixed)
        _mix_in_place(mixed, scratch)
        np.bitwise_and(mixed, mask, out=mixed)
        np.bitwise_xor(mixed, left, out=left)
        left, right = right, left
    return (left << half_bits) | right


def shuffle_blocks(
    num_sequences: Any, key: Any, index: Any, *, block_sequences: int, window_blocks: int
) -> Words:
    """Sequence at position `index` of a shuffled cell of `num_sequences`; arguments broadcast.

    Blocks of `block_sequences` are permuted; inside each run of `window_blocks` of them the
    sequences are permuted, so a window reads whole blocks. The incomplete last block follows.
    """
    sizes, keys, indices = np.broadcast_arrays(
        as_words(num_sequences), as_words(key), as_words(index)
    )
    if np.any(indices >= sizes):
        raise ValueError("shuffle_blocks: an index is not below the number of sequences")
    result = np.empty(indices.shape, np.uint64)
    flat = (result.reshape(-1), sizes.reshape(-1), keys.reshape(-1), indices.reshape(-1))
    for start in range(0, result.size, PIECE_LENGTH):
        out, size, key, index = (array[start : start + PIECE_LENGTH] for array in flat)
        out[:] = _shuffle_piece(
            size, key, index, np.uint64(block_sequences), np.uint64(window_blocks)
        )
    return result


def _shuffle_piece(
    sizes: Words, keys: Words, indices: Words, block: np.uint64, window_blocks: np.uint64
) -> Words:
    window = block * window_blocks
    num_blocks = sizes // block
    in_blocks = num_blocks * block
    whole = indices < in_blocks
    result = np.empty(indices.shape, np.uint64)
    if whole.any():
        keys_w, blocks_w, indices_w = keys[whole], num_blocks[whole], indices[whole]
        windows = indices_w // window
        first_block = windows * window_blocks
        width = np.minimum(window_blocks, blocks_w - first_block)
        window_keys = fold(fold(_one_if_constant(keys_w), 1), _one_if_constant(windows))
        inner = permute(width * block, window_keys, indices_w - windows * window)
        outer = permute(blocks_w, fold(_one_if_constant(keys_w), 0), first_block + inner // block)
        result[whole] = outer * block + inner % block
    if not whole.all():
        tail = ~whole
        start = in_blocks[tail]
        inner = permute(sizes[tail] - start, fold(keys[tail], 2), indices[tail] - start)
        result[tail] = start + inner
    return result
