"""Write the pages of a corpus: one HTML file each, with everything inside, for `site/map/`."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from portolan.files import write_bytes_atomic
from portolan.report.data_map import (
    decontamination,
    duplicates,
    overview,
    progress,
    terms,
    weights,
)
from portolan.report.data_map.evidence import PER_STRATUM
from portolan.report.data_map.facts import DataMap
from portolan.report.figures import Table
from portolan.report.site import render_template
from portolan.report.words import MISSING, count, percent, plural

MAX_OVERVIEW_BYTES = 1_500_000
ROWS_BEFORE_FOLD = 15
COMMON_SCRIPT = "map_common.js"


class Page(NamedTuple):
    """A page: its file, its name in the menu, its heading."""

    file: str
    title: str
    heading: str


INDEX = Page("index.html", "Data map", "Data map")
OVERVIEW = Page("domains.html", "Overview", "Overview of the corpus")
PAIRS = Page("pairs.html", "Duplicates", "Near-duplicate pairs")
DECONTAMINATION = Page("decontamination.html", "Decontamination", "Decontamination")
MIXTURE = Page("mixture.html", "Mixture", "Mixture")
PROVENANCE = Page("provenance.html", "Provenance", "Provenance and licences")
STAGES = Page("stages.html", "Stages", "Stages of curation")
QUOTING = (OVERVIEW, PAIRS, DECONTAMINATION)
"""Pages that quote documents of the corpus."""

Rendered = tuple[Page, str, str, str]
"""Page, its HTML, its headline number and what the number counts, for the index."""


def write_map(folder: Path, data_map: DataMap) -> list[Path]:
    """Write the pages that the corpus has something for, and the index; returns their paths.

    The same facts give the same bytes.

    Raises:
        StorageError: a page cannot be written.
    """
    from altair.utils.schemapi import debug_mode

    with debug_mode(False):
        pages = list(render_pages(data_map))
    for path in folder.glob("*.html"):
        if path.name not in {page.file for page, _ in pages}:
            path.unlink()
    for page, html in pages:
        write_bytes_atomic(folder / page.file, html.encode())
    return [folder / page.file for page, _ in pages]


def render_pages(data_map: DataMap) -> Iterator[tuple[Page, str]]:
    """Index first, then the pages in the order of the menu."""
    makers: list[tuple[Page, Callable[[DataMap, Render], Rendered] | None]] = [
        (OVERVIEW, _overview),
        (PAIRS, _pairs if data_map.pairs else None),
        (DECONTAMINATION, _decontamination if data_map.contamination else None),
        (MIXTURE, _mixture if data_map.mixtures else None),
        (PROVENANCE, _provenance),
        (STAGES, _stages),
    ]
    menu = [INDEX, *(page for page, maker in makers if maker)]

    def render(page: Page, template: str, drawn: Sequence[Any] = (), **values: Any) -> str:
        return render_template(template, drawn, page=page, pages=menu, map=data_map, **values)

    made = [maker(data_map, render) for _, maker in makers if maker]
    cards = [(page, number, text) for page, _, number, text in made]
    total = data_map.overview.total
    lead = (
        f"{overview.compact(total.tokens)} tokens in {plural(total.documents, 'document')} from "
        f"{plural(len(data_map.provenance), 'source')}: what they are about, where they come "
        "from, what was removed and why."
    )
    yield INDEX, render(INDEX, "map_index.html", cards=cards, lead=lead)
    yield from ((page, html) for page, html, _, _ in made)


Render = Callable[..., str]


def _overview(data_map: DataMap, render: Render) -> Rendered:
    found = data_map.overview
    has_domains = any(domain.origin != "source" for domain in found.domains)
    cells = sum(1 for number in found.cells.values() if number.documents)
    total = found.total
    largest = max(found.domains, key=lambda domain: sum(c.tokens for c in found.row(domain.name)))
    largest_share = sum(c.tokens for c in found.row(largest.name)) / max(1, total.tokens)
    cut_names = [f"Q{i} / Q{i + 1}" for i in range(found.num_buckets - 1)]
    html = render(
        OVERVIEW,
        "map_overview.html",
        page_scripts=(COMMON_SCRIPT, "map_overview.js"),
        page_data=overview.page_data(found),
        overview=found,
        has_domains=has_domains,
        lead=f"{overview.compact(total.tokens)} tokens in "
        f"{plural(len(found.domains), 'domain')}. The largest is {largest.label} with "
        f"{percent(largest_share)} of them.",
        facts=(
            ("Tokens", overview.compact(total.tokens), count(total.tokens)),
            ("Documents", overview.compact(total.documents), count(total.documents)),
            ("Domains", count(len(found.domains)), "of meaning" if has_domains else "one a source"),
            ("Cells with text", count(cells), "domain by bucket" if found.num_buckets > 1 else ""),
        ),
        rows=overview.map_rows(found),
        cuts=Table("Raw scores between the buckets", ("Content type", *cut_names),
                   tuple(overview.cut_rows(found))) if found.cuts else None,
        types=overview.composition(found, found.by_type),
        sources=overview.composition(found, found.by_source),
        enriched_types=overview.enrichment_rows(found, found.by_type),
        enriched_sources=overview.enrichment_rows(found, found.by_source),
        limit=ROWS_BEFORE_FOLD,
        example_query=f"for example {_example_query(data_map)}",
    )  # fmt: skip
    text = f"{plural(len(found.domains), 'domain')} by {plural(found.num_buckets, 'bucket')}"
    return OVERVIEW, html, overview.compact(total.tokens) + " tokens", text


def _example_query(data_map: DataMap) -> str:
    """A word that the search finds: the first keyword of the first domain, or its label."""
    first = data_map.overview.domains[0]
    return first.keywords[0] if first.keywords else first.label


def _pairs(data_map: DataMap, render: Render) -> Rendered:
    pairs = data_map.pairs
    assert pairs is not None
    removed = sum(number for _, number, _, exempt in pairs.losses if not exempt)
    probability = duplicates.candidate_probability(duplicates.HALF, pairs.bands, pairs.band_rows)
    html = render(
        PAIRS,
        "map_pairs.html",
        page_scripts=(COMMON_SCRIPT, "map_pairs.js"),
        page_data=duplicates.page_data(pairs),
        pairs=pairs,
        lead=duplicates.lead(pairs),
        facts=(
            ("Removed", count(removed), "near-duplicate documents"),
            ("Evidence", count(pairs.num_evidence), "verified pairs"),
            ("Shown here", count(len(pairs.rows)), f"up to {pairs.per_stratum} a stratum"),
            ("Containment from", f"{pairs.threshold:g}", "of the removed text in the kept one"),
        ),
        losses=duplicates.loss_table(pairs),
        strata=duplicates.strata_table(pairs),
        recall=duplicates.recall_table(pairs),
        half=f"{probability:.3f}",
    )
    return (
        PAIRS,
        html,
        f"{count(removed)} removed",
        f"{count(pairs.num_evidence)} pairs of evidence",
    )


def _decontamination(data_map: DataMap, render: Render) -> Rendered:
    found = data_map.contamination
    assert found is not None
    flagged, documents = sum(found.flagged.values()), sum(found.documents.values())
    html = render(
        DECONTAMINATION,
        "map_decontamination.html",
        page_scripts=(COMMON_SCRIPT, "map_decontamination.js"),
        page_data=decontamination.page_data(found),
        lead=decontamination.lead(found),
        facts=(
            ("Flagged", count(flagged), "documents left out of training"),
            ("Share", percent(flagged / documents, 3) if documents else MISSING, "of documents"),
            ("Sets", count(len(found.sets)), "registered"),
            ("Evidence", count(found.num_evidence), "matches"),
        ),
        flags=decontamination.flag_table(found),
        sets=decontamination.set_table(found),
        recall=decontamination.recall_table(found),
        matches=found.matches,
        per_stratum=PER_STRATUM,
        num_evidence=count(found.num_evidence),
    )
    text = f"documents hold items of {plural(len(found.sets), 'evaluation set')}"
    return DECONTAMINATION, html, f"{count(flagged)} flagged", text


def _mixture(data_map: DataMap, render: Render) -> Rendered:
    figure = weights.epochs_figure(data_map.mixtures)
    first = data_map.mixtures[0]
    epochs = weights.epochs_of(first)
    most = max(epochs.values(), default=0.0)
    html = render(
        MIXTURE,
        "map_mixture.html",
        (figure,) if figure else (),
        page_scripts=(COMMON_SCRIPT, "map_mixture.js"),
        page_data=weights.page_data(data_map.mixtures, data_map.overview),
        lead=weights.lead(data_map.mixtures),
        facts=(
            ("Cells", count(len(first["cells"])), "in the store"),
            ("Phases", count(len(first["phases"])), first["name"]),
            ("Most epochs", f"{most:.2f}", f"cap {first['cap_epochs']:g}"),
            ("Lattice", count(first["lattice"]), "integer counts a phase"),
        ),
        phases=weights.phase_table(data_map.mixtures),
        mixtures=data_map.mixtures,
        epochs=figure,
    )
    return MIXTURE, html, f"{most:.2f} epochs", f"at most, cap {first['cap_epochs']:g}"


def _provenance(data_map: DataMap, render: Render) -> Rendered:
    rows = data_map.provenance
    classes = terms.classes(rows)
    html = render(
        PROVENANCE,
        "map_provenance.html",
        lead=terms.lead(rows),
        facts=tuple((name, plural(number, "source"), tokens) for name, number, tokens in classes),
        classes=classes,
        columns=[(title, is_number) for _, title, is_number in terms.shown_columns(rows)],
        sources=terms.source_rows(rows),
    )
    return PROVENANCE, html, plural(len(rows), "source"), f"{len(classes)} licence classes"


def _stages(data_map: DataMap, render: Render) -> Rendered:
    flows = data_map.flows
    figure = progress.flow_figure(flows)
    read, kept = sum(flow.read for flow in flows), sum(flow.kept for flow in flows)
    html = render(
        STAGES,
        "map_stages.html",
        (figure,) if figure else (),
        lead=progress.lead(flows),
        facts=(
            ("Read", count(read), "documents"),
            ("Kept", count(kept), percent(kept / read) if read else MISSING),
            ("Held out", count(sum(flow.heldout for flow in flows)), "documents for evaluation"),
            ("Stages", count(len(data_map.stages)), "with a manifest each"),
        ),
        flow=figure,
        accounting=progress.accounting_table(flows),
        stages=progress.stage_boxes(data_map.stages),
        steps=progress.step_table(data_map.steps),
    )
    return STAGES, html, plural(len(data_map.stages), "stage"), f"{count(read)} documents read"
