"""The pair browser: evidence of near-duplicate removal, to be judged by a person."""

from typing import Any

from portolan.report.data_map.facts import Pair, Pairs
from portolan.report.figures import Table
from portolan.report.words import MISSING, count, percent

SIMILARITIES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
HALF = 0.495
"""Word-5 Jaccard similarity of a document and a strict half of it."""


def candidate_probability(similarity: float, bands: int, rows: int) -> float:
    """1 − (1 − s^rows)^bands: how likely a pair shares a band of its signature."""
    return 1 - (1 - similarity**rows) ** bands


def page_data(pairs: Pairs) -> dict[str, Any]:
    """What the script of the page reads."""
    return {"evidence": pairs.evidence_key, "pairs": [_row(pair) for pair in pairs.rows]}


def _row(pair: Pair) -> dict[str, Any]:
    return {
        "removed_id": pair.removed_id,
        "removed_source": pair.removed_source,
        "kept_id": pair.kept_id,
        "kept_source": pair.kept_source,
        "containment": round(pair.containment, 6),
        "jaccard": round(pair.jaccard, 6),
        "new_words": pair.new_words,
        "chars_removed": pair.chars_removed,
        "chars_kept": pair.chars_kept,
        "component_size": pair.component_size,
        "exempt": pair.is_exempt,
        "bin": pair.stratum[2],
        "segments": pair.segments,
    }


def lead(pairs: Pairs) -> str:
    """One sentence on what was removed and why."""
    removed = sum(number for _, number, _, exempt in pairs.losses if not exempt)
    return (
        f"{count(removed)} documents were removed because a kept, longer document holds at least "
        f"{percent(pairs.threshold, 0)} of their windows of three words. Each removal has one row "
        "of evidence; here both texts stand side by side."
    )


def loss_table(pairs: Pairs) -> Table:
    """Documents that each source lost."""
    rows = [
        (
            source + (" (exempt: kept)" if exempt else ""),
            count(removed),
            count(before),
            percent(removed / before, 2) if before else MISSING,
        )
        for source, removed, before, exempt in sorted(pairs.losses, key=lambda row: -row[1])
    ]
    columns = ("Source", "Near-duplicates", "Documents compared", "Share")
    return Table("Near-duplicates by source", columns, tuple(rows))


def strata_table(pairs: Pairs) -> Table:
    """Size of every (source pair, containment bin) and how many of it are shown."""
    shown: dict[tuple[str, str, int], int] = {}
    for pair in pairs.rows:
        shown[pair.stratum] = shown.get(pair.stratum, 0) + 1
    rows = [
        (
            f"{removed} → {kept}",
            f"{bin_ / 20:.2f} to {(bin_ + 1) / 20:.2f}",
            count(number),
            count(shown.get((removed, kept, bin_), 0)),
        )
        for (removed, kept, bin_), number in sorted(
            pairs.strata.items(), key=lambda row: (-row[1], row[0])
        )
    ]
    columns = ("Removed → kept", "Containment", "Pairs", "Shown")
    return Table("Pairs by source pair and containment", columns, tuple(rows))


def recall_table(pairs: Pairs) -> Table:
    """Probability that a pair of a similarity is compared at all."""
    shares = (
        (f"{s:.2f}", percent(candidate_probability(s, pairs.bands, pairs.band_rows), 2))
        for s in SIMILARITIES
    )
    columns = ("Jaccard similarity", "Compared with probability")
    return Table("Recall limit of the bands", columns, tuple(shares))
