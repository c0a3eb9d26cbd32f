"""Window hashes of many texts at once, against hashing each window by itself."""

import numpy as np
import pyarrow as pa
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from portolan.data.ngrams import Tokens, batches, hash_rows, hash_strings, hash_values

WORDS = st.sampled_from(
    ["a", "bb", "ü€", "\U0001f600", "thirteenchars", "twelve chars"[:6], "x" * 40]
)
TEXTS = st.lists(st.lists(WORDS, max_size=9).map(" ".join), max_size=6)


def windows_of(tokens, size, joint, short_whole):
    if len(tokens) < size:
        return [joint.join(tokens)] if short_whole and tokens else []
    return [joint.join(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]


def hashes_of(texts):
    return [xxhash.xxh3_64_intdigest(text.encode()) for text in texts]


@given(TEXTS, st.integers(1, 6), st.booleans())
def test_windows_of_words_and_characters(texts, size, short_whole):
    for laid, split, joint in (
        (Tokens.of_words(texts), str.split, " "),
        (Tokens.of_characters(texts), list, ""),
    ):
        found = laid.windows(size, short_whole=short_whole)
        assert laid.counts.tolist() == [len(split(text)) for text in texts]
        for place, text in enumerate(texts):
            expected = hashes_of(windows_of(split(text), size, joint, short_whole))
            assert found.of(place).tolist() == expected
            assert found.distinct(place).tolist() == sorted(set(expected))


@given(st.lists(st.text(max_size=60).filter(lambda text: text.isprintable()), max_size=8))
def test_hashes_of_values(texts):
    assert hash_strings(texts).tolist() == hashes_of(texts)
    assert hash_values(pa.array(texts, pa.string())).tolist() == hashes_of(texts)
    rows = np.arange(6, dtype="<u8").reshape(3, 2)
    assert hash_rows(rows).tolist() == [xxhash.xxh3_64_intdigest(row.tobytes()) for row in rows]


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 60))
def test_batches_hold_every_text_once_and_keep_the_limit(lengths, limit):
    runs = batches(lengths, limit)
    assert [i for run in runs for i in range(run.start, run.stop)] == list(range(len(lengths)))
    assert all(sum(lengths[run]) <= limit or run.stop - run.start == 1 for run in runs)
