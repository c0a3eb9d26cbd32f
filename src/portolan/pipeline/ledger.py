"""Forecasts of the target side by side: amended after a change, each scored for its time."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from portolan.canonical import digest, parse, stringify_floats
from portolan.console import console, say
from portolan.errors import UsageError
from portolan.files import write_json_atomic
from portolan.pipeline.corpus import Corpus
from portolan.pipeline.forecasting import FORECAST_DIGITS, HEADLINE, planned_conditions
from portolan.pipeline.recorder import ProjectRecord
from portolan.pipeline.runs import PlannedRun, evaluations
from portolan.project import Project
from portolan.record.chain import ChainFault, ChainReader, Record
from portolan.record.times import now
from portolan.scaling.ledger import (
    Amendment,
    Effect,
    Entry,
    Regime,
    amend_body,
    baselines,
    build_ledger,
)
from portolan.scaling.registration import minimum_conditions

FIELD_OF_KIND = {
    "context": "sequence_length",
    "mixture": "mixture_schedule",
    "horizon": "steps",
}
"""Condition that a change of each kind touches."""


def read_records(project: Project) -> list[Record]:
    """Records of the journal up to the first fault, without locking or repairing it."""
    records: list[Record] = []
    path = project.record / "journal.jsonl"
    if path.is_file():
        with path.open("rb") as file:
            try:
                for record in ChainReader().read(file):
                    records.append(record)
            except ChainFault:
                pass
    return records


def current(records: Iterable[Record], kind: str) -> list[Record]:
    """Records of a type that no later one supersedes, oldest first."""
    kept = [record for record in records if record.type == kind]
    gone = {identity for record in kept for identity in record.supersedes}
    return [record for record in kept if record.id not in gone]


def registered_forecasts(records: Sequence[Record], run_id: str) -> list[tuple[str, Any]]:
    """(id, body) of the forecasts of a run that some registration lists, oldest first."""
    listed = {
        identity
        for record in records
        if record.type == "registration"
        for identity in record.body.get("forecasts", ())
    }
    return [
        (record.id, record.body)
        for record in records
        if record.type == "forecast"
        and record.id in listed
        and record.body["target"].get("lineage") == run_id
    ]


@dataclass(frozen=True)
class RecordedChange:
    """A change of a run decided while it went on: what it touches, from which update."""

    id: str
    from_step: int
    kind: str
    content: Mapping[str, Any]


def recorded_changes(records: Sequence[Record], run_id: str) -> list[RecordedChange]:
    """Unplanned changes of a run that were not rolled back, by their first update.

    A change of code or infrastructure has kind `other`: no condition depends on it.
    """
    runs = {r.id for r in records if r.type == "run" and r.body.get("name") == run_id}
    found = []
    for record in current(records, "change"):
        body = record.body
        if body["planned"] or body.get("verdict") == "rolled_back":
            continue
        if runs.intersection(body.get("refs", ())):
            content = _content(body["what"])
            kind = str(content.get("kind", "other"))
            found.append(RecordedChange(record.id, int(body["from_step"]["n"]), kind, content))
    return sorted(found, key=lambda change: change.from_step)


def _content(what: Mapping[str, str]) -> Mapping[str, Any]:
    for text in (what.get("config"), what.get("data")):
        if text and text.startswith("{"):
            return parse(text)
    return {}


def regimes(
    registered: Mapping[str, Any], changes: Sequence[RecordedChange], metrics: Mapping[str, Any]
) -> list[Regime]:
    """Live conditions from each step on: those of the plan, then those that changes replaced.

    `metrics` holds the evaluations by name: after a change of packing both the registered and
    another metric must go on.
    """
    found = [Regime(0, dict(registered))]
    for change in changes:
        live = dict(found[-1].live)
        if field := FIELD_OF_KIND.get(change.kind):
            live[field] = {
                "sequence_length": change.content.get("sequence_length"),
                "steps": change.content.get("horizon"),
                "mixture_schedule": digest(stringify_floats(dict(change.content))),
            }[field]
        dual = change.kind != "context" or _dual_logged(metrics, change.from_step)
        found.append(Regime(change.from_step, live, change.id, dual))
    return found


def _dual_logged(metrics: Mapping[str, Mapping[int, float]], step: int) -> bool:
    """Whether the metric of record and another macro loss were evaluated after a step.

    Before the first evaluation after it nothing speaks against it.
    """
    after = {
        name
        for name, values in metrics.items()
        if name.endswith("macro_loss") and max(values, default=0) > step
    }
    return not after or (HEADLINE in after and len(after) > 1)


def target_ledger(
    project: Project, corpus: Corpus, records: Sequence[Record], target: PlannedRun
) -> list[Entry]:
    """Every registered forecast of the target with its score so far."""
    metrics = evaluations(project, target.run_id) if _has_metrics(project, target) else {}
    live = planned_conditions(project, corpus, target)
    return build_ledger(
        registered_forecasts(records, target.run_id),
        regimes(live, recorded_changes(records, target.run_id), metrics),
        metrics.get(HEADLINE, {}),
    )


def _has_metrics(project: Project, target: PlannedRun) -> bool:
    folder = project.runs / target.run_id
    return (folder / "metrics").is_dir() or (folder / "metrics.jsonl").is_file()


# ---------------------------------------------------------------- amending


def amend_target(
    project: Project,
    corpus: Corpus,
    record: ProjectRecord,
    target: PlannedRun,
    *,
    change: RecordedChange,
    shifts: Sequence[str] = (),
    multipliers: Sequence[str] = (),
    reason: str = "",
    delay: Mapping[str, Any] | None = None,
) -> str:
    """Register an amended forecast for a recorded change; the earlier one stays and stays scored.

    Args:
        shifts: `mean,sd` in nats, one per independent effect.
        multipliers: `ratio,sd` of compute, one per independent effect.
        delay: output of the delay simulator, needed when the horizon moved.

    Returns:
        Id of the new forecast record.
    """
    records = list(record.journal.records())
    known = registered_forecasts(records, target.run_id)
    if not known:
        raise UsageError(
            f"no forecast is registered for {target.run_id}", remedy="run `portolan register`"
        )
    earlier_id, earlier = known[-1]
    metrics = evaluations(project, target.run_id) if _has_metrics(project, target) else {}
    live = planned_conditions(project, corpus, target)
    after = regimes(live, recorded_changes(records, target.run_id), metrics)[-1].live
    effects = [
        *_shift_effects(shifts),
        *_multiplier_effects(multipliers, earlier),
        *([_delay_effect(delay)] if delay else []),
    ]
    body = amend_body(
        earlier,
        Amendment(
            from_step=change.from_step,
            changes=(change.id,),
            reason=reason or f"a change of the {change.kind} from update {change.from_step} on",
            effects=tuple(effects),
            conditions=minimum_conditions(after),
            evaluations=metrics.get(HEADLINE, {}),
            made_at=now(),
            steps=int(after["steps"]),
            delay=delay,
        ),
    )
    return _append(project, record, target, body, earlier_id)


def _append(
    project: Project, record: ProjectRecord, target: PlannedRun, body: dict[str, Any], earlier: str
) -> str:
    """Forecast and amended registration, both superseding, and the file beside them."""
    identity = record.journal.append("forecast", body, supersedes=[earlier])
    path = project.forecasts / f"{identity.split(':')[1][:FORECAST_DIGITS]}.json"
    write_json_atomic(path, body | {"id": identity})
    artifact = record.artifact("forecast", path.stem, [path], "the amended forecast as a file")
    before = [r for r in record.find("registration") if earlier in r.body.get("forecasts", ())][-1]
    amended = dict(before.body) | {
        "text": f"the forecast of {target.run_id} is amended: {body['reason']}",
        "refs": [artifact],
        "forecasts": [identity],
        "amends": [{"field": "forecasts", "before": earlier, "after": identity}],
    }
    record.journal.append("registration", amended, supersedes=[before.id])
    record.sign()
    return identity


def find_change(changes: Sequence[RecordedChange], change_id: str) -> RecordedChange:
    """A recorded change by its id or a part of it; by default the newest.

    Raises:
        UsageError: there is none.
    """
    matching = [c for c in changes if c.id == change_id or change_id in c.id]
    if not matching:
        raise UsageError(
            f"no recorded change {change_id!r} of the target" if change_id else "nothing changed",
            remedy="record the change first with `portolan change`; it gives the id",
        )
    return matching[-1]


def _pair(text: str, option: str) -> tuple[float, float]:
    try:
        mean, sd = (float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"{option} {text!r} is not two numbers", remedy=f"write {option} -0.0065,0.001"
        ) from None
    return mean, sd


def _shift_effects(shifts: Sequence[str]) -> list[Effect]:
    return [Effect("level shift", *_pair(text, "--shift")) for text in shifts]


def _multiplier_effects(multipliers: Sequence[str], body: Mapping[str, Any]) -> list[Effect]:
    """Effects in compute, turned into nats by the baseline law at the registered median."""
    baseline = body.get("baseline") or {}
    if multipliers and not {"E", "alpha"} <= set(baseline):
        raise UsageError(
            "the registration states no law to turn a compute multiplier into nats",
            remedy="give the effect with --shift MEAN,SD",
        )
    median = float(body["quantiles"][body["metric"]["name"]]["1.00"]["0.5"])
    effects = []
    for text in multipliers:
        ratio, sd = _pair(text, "--multiplier")
        effects.append(
            Effect.multiplier(
                f"compute x {ratio:g}", ratio, sd, loss=median,
                asymptote=float(baseline["E"]), exponent=float(baseline["alpha"]),
            )
        )  # fmt: skip
    return effects


def _delay_effect(delay: Mapping[str, Any]) -> Effect:
    return Effect("shortened horizon", float(delay["loss_cost"]), float(delay["loss_cost_sd"]))


# ---------------------------------------------------------------- printing


def ledger_json(entries: Sequence[Entry], values: Mapping[int, float]) -> dict[str, Any]:
    """Forecasts with their scores and the baselines beside them, as plain JSON."""
    rows = [
        {
            "forecast": entry.id,
            "made_at": entry.body["made_at"],
            "reason": entry.body.get("reason", ""),
            "changes": list(entry.body.get("changes", ())),
            "status": entry.word,
            "final_quantiles": dict(entry.final),
            "score": dict(entry.score),
        }
        for entry in entries
    ]
    beside = baselines(entries[0].body, values) if entries else {}
    return stringify_floats({"forecasts": rows, "baselines": beside})


def print_ledger(entries: Sequence[Entry], values: Mapping[int, float]) -> None:
    """One line a forecast, then the finals of the baselines."""
    table = Table(title="Forecasts of the target, nats per token", title_justify="left")
    for column in ("forecast", "made", "median", "95 % interval", "status", "scored", "mean WIS"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        final = entry.final
        mean = entry.score["mean"].get("wis")
        table.add_row(
            entry.id.partition(":")[2][:FORECAST_DIGITS],
            entry.body["made_at"][:10],
            f"{float(final['0.5']):.4f}",
            f"{float(final['0.025']):.4f} to {float(final['0.975']):.4f}",
            entry.word,
            str(entry.score["num_scored"]),
            "-" if mean is None else f"{mean:.4f}",
        )
    console.print(table)
    for name, value in baselines(entries[0].body, values).items() if entries else ():
        say(f"baseline {name}: {'not stated' if value is None else f'{value:.4f}'}")


def write_ledger(folder: Path, content: Mapping[str, Any]) -> None:
    """Keep the ledger beside the run, for the page and for readers."""
    write_json_atomic(folder / "ledger.json", dict(content))
