"""`portolan watch`: the target against its registered band, its rungs and the health rules."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.live import Live

from portolan.console import console, say
from portolan.errors import PortolanError, UsageError
from portolan.files import write_json_atomic
from portolan.health import bands
from portolan.health.checklist import Evidence
from portolan.health.curves import RunCurves, by_width, read_curves
from portolan.health.local import LocalRun, collect, is_training
from portolan.health.monitor import Monitor
from portolan.health.rules import Settings
from portolan.health.signals import Signal, read_trace
from portolan.health.status import EXIT_CODES, Evaluation, Observed, Status, assess, worst
from portolan.optim.schedule import HorizonEvent, Schedule
from portolan.pipeline.corpus import Corpus, find_corpus
from portolan.pipeline.forecasting import HEADLINE
from portolan.pipeline.ledger import (
    RecordedChange,
    current,
    read_records,
    recorded_changes,
    target_ledger,
)
from portolan.pipeline.runs import PlannedRun, evaluations, is_finished, planned_runs
from portolan.pipeline.watch_view import print_alarms, print_json, print_line, render
from portolan.project import Project
from portolan.record.chain import Record
from portolan.scaling.curves import points_from_completed
from portolan.scaling.interval import NOISE
from portolan.scaling.ledger import Entry
from portolan.scaling.score import distribution_at

FOLLOW_SECONDS = 5.0
STATUS_FILE = "status.json"


@dataclass(frozen=True)
class Subject:
    """What is watched: the target, the journal, its forecasts and its evaluations."""

    project: Project
    target: PlannedRun
    rungs: tuple[PlannedRun, ...]
    records: Sequence[Record]
    ledger: Sequence[Entry]
    values: dict[int, float]
    changes: Sequence[RecordedChange]


def find_subject(project: Project) -> Subject:
    """The target of the recipe, as far as it exists.

    Raises:
        UsageError: there is no corpus, so nothing can have been trained.
    """
    corpus = find_corpus(project)
    if corpus is None:
        raise UsageError("nothing to watch: the corpus is not curated", remedy="run `portolan run`")
    return _subject(project, corpus)


def _subject(project: Project, corpus: Corpus) -> Subject:
    runs = planned_runs(project, corpus)
    target = runs[-1]
    records = read_records(project)
    folder = project.runs / target.run_id
    found = evaluations(project, target.run_id) if folder.is_dir() else {}
    return Subject(
        project=project,
        target=target,
        rungs=tuple(run for run in runs[:-1] if is_finished(project, run)),
        records=records,
        ledger=target_ledger(project, corpus, records, target),
        values=found.get(HEADLINE, {}),
        changes=recorded_changes(records, target.run_id),
    )


def watch_status(project: Project) -> Status:
    """The status of the target at this moment."""
    subject = find_subject(project)
    folder = project.runs / subject.target.run_id
    moment = time.time()
    if not (folder / "run.json").is_file():
        curves = _empty_curves(subject.target)
        evidence = Evidence(curves, settings=_settings(subject, None, ()))
        return assess(evidence, Observed("not started", forecast=_forecast_word(subject)))
    target = _curves(subject, subject.target)
    rungs = by_width([_curves(subject, run) for run in subject.rungs])
    settings = _settings(subject, target, rungs)
    training = is_training(folder, moment)
    judged = _evaluations(subject)
    evidence = Evidence(
        target=target,
        rungs=rungs,
        settings=settings,
        evaluations=subject.values,
        rates=_rates(subject),
        capped=subject.target.rung.lr_capped,
        config=_config(subject),
        bands=[(item.fraction, item.band) for item in judged if item.band],
        void=_void_word(subject.ledger, judged),
        changes=[change.from_step for change in subject.changes],
        context_changes=[c.from_step for c in subject.changes if c.kind == "context"],
        mixture_changes=[c.from_step for c in subject.changes if c.kind == "mixture"],
    )
    monitor = Monitor(settings)
    run = LocalRun(
        folder,
        subject.target.run_id,
        target.steps,
        subject.records,
        moment if training else None,
    )
    monitor.run(_with_forecast(collect(run), judged))
    state = "training" if training else "finished" if run.finished else "stopped"
    observed = Observed(
        state=state,
        evaluations=judged,
        alarms=monitor.alarms,
        forecast=_forecast_word(subject),
        unmeasured_rules=monitor.unmeasured(),
        notices=monitor.notices(),
    )
    return assess(evidence, observed)


def _curves(subject: Subject, run: PlannedRun) -> RunCurves:
    """Curves of a run; shares of the target are those of its horizon after all changes."""
    folder = subject.project.runs / run.run_id
    curves = read_curves(folder, subject.project.read("runs", run.run_id, "run.json"))
    return dataclasses.replace(curves, steps=_horizon(subject)) if run.is_target else curves


def _horizon(subject: Subject) -> int:
    moved = [int(c.content["horizon"]) for c in subject.changes if c.kind == "horizon"]
    return moved[-1] if moved else subject.target.rung.steps


def _empty_curves(target: PlannedRun) -> RunCurves:
    rung = target.rung
    return RunCurves(
        run_id=target.run_id,
        label=f"d{rung.width}",
        width=rung.width,
        steps=rung.steps,
        log_flops=0.0,
        num_experts=rung.config.num_experts,
        series={},
    )


def _settings(subject: Subject, target: RunCurves | None, rungs: Sequence[RunCurves]) -> Settings:
    """Limits of the recipe, noise of the registration, the rungs' own routing entropy."""
    health = subject.project.recipe.health
    noise = NOISE
    if subject.ledger:
        parameters = subject.ledger[-1].body["method"].get("parameters", {})
        noise = float(parameters.get("final_noise_nats", NOISE))
    edge = bands.lower_edge(target, rungs, "routing entropy") if target else None
    steps = _horizon(subject)

    def entropy_floor(row: int) -> float | None:
        return edge((row + 1) / steps) if edge else None

    return Settings(
        time_scale=health.time_scale,
        registered=_registered(subject.project),
        num_experts=subject.target.rung.config.num_experts or None,
        evaluation_noise=noise,
        checkpoint_seconds=subject.project.recipe.train.temporary_checkpoint_seconds,
        entropy_floor=entropy_floor,
    )


def _registered(project: Project) -> dict[str, float]:
    """Absolute limits that the recipe sets."""
    found = project.recipe.health.model_dump()
    return {name: x for name, x in found.items() if name != "time_scale" and x is not None}


def _rates(subject: Subject) -> Any:
    """Both learning rates by zero-based update, by the plan and the recorded horizons."""
    rung, settings = subject.target.rung, subject.project.recipe.optimizer
    events = tuple(
        HorizonEvent(change.from_step, int(change.content["horizon"]))
        for change in subject.changes
        if change.kind == "horizon"
    )
    schedule = Schedule(
        rung.steps, settings.warmup_steps or rung.warmup_steps, settings.min_ratio, events
    )

    def rates(row: int) -> tuple[float, float]:
        factor = schedule.factor(row)
        return rung.hyperball * factor, rung.adam * factor

    return rates


def _config(subject: Subject) -> tuple[str, str] | None:
    """Registered and running digest; a digest under a recorded change counts as registered."""
    attempts = [
        record.body
        for record in current(subject.records, "attempt")
        if record.body["run"] == subject.target.run_id
    ]
    if not attempts or not subject.ledger:
        return None
    live = str(attempts[-1]["config_digest"])
    return (live if subject.changes else subject.target.config_digest), live


def _evaluations(subject: Subject) -> list[Evaluation]:
    """Every evaluation beside the forecast that was in force when it was made."""
    steps = _horizon(subject)
    found = []
    for completed, value in sorted(subject.values.items()):
        entry = _in_force(subject.ledger, completed)
        if entry is None:
            words = {e.status.get(completed) for e in subject.ledger}
            gate = "mismatch" if "mismatch" in words else "unverified" if words - {None} else "none"
            fraction = points_from_completed({completed: value}, steps)[0][0]
            found.append(Evaluation(completed, fraction, value, gate))
            continue
        found.append(_judged(entry, completed, value))
    return found


def _in_force(ledger: Sequence[Entry], completed: int) -> Entry | None:
    matching = [entry for entry in ledger if entry.status.get(completed) == "match"]
    return matching[-1] if matching else None


def _judged(entry: Entry, completed: int, value: float) -> Evaluation:
    """An evaluation with the band and the interval of its forecast."""
    steps = int(entry.body["target"]["steps"])
    fraction = points_from_completed({completed: value}, steps)[0][0]
    quantiles = entry.body["quantiles"][entry.body["metric"]["name"]]
    if not min(map(float, quantiles)) - 1e-9 <= fraction <= 1 + 1e-9:
        return Evaluation(completed, fraction, value, "match")
    rows = {round(float(row["mark"]), 6): row for row in entry.score["marks"]}
    distribution = distribution_at(quantiles, fraction)
    low, high = distribution.interval(0.9)
    outside = not distribution.inside(0.95, value)
    row = rows.get(round(fraction, 6))
    return Evaluation(
        completed,
        fraction,
        value,
        "match",
        band=row["band"] if row else "",
        median=float(distribution.quantile(0.5)[0]),
        low_90=low,
        high_90=high,
        outside_95=outside,
    )


def _void_word(ledger: Sequence[Entry], judged: Sequence[Evaluation]) -> str:
    """Why the newest evaluation has no band, empty while a forecast applies."""
    if not judged or judged[-1].gate == "match":
        return ""
    if not ledger:
        return "no forecast is registered"
    return ledger[-1].word if ledger[-1].word != "in force" else "no evaluation since the amendment"


def _forecast_word(subject: Subject) -> str:
    if not subject.ledger:
        return "no forecast is registered"
    entry = subject.ledger[-1]
    name = entry.id.partition(":")[2][:16]
    before = len(subject.ledger) - 1
    earlier = f"; {before} earlier, see `portolan forecast ledger`" if before else ""
    return f"{name} {entry.word}{earlier}"


def _with_forecast(signals: list[Signal], judged: Sequence[Evaluation]) -> list[Signal]:
    """The signals with one more after each evaluation: outside the 95 % interval, or void."""
    by_row = {item.completed - 1: item for item in judged}
    found = []
    for signal in signals:
        found.append(signal)
        if signal.source != HEADLINE or signal.row is None:
            continue
        item = by_row.get(signal.row)
        if item is None:
            continue
        if item.gate == "mismatch":
            found.append(Signal(signal.time, "forecast/outside_95", {"void": True}, signal.row))
        elif item.band and item.median is not None:
            outside = float(item.outside_95)
            found.append(Signal(signal.time, "forecast/outside_95", outside, signal.row))
    return found


def watch(project: Project, *, follow: bool, as_json: bool, every: float = FOLLOW_SECONDS) -> int:
    """Print the status once, or until the run ends; returns the exit code of the last verdict."""
    if not follow:
        status = watch_status(project)
        _keep(project, status)
        if as_json:
            print_json(status, indent=2)
        else:
            console.print(render(status))
        return status.exit_code
    if console.is_terminal and not as_json:
        with Live(console=console, auto_refresh=False) as live:
            return _follow(project, every, lambda status: live.update(render(status), refresh=True))
    return _follow(project, every, print_json if as_json else print_line)


def replay(project: Project, trace: Path, *, as_json: bool) -> int:
    """Print the alarms of a recorded trace under the recipe's limits; returns the worst's code."""
    recipe = project.recipe
    shape = recipe.shape(recipe.model.width)
    monitor = Monitor(
        Settings(
            time_scale=recipe.health.time_scale,
            registered=_registered(project),
            num_experts=shape.num_experts or None,
        )
    )
    if not trace.is_file():
        raise UsageError(f"there is no trace {trace}", remedy="name a file of JSON lines")
    monitor.run(read_trace(trace))
    print_alarms(monitor.alarms, monitor.unmeasured(), as_json=as_json)
    return EXIT_CODES[worst([alarm.severity for alarm in monitor.alarms])]


def _follow(project: Project, every: float, show: Any) -> int:
    """Show the status until the run is over; one that has not started is waited for."""
    while True:
        begin = time.monotonic()
        status = watch_status(project)
        show(status)
        if status.state in ("finished", "stopped"):
            _keep(project, status)
            return status.exit_code
        # Looking must not take a tenth of what the run itself gets.
        time.sleep(max(every, 10 * (time.monotonic() - begin)))


def leave_status(project: Project) -> None:
    """Leave the present status beside the target, for the page; say so when that is impossible.

    The page must be made for the run that went wrong as well.
    """
    try:
        _keep(project, watch_status(project))
    except PortolanError as error:
        say(f"status not renewed: {error.message}")


def _keep(project: Project, status: Status) -> None:
    """Leave the status beside the run for the page."""
    folder = project.runs / status.run_id
    if folder.is_dir():
        write_json_atomic(folder / STATUS_FILE, status.to_json())
