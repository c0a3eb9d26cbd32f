"""Read a project folder into `Project`; every part may be missing.

A missing file is an empty part. A damaged file becomes a line of `Project.problems`, which the
page prints: a report must render for the run that went wrong as well.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from portolan.accounting import active_parameters, total_parameters, training_flops
from portolan.data.mixture import load_mixture
from portolan.errors import PortolanError
from portolan.record.verdicts import VERDICTS
from portolan.report import journal
from portolan.report.facts import (
    Claim,
    Corpus,
    Forecast,
    Law,
    Project,
    Run,
    Score,
    Source,
)
from portolan.report.health import read_health
from portolan.report.moments import read_observed
from portolan.report.series import NO_SERIES, SERIES_PREFIXES, read_series
from portolan.report.values import as_count, as_number, as_text, first
from portolan.shapes import config_from_json

if TYPE_CHECKING:
    from portolan.record.verify import Report

T = TypeVar("T")

FORECAST_AXIS = "C = 3FT, without the output head"
"""Name of the compute axis of the forecast: three forward passes, attention priced non-causally."""


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _rows(value: Any) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


class Folder:
    """Reads files of one project and remembers what could not be read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.problems: list[str] = []

    def name(self, path: Path) -> str:
        """Path as a reader of the page may see it: relative to the project."""
        return path.relative_to(self.root).as_posix()

    def guard(self, path: Path, read: Callable[[Path], T], default: T) -> T:
        """Result of `read(path)`; on damage note the problem and return the default."""
        try:
            return read(path)
        except (OSError, ValueError, PortolanError) as error:
            reason = error.message if isinstance(error, PortolanError) else str(error)
            reason = reason.replace(str(self.root), ".")
            self.problems.append(f"{self.name(path)} could not be read: {reason}")
            return default

    def json(self, path: Path) -> Mapping[str, Any]:
        """Table in a JSON file, empty when the file is absent or damaged."""
        if not path.is_file():
            return {}
        return _table(self.guard(path, lambda p: json.loads(p.read_bytes()), {}))


def read_project(root: Path, verification: "Report | None" = None) -> Project:
    """Read everything the page shows. `verification` is a finished check of the whole project."""
    root = root.resolve()
    folder, record = Folder(root), root / "record"
    run_files = sorted((root / "runs").glob("*/run.json"))
    # Those of an ablation and of a swarm are many, and are compared elsewhere.
    shown = (p for p in run_files if folder.json(p).get("role") not in ("ablation", "swarm"))
    runs = sorted((_run(folder, path) for path in shown), key=_run_order)
    records = folder.guard(record, journal.read_records, [])
    forecasts = [_forecast(folder, path) for path in sorted((root / "forecasts").glob("*.json"))]
    seq_of = {entry.id: entry.seq for entry in records}
    forecasts.sort(key=lambda f: (seq_of.get(f.id, -1), f.made_at, f.id))
    newest = forecasts[-1].id if forecasts else ""
    target = next((run for run in runs if run.role == "target"), None)
    observed = read_observed(records)
    if observed.problem:
        folder.problems.append(f"The lineages contradict each other: {observed.problem}")
    return Project(
        name=journal.project_name(records) or root.name,
        corpus=_corpus(folder, target),
        runs=tuple(runs),
        forecasts=tuple(forecasts),
        score=_score(folder.json(root / "runs" / target.id / "score.json")) if target else None,
        journal=tuple(journal.as_entry(entry) for entry in records),
        order_grade=folder.guard(record, lambda p: journal.order_grade(p, records, newest), ""),
        num_witnesses=folder.guard(record, journal.count_witnesses, 0),
        verification=folder.guard(record, lambda p: journal.check(p, verification), None),
        claims=tuple(_claims(folder.json(root / "site" / "reconciliation.json"))),
        problems=tuple(dict.fromkeys(folder.problems)),
        has_ablation=(root / "site" / "ablation.html").is_file(),
        has_map=(root / "site" / "map" / "index.html").is_file(),
        observed=observed,
        health=read_health(folder.json(root / "runs" / target.id / "status.json"))
        if target
        else None,
    )


def _claims(facts: Mapping[str, Any]) -> list[Claim]:
    """Claims with their worst verdict, from the data that `portolan reconcile` leaves."""
    found: dict[str, Claim] = {}
    for case in _rows(facts.get("cases")):
        figures = {as_text(row.get("id")): row for row in _rows(case.get("figures"))}
        for finding in _rows(case.get("findings")):
            left = figures.get(as_text(finding.get("left")), {})
            right = figures.get(as_text(finding.get("right")), {})
            if left.get("layer") != "claimed":
                continue
            derived = right.get("layer") == "derived"
            against = as_text(right.get("arithmetic" if derived else "source"))
            name, verdict = as_text(left.get("name")), as_text(finding.get("verdict"))
            claim = Claim(name, verdict, against)
            before = found.get(as_text(left.get("id")), claim)
            found[as_text(left.get("id"))] = claim._replace(
                verdict=max(before.verdict, claim.verdict, key=_severity),
                against=claim.against if before == claim else f"{before.against}; {claim.against}",
            )
    return list(found.values())


def _severity(verdict: str) -> int:
    """Place in the order of verdicts; an unknown word is the worst."""
    return VERDICTS.index(verdict) if verdict in VERDICTS else len(VERDICTS)


def _run_order(run: Run) -> tuple[bool, int, int, str]:
    return (run.role == "target", run.width or 0, run.seed or 0, run.id)


# ---------------------------------------------------------------- corpus


def _corpus(folder: Folder, target: Run | None) -> Corpus | None:
    summary = folder.json(folder.root / "corpus" / "summary.json")
    if not summary:
        return None
    epochs = _source_epochs(folder, summary, target) if target else {}
    tokenizer, store = _table(summary.get("tokenizer")), _table(summary.get("store"))
    unigram = _table(summary.get("unigram_cross_entropy"))
    return Corpus(
        sources=tuple(_source(row, epochs) for row in _rows(summary.get("sources"))),
        vocab_size=as_count(tokenizer.get("vocab_size")),
        bytes_per_token=as_number(tokenizer.get("bytes_per_token")),
        tokenizer_digest=as_text(tokenizer.get("digest")),
        bos=as_text(tokenizer.get("bos")),
        eos=as_text(tokenizer.get("eos")),
        store_digest=as_text(store.get("digest")),
        num_store_tokens=as_count(store.get("tokens")),
        num_store_documents=as_count(store.get("documents")),
        unigram_macro=as_number(unigram.get("macro")),
        unigram_micro=as_number(unigram.get("micro")),
    )


def _source_epochs(folder: Folder, summary: Mapping[str, Any], target: Run) -> Mapping[str, float]:
    """How often the target reads each source under its own mixture: the mean over its tokens."""
    path = folder.root / "runs" / target.id / "mixture.json"
    mixture = folder.guard(path, load_mixture, None) if path.is_file() else None
    if mixture is None or mixture.store_digest != _table(summary.get("store")).get("digest"):
        return {}
    epochs, found = mixture.epochs(), dict[str, float]()
    tokens = {
        as_text(row.get("key")): as_count(row.get("tokens"))
        for row in _rows(summary.get("sources"))
    }
    for cell in _rows(summary.get("cells")):
        for key, counts in _table(cell.get("sources")).items():
            count = as_count(counts[-1]) if isinstance(counts, list) and counts else None
            share = (count or 0) / max(1, tokens.get(key) or 0)
            found[key] = found.get(key, 0.0) + epochs.get(as_text(cell.get("name")), 0.0) * share
    return found


def _source(row: Mapping[str, Any], epochs: Mapping[str, float]) -> Source:
    dropped = ((str(k), as_count(v) or 0) for k, v in _table(row.get("dropped")).items())
    return Source(
        key=as_text(row.get("key")),
        category=as_text(row.get("category")),
        license_spdx=as_text(row.get("license_spdx")),
        license_class=as_text(row.get("license_class")),
        num_documents=as_count(row.get("documents")),
        num_bytes=as_count(row.get("bytes")),
        num_tokens=as_count(row.get("tokens")),
        num_heldout_documents=as_count(row.get("heldout_documents")),
        num_heldout_tokens=as_count(row.get("heldout_tokens")),
        dropped=tuple(sorted(dropped)),
        epochs=epochs.get(as_text(row.get("key")), as_number(row.get("epochs"))),
    )


# ---------------------------------------------------------------- runs


def _run(folder: Folder, path: Path) -> Run:
    facts = folder.json(path)
    plan, model = _table(facts.get("plan")), _table(facts.get("model"))
    num_steps, tokens = as_count(plan.get("steps")), as_count(plan.get("tokens"))
    prefixes = ("",) if facts.get("role") == "imported" else SERIES_PREFIXES
    metrics = folder.guard(path.parent, lambda p: read_series(p, num_steps, prefixes), NO_SERIES)
    return Run(
        id=as_text(facts.get("id")) or path.parent.name,
        role=as_text(facts.get("role")) or "other",
        width=as_count(first(facts, "width") or first(model, "width")),
        seed=as_count(facts.get("seed")),
        num_layers=as_count(model.get("num_layers")),
        num_experts=as_count(model.get("num_experts")),
        experts_per_token=as_count(model.get("experts_per_token")),
        num_steps=num_steps,
        stop_after=as_count(plan.get("stop_after")),
        tokens=tokens,
        tokens_per_step=as_count(plan.get("tokens_per_step")),
        rate_capped=bool(plan.get("lr_capped")),
        num_attempts=len(list(path.parent.glob("attempt-*.json"))),
        completed=metrics.completed,
        train_seconds=metrics.train_seconds,
        evaluations=metrics.evaluations,
        series=metrics.series,
        **_counts(model, plan, tokens),
    )


def _counts(
    model: Mapping[str, Any], plan: Mapping[str, Any], tokens: int | None
) -> dict[str, Any]:
    """Parameters and compute from the shape; from the plan when the shape is incomplete."""
    try:
        shape = config_from_json(model)
    except (TypeError, ValueError, PortolanError):
        return {
            "total_parameters": as_count(plan.get("total_params")),
            "active_parameters": as_count(plan.get("active_params")),
            "flops": as_number(plan.get("flops_no_head")),
            "flops_axis": as_text(plan.get("flops_axis")) or "as planned",
        }
    flops = float(training_flops(shape, tokens, "no_head")) if tokens else None
    return {
        "total_parameters": total_parameters(shape),
        "active_parameters": active_parameters(shape),
        "flops": flops,
        "flops_axis": FORECAST_AXIS,
    }


# ---------------------------------------------------------------- forecast and score


def _forecast(folder: Folder, path: Path) -> Forecast:
    facts = folder.json(path)
    body = _table(facts.get("body")) or facts
    target, method = _table(body.get("target")), _table(body.get("method"))
    metric, conditions = body.get("metric"), body.get("conditions")
    metric_name = as_text(first(metric, "name") if isinstance(metric, Mapping) else metric)
    quantiles = {str(name): marks for name, marks in _quantiles(body.get("quantiles")) if marks}
    if metric_name not in quantiles and quantiles:
        metric_name = next(
            (n for n in quantiles if n.endswith("macro_loss")), next(iter(quantiles))
        )
    baseline = _table(body.get("baseline"))
    known = _table(body.get("known_before"))
    grade = as_text(first(body, "order_grade", "grade"))
    return Forecast(
        id=as_text(first(facts, "id", "forecast_id")) or _forecast_id(path),
        made_at=as_text(body.get("made_at")),
        title=as_text(body.get("title")),
        metric=metric_name,
        method=as_text(first(method, "model_name", "model", "name", "form"))
        if method
        else as_text(body.get("method")),
        flops_axis=as_text(first(target, "axis", "flops_axis", "C_axis")),
        target_flops=as_number(first(target, "C", "flops", "compute", "c")),
        num_steps=as_count(first(target, "U", "steps", "num_steps")),
        evaluations_known_before=_count_known(body.get("known_before")),
        retrospective=bool(known.get("retrospective")) or "retrospective" in grade,
        on_failure=as_text(body.get("on_failure")),
        quantiles=quantiles,
        baseline=_by_mark(first(baseline, "F0", "forecast")),
        law=_law(baseline),
        num_conditions=len(conditions) if isinstance(conditions, list) else None,
    )


def _forecast_id(path: Path) -> str:
    return path.stem if path.stem.startswith("forecast:") else f"forecast:{path.stem}"


def _count_known(value: Any) -> int | None:
    if isinstance(value, list):
        return len(value)
    return as_count(
        first(value, "count", "num", "evaluations") if isinstance(value, Mapping) else value
    )


def _by_mark(table: Any) -> dict[float, float]:
    values = {}
    for mark, value in _table(table).items():
        place, number = as_number(mark), as_number(value)
        if place is not None and number is not None:
            values[round(place, 4)] = number
    return dict(sorted(values.items()))


def _quantiles(table: Any) -> Iterator[tuple[str, dict[float, dict[float, float]]]]:
    for name, marks in _table(table).items():
        rows = {as_number(mark): _by_mark(row) for mark, row in _table(marks).items()}
        yield name, {round(m, 4): r for m, r in sorted(rows.items()) if m is not None and r}


def _law(baseline: Mapping[str, Any]) -> Law | None:
    scale, exponent, asymptote = (as_number(baseline.get(name)) for name in ("A", "alpha", "E"))
    if scale is None or exponent is None or asymptote is None:
        return None
    return Law(asymptote=asymptote, scale=scale, exponent=exponent)


def _score(facts: Mapping[str, Any]) -> Score | None:
    if not facts:
        return None
    final, coverage = _table(facts.get("final")), _table(facts.get("coverage"))
    outcome, median = as_number(final.get("outcome")), as_number(final.get("median"))
    bands = (
        (round(mark, 4), as_text(row.get("band")))
        for row in _rows(facts.get("marks"))
        if (mark := as_number(row.get("mark"))) is not None
    )
    shares = ((str(k), as_number(_table(v).get("share"))) for k, v in coverage.items())
    return Score(
        outcome=outcome,
        error=None if outcome is None or median is None else outcome - median,
        standardised_error=as_number(final.get("z")),
        crps=as_number(final.get("crps")),
        weighted_interval_score=as_number(final.get("wis")),
        compute_equivalent=as_number(final.get("compute_equivalent")),
        coverage=tuple((level, share) for level, share in shares if share is not None),
        num_scored=as_count(facts.get("num_scored")),
        num_void=as_count(facts.get("num_void")),
        num_unverified=as_count(facts.get("num_unverified")),
        bands=tuple(bands),
        verdict=as_text(facts.get("verdict")),
    )
