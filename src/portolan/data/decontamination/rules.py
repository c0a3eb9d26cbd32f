"""The three rules that flag a document, from its hits after the frequency filters."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from portolan.data.decontamination.features import WINDOW_TOKENS
from portolan.data.decontamination.index import EvaluationIndex

PARAGRAPH, WINDOW, SHORT = "paragraph", "window", "short"
MIN_SHARE = 0.5
SPAN_WINDOWS = 32


@dataclass(frozen=True)
class Hits:
    """Hits of one document, columns of the hit stage; `tokens` is the length of the document."""

    tokens: int
    position: np.ndarray
    hashes: np.ndarray
    short: np.ndarray
    paragraph: np.ndarray
    paragraph_windows: np.ndarray
    crosses: np.ndarray

    @classmethod
    def of(cls, table: pa.Table) -> "Hits":
        """Hits of a table that holds one document's rows."""
        names = ("position", "hash", "short", "paragraph", "paragraph_windows", "crosses")
        return cls(table["tokens"][0].as_py(), *(np.asarray(table[name]) for name in names))


@dataclass(frozen=True)
class Finding:
    """Why a document is flagged: rule, share of windows, paragraph, token span, hashes in it."""

    rule: str
    score: float
    paragraph: int
    begin: int
    end: int
    hashes: np.ndarray


def judge(hits: Hits) -> tuple[list[Finding], float]:
    """Findings of all rules, and the largest share of windows that either share rule saw."""
    findings, overlap = [], 0.0
    for finding in (*_paragraphs(hits), *_best_span(hits)):
        overlap = max(overlap, finding.score)
        if finding.score >= MIN_SHARE:
            findings.append(finding)
    for place in np.flatnonzero(hits.short):
        begin = int(hits.position[place])
        same = hits.paragraph == hits.paragraph[place]
        findings.append(
            Finding(SHORT, 1.0, int(hits.paragraph[place]), begin, begin, hits.hashes[same])
        )
        overlap = 1.0
    return findings, overlap


def _paragraphs(hits: Hits) -> Iterator[Finding]:
    """Share of each paragraph's windows that are hits."""
    inside = ~hits.short & ~hits.crosses
    paragraph = hits.paragraph[inside]
    position, hashes = hits.position[inside], hits.hashes[inside]
    windows = hits.paragraph_windows[inside]
    numbers, first, counts = np.unique(paragraph, return_index=True, return_counts=True)
    for number, place, count in zip(numbers.tolist(), first.tolist(), counts.tolist(), strict=True):
        end = place + count
        yield Finding(
            PARAGRAPH,
            count / int(windows[place]),
            number,
            int(position[place]),
            int(position[end - 1]) + WINDOW_TOKENS,
            hashes[place:end],
        )


def _best_span(hits: Hits) -> Iterator[Finding]:
    """The largest share of hits among min(32, all) consecutive windows of the document."""
    position, hashes = hits.position[~hits.short], hits.hashes[~hits.short]
    if not len(position):
        return
    span = min(SPAN_WINDOWS, hits.tokens - WINDOW_TOKENS + 1)
    # The fullest span can be moved until it begins at a hit, or ends with the document.
    ends = np.searchsorted(position, position + span)
    counts = ends - np.arange(len(position))
    best = int(np.argmax(counts))
    end = int(ends[best])
    yield Finding(
        WINDOW,
        int(counts[best]) / span,
        int(hits.paragraph[~hits.short][best]),
        int(position[best]),
        int(position[end - 1]) + WINDOW_TOKENS,
        hashes[best:end],
    )


def main_item(finding: Finding, index: EvaluationIndex) -> int:
    """Number of the item that holds most of a finding's windows; the first of equals."""
    table = index.short if finding.rule == SHORT else index.windows
    held = Counter(item for value in finding.hashes.tolist() for item in table.items_of(value))
    return min(held, key=lambda item: (-held[item], item))


def first_items(hits: Hits, index: EvaluationIndex, count: int) -> list[int]:
    """Numbers of the first distinct items hit."""
    found: dict[int, None] = {}
    for value, short in zip(hits.hashes.tolist(), hits.short.tolist(), strict=True):
        table = index.short if short else index.windows
        found |= dict.fromkeys(table.items_of(value))
        if len(found) >= count:
            break
    return list(found)[:count]


def precision_by_source(
    flagged: Sequence[tuple[str, str]], labels: Sequence[tuple[str, str, bool]]
) -> dict[str, dict[str, float | int | None]]:
    """Precision and recall of flags on a labelled sample, by source.

    Args:
        flagged: (source, id) of flagged documents.
        labels: (source, id, whether a person found it contaminated).
    """
    flags = set(flagged)
    counts: dict[str, Counter[tuple[bool, bool]]] = {}
    for source, identifier, truth in labels:
        counts.setdefault(source, Counter())[(source, identifier) in flags, truth] += 1
    report = {}
    for source, found in sorted(counts.items()):
        right, wrong, missed = found[True, True], found[True, False], found[False, True]
        report[source] = {
            "labelled": found.total(),
            "right": right,
            "wrong": wrong,
            "missed": missed,
            "precision": right / (right + wrong) if right + wrong else None,
            "recall": right / (right + missed) if right + missed else None,
        }
    return report
