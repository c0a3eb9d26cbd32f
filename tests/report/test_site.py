"""The page as a document: complete at every stage, self-contained, escaped, accessible."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from portolan.errors import UsageError
from portolan.record.verify import verify_project
from portolan.report import build_site, figures
from portolan.report.gather import read_project
from portolan.report.site import MAX_PAGE_BYTES, render, specification

STAGES = ("empty", "corpus", "ladder", "registered", "running", "finished")
ALL_FIGURES = {
    "forecast-band", "residuals", "ladder-fit", "domains-loss", "domains-bpb", "train-loss",
    "router-load-max-over-mean", "router-entropy", "gradient-norms", "norms-constrained",
    "norms-free", "learning-rates",
}  # fmt: skip
EXPECTED = {
    "empty": set(),
    "corpus": set(),
    "ladder": ALL_FIGURES - {"residuals", "ladder-fit"},
    "registered": ALL_FIGURES - {"residuals"},
    "running": ALL_FIGURES,
    "finished": ALL_FIGURES,
}


class Page(HTMLParser):
    """Attributes, ids, headings and texts of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.headings: list[int] = []
        self.scripts: list[dict[str, str | None]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "script":
            self.scripts.append(dict(attrs))

    def values(self, name: str) -> list[str]:
        return [value for _, key, value in self.attributes if key == name]


def html_of(project: Path) -> str:
    return (project / "site" / "index.html").read_text()


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_its_figures(project_at, stage):
    page = Page(html_of(project_at(stage)))
    drawn = {i.removeprefix("chart-") for i in page.values("id") if i.startswith("chart-")}
    strip = {"strip"} if stage in ("registered", "running", "finished") else set()
    assert drawn == EXPECTED[stage] | strip
    for section in ("summary", "record", "limits", "verify", "terms"):
        assert section in page.values("id")


@pytest.mark.parametrize("stage", STAGES)
def test_page_is_self_contained_and_well_formed(project_at, stage):
    html = html_of(project_at(stage))
    page = Page(html)
    assert len(html.encode()) <= MAX_PAGE_BYTES
    assert all(link.startswith("#") or link == "data:," for link in page.values("href"))
    assert not page.values("src") and not page.values("action")
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "en" in page.values("lang")
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    anchors = {link[1:] for link in page.values("href") if link.startswith("#")}
    assert anchors <= set(ids)
    assert set(page.values("aria-labelledby")) <= set(ids)
    charts = [value for tag, key, value in page.attributes if key == "role" and value == "img"]
    assert len(charts) == len([i for i in ids if i.startswith("chart-")])
    assert all(page.values("aria-label"))
    assert page.headings[0] == 1 and page.headings.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(page.headings, page.headings[1:], strict=False))


def test_finished_page_states_the_result(project_at, sample):
    html = html_of(project_at("finished"))
    project = read_project(project_at("finished"))
    median, outcome = project.forecast.median(), project.target.final(sample.MACRO)
    assert f"{median:.4f}" in html and f"{outcome:.4f}" in html
    assert project.score.outcome == pytest.approx(outcome)
    assert "Inside the 50 % interval" in html
    assert "chained" in html and "6.3121" in html


def test_the_same_project_gives_the_same_bytes(project_at):
    project = project_at("running")
    assert render(read_project(project)) == render(read_project(project)) == html_of(project)


def test_charts_satisfy_the_schema_of_vega_lite(project_at):
    project = read_project(project_at("running"))
    drawn = [
        figures.strip_figure(project),
        *figures.forecast_figures(project),
        *figures.ladder_figures(project),
        *figures.domain_figures(project)[:1],
        *figures.training_figures(project)[:2],
    ]
    for figure in drawn:
        specification(figure, validate=True)


def test_text_of_the_project_stays_text(hostile_project):
    html = html_of(hostile_project)
    page = Page(html)
    assert len(page.scripts) == 2
    assert not [tag for tag, _, _ in page.attributes if tag == "img"]
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "window.hacked" in html
    assert "<script>window.hacked" not in html


def test_damaged_parts_are_named_and_do_not_stop_the_page(sample, tmp_path):
    root = sample.build_sample(tmp_path / "damaged", "finished")
    (root / "corpus" / "summary.json").write_text("{")
    (root / "forecasts" / "broken.json").write_bytes(b"\xff\xfe")
    segment = next((root / "runs" / sample.RUNGS[0].id / "metrics").glob("*.parquet"))
    segment.write_bytes(segment.read_bytes()[:100])
    journal = root / "record" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b"sealed", b"healed"))
    html = build_site(root).read_text()
    assert str(tmp_path) not in html
    for place in ("corpus/summary.json", "forecasts/broken.json", f"runs/{sample.RUNGS[0].id}"):
        assert f"{place} could not be read" in html
    assert "Journal: broken" in html


def test_a_verification_of_the_files_is_shown(project_at):
    project = project_at("registered")
    report = verify_project(project)
    html = render(read_project(project, report))
    assert "Record and files" in html
    assert "were not read again" not in html


def test_missing_project_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no project folder"):
        build_site(tmp_path / "nothing")
