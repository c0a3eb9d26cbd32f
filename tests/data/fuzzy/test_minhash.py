"""Signatures and buckets: golden values, the curve of candidates, and the pinned library."""

import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from portolan.data.fuzzy import minhash, shingles
from portolan.data.ngrams import Windows

TEXT = "the quick brown fox jumps over the lazy dog and runs away"
CURVE = {
    0.5: 0.0126,
    0.6: 0.0902,
    0.7: 0.4050,
    0.75: 0.6744,
    0.8: 0.9032,
    0.85: 0.9914,
    0.9: 0.9999,
}


def hexes(values):
    return [f"{int(value):016x}" for value in values]


def test_golden_values_of_the_reference():
    assert shingles.clean("Hello,  World!\n It's  5-5 ") == "hello world its 55"
    high, low = minhash.constants(286)
    assert hexes([high[0], low[0]]) == ["c621fbcd16d92688", "705a5661a791ffc1"]
    assert hexes([high[285], low[285]]) == ["56a51586e195642c", "d82fc476ee6fda09"]
    found = minhash.reference_signatures(shingles.shingle_hashes([TEXT], "word", 5), 286)
    assert hexes(found[0, :3]) == ["0fd6c781a0210636", "0d770987ae7f8266", "0989b65d76103d61"]
    buckets = minhash.bucket_ids(found, 26, 11)[0]
    expected = ["e7f6950a758f6c44", "679f7cf3d95f8823", "a23cf66894914d4e"]
    assert hexes(buckets[[0, 1, 25]]) == expected


def test_signatures_of_the_pinned_library_have_not_changed():
    found = minhash.rensa_signatures(shingles.shingle_hashes([TEXT], "word", 5), 286)
    assert found[0, :3].tolist() == [3267924397, 3442934787, 3315439777]


@given(st.text(max_size=80))
def test_clean_is_stable_and_without_punctuation(text):
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    cleaned = shingles.clean(text)
    assert not set(cleaned) & set(string.punctuation)
    assert cleaned == " ".join(cleaned.split())
    assert shingles.clean(cleaned) == cleaned


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5), st.integers(1, 8))
def test_permutation_is_the_high_half_of_a_128_bit_product(hashes, count):
    high, low = minhash.constants(count)
    found = minhash.permute(np.array(hashes, np.uint64), high, low)
    for row, h, l in zip(found, high.tolist(), low.tolist(), strict=True):
        assert row.tolist() == [((value * (h << 64 | l)) % 2**128) >> 64 for value in hashes]


def test_shingles_need_their_unit_and_size():
    with pytest.raises(TypeError):
        shingles.shingle_hashes([TEXT])  # pyright: ignore
    with pytest.raises(TypeError):
        shingles.shingle_hashes([TEXT], 5)  # pyright: ignore
    by_character = shingles.shingle_hashes([TEXT, ""], "char", 5)
    assert np.diff(by_character.offsets).tolist() == [len(TEXT) - 4, 0]


def test_equal_rows_in_two_bands_are_two_buckets():
    signature = np.full((1, 286), 7, np.uint64)
    assert len(set(minhash.bucket_ids(signature, 26, 11)[0].tolist())) == 26


@pytest.mark.parametrize("name", ["reference", "rensa"])
def test_candidate_rate_follows_the_curve(name):
    pairs = 2_000 if name == "reference" else 10_000
    generator = np.random.default_rng(1)
    for jaccard, expected in CURVE.items():
        assert minhash.candidate_probability(jaccard, 26, 11) == pytest.approx(expected, abs=5e-5)
        shared = round(jaccard * 20)
        hashes = generator.integers(0, 2**64, (pairs, 20), dtype=np.uint64)
        only = (20 - shared) // 2
        first, second = hashes[:, : 20 - only], hashes[:, np.r_[:shared, 20 - only : 20]]
        exact = shared / 20
        buckets = []
        for part in (first, second):
            offsets = np.arange(pairs + 1) * part.shape[1]
            found = minhash.SIGNATURES[name](Windows(part.ravel(), offsets), 286)
            buckets.append(minhash.bucket_ids(found, 26, 11))
        rate = (buckets[0] == buckets[1]).any(axis=1).mean()
        margin = 0.02 if pairs == 10_000 else 0.03
        assert rate == pytest.approx(minhash.candidate_probability(exact, 26, 11), abs=margin)
