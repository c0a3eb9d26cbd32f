"""Held-out documents: their choice, the overlap rules, and the evidence of each removal."""

import random
from fractions import Fraction

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from portolan.data.heldout import Hit, WindowIndex, _Judge, choose_heldout, window_hashes
from portolan.recipe import DataSettings
from portolan.source_settings import SourceSettings


def settings_of(**fields) -> DataSettings:
    return DataSettings(sources=(SourceSettings(key="a", kind="text", path="in"),), **fields)


def words(seed, count):
    generator = random.Random(seed)
    return [f"w{generator.randrange(10**9)}" for _ in range(count)]


def windows_of(text):
    tokens = text.casefold().split()
    return [tuple(tokens[i : i + 13]) for i in range(max(1, len(tokens) - 12))]


@given(st.lists(st.sampled_from(["a", "B", "ç", "Straße", "x1"]), min_size=1, max_size=60))
def test_equal_windows_have_equal_hashes(tokens):
    text = " ".join(tokens)
    hashes, windows = window_hashes(text), windows_of(text)
    assert len(hashes) == len(windows)
    by_hash = dict(zip(hashes.tolist(), windows, strict=True))
    assert all(by_hash[h] == w for h, w in zip(hashes.tolist(), windows, strict=True))
    assert len(by_hash) == len(set(windows))
    assert np.array_equal(window_hashes("  " + text.upper().lower() + "\n"), window_hashes(text))


def test_a_short_text_is_one_window_and_no_prefix_of_a_longer_one():
    short, longer = window_hashes("one two three"), window_hashes("one two three four")
    assert len(short) == len(longer) == 1
    assert short[0] != longer[0]


def test_choice_is_by_smallest_hash_within_the_budgets():
    ids = [f"{i:032x}" for i in range(1000)]
    sizes = [100 + i % 50 for i in range(1000)]
    settings = settings_of(
        seed=3,
        heldout_documents_per_domain=20,
        heldout_bytes_per_domain=10**9,
        heldout_fraction_max=0.5,
    )
    chosen = choose_heldout("a", ids, sizes, settings)
    order = sorted(ids, key=lambda name: xxhash.xxh3_64_intdigest(f"3:a:{name}".encode()))
    assert chosen == sorted(order[:20])
    shuffled = list(zip(ids, sizes, strict=True))
    random.Random(1).shuffle(shuffled)
    assert choose_heldout("a", *zip(*shuffled, strict=True), settings) == chosen
    assert choose_heldout("b", ids, sizes, settings) != chosen


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    st.integers(1, 40),
    st.integers(1, 5000),
    st.floats(0, 1),
)
def test_choice_keeps_every_budget(sizes, max_documents, max_bytes, fraction):
    ids = [f"{i:032x}" for i in range(len(sizes))]
    settings = settings_of(
        heldout_documents_per_domain=max_documents,
        heldout_bytes_per_domain=max_bytes,
        heldout_fraction_max=fraction,
    )
    chosen = choose_heldout("a", ids, sizes, settings)
    used = sum(sizes[int(name, 16)] for name in chosen)
    assert len(chosen) <= min(max_documents, Fraction(fraction) * len(ids))
    assert used <= min(max_bytes, Fraction(fraction) * sum(sizes))


def judge(heldout_texts, training_texts, num_documents=1000):
    index = WindowIndex.build(heldout_texts)
    hits = [
        Hit(str(i), len(hashes := window_hashes(text)), index.hits(hashes).astype(np.int32))
        for i, text in enumerate(training_texts)
    ]
    owners = [("s", str(i)) for i in range(len(heldout_texts))]
    arbiter = _Judge(index, owners, num_documents, [hit for hit in hits if len(hit.places)])
    return [arbiter.verdict(hit) if len(hit.places) else None for hit in hits]


def test_index_counts_windows_of_each_document():
    texts = [" ".join(words(i, 40)) for i in range(3)] + [" ".join(words(0, 20))]
    index = WindowIndex.build(texts)
    assert index.num_windows.tolist() == [28, 28, 28, 8]
    places = index.hits(window_hashes(texts[0]))
    assert index.count_by_document(places).tolist() == [28, 0, 0, 8]
    assert len(index.hits(window_hashes(" ".join(words(9, 99))))) == 0


def test_half_of_its_own_windows_removes_a_training_document():
    held = words(1, 200)
    # 100 words hold 88 windows: with 56 copied words 44 of them stand in the held-out text.
    exactly_half = " ".join(held[:56] + words(2, 44))
    below_half = " ".join(held[:55] + words(3, 45))
    quoted = " ".join(word.upper() for word in held[:56]) + "\n" + " ".join(words(2, 44))
    half, below, upper = judge([" ".join(held)], [exactly_half, below_half, quoted])
    assert (half["rule"], half["num_shared"], half["num_windows"]) == ("own_windows", 44, 88)
    assert below is None
    assert upper == {**half, "id": "2"}


def test_a_training_document_that_holds_a_heldout_one_is_removed():
    held = words(1, 50)
    around = words(2, 1000)
    inside = " ".join(around[:500] + held + around[500:])
    part = " ".join(around[:500] + held[:20] + around[500:])
    found, kept = judge([" ".join(words(7, 30)), " ".join(held)], [inside, part])
    assert found == {
        "id": "0",
        "reason": "near_heldout",
        "rule": "heldout_windows",
        "heldout_source": "s",
        "heldout_id": "1",
        "num_shared": 38,
        "num_windows": 38,
    }
    assert kept is None


def test_windows_common_in_the_corpus_do_not_empty_a_source():
    header = words(1, 60)
    heldout = " ".join(header + words(2, 10))
    training = [" ".join(header + words(100 + i, 300)) for i in range(20)]
    assert judge([heldout], training) == [None] * 20
    # Four documents are below the threshold of five: there the same overlap is evidence.
    assert all(row is not None for row in judge([heldout], training[:4]))


def test_a_short_document_must_match_whole():
    exact, near = judge(["Licence: MIT"], ["licence:  mit", "licence: mit or isc"])
    assert exact["rule"] == "own_windows"
    assert near is None


@pytest.mark.parametrize(("num_documents", "expected"), [(10, 5), (1000, 5), (1001, 6), (5000, 25)])
def test_common_threshold(num_documents, expected):
    index = WindowIndex.build(["a b"])
    assert _Judge(index, [("s", "0")], num_documents, []).common_documents == expected
