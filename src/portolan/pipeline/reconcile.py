"""Reconcile a project: its claims against what was registered, configured, launched, observed."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from portolan.canonical import decimal
from portolan.console import console, say
from portolan.errors import UsageError
from portolan.files import read_json, write_bytes_atomic, write_json_atomic
from portolan.pipeline.claims import HEADLINE
from portolan.pipeline.plan import plan_width
from portolan.pipeline.runs import evaluations
from portolan.project import RECIPE_FILE, Project, open_project
from portolan.record.audit.figures import Figure, figures_of_claims
from portolan.record.audit.folder import CaseTable
from portolan.record.audit.formulas import shape_figures, show_value
from portolan.record.audit.links import Link
from portolan.record.audit.reconciliation import Reconciliation, reconcile, reconcile_folder
from portolan.record.bases import Layer
from portolan.record.chain import Record
from portolan.record.lineage_view import LineageView, read_lineages
from portolan.record.reach import FETCHABLE
from portolan.record.reach_report import latest_reach
from portolan.record.visible import visible
from portolan.report.audit import render_audit
from portolan.report.journal import read_records
from portolan.shapes import config_from_json

PAGE, DATA = "reconciliation.html", "reconciliation.json"
REACH_FILE = "reach.json"
PLAN_BASES = {
    "tokens": ("tokens", "tokens.planned"),
    "steps": ("steps", "steps.planned"),
    "batch": ("sequences/step", "batch.sequences"),
    "sequence": ("tokens", "seq.tokens"),
    "devices": ("devices", "devices.mesh"),
    "flops": ("FLOP", "flops.model.fwd_bwd"),
}
"""Unit and basis of the figures in a registered plan."""
FORECAST_BASIS = ("nats/token", "forecast.macro.nats")
CASES = (
    ("tokens", "Was the planned number of tokens trained?"),
    ("steps", "Do plan, launch and metrics name the same number of updates?"),
    ("batch", "Is the batch the registered one?"),
    ("sequence", "Is the sequence length the registered one?"),
    ("parameters", "Does the shape have the stated number of parameters?"),
    ("flops", "Does the formula give the stated operations?"),
    ("loss", "Is the stated loss the measured one?"),
    ("forecast", "Is the stated forecast the registered one?"),
)


def reconcile_project(project: Project) -> Reconciliation:
    """Reconcile the newest production run of a project; nothing is written.

    Raises:
        UsageError: no target is registered yet, so nothing is claimed.
    """
    records = read_records(project.record)
    run_id = _newest_target(records)
    figures = list(_gather(project, records, run_id))
    shape = _shape(project, run_id)
    links = tuple(_links(records, figures))
    known = {figure.id for figure in figures}
    cases = tuple(case for case in _cases(figures) if case.compare)
    lineage = next(
        (view for view in read_lineages(records) if any(r.name == run_id for r in view.runs)), None
    )
    return reconcile(
        figures,
        links,
        cases=cases,
        shared=frozenset(known),
        shape=shape,
        lineage=_only(lineage, run_id),
        unreachable=_closed(latest_reach(project.record, records)),
        heading={
            "title": f"Reconciliation of {project.recipe.name}",
            "subject": run_id,
            "introduction": (
                "What this project claims about its target run, beside what it registered, "
                "configured, launched and observed. Every number below is read from the project's "
                "own files; the verdicts follow from arithmetic and from the journal."
            ),
            "as_of": records[-1].time,
        },
    )


def known_figures(project: Project) -> list[Figure]:
    """Every figure that a document of the project may state: of all runs, layers and forecasts."""
    records = read_records(project.record)
    runs = [record.body["name"] for record in records if record.type == "run"]
    figures = [*figures_of_claims(records), *_configured(project)]
    for run_id in runs:
        facts = project.read("runs", run_id, "run.json")
        if facts is not None:
            figures += _plan_figures("launched", facts["plan"], f"runs/{run_id}/run.json")
        figures += [*_registered(project, records, run_id), *_observed(project, records, run_id)]
    for record in records:
        if record.type == "forecast":
            final = record.body["quantiles"].get(HEADLINE, {}).get("1.00", {})
            source = f"record/journal.jsonl line {record.seq}"
            figures += [
                _figure("registered", f"quantile {name}", value, *FORECAST_BASIS, source)
                for name, value in final.items()
            ]
    return figures


def write_reconciliation(project: Project) -> tuple[Reconciliation, Path]:
    """Reconcile and write the page and its data under `site/`; returns the page's path."""
    result = reconcile_project(project)
    page = project.site / PAGE
    write_bytes_atomic(page, render_audit(result, home="index.html").encode())
    write_json_atomic(project.site / DATA, result.to_json())
    return result, page


def _newest_target(records: Sequence[Record]) -> str:
    names = [r.body["name"] for r in records if r.type == "run" and r.body["role"] == "production"]
    if not names:
        raise UsageError(
            "no target run is registered yet, so there is nothing to reconcile",
            remedy="run `portolan register` first, or name a folder with a table of claims",
        )
    return names[-1]


def _gather(project: Project, records: Sequence[Record], run_id: str) -> Iterator[Figure]:
    """Figures of all layers about one run, each with the file or record that states it."""
    for claim in figures_of_claims(records):
        if claim.case == run_id:
            yield dataclasses.replace(claim, case=_case_of(claim.basis), scope="", url="")
    yield from _registered(project, records, run_id)
    yield from _configured(project)
    facts = project.read("runs", run_id, "run.json")
    if facts is not None:
        yield from _plan_figures("launched", facts["plan"], f"runs/{run_id}/run.json")
    yield from _observed(project, records, run_id)


def _registered(project: Project, records: Sequence[Record], run_id: str) -> Iterator[Figure]:
    forecasts = {
        record.id: record
        for record in records
        if record.type == "forecast" and record.body["target"].get("lineage") == run_id
    }
    found = [
        record
        for record in records
        if record.type == "registration" and set(record.body.get("forecasts", ())) & set(forecasts)
    ]
    if not found:
        return
    source = f"record/journal.jsonl line {found[-1].seq}"
    plan = found[-1].body["plan"]
    for name, (unit, basis) in PLAN_BASES.items():
        yield _figure("registered", name, plan[name]["value"], unit, basis, source)
    for record in forecasts.values():
        final = record.body["quantiles"].get(HEADLINE, {}).get("1.00", {})
        if record.id in found[-1].body["forecasts"] and "0.5" in final:
            median = _figure(
                "registered", "forecast", final["0.5"], *FORECAST_BASIS,
                f"record/journal.jsonl line {record.seq}",
            )  # fmt: skip
            yield dataclasses.replace(median, due=int(plan["steps"]["value"]))


def _configured(project: Project) -> Iterator[Figure]:
    rung = plan_width(project.recipe, project.recipe.model.width)
    yield from _plan_figures("configured", rung.plan(), "recipe.toml")
    ratio = project.recipe.budget.tokens_per_active_param
    yield _figure(
        "configured", "ratio", _text(ratio), "tokens/parameter", "tokens_per_active_param",
        "recipe.toml",
    )  # fmt: skip


def _plan_figures(layer: Layer, plan: Mapping[str, Any], source: str) -> Iterator[Figure]:
    rows = (
        ("tokens", "tokens", *PLAN_BASES["tokens"]),
        ("steps", "steps", *PLAN_BASES["steps"]),
        ("batch", "batch_sequences", *PLAN_BASES["batch"]),
        ("flops", "flops_with_head", *PLAN_BASES["flops"]),
        ("parameters", "total_params", "parameters", "params.total"),
        ("active parameters", "active_params", "parameters", "params.active"),
    )
    for name, key, unit, basis in rows:
        if plan.get(key) is not None:
            yield _figure(layer, name, _text(plan[key]), unit, basis, source)
    if plan.get("tokens_per_step") and plan.get("batch_sequences"):
        length = plan["tokens_per_step"] // plan["batch_sequences"]
        yield _figure(layer, "sequence", str(length), *PLAN_BASES["sequence"], source)


def _observed(project: Project, records: Sequence[Record], run_id: str) -> Iterator[Figure]:
    curve = evaluations(project, run_id).get(HEADLINE, {}) if _has_metrics(project, run_id) else {}
    outcome = project.read("runs", run_id, "finished.json")
    if curve:
        last = max(curve)
        source = f"runs/{run_id}/metrics"
        yield _figure(
            "observed", "updates in the metrics", str(last), "updates", "step.completed", source
        )
        loss = _figure(
            "observed", "last loss", _text(curve[last]), "nats/token", "eval.macro.nats", source
        )
        yield dataclasses.replace(loss, as_of=last)
    if outcome is not None:
        source = f"runs/{run_id}/finished.json"
        completed = str(outcome["completed"])
        yield _figure("observed", "updates", completed, "updates", "step.completed", source)
        final = _text(outcome["evaluation"][HEADLINE])
        loss = _figure("observed", "loss", final, "nats/token", "eval.macro.nats", source)
        yield dataclasses.replace(loss, as_of=outcome["completed"])
        for record in reversed(records):
            name = f"{run_id} step-{completed}"
            if record.type == "artifact" and record.body.get("name") == name:
                yield _figure(
                    "observed", "checkpoint", str(record.body["bytes"]), "bytes", "ckpt.bytes",
                    f"record/journal.jsonl line {record.seq}",
                )  # fmt: skip
                break


def _has_metrics(project: Project, run_id: str) -> bool:
    folder = project.runs / run_id
    return (folder / "metrics").is_dir() or (folder / "metrics.jsonl").is_file()


def _shape(project: Project, run_id: str) -> list[Figure]:
    facts = project.read("runs", run_id, "run.json")
    if facts is None:
        recipe = project.recipe
        return shape_figures(recipe.shape(recipe.model.width), "recipe.toml")
    return shape_figures(config_from_json(facts["model"]), f"runs/{run_id}/run.json")


def _links(records: Sequence[Record], figures: Sequence[Figure]) -> Iterator[Link]:
    """Conflicts that a correction in the journal states in public, by the claims it names."""
    ids = {figure.id for figure in figures}
    for record in records:
        if record.type == "event" and record.body.get("kind") == "correction":
            named = {
                f"claim:{ref.partition(':')[2][:10]}"
                for ref in record.body.get("refs", ())
                if ref.startswith("claim:")
            }
            for name in sorted(named & ids):
                yield Link("published", (name,), "run", record.body["text"])


def _cases(figures: Sequence[Figure]) -> Iterator[CaseTable]:
    """Each figure against the next weightier one of its basis, claims against formulas as well."""
    for identity, question in CASES:
        own = [figure for figure in figures if figure.case == identity]
        pairs: list[str] = []
        for basis in dict.fromkeys(figure.basis for figure in own):
            same = [figure for figure in own if figure.basis == basis]
            pairs += [f"{a.id} ~ {b.id}" for a, b in itertools.pairwise(same)]
            if basis in DERIVED and same:
                pairs.append(f"{same[0].id} ~ ={basis}")
            if len(same) == 1 and basis not in DERIVED:
                pairs.append(same[0].id)
        yield CaseTable(id=identity, title=question, compare=tuple(pairs))


DERIVED = frozenset(
    {"tokens.nominal", "tokens.planned", "params.total", "params.active", "flops.model.fwd_bwd"}
)
"""Bases that a formula gives from other figures of the project."""

_CASE_OF_BASIS = {
    "tokens.planned": "tokens",
    "tokens.nominal": "tokens",
    "steps.planned": "steps",
    "step.completed": "steps",
    "batch.sequences": "batch",
    "seq.tokens": "sequence",
    "params.total": "parameters",
    "params.active": "parameters",
    "flops.model.fwd_bwd": "flops",
    "eval.macro.nats": "loss",
    "forecast.macro.nats": "forecast",
}


def _case_of(basis: str) -> str:
    return _CASE_OF_BASIS.get(basis, "")


def _figure(layer: Layer, name: str, value: str, unit: str, basis: str, source: str) -> Figure:
    number = Decimal(value)
    whole = number == number.to_integral_value()
    return Figure(
        f"{layer}: {name}",
        name,
        f"{number:f}" if whole else value,
        unit,
        basis,
        layer,
        stated_by="this project",
        source=source,
        case=_case_of(basis),
        rounding="exact",
    )


def _text(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else str(value)
        if isinstance(value, int)
        else decimal(value)
    )


def _only(view: LineageView | None, run_id: str) -> LineageView | None:
    """The part of a lineage that this run wrote, when it is the only one that counts."""
    if view is None or len(view.runs) != 1 or view.runs[0].name != run_id:
        return None
    return view


def run(root: Path, folder: Path | None, *, as_json: bool, page: Path | None) -> int:
    """Reconcile a folder with a table of claims, or the project in `root`; returns the exit code.

    Prints a table, or JSON. The page of a project goes to its `site/` unless `page` is given.
    """
    written: list[Path] = []
    if folder is not None:
        result = reconcile_folder(folder, unreachable_sources(folder))
    elif (root / RECIPE_FILE).is_file():
        result, path = write_reconciliation(open_project(root))
        written.append(path)
    else:
        raise UsageError(
            f"{root} is no project",
            remedy="name a folder with a table of claims: portolan reconcile FOLDER",
        )
    if page is not None:
        write_bytes_atomic(page, render_audit(result).encode())
        written.append(page)
    if as_json:
        say(json.dumps(result.to_json(), indent=2, ensure_ascii=False))
        return result.exit_code
    print_findings(result)
    for path in written:
        say(f"page: {path}")
    return result.exit_code


def unreachable_sources(folder: Path) -> frozenset[str]:
    """Locators that `portolan reach --json` found closed, from `reach.json` beside the claims."""
    path = folder / REACH_FILE
    if not path.is_file():
        return frozenset()
    try:
        classes = {str(row["locator"]): str(row["class"]) for row in read_json(path)["findings"]}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is not a report of `portolan reach --json`", remedy="make it again"
        ) from error
    return _closed(classes)


def _closed(classes: Mapping[str, str]) -> frozenset[str]:
    """Locators that certainly give nothing to a stranger; `unknown` stays unknown."""
    return frozenset(
        locator for locator, word in classes.items() if word not in (*FETCHABLE, "unknown")
    )


def print_findings(result: Reconciliation) -> None:
    """A table of the findings, the cross-checks, and a line with the counts."""
    table = Table(title=visible(result.title), title_justify="left")
    for heading in ("case", "left", "right", "verdict", "why"):
        table.add_column(heading, overflow="fold")
    for case in result.cases:
        values = {figure.id: f"{figure.id}: {show_value(figure)}" for figure in case.figures}
        rows = [(finding, f"{finding.rule}: {finding.reason}") for finding in case.findings]
        rows += [
            (finding, f"assuming {variant.assumption}")
            for variant in case.variants
            for finding in variant.findings
        ]
        for number, (finding, reason) in enumerate(rows):
            sides = (values.get(side, side) for side in (finding.left, finding.right))
            cells = ("" if number else case.id, *sides, finding.label, reason)
            table.add_row(*(Text(visible(cell)) for cell in cells))
    console.print(table)
    for check in result.checks:
        if check.outcome == "no data":
            continue
        lines = "; ".join(check.arithmetic)
        say(
            visible(
                f"{check.outcome}: {check.name}. {check.reason}{f' ({lines})' if lines else ''}"
            )
        )
    counts = ", ".join(f"{n} {verdict.replace('_', ' ')}" for verdict, n in result.counts.items())
    say(f"{len(result.findings)} comparisons: {counts}")
