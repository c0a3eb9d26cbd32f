import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portolan.data.mixing import MAX_SIZE, WORD_MASK, fold, mix64, permute, shuffle_blocks

words = st.integers(0, WORD_MASK)


def feistel_by_hand(size: int, key: int, index: int) -> int:
    """The definition in plain integers, one element at a time."""
    bits = max(2, (size - 1).bit_length())
    half = (bits + 1) // 2
    while True:
        left, right = index >> half, index & ((1 << half) - 1)
        for j in range(6):
            left, right = right, left ^ (mix64(right ^ fold(key, j)) % (1 << half))
        index = (left << half) | right
        if index < size:
            return index


def test_golden_words():
    assert fold(0, 0) == 0xE220A8397B1DCDAF
    assert fold(42, 0) == 0xBDD732262FEB6E95
    assert mix64(1) == 0x5692161D100B05E5


def test_golden_permutations():
    assert permute(10, 0, np.arange(10)).tolist() == [7, 5, 1, 8, 6, 3, 4, 0, 9, 2]
    assert permute(10, 1, np.arange(10)).tolist() == [3, 9, 4, 0, 7, 8, 1, 2, 5, 6]
    assert permute(1000, 42, np.arange(5)).tolist() == [899, 754, 631, 534, 148]
    assert permute(1, 42, 0).tolist() == [0]


def test_golden_block_shuffles():
    order = shuffle_blocks(100, 42, np.arange(12), block_sequences=4, window_blocks=3)
    assert order.tolist() == [55, 57, 34, 35, 52, 53, 59, 58, 33, 56, 54, 32]
    tail = shuffle_blocks(50, 42, np.arange(6), block_sequences=64, window_blocks=3)
    assert tail.tolist() == [48, 15, 17, 46, 26, 9]


@given(st.lists(words, min_size=1, max_size=8), words)
def test_arrays_equal_integers(values, key):
    array = np.array(values, np.uint64)
    assert mix64(array).tolist() == [mix64(value) for value in values]
    assert fold(key, array).tolist() == [fold(key, value) for value in values]
    assert fold(array, 3).tolist() == [fold(value, 3) for value in values]


@pytest.mark.parametrize("size", range(1, 301))
def test_permutation_is_a_bijection(size):
    assert np.array_equal(np.sort(permute(size, size * 7919, np.arange(size))), np.arange(size))


@settings(max_examples=30)
@given(st.integers(1, 40_000), words)
def test_permutation_of_any_size_is_a_bijection(size, key):
    result = permute(size, key, np.arange(size))
    assert np.array_equal(np.sort(result), np.arange(size))
    sample = range(0, size, max(1, size // 7))
    assert [int(result[i]) for i in sample] == [feistel_by_hand(size, key, i) for i in sample]


@given(st.lists(st.tuples(st.integers(1, MAX_SIZE), words, words), min_size=1, max_size=20))
def test_sizes_and_keys_may_differ_by_element(rows):
    rows = [(size, key, index % size) for size, key, index in rows]
    sizes, keys, indices = (np.array(column, np.uint64) for column in zip(*rows, strict=True))
    expected = [feistel_by_hand(*row) for row in rows]
    assert permute(sizes, keys, indices).tolist() == expected


@settings(max_examples=40)
@given(st.integers(1, 3000), words, st.integers(1, 70), st.integers(1, 9))
def test_block_shuffle_is_a_bijection_that_reads_windows_of_whole_blocks(size, key, block, window):
    order = shuffle_blocks(
        size, key, np.arange(size), block_sequences=block, window_blocks=window
    ).astype(np.int64)
    assert np.array_equal(np.sort(order), np.arange(size))
    in_blocks = size // block * block
    for start in range(0, in_blocks, block * window):
        chosen = order[start : min(start + block * window, in_blocks)]
        counts = np.bincount(chosen // block)
        assert set(counts.tolist()) <= {0, block}
    assert set(order[in_blocks:].tolist()) == set(range(in_blocks, size))


def test_keys_give_different_orders():
    orders = {tuple(permute(1000, key, np.arange(1000)).tolist()) for key in range(50)}
    assert len(orders) == 50


def test_an_index_out_of_range_is_refused():
    with pytest.raises(ValueError, match="below its size"):
        permute(10, 0, 10)
    with pytest.raises(ValueError, match="below the number"):
        shuffle_blocks(10, 0, 10, block_sequences=4, window_blocks=2)
