"""Forecast, registration and score of the target."""

import hashlib
from typing import Any

from portolan.canonical import digest, stringify_floats
from portolan.console import say
from portolan.errors import UsageError
from portolan.files import read_json, write_json_atomic
from portolan.pipeline.change_records import run_course
from portolan.pipeline.corpus import Corpus
from portolan.pipeline.plan import ladder_share
from portolan.pipeline.provenance import code_commit, code_digest
from portolan.pipeline.recorder import ProjectRecord
from portolan.pipeline.runs import PlannedRun, evaluations, is_finished, planned_runs
from portolan.project import Project
from portolan.record.times import now
from portolan.record.types import Check, Registration
from portolan.scaling.curves import RungCurve, TargetPlan
from portolan.scaling.forecast import Forecast, forecast_ladder
from portolan.scaling.interval import LEVELS
from portolan.scaling.registration import build_body, minimum_conditions

HEADLINE = "eval_dropless/heldout/macro_loss"
FORECAST_DIGITS = 16


def metric_identity(corpus: Corpus, run: PlannedRun) -> dict[str, Any]:
    """What makes two values of the metric of record the same quantity."""
    return {
        "name": HEADLINE,
        "evaluation_digest": corpus.evaluation_digest,
        "packing": run.rung.config.sequence_length,
        "dropless": True,
        "weights_view": "raw",
        "tokenizer": corpus.tokenizer_digest,
        "unit": "nats per token",
        "aggregation": "unweighted mean over domains of token-weighted mean loss",
        "domains": corpus.domains,
    }


def planned_conditions(project: Project, corpus: Corpus, target: PlannedRun) -> dict[str, Any]:
    """The fields that a registration conditions on, as the recipe plans them."""
    recipe = project.recipe
    return stringify_floats(
        {
            "lineage": target.run_id,
            "sequence_length": target.rung.config.sequence_length,
            "steps": target.rung.steps,
            "tokens_per_step": target.rung.tokens_per_step,
            "mixture": corpus.store_digest,
            "mixture_schedule": digest(stringify_floats(recipe.mixture.model_dump(mode="json"))),
            "optimizer": digest(stringify_floats(recipe.optimizer.model_dump(mode="json"))),
            "transport": "grouped, dropless",
            "metric_identity": digest(metric_identity(corpus, target)),
        }
    )


def make_forecast(project: Project, corpus: Corpus, *, steps: int | None = None) -> Forecast:
    """Forecast the target from all rungs of the recipe.

    Args:
        steps: updates of the target after a change of its horizon, None for the planned ones.

    Raises:
        UsageError: a rung is not finished.
    """
    runs = planned_runs(project, corpus)
    identity = digest(metric_identity(corpus, runs[-1]))
    curves = []
    for run in runs[:-1]:
        if not is_finished(project, run):
            raise UsageError(
                f"rung {run.run_id} is not finished", remedy="run `portolan ladder` first"
            )
        values = evaluations(project, run.run_id)
        curves.append(
            RungCurve.from_rung(
                run.rung,
                run_id=run.run_id,
                evaluations={name: v for name, v in values.items() if name.endswith("loss")},
                seed=run.seed,
                metric_identity=identity,
                config_digest=run.config_digest,
                evaluations_sha256=digest(
                    stringify_floats(
                        {name: {str(n): x for n, x in v.items()} for name, v in values.items()}
                    )
                ),
            )
        )
    target = TargetPlan.from_rung(runs[-1].rung, run_id=runs[-1].run_id)
    return forecast_ladder(
        curves,
        target if steps is None else target.until(steps),
        method=project.recipe.forecast.method,
        asymptote=project.recipe.forecast.asymptote,
        headline=HEADLINE,
    )


def print_forecast(forecast: Forecast) -> None:
    """Print median, intervals, F0 and warnings."""
    final = forecast.metrics[forecast.headline]
    say(
        f"{forecast.method} forecast of {forecast.headline} at the end of "
        f"{forecast.target.run_id}, nats per token:"
    )
    say(f"  median {final.median:.4f}")
    for level, low, high in ((50, 0.25, 0.75), (80, 0.10, 0.90), (95, 0.025, 0.975)):
        say(f"  {level} % interval {final.quantile(low):.4f} to {final.quantile(high):.4f}")
    if final.curve is not None and final.reference is not None:
        low, median, high = (final.reference[LEVELS.index(q)] for q in (0.025, 0.5, 0.975))
        say(f"  beside it: F1 {median:.4f}, 95 % interval {low:.4f} to {high:.4f}")
        for name, shape in final.curve.shapes.items():
            say(f"  shape {name}: weight {shape.weight:.2f}, median {shape.medians[-1]:.4f}")
    if forecast.summed_macro is not None:
        say(f"  mean of the domains' forecasts {forecast.summed_macro.median:.4f}")
    say(f"  point forecast F0 {final.baseline[-1]:.4f} (asymptote {final.law.asymptote:.4f})")
    for warning in forecast.warnings:
        say(f"  warning: {warning}")


def registered(record: ProjectRecord, target: PlannedRun) -> Any | None:
    """The forecast record of a target that a registration lists, or None."""
    entry = _recorded_forecast(record, target)
    if entry is None:
        return None
    listed = [r for r in record.find("registration") if entry.id in r.body.get("forecasts", ())]
    return entry if listed else None


def _recorded_forecast(record: ProjectRecord, target: PlannedRun) -> Any | None:
    found = [
        item
        for item in record.find("forecast")
        if item.body["target"].get("lineage") == target.run_id
    ]
    return found[-1] if found else None


def register_target(
    project: Project, corpus: Corpus, record: ProjectRecord, *, retrospective: bool
) -> bool:
    """Seal forecast and plan; False when they are registered already.

    Raises:
        UsageError: the target has evaluations and `retrospective` was not asked for.
    """
    target = planned_runs(project, corpus)[-1]
    if registered(record, target):
        return False
    folder = project.runs / target.run_id
    seen = sorted(evaluations(project, target.run_id).get(HEADLINE, {})) if folder.exists() else []
    if seen and not retrospective:
        raise UsageError(
            f"{target.run_id} already has {len(seen)} evaluations: a forecast made now is not a "
            "pre-registration",
            remedy="pass --retrospective to register it marked as such",
        )
    # A process killed between the two records left the forecast: it is sealed, so it is kept.
    entry = _recorded_forecast(record, target)
    if entry is None:
        steps = run_course(project, record, target).num_updates
        body = _forecast_body(project, corpus, target, steps, seen)
        identity = record.journal.append("forecast", body)
    else:
        body, identity = entry.body, entry.id
    path = project.forecasts / f"{identity.split(':')[1][:FORECAST_DIGITS]}.json"
    write_json_atomic(path, body | {"id": identity})
    artifact = record.artifact("forecast", path.stem, [path], "the registered forecast as a file")
    record.run(
        target.run_id,
        "production",
        f"target of width {target.rung.width}: {target.rung.steps} updates of "
        f"{target.rung.tokens_per_step} tokens",
    )
    record.journal.append(
        "registration", _registration(project, corpus, target, identity, artifact)
    )
    record.sign()
    return True


def _forecast_body(
    project: Project, corpus: Corpus, target: PlannedRun, steps: int, seen: list[int]
) -> dict[str, Any]:
    conditions = planned_conditions(project, corpus, target) | {"steps": steps}
    return build_body(
        make_forecast(project, corpus, steps=steps),
        title=f"{project.recipe.name}: final loss of the target",
        author="the project's owner",
        made_at=now(),
        metric=metric_identity(corpus, target),
        recipe=_recipe_digests(project, corpus, target),
        method={"code_commit": code_commit(), "script_sha256": code_digest()},
        conditions=minimum_conditions(conditions),
        on_failure=(
            "the ladder does not predict this target within its interval: report the miss, look "
            "for a cause among rate, batch and data before the recipe is used at a larger scale"
        ),
        evaluations_seen=seen,
    )


def _recipe_digests(project: Project, corpus: Corpus, target: PlannedRun) -> dict[str, Any]:
    recipe = project.recipe
    conditions = planned_conditions(project, corpus, target)
    return {
        "recipe": recipe.digest(),
        "model": digest(stringify_floats(target.rung.plan())),
        "optimizer": conditions["optimizer"],
        "mixture": corpus.store_digest,
        "mixture_schedule": conditions["mixture_schedule"],
        "tokenizer": corpus.tokenizer_digest,
        "transport": conditions["transport"],
        "precision": recipe.train.compute_dtype,
        "reference_tokens": recipe.budget.reference_tokens or target.rung.tokens,
        "evaluation_cadence": "every 5 % of the planned updates",
    }


def _registration(
    project: Project, corpus: Corpus, target: PlannedRun, forecast: str, artifact: str
) -> Registration:
    rung = target.rung

    def quantity(value: int, unit: str, basis: str) -> dict[str, str]:
        return {"value": str(value), "unit": unit, "basis": basis, "scope": "plan"}

    share = ladder_share(project.recipe)["no_head"]
    return Registration(
        text=(
            f"{target.run_id}: {rung.active_params} active of {rung.total_params} parameters, "
            f"{rung.tokens} tokens; the ladder cost {100 * share:.1f} % of its planned FLOPs"
        ),
        refs=(artifact,),
        lineage=project.recipe.name,
        question="Does the ladder predict the held-out loss of the target?",
        hypothesis="The final macro loss lies inside the registered 95 % interval.",
        plan={
            "tokens": quantity(rung.tokens, "token", "tokens.planned"),
            "steps": quantity(rung.steps, "step", "steps.planned"),
            "batch": quantity(rung.batch_sequences, "sequence", "batch.sequences"),
            "sequence": quantity(rung.config.sequence_length, "token", "seq.tokens"),
            "devices": quantity(1, "device", "devices.mesh"),
            "flops": quantity(rung.flops_with_head, "FLOP", "flops.model.fwd_bwd"),
        },  # type: ignore[arg-type]
        data_manifest=corpus.store_digest,
        code_ref=code_commit(),
        primary_metric=HEADLINE,
        stop_rule="after the planned number of updates, or at the first non-finite loss",
        analysis="score against the registered quantiles at every 5 % mark, then at the end",
        failure="the final macro loss lies outside the 95 % interval, or the run does not end",
        forecasts=(forecast,),
        retention="final and milestone checkpoints and all metrics stay in the project folder",
        rollback_depth="the two newest verified checkpoints",
        recovery_policy="resume from the newest checkpoint that validates; never start fresh",
        responsible="the project's owner",
        inferred=("devices: one process on this machine",),
    )


def score_target(project: Project, corpus: Corpus, record: ProjectRecord) -> dict[str, Any] | None:
    """Score the registered forecast and those before it; writes score.json and a check record."""
    from portolan.pipeline.ledger import target_ledger

    target = planned_runs(project, corpus)[-1]
    entry = registered(record, target)
    if entry is None:
        raise UsageError(
            f"no forecast is registered for {target.run_id}", remedy="run `portolan register`"
        )
    values = evaluations(project, target.run_id).get(HEADLINE, {})
    marks = _marks(values, run_course(project, record, target).num_updates)
    ledger = target_ledger(project, corpus, list(record.journal.records()), target)
    scores = {item.id: dict(item.score) for item in ledger}
    result = stringify_floats(
        scores.pop(entry.id)
        | {
            "forecast": entry.id,
            "run": target.run_id,
            "retrospective": entry.body["known_before"]["retrospective"],
        }
        | ({"earlier": scores} if scores else {})
    )
    path = project.runs / target.run_id / "score.json"
    if path.is_file() and read_json(path) == result:
        return None
    write_json_atomic(path, result)
    record.journal.append(
        "check",
        Check(
            text=f"the forecast scored against {len(marks)} evaluations: {result['verdict']}",
            refs=(entry.id,),
            rule="forecast-score",
            version="1",
            inputs={
                "forecast": entry.id,
                "evaluations": digest(stringify_floats(marks)),
            },
            result={"verdict": result["verdict"], "sha256": _file_digest(path)},
            tool_digest=code_digest(),
        ),
    )
    record.artifact("eval_output", f"{target.run_id} score", [path], "score of the forecast")
    record.sign()
    return result


def _file_digest(path: Any) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _marks(values: dict[int, float], steps: int) -> dict[str | float, float]:
    """{`0.05`: value ...} of the evaluations at the marks of a run of so many updates."""
    from portolan.scaling.curves import mark_label, points_from_completed, snap

    points = snap(points_from_completed(values, steps))
    return {mark_label(mark): value for mark, value in points.items()}
