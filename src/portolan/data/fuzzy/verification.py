"""Who of a candidate group is removed: exact containment of 3-token windows, the longest first.

Signatures only propose. A document is removed if a kept one before it in order holds at least a
share `containment` of its windows; a removed document never stands for another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from portolan.data.ngrams import Tokens, batches

WINDOW_TOKENS = 3
MAX_PAIRWISE, FEW = 256, 4
PROBES, MAX_PROBE_DOCUMENTS, MAX_TESTS = 32, 512, 32


@dataclass(frozen=True)
class Rules:
    """When a document is removed: containment of its windows, or no token of its own."""

    containment: float
    no_new_token: bool = False


@dataclass(frozen=True)
class Removal:
    """Position of the document that stays for a removed one, windows they share, tests made."""

    kept: int
    shared: int
    comparisons: int


def fold(text: str) -> str:
    """Tokens of a text as verification compares them: case-folded, joined by one space."""
    return " ".join(text.casefold().split())


def window_sets(folded: Sequence[str]) -> list[np.ndarray]:
    """Sorted distinct XXH3-64 of the 3-token windows of each folded text.

    A text of fewer tokens has one window, all of it.
    """
    found: list[np.ndarray] = []
    for run in batches([len(text) for text in folded]):
        texts = folded[run]
        windows = Tokens.of_words(texts).windows(WINDOW_TOKENS, short_whole=True)
        found += [windows.distinct(index) for index in range(len(texts))]
    return found


def count_shared(first: np.ndarray, second: np.ndarray) -> int:
    """Number of values that two sorted arrays of distinct values share."""
    both = np.sort(np.concatenate([first, second]))
    return int(np.count_nonzero(both[1:] == both[:-1]))


def judge(
    windows: Sequence[np.ndarray],
    may_go: Sequence[bool],
    rules: Rules,
    tokens: Callable[[int], set[str]],
    *,
    max_pairwise: int = MAX_PAIRWISE,
) -> list[Removal | None]:
    """Verdict on each document of a group, whose documents are in order of preference.

    Args:
        windows: distinct windows of each document.
        may_go: False for a document that stays whatever it shares (its tail was not read).
        rules: thresholds.
        tokens: distinct tokens of a document, asked for only if a rule needs them.
        max_pairwise: larger groups go through an inverted index.

    Returns:
        None for each document that stays.
    """
    if len(windows) <= min(FEW, max_pairwise):
        return _judge_few(windows, may_go, rules, tokens)
    if len(windows) <= max_pairwise:
        return _judge_pairs(windows, may_go, rules, tokens)
    return _IndexedGroup(windows, rules, tokens).judge(may_go)


def _judge_few(
    windows: Sequence[np.ndarray],
    may_go: Sequence[bool],
    rules: Rules,
    tokens: Callable[[int], set[str]],
) -> list[Removal | None]:
    """Test each document against the survivors before it, one pair at a time."""
    verdicts: list[Removal | None] = []
    survivors: list[int] = []
    for document, own in enumerate(windows):
        verdict = None
        for comparisons, kept in enumerate(survivors if may_go[document] else (), 1):
            shared = count_shared(own, windows[kept])
            holds = shared / len(own) >= rules.containment
            if holds or (rules.no_new_token and tokens(document) <= tokens(kept)):
                verdict = Removal(kept, shared, comparisons)
                break
        if verdict is None:
            survivors.append(document)
        verdicts.append(verdict)
    return verdicts


def _judge_pairs(
    windows: Sequence[np.ndarray],
    may_go: Sequence[bool],
    rules: Rules,
    tokens: Callable[[int], set[str]],
) -> list[Removal | None]:
    """Test everything against each survivor in turn; the first survivor that holds it removes it.

    Costs survivors times all windows of the group.
    """
    sizes = np.array([len(found) for found in windows])
    begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    distinct, places = np.unique(np.concatenate(windows), return_inverse=True)
    is_held = np.zeros(len(distinct), bool)
    undecided = np.array(may_go, bool)
    verdicts: list[Removal | None] = [None] * len(windows)
    comparisons = 0
    for kept in range(len(windows)):
        if verdicts[kept] is not None:
            continue
        comparisons += 1
        undecided[kept] = False
        later = undecided[kept + 1 :]
        if not later.any():
            continue
        own = places[begins[kept] : begins[kept + 1]]
        is_held[own] = True
        rest = is_held[places[begins[kept + 1] :]]
        shared = np.add.reduceat(rest, begins[kept + 1 : -1] - begins[kept + 1], dtype=np.int64)
        is_held[own] = False
        goes = later & (shared / sizes[kept + 1 :] >= rules.containment)
        if rules.no_new_token:
            known = tokens(kept)
            for place in np.flatnonzero(later & ~goes):
                goes[place] = tokens(kept + 1 + int(place)) <= known
        for place in np.flatnonzero(goes):
            verdicts[kept + 1 + place] = Removal(kept, int(shared[place]), comparisons)
        undecided[kept + 1 :] &= ~goes
    return verdicts


class _IndexedGroup:
    """A group too large for all pairs: survivors are found by the rarest windows they hold.

    A posting list ends after 512 survivors, which bounds the work for a document.
    """

    def __init__(
        self, windows: Sequence[np.ndarray], rules: Rules, tokens: Callable[[int], set[str]]
    ) -> None:
        self.rules, self.tokens = rules, tokens
        sizes = [len(found) for found in windows]
        distinct, places = np.unique(np.concatenate(windows), return_inverse=True)
        self.frequency = np.bincount(places, minlength=len(distinct))
        self.windows = np.split(places.astype(np.int32), np.cumsum(sizes)[:-1])
        self.survivors: dict[int, list[int]] = {}

    def judge(self, may_go: Sequence[bool]) -> list[Removal | None]:
        """Verdict on each document in order."""
        verdicts: list[Removal | None] = []
        for document, goes in enumerate(may_go):
            verdict = self._find_holder(document) if goes else None
            if verdict is None:
                for place in self.windows[document].tolist():
                    posted = self.survivors.setdefault(place, [])
                    if len(posted) < MAX_PROBE_DOCUMENTS:
                        posted.append(document)
            verdicts.append(verdict)
        return verdicts

    def _find_holder(self, document: int) -> Removal | None:
        own = self.windows[document]
        for comparisons, survivor in enumerate(self._candidates(own), 1):
            shared = count_shared(own, self.windows[survivor])
            holds = shared / len(own) >= self.rules.containment
            if not holds and self.rules.no_new_token:
                holds = self.tokens(document) <= self.tokens(survivor)
            if holds:
                return Removal(survivor, shared, comparisons)
        return None

    def _candidates(self, own: np.ndarray) -> list[int]:
        """At most 32 survivors with the most of the 32 rarest windows, in order.

        A window that no other document holds leads nowhere; common ones are tried if rare ones
        lead to nobody.
        """
        frequency = self.frequency[own]
        order = np.argsort(frequency, kind="stable")
        first, last = np.searchsorted(frequency[order], [2, MAX_PROBE_DOCUMENTS + 1])
        found = self._count_probes(own[order[first:last][:PROBES]])
        found = found or self._count_probes(own[order[last:][:PROBES]])
        best = sorted(found, key=lambda survivor: (-found[survivor], survivor))
        return sorted(best[:MAX_TESTS])

    def _count_probes(self, probes: np.ndarray) -> dict[int, int]:
        """Survivors that hold some of the windows, with their number."""
        found: dict[int, int] = {}
        for place in probes.tolist():
            for survivor in self.survivors.get(place, ()):
                found[survivor] = found.get(survivor, 0) + 1
        return found
