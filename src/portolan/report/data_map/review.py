"""Labels that a reviewer exported from the pair browser: precision by source pair."""

import csv
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from portolan.errors import UsageError
from portolan.report.data_map.facts import containment_bin

LABELS = ("correct", "wrong", "unsure")
COLUMNS = (
    "evidence", "removed_source", "removed_id", "kept_source", "kept_id", "containment", "label",
)  # fmt: skip
Stratum = tuple[str, str, int]


@dataclass(frozen=True)
class Label:
    """A reviewer's word on one pair."""

    evidence: str
    removed_source: str
    kept_source: str
    containment: float
    label: str

    @property
    def stratum(self) -> Stratum:
        """Removed source, kept source, containment in steps of .05."""
        return self.removed_source, self.kept_source, containment_bin(self.containment)


@dataclass(frozen=True)
class Precision:
    """Labels of a group: `share` correct of those decided, with its 95 % Wilson interval."""

    name: str
    correct: int
    wrong: int
    unsure: int
    share: float | None
    low: float
    high: float


def read_labels(path: Path) -> list[Label]:
    """Labels of a CSV or JSON export.

    Raises:
        UsageError: the file is missing, of another format, or holds an unknown label.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("{"):
            rows = json.loads(text)["labels"]
        else:
            rows = list(csv.DictReader(io.StringIO(text)))
        labels = [
            Label(
                row["evidence"],
                row["removed_source"],
                row["kept_source"],
                float(row["containment"]),
                row["label"],
            )
            for row in rows
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is not a file of labels: {type(error).__name__}: {error}",
            remedy=f"export it from map/pairs.html; its columns are {', '.join(COLUMNS)}",
        ) from error
    for label in labels:
        if label.label not in LABELS:
            raise UsageError(
                f"{path} holds the label {label.label!r}", remedy=f"use {', '.join(LABELS)}"
            )
    return labels


def precision_by_pair(labels: Sequence[Label]) -> list[Precision]:
    """One row a source pair, those with most labels first."""
    groups: dict[str, Counter[str]] = {}
    for label in labels:
        name = f"{label.removed_source} -> {label.kept_source}"
        groups.setdefault(name, Counter())[label.label] += 1
    ordered = sorted(groups.items(), key=lambda row: (-row[1].total(), row[0]))
    return [_precision(name, counts) for name, counts in ordered]


def _precision(name: str, counts: Mapping[str, int]) -> Precision:
    from scipy.stats import binomtest

    correct, wrong, unsure = (counts.get(label, 0) for label in LABELS)
    decided = correct + wrong
    if not decided:
        return Precision(name, correct, wrong, unsure, None, 0.0, 1.0)
    low, high = binomtest(correct, decided).proportion_ci(method="wilson")
    return Precision(name, correct, wrong, unsure, correct / decided, float(low), float(high))


def overall_precision(
    labels: Sequence[Label], strata: Mapping[Stratum, int]
) -> tuple[float, float] | None:
    """Share of correct removals over all evidence, and the share of evidence that it speaks for.

    The sample holds as many pairs of a rare stratum as of a frequent one, so each stratum counts by
    the evidence rows that it has, not by the labels.
    """
    decided: dict[Stratum, list[bool]] = {}
    for label in labels:
        if label.label != "unsure" and label.stratum in strata:
            decided.setdefault(label.stratum, []).append(label.label == "correct")
    covered = sum(strata[stratum] for stratum in decided)
    if not covered:
        return None
    right = sum(
        strata[stratum] * sum(answers) / len(answers) for stratum, answers in decided.items()
    )
    return right / covered, covered / sum(strata.values())
