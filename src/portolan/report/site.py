"""The page: one HTML file with everything inside, which opens from disk without a network."""

import base64
import functools
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import portolan
from portolan.errors import UsageError
from portolan.files import write_bytes_atomic
from portolan.record.visible import visible
from portolan.report import figures, health_tables, observed, tables, words
from portolan.report.facts import Project
from portolan.report.figures import Figure, Table
from portolan.report.gather import read_project
from portolan.report.palette import css_variables

if TYPE_CHECKING:
    from portolan.record.verify import Report

TEMPLATES = Path(__file__).parent / "templates"
MAX_PAGE_BYTES = 2_500_000

DRAW_CHARTS = """
const charts = JSON.parse(document.getElementById("charts").textContent);
const options = {
  renderer: "svg", actions: false, ast: true, defaultStyle: false,
  tooltip: {disableDefaultStyle: true, theme: "page"},
};
async function drawAll() {
  const root = document.documentElement;
  for (const [id, spec] of Object.entries(charts)) {
    const box = document.getElementById("chart-" + id);
    try {
      await vegaEmbed(box, spec, options);
    } catch (error) {
      box.textContent = "This chart could not be drawn.";
      console.error(error);
    }
  }
  root.dataset.charts = "drawn";
}
drawAll();
"""


@dataclass(frozen=True)
class Section:
    """A part of the page: anchor, heading, introduction, figures and tables."""

    id: str
    title: str
    introduction: str
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()


def build_site(project_folder: Path, verification: "Report | None" = None) -> Path:
    """Write `site/index.html` of a project and return its path.

    Args:
        project_folder: an existing project at any stage.
        verification: result of `record.verify.verify_project`; without it the page verifies
            the journal alone, which reads no other file.

    Raises:
        UsageError: the folder does not exist.
        StorageError: the page cannot be written.
    """
    if not project_folder.is_dir():
        raise UsageError(
            f"there is no project folder {project_folder}",
            remedy="make one with `portolan init`, or name another with -C",
        )
    page = render(read_project(project_folder, verification))
    path = project_folder / "site" / "index.html"
    write_bytes_atomic(path, page.encode())
    return path


def render(project: Project) -> str:
    """The HTML of the page; the same project gives the same bytes."""
    from altair.utils.schemapi import debug_mode

    # Checking each part of each chart against the schema takes longer than all the rest.
    with debug_mode(False):
        strip = figures.strip_figure(project)
        sections = _sections(project)
    drawn = [*([strip] if strip else []), *(f for part in sections for f in part.figures)]
    return render_template(
        "page.html",
        drawn,
        project=project,
        headline=words.headline(project),
        steps=words.steps(project),
        strip=strip,
        sections=sections,
        timeline=tables.timeline(project),
        corpus_facts=tables.corpus_facts(project.corpus) if project.corpus else (),
        limits=words.LIMITS,
        glossary=words.GLOSSARY,
        contents=_contents(sections),
    )


def render_template(
    name: str,
    drawn: Sequence[Figure],
    *,
    page_scripts: Sequence[str] = (),
    page_data: Any = None,
    **values: Any,
) -> str:
    """The HTML of a template that has these figures, with style, charts and script inside.

    `page_scripts` are script files of the templates; they read `page_data` from the page.
    """
    import jinja2
    from altair.utils.schemapi import debug_mode

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_readable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    with debug_mode(False):
        specifications = {figure.id: specification(figure) for figure in drawn}
    script = _script() if drawn else ""
    page_script = "\n".join((TEMPLATES / path).read_text() for path in page_scripts)
    return environment.get_template(name).render(
        charts_json=_inline_json(specifications),
        script=script,
        page_script=page_script,
        page_json=_inline_json(page_data),
        script_digests=[_source_digest(text) for text in (script, page_script) if text],
        light=css_variables("light"),
        dark=css_variables("dark"),
        version=portolan.__version__,
        **values,
    )


def _readable(value: Any) -> Any:
    """Text whose control and bidirectional characters are shown as code points; markup as it is."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return "\n".join(visible(line) for line in value.split("\n"))


def _sections(project: Project) -> tuple[Section, ...]:
    """Sections with charts and tables, in reading order; empty ones are left out."""
    run = figures.observed_run(project)
    routing = f"Routing, norms and rates are those of {run.role} {run.label}." if run else ""
    cost, score = tables.cost_table(project), tables.score_table(project)
    claims = tables.claims_table(project)
    moments, evidence = observed.moment_table(project), observed.evidence_table(project)
    corpus = project.corpus
    sections = (
        Section("forecast", "Forecast", _forecast_intro(project),
                figures.forecast_figures(project), (score,) if score else ()),
        Section("health", "Status", health_tables.introduction(project), (),
                health_tables.tables(project)),
        Section("ladder", "Ladder",
                "Small models of the same recipe, extended to the compute of the target.",
                figures.ladder_figures(project)),
        Section("domains", "Domains", "Held-out text by kind. The macro loss is the plain mean of "
                "these domains.", figures.domain_figures(project)),
        Section("training", "Inside the training", routing, figures.training_figures(project)),
        Section("lineage", "Lineage", "Which run trained which updates, and what happened on the "
                "way.", (*observed.lineage_figures(project), *observed.series_figures(project)),
                (moments,) if moments else ()),
        Section("cost", "Cost", "", (), (cost,) if cost else ()),
        Section("claims", "Claims", "Every published number, beside the file or the formula that "
                "it was compared with.", (), (claims,) if claims else ()),
        Section("evidence", "Evidence", "What the statements of the record rest on. Sampled or "
                "truncated evidence says nothing about extremes.", (),
                (evidence,) if evidence else ()),
        Section("corpus", "Corpus", "What the models read.", (),
                tables.corpus_tables(corpus) if corpus else ()),
    )  # fmt: skip
    return tuple(part for part in sections if part.figures or part.tables)


def _forecast_intro(project: Project) -> str:
    forecast = project.forecast
    if forecast is None:
        return "No forecast is made yet; the curves are those of the rungs so far."
    parts = [f"Made {forecast.made_at[:10]}" if forecast.made_at else "Made"]
    if forecast.method:
        parts.append(f"with the method {forecast.method}")
    if forecast.num_conditions:
        parts.append(f"under {words.plural(forecast.num_conditions, 'condition')}")
    text = " ".join(parts) + "."
    if forecast.on_failure:
        text += f" If it fails: {forecast.on_failure.rstrip('.')}."
    return text


def _contents(sections: Sequence[Section]) -> list[tuple[str, str]]:
    fixed = [("record", "Record"), ("limits", "Limits"), ("verify", "Verify"), ("terms", "Terms")]
    return [("summary", "Summary"), *((part.id, part.title) for part in sections), *fixed]


def specification(figure: Figure, *, validate: bool = False) -> dict[str, Any]:
    """Vega-Lite of a chart; the page's own words are its description."""
    chart = figure.chart.properties(description=figure.description).to_dict(validate=validate)
    chart.pop("$schema", None)
    return chart


def _inline_json(value: Any) -> str:
    """JSON that can stand inside a script element: no character that could end it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@functools.cache
def _script() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script that draws the charts of the page."""
    import vl_convert

    bundle = vl_convert.javascript_bundle(DRAW_CHARTS)
    return re.sub("</(script)", r"<\\/\1", bundle, flags=re.IGNORECASE)


def _source_digest(script: str) -> str:
    """Digest of a script in the form of a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
