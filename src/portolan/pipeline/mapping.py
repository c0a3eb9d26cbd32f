"""The verb `map`: pages of a curated corpus, and precision from labels that a reviewer exported."""

import webbrowser
from pathlib import Path
from typing import Any

from portolan.console import say
from portolan.data.mixture import load_mixture
from portolan.errors import PortolanError
from portolan.pipeline.corpus import SUMMARY, find_corpus
from portolan.pipeline.plan import plan_width
from portolan.pipeline.swarm import FOLDER as MIXTURES
from portolan.project import Project
from portolan.record.visible import visible
from portolan.report import build_site
from portolan.report.data_map import INDEX, MAP, write_map
from portolan.report.data_map.gather import read_map, read_strata
from portolan.report.data_map.review import overall_precision, precision_by_pair, read_labels

SWARM_PREFIX = "swarm-"


def make_map(project: Project, *, open_page: bool = False) -> None:
    """Write the pages of the corpus to `site/map/`, and link them from the project's page."""
    pages = write_pages(project)
    index = pages[0]
    page = project.site / "index.html"
    if not page.is_file() or f'href="{MAP}/{INDEX.file}"' not in page.read_text(encoding="utf-8"):
        build_site(project.root)
    say(f"data map: {index.resolve()} ({len(pages)} pages)")
    if open_page:
        webbrowser.open(index.resolve().as_uri())


def write_pages(project: Project) -> list[Path]:
    """Write the pages and return their paths, the index first.

    Raises:
        UsageError: nothing is curated yet.
    """
    names = project.recipe.data.domains.labels_file
    data_map = read_map(
        project.root,
        project.recipe.name,
        _mixtures(project),
        labels_file=project.root / names if names else None,
    )
    return write_map(project.site / MAP, data_map)


def try_pages(project: Project) -> None:
    """Write the pages if there is a corpus that can be read; else say why not and go on."""
    if not (project.corpus / SUMMARY).is_file():
        return
    try:
        write_pages(project)
    except (PortolanError, OSError, ValueError) as error:
        say(visible(f"the data map is left as it was: {error}"))


def _mixtures(project: Project) -> list[dict[str, Any]]:
    """The mixture of the target as planned, then the mixture files of the project."""
    found = []
    if (corpus := find_corpus(project)) is not None:
        target = plan_width(project.recipe, project.recipe.model.width)
        found.append(corpus.mixture(target).to_json())
    for path in sorted((project.root / MIXTURES).glob("*.json")):
        if path.name.startswith(SWARM_PREFIX):
            continue
        try:
            content = load_mixture(path).to_json()
        except PortolanError as error:
            say(visible(f"left out of the map: {error.message}"))
            continue
        found.append({**content, "name": path.stem})
    return found


def review(project: Project, path: Path) -> None:
    """Print the precision of near-duplicate removal by source pair from exported labels."""
    labels = read_labels(path)
    evidence_key, strata = read_strata(project.root)
    mine = [label for label in labels if label.evidence == evidence_key]
    if len(mine) < len(labels):
        say(f"{len(labels) - len(mine)} labels belong to other evidence and are left out")
    for row in precision_by_pair(mine):
        share = "–" if row.share is None else f"{row.share:.3f} [{row.low:.3f}, {row.high:.3f}]"
        say(
            visible(
                f"{row.name}: precision {share}, {row.correct} correct, {row.wrong} wrong, "
                f"{row.unsure} unsure"
            )
        )
    overall = overall_precision(mine, strata)
    if overall is None:
        say("no label decides anything yet")
        return
    share, covered = overall
    say(f"all evidence: precision {share:.3f}, judged for {covered:.1%} of the pairs")
