"""Enrichment, comparison of texts, precision from labels: against the published and by hand."""

import json
import math
import random
import re

import pytest

from portolan.errors import UsageError
from portolan.report.data_map.differences import align
from portolan.report.data_map.duplicates import candidate_probability
from portolan.report.data_map.enrichment import enrichment
from portolan.report.data_map.facts import Count, containment_bin
from portolan.report.data_map.overview import compact
from portolan.report.data_map.review import (
    COLUMNS,
    Label,
    overall_precision,
    precision_by_pair,
    read_labels,
)


def test_enrichment_of_the_public_grid(sample_map, cells_csv):
    tokens = sample_map.read_cells(cells_csv)
    cell = tokens["c30", 4]
    bucket = sum(number for (_, b), number in tokens.items() if b == 4)
    domain = sum(number for (name, _), number in tokens.items() if name == "c30")
    found = enrichment(
        Count(400, cell), Count(9_000, bucket), Count(2_000, domain),
        Count(50_000, sum(tokens.values())),
    )  # fmt: skip
    assert found is not None
    assert found.ratio == pytest.approx(2.8172, abs=5e-5)
    assert found.log2 == pytest.approx(1.494, abs=5e-4)
    width = 1.96 / math.log(2) * math.sqrt(1 / 400 - 1 / 9_000 + 1 / 2_000 - 1 / 50_000)
    assert found.half_width == pytest.approx(width)


def test_enrichment_is_hidden_under_twenty_documents():
    counts = Count(100, 100), Count(100, 100), Count(200, 200)
    assert enrichment(Count(19, 50), *counts) is None
    assert enrichment(Count(20, 50), *counts) is not None
    assert enrichment(Count(200, 200), Count(200, 200), *2 * (Count(200, 200),)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (999_600, "1.00 M"), (1_000, "1.00 k"), (670_000_000_000, "670 G"),
     (23_014_383_400_000, "23.0 T")],
)  # fmt: skip
def test_large_numbers_have_three_digits(value, text):
    assert compact(value) == text.replace(" ", "\u202f")


def test_probability_of_a_candidate_is_that_of_the_table():
    table = {0.5: 0.0126, 0.6: 0.0902, 0.7: 0.4050, 0.75: 0.6744, 0.8: 0.9032, 0.85: 0.9914}
    for similarity, probability in table.items():
        assert candidate_probability(similarity, 26, 11) == pytest.approx(probability, abs=5e-5)
    assert candidate_probability(0.495, 26, 11) == pytest.approx(0.011, abs=5e-4)


def sides(segments) -> tuple[str, str, int]:
    """Texts that segments rebuild, and words that they leave out."""
    left = right = ""
    gaps = 0
    for segment in segments:
        if isinstance(segment[0], int):
            gaps += segment[0]
        else:
            left += segment[0]
            right += segment[-1]
    return left, right, gaps


def test_short_texts_are_rebuilt_and_only_what_differs_is_marked():
    left = "def f(x):\n    return x + 1\n\nThe quick brown fox. It jumps over the dog!\n"
    right = "def f(x):\n    return x + 2\n\nThe quick red fox. It jumps over the dog!\nMore."
    segments = align(left, right)
    assert sides(segments) == (left, right, 0)
    changed = [(a.strip(), b.strip()) for a, b in (s for s in segments if len(s) == 2)]
    assert changed == [("1", "2"), ("brown", "red"), ("", "More.")]


def test_alignment_of_long_texts_is_bounded_and_counts_what_it_leaves_out():
    rng = random.Random(0)
    words = [f"w{rng.randrange(500)}" + "." * (rng.random() < 0.1) for _ in range(20_000)]
    other = list(words)
    for place in rng.sample(range(20_000), 5):
        other[place] = "changed"
    segments = align(" ".join(words), " ".join(other))
    left, right, gaps = sides(segments)
    assert len(left) + len(right) < 10_000 and right.count("changed") == 5
    assert gaps + len(left.split()) == pytest.approx(20_000, abs=10)
    noise = [" ".join(f"w{rng.randrange(9**9)}" for _ in range(30_000)) for _ in range(2)]
    assert sum(map(len, sides(align(*noise))[:2])) < 10_000
    giant = align("x" * 150_000, "y" * 150_000)
    assert sum(map(len, sides(giant)[:2])) < 10_000


def test_white_space_alone_is_no_difference():
    assert all(len(segment) == 1 for segment in align("a  b c.\nd", "a b c. d"))
    assert align("", "") == ()


def test_bins_of_containment():
    assert [containment_bin(c) for c in (0.75, 0.7999, 0.95, 0.98, 1.0)] == [15, 15, 19, 19, 19]


def write(path, labels):
    rows = [dict(zip(COLUMNS, ("e" * 16, *label), strict=True)) for label in labels]
    path.write_text(json.dumps({"format": "portolan-labels", "labels": rows}))
    return path


def test_precision_by_pair_and_over_all_evidence(tmp_path):
    labels = [("a,b", "1", "k", "9", 0.99, "correct")] * 3 + [
        ("a,b", "2", "k", "9", 0.76, "wrong"),
        ("c", "3", "k", "9", 0.99, "unsure"),
        ("c", "4", "k", "9", 0.99, "correct"),
    ]
    read = read_labels(write(tmp_path / "labels.json", labels))
    first, second = precision_by_pair(read)
    assert (first.name, first.correct, first.wrong, first.unsure) == ("a,b -> k", 3, 1, 0)
    # Wilson's interval of 3 of 4, by its formula.
    z, n, p = 1.959964, 4, 0.75
    centre, half = p + z * z / 8, z * math.sqrt(p * (1 - p) / n + z * z / 64)
    assert first.low == pytest.approx((centre - half) / (1 + z * z / n), abs=1e-6)
    assert first.high == pytest.approx((centre + half) / (1 + z * z / n), abs=1e-6)
    assert (second.share, second.unsure) == (1.0, 1)
    strata = {("a,b", "k", 19): 60, ("a,b", "k", 15): 20, ("c", "k", 19): 10, ("d", "k", 19): 10}
    assert overall_precision(read, strata) == pytest.approx((70 / 90, 0.9))
    assert overall_precision([], strata) is None


def test_a_group_without_a_decision_has_no_share():
    (row,) = precision_by_pair([Label("e", "a", "b", 1.0, "unsure")])
    assert row.share is None


@pytest.mark.parametrize(
    ("text", "message"),
    [("a,b\n1,2\n", "is not a file of labels"), ("{", "is not a file of labels"),
     (",".join(COLUMNS) + "\ne,a,1,b,2,.9,maybe\n", "holds the label 'maybe'")],
)  # fmt: skip
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "labels.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)):
        read_labels(path)
