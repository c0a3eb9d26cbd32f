"""Who of a group stays: golden containments, the order, and the inverted index."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from portolan.data.fuzzy.verification import Rules, count_shared, fold, judge, window_sets

NUMBERS = "one two three four five six seven eight nine ten eleven twelve"
NINE_AND_X = "one two three four five six seven eight nine X"
SIX_X_THREE = "one two three four five six X eight nine ten"


def verdicts(texts, threshold, no_new_token=False, may_go=None, **options):
    folded = [fold(text) for text in texts]
    return judge(
        window_sets(folded),
        [True] * len(texts) if may_go is None else may_go,
        Rules(threshold, no_new_token),
        lambda index: set(folded[index].split()),
        **options,
    )


def slow_verdicts(texts, threshold):
    """The definition, pair by pair, over sets of token triples."""

    def grams(text):
        tokens = text.casefold().split()
        return {tuple(tokens[i : i + 3]) for i in range(max(1, len(tokens) - 2))}

    survivors, found = [], []
    for place, text in enumerate(texts):
        own = grams(text)
        for kept in survivors:
            if len(own & grams(texts[kept])) / len(own) >= threshold:
                found.append(kept)
                break
        else:
            survivors.append(place)
            found.append(None)
    return found


def kept_of(found):
    return [None if verdict is None else verdict.kept for verdict in found]


def test_golden_containments():
    small, large = window_sets(["a b c d e f", "a b c d e f g h"])
    assert (count_shared(small, large), len(small), len(large)) == (4, 4, 6)
    removed = verdicts([NUMBERS, SIX_X_THREE, NINE_AND_X], 0.75)
    assert removed[:2] == [None, None]
    assert (removed[2].kept, removed[2].shared, removed[2].comparisons) == (0, 7, 1)
    assert verdicts([NUMBERS, NINE_AND_X], 0.98) == [None, None]
    assert verdicts([NUMBERS, SIX_X_THREE], 0.625)[1].shared == 5


def test_a_removed_document_never_represents():
    first, second = "a b c d e f g h i j", "b c d e f g h i j x"
    third = "c d e f g h i j x y"
    # The third is held by the second alone, which the first has removed.
    assert kept_of(verdicts([first, second, third], 0.8)) == [None, 0, None]


def test_truncated_documents_stay_and_represent():
    found = verdicts([NUMBERS, NUMBERS, NUMBERS], 0.9, may_go=[True, False, True])
    assert kept_of(found) == [None, None, 0]
    found = verdicts(["x y z", NUMBERS, NUMBERS], 0.9, may_go=[True, False, True])
    assert kept_of(found) == [None, None, 1]


def test_a_document_without_new_tokens_goes_if_asked():
    texts = [NUMBERS, "twelve eleven ten nine"]
    assert kept_of(verdicts(texts, 0.98)) == [None, None]
    assert kept_of(verdicts(texts, 0.98, no_new_token=True)) == [None, 0]
    indexed = verdicts([NUMBERS, f"{NUMBERS} a"], 0.98, no_new_token=True, max_pairwise=0)
    assert kept_of(indexed) == [None, None]


@given(
    st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=9), min_size=1, max_size=9),
    st.sampled_from([0.3, 0.5, 0.75, 0.98]),
)
def test_verdicts_are_those_of_the_definition(documents, threshold):
    texts = sorted((" ".join(tokens) for tokens in documents), key=lambda text: (-len(text), text))
    assert kept_of(verdicts(texts, threshold)) == slow_verdicts(texts, threshold)


@pytest.mark.parametrize("num_words", [12, 80])
def test_the_inverted_index_finds_what_all_pairs_find(num_words):
    generator = random.Random(num_words)
    words = [f"w{i}" for i in range(4000)]
    originals = [generator.choices(words, k=num_words) for _ in range(60)]
    texts = [" ".join(text) for text in originals]
    while len(texts) < 300:
        copy = list(generator.choice(originals))
        begin = generator.randrange(3)
        texts.append(" ".join(copy[begin : len(copy) - generator.randrange(3)]))
    texts.sort(key=lambda text: (-len(text), text))
    pairs = kept_of(verdicts(texts, 0.75, max_pairwise=10**6))
    indexed = kept_of(verdicts(texts, 0.75))
    assert indexed == pairs == slow_verdicts(texts, 0.75)
    assert sum(kept is not None for kept in pairs) > 200


@given(st.lists(st.integers(0, 30)), st.lists(st.integers(0, 30)))
def test_shared_values_are_counted(first, second):
    arrays = [np.unique(np.array(values, np.uint64)) for values in (first, second)]
    assert count_shared(*arrays) == len(set(first) & set(second))
