"""The overview: domains by quality, where each bucket comes from, examples, topic search."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from portolan.report.data_map.enrichment import Enrichment, enrichment
from portolan.report.data_map.facts import Count, Domain, Overview
from portolan.report.words import MISSING, percent

TOP_SOURCES = 6
UNITS = (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3))


class HeatCell(NamedTuple):
    """A shaded cell of a table: text, the softer text beside it, shade 0 to 1, below or above."""

    text: str
    note: str = ""
    heat: float = 0.0
    is_less: bool = False


class HeatRow(NamedTuple):
    """A row of a shaded table."""

    name: str
    share: str
    total: str
    cells: tuple[HeatCell, ...]


def compact(value: int) -> str:
    """An integer with three digits and a unit: 16.4 M."""
    for unit, length in UNITS:
        if value >= 0.9995 * length:
            return f"{value / length:#.3g}".rstrip(".") + f"\u202f{unit}"
    return str(value)


def page_data(overview: Overview) -> dict[str, Any]:
    """What the script of the page reads: counts, enrichment, examples, words to search."""
    return {
        "buckets": overview.bucket_names,
        "sources": tuple(overview.by_source),
        "total": overview.total,
        "domains": [_domain(overview, domain) for domain in overview.domains],
    }


def _domain(overview: Overview, domain: Domain) -> dict[str, Any]:
    index = {source: i for i, source in enumerate(overview.by_source)}
    row = overview.row(domain.name)
    sources = {s: overview.by_domain_source.get((domain.name, s), Count()) for s in index}
    most = sorted(sources, key=lambda s: -sources[s].tokens)[:TOP_SOURCES]
    return {
        "name": domain.name,
        "label": domain.label,
        "keywords": domain.keywords,
        "row": row,
        "enrichment": [_numbers(e) for e in _enrichments(overview, row)],
        "sources": [(index[s], sources[s].tokens) for s in most if sources[s].tokens],
        "examples": [
            [
                (index.get(e.source, -1), e.id, e.text, int(e.is_cut))
                for e in overview.examples.get((domain.name, b), ())
            ]
            for b in range(overview.num_buckets)
        ],
    }


def _numbers(value: Enrichment | None) -> tuple[float, float] | None:
    return None if value is None else (round(value.log2, 3), round(value.half_width, 3))


def _enrichments(overview: Overview, row: Sequence[Count]) -> list[Enrichment | None]:
    """Enrichment of a group in every bucket; none where there is one bucket for all."""
    if overview.num_buckets == 1:
        return [None]
    group = sum(row, Count())
    return [
        enrichment(within, bucket, group, overview.total)
        for within, bucket in zip(row, overview.by_bucket, strict=True)
    ]


def map_rows(overview: Overview) -> list[tuple[Domain, str, str, tuple[HeatCell, ...]]]:
    """Rows of the grid: domain, share, tokens, cells shaded by the root of their tokens."""
    largest = max((count.tokens for count in overview.cells.values()), default=0)
    total = overview.total.tokens
    return [
        (
            domain,
            percent(_share(sum(row, Count()).tokens, total)),
            compact(sum(row, Count()).tokens),
            tuple(
                HeatCell(
                    compact(count.tokens) if count.documents else MISSING,
                    heat=round(math.sqrt(_share(count.tokens, largest)), 3),
                )
                for count in row
            ),
        )
        for domain, row in ((d, overview.row(d.name)) for d in overview.domains)
    ]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def composition(overview: Overview, groups: Mapping[str, Sequence[Count]]) -> list[HeatRow]:
    """Share of each bucket that a group (source or content type) holds, largest groups first."""
    rows = []
    for name in _by_tokens(groups):
        total = sum(groups[name], Count()).tokens
        shares = [
            _share(count.tokens, bucket.tokens)
            for count, bucket in zip(groups[name], overview.by_bucket, strict=True)
        ]
        cells = tuple(
            HeatCell(percent(s) if c.documents else MISSING, heat=round(math.sqrt(s), 3))
            for s, c in zip(shares, groups[name], strict=True)
        )
        rows.append(
            HeatRow(name, percent(_share(total, overview.total.tokens)), compact(total), cells)
        )
    return rows


def enrichment_rows(overview: Overview, groups: Mapping[str, Sequence[Count]]) -> list[HeatRow]:
    """Binary logarithm of the enrichment of each group in each bucket with its interval."""
    if overview.num_buckets == 1:
        return []
    rows = []
    for name in _by_tokens(groups):
        total = sum(groups[name], Count()).tokens
        found = _enrichments(overview, groups[name])
        cells = tuple(_enrichment_cell(value) for value in found)
        rows.append(
            HeatRow(name, percent(_share(total, overview.total.tokens)), compact(total), cells)
        )
    return rows


def _enrichment_cell(value: Enrichment | None) -> HeatCell:
    if value is None:
        return HeatCell(MISSING, "under 20")
    text = f"{value.log2:+.2f}".replace("-", "−")
    heat = round(min(1.0, abs(value.log2) / 3), 3)
    return HeatCell(text, f"±{value.half_width:.2f}", heat, value.log2 < 0)


def _by_tokens(groups: Mapping[str, Sequence[Count]]) -> Iterable[str]:
    return sorted(groups, key=lambda name: (-sum(groups[name], Count()).tokens, name))


def cut_rows(overview: Overview) -> list[tuple[str, ...]]:
    """Raw scores between the buckets: content type, then one cut a column."""
    return [
        (kind, *(f"{cut:.3f}" for cut in cuts))
        for kind, cuts in sorted(overview.cuts.items(), key=lambda row: (row[0] == "default", row))
    ]
