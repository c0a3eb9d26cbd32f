"""Forecast of a target's evaluations from its rungs: F1 quantiles beside the F0 baseline."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from portolan.errors import UsageError
from portolan.scaling.baseline import (
    PUBLIC_ASYMPTOTE,
    PUBLIC_TAIL_CONSTANT,
    RELATIVE_ASYMPTOTE,
    PowerLaw,
    forecast_baseline,
)
from portolan.scaling.curves import (
    RungCurve,
    TargetPlan,
    WidthCurve,
    by_width,
    mark_label,
    pooled_seed_sd,
)
from portolan.scaling.interval import (
    LEVEL_LABELS,
    LEVELS,
    NOISE,
    PUBLIC_RULE,
    TAIL_CONSTANT,
    TAIL_NOISE,
    AsymptoteRule,
    predict,
    relative_rule,
)
from portolan.scaling.ladder import MIN_FORECAST_STEPS, NUM_MARKS

AsymptoteName = Literal["relative", "public"]

METHOD_NAME = "F1"
MACRO_LOSS = "macro_loss"
"""Ending of the name of the metric of record."""
MIN_RUNGS = 3
LOSS_DIGITS = 6
"""Decimals kept in a record: a millionth of a nat, far below any noise."""
FLAGS = ("family", "tokens_per_active_param", "lr_capped", "beta2_guard")


@dataclass(frozen=True)
class MetricForecast:
    """Forecast of one metric: arrays over `marks` (1..20), quantiles of shape [marks, 13].

    `noise` is the standard deviation of one evaluation of one seed used at each mark.
    """

    metric: str
    marks: tuple[int, ...]
    quantiles: np.ndarray
    baseline: tuple[float, ...]
    law: PowerLaw
    rule: AsymptoteRule
    asymptote_mean: float
    asymptote_sd: float
    noise: tuple[float, ...]

    def quantile(self, level: float, mark: int = NUM_MARKS) -> float:
        """One quantile at one mark."""
        return float(self.quantiles[self.marks.index(mark), LEVELS.index(level)])

    @property
    def median(self) -> float:
        """Median of the final evaluation."""
        return self.quantile(0.5)


@dataclass(frozen=True)
class Forecast:
    """All metrics of one target; `headline` names the metric of record."""

    target: TargetPlan
    headline: str
    metrics: dict[str, MetricForecast]
    inputs: tuple[dict[str, Any], ...]
    parameters: dict[str, Any]
    warnings: tuple[str, ...]

    def quantiles_record(self) -> dict[str, dict[str, dict[str, float]]]:
        """`{metric: {mark: {level: value}}}`, values rounded to a millionth."""
        return {
            name: {
                mark_label(mark): {
                    label: round(float(value), LOSS_DIGITS)
                    for label, value in zip(LEVEL_LABELS, row, strict=True)
                }
                for mark, row in zip(forecast.marks, forecast.quantiles, strict=True)
            }
            for name, forecast in self.metrics.items()
        }

    def baseline_record(self) -> dict[str, Any]:
        """F0 of the metric of record: value at each mark and the final law."""
        forecast = self.metrics[self.headline]
        return {
            "metric": self.headline,
            "F0": {
                mark_label(mark): round(value, LOSS_DIGITS)
                for mark, value in zip(forecast.marks, forecast.baseline, strict=True)
            },
            "A": forecast.law.coefficient,
            "alpha": forecast.law.exponent,
            "E": forecast.law.asymptote,
        }


def forecast_ladder(
    rungs: Sequence[RungCurve],
    target: TargetPlan,
    *,
    asymptote: AsymptoteName = "relative",
    metrics: Sequence[str] | None = None,
    headline: str | None = None,
    min_rungs: int = MIN_RUNGS,
) -> Forecast:
    """Forecast every metric of the target at every 5 % mark; deterministic.

    Args:
        rungs: finished or truncated rungs; repeated widths are seeds and are averaged.
        asymptote: `public` gives the macro loss the prior of the public family (1.5 nats);
            every other metric, and every metric under `relative`, has it near 0.60 of its best
            final rung value.
        metrics: names to forecast; by default all losses that every rung has.
        headline: metric of record; by default the one whose name ends in `macro_loss`.
        min_rungs: distinct widths needed; 2 only to register a rung from smaller ones.

    Raises:
        UsageError: too few rungs, a run shorter than 20 steps, or runs of different recipes.
    """
    _check_runs(rungs, target, min_rungs)
    names, warnings = _choose_metrics(rungs, metrics)
    headline = headline or next((n for n in names if n.endswith(MACRO_LOSS)), names[0])
    if headline not in names:
        raise UsageError(
            f"the metric of record {headline!r} was not evaluated on every rung",
            remedy=f"choose one of {', '.join(names)}",
        )
    warnings += _ladder_warnings(rungs, target, asymptote)
    results = {}
    for name in names:
        rule = "public" if asymptote == "public" and name.endswith(MACRO_LOSS) else "relative"
        results[name], notes = _forecast_metric(rungs, target, name, rule)
        warnings += [f"{name}: {note}" for note in notes]
    return Forecast(
        target=target,
        headline=headline,
        metrics=results,
        inputs=tuple(_input_record(rung, headline) for rung in rungs),
        parameters=_parameters(results[headline]),
        warnings=tuple(warnings),
    )


def _check_runs(rungs: Sequence[RungCurve], target: TargetPlan, min_rungs: int) -> None:
    """Refuse ladders that no forecast should be made from."""
    widths = sorted({rung.width for rung in rungs})
    if len(widths) < max(2, min_rungs):
        raise UsageError(
            f"a forecast needs rungs of at least {max(2, min_rungs)} widths, got {widths}",
            remedy="add a width to [ladder] widths in the recipe and train it",
        )
    for run in (*rungs, target):
        if run.steps < MIN_FORECAST_STEPS:
            raise UsageError(
                f"{run.run_id} has {run.steps} steps, a forecast needs at least "
                f"{MIN_FORECAST_STEPS}",
                remedy="raise budget.tokens_per_active_param or lower the batch",
            )
        for flag in FLAGS:
            if getattr(run, flag) != getattr(rungs[0], flag):
                raise UsageError(
                    f"{run.run_id} has {flag} = {getattr(run, flag)!r}, {rungs[0].run_id} has "
                    f"{getattr(rungs[0], flag)!r}: they follow different laws",
                    remedy="fit only runs of one recipe; leave out the width that differs",
                )
    if len({rung.metric_identity for rung in rungs}) > 1:
        raise UsageError(
            "the rungs were not evaluated on the same held-out data in the same way",
            remedy="evaluate every rung again with one evaluation set",
        )


def _choose_metrics(
    rungs: Sequence[RungCurve], metrics: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    """Metric names to forecast, and a warning for losses that not all rungs have."""
    everywhere = set.intersection(*(set(rung.points) for rung in rungs))
    if metrics is not None:
        if missing := sorted(set(metrics) - everywhere):
            raise UsageError(
                f"the metric {missing[0]!r} is missing from a rung",
                remedy=f"choose from {', '.join(sorted(everywhere))}",
            )
        return list(metrics), []
    names = sorted(name for name in everywhere if name.endswith("loss"))
    if not names:
        raise UsageError("no loss was evaluated on every rung", remedy="evaluate the rungs first")
    somewhere = {name for rung in rungs for name in rung.points if name.endswith("loss")}
    dropped = sorted(somewhere - everywhere)
    return names, [f"{name}: not evaluated on every rung, not forecast" for name in dropped]


def _ladder_warnings(
    rungs: Sequence[RungCurve], target: TargetPlan, asymptote: AsymptoteName
) -> list[str]:
    warnings = []
    if len({rung.width for rung in rungs}) < MIN_RUNGS:
        warnings.append("two rungs: misfit of the law cannot be seen")
    if len(rungs) == len({rung.width for rung in rungs}):
        warnings.append(f"no repeated seed: the noise of {NOISE} nats is assumed, not measured")
    if rungs[0].lr_capped:
        warnings.append("every rung is at the learning-rate cap")
    decades = math.log10(target.flops / max(rung.flops for rung in rungs))
    if decades <= 0:
        warnings.append("the target is not larger than the largest rung")
    elif decades > 1.5:
        warnings.append(
            f"the target has {10**decades:.0f} times the compute of the largest rung: the "
            "asymptote dominates the interval"
        )
    if asymptote == "public" and rungs[0].family != "ladder":
        warnings.append(f"the public asymptote does not apply to family {rungs[0].family}")
    return warnings


def _forecast_metric(
    rungs: Sequence[RungCurve], target: TargetPlan, metric: str, rule_name: AsymptoteName
) -> tuple[MetricForecast, list[str]]:
    """F0 and F1 of one metric at every mark that all widths have."""
    curves = by_width(rungs, metric)
    if incomplete := [curve.width for curve in curves if not curve.has(NUM_MARKS)]:
        raise UsageError(
            f"the rung of width {incomplete[0]} has no final {metric} and lacks the marks from "
            "60 to 80 % that would extend it",
            remedy="finish the rung, or leave its width out",
        )
    best_final = min(curve.value(NUM_MARKS, TAIL_CONSTANT) for curve in curves)
    public = rule_name == "public"
    baseline = forecast_baseline(
        curves,
        target.flops,
        asymptote=PUBLIC_ASYMPTOTE if public else RELATIVE_ASYMPTOTE * best_final,
        tail_constant=PUBLIC_TAIL_CONSTANT,
    )
    rows, noises, predictive, rule = [], [], None, PUBLIC_RULE
    for mark in baseline.marks:
        losses = np.array([curve.value(mark, TAIL_CONSTANT) for curve in curves])
        rule = PUBLIC_RULE if public else relative_rule(best_final, float(losses.min()))
        noise = max(NOISE, pooled_seed_sd(rungs, metric, mark) or 0.0)
        predictive = predict(
            np.array([float(curve.flops) for curve in curves]) * mark / NUM_MARKS,
            losses,
            np.array([_rung_noise(curve, mark, noise) for curve in curves]),
            float(target.flops) * mark / NUM_MARKS,
            rule,
            outcome_noise=noise,
        )
        rows.append(predictive.quantiles())
        noises.append(noise)
    assert predictive is not None
    forecast = MetricForecast(
        metric=metric,
        marks=baseline.marks,
        quantiles=np.array(rows),
        baseline=baseline.values,
        law=baseline.laws[-1],
        rule=rule,
        asymptote_mean=predictive.asymptote_mean,
        asymptote_sd=predictive.asymptote_sd,
        noise=tuple(noises),
    )
    return forecast, [*baseline.warnings, *_curve_warnings(curves, forecast)]


def _rung_noise(curve: WidthCurve, mark: int, noise: float) -> float:
    """Noise of the mean over seeds, larger where the mark was extrapolated."""
    last = mark if mark in curve.values else max(curve.values)
    mean_noise = noise / math.sqrt(curve.num_seeds[last])
    return mean_noise if mark in curve.values else math.hypot(mean_noise, TAIL_NOISE)


def _curve_warnings(curves: Sequence[WidthCurve], forecast: MetricForecast) -> list[str]:
    """Marks left out, ends extrapolated, medians that rise, a law without gain from compute."""
    warnings = [
        f"width {curve.width} is extrapolated from {mark_label(max(curve.values))} to the end"
        for curve in curves
        if NUM_MARKS not in curve.values
    ]
    missing = [k for k in range(1, NUM_MARKS + 1) if k not in forecast.marks]
    if missing:
        labels = ", ".join(mark_label(k) for k in missing)
        warnings.append(f"no forecast at marks {labels}: a rung was not evaluated there")
    medians = forecast.quantiles[:, LEVELS.index(0.5)]
    for i in range(1, len(medians)):
        if medians[i] > medians[i - 1]:
            label = mark_label(forecast.marks[i])
            warnings.append(f"F1 median rises at mark {label}")
    if forecast.law.exponent <= 0:
        warnings.append("larger rungs are not better: the exponent is not positive")
    return warnings


def _input_record(rung: RungCurve, headline: str) -> dict[str, Any]:
    """The `inputs` entry of one rung: what was used, what was extrapolated and why."""
    curve = by_width([rung], headline)[0]
    record: dict[str, Any] = {
        "run": rung.run_id,
        "width": rung.width,
        "seed": rung.seed,
        "steps": rung.steps,
        "flops": rung.flops,
        "config_digest": rung.config_digest or "not_stated",
        "evaluations_sha256": rung.evaluations_sha256 or "not_stated",
        "marks": [mark_label(mark) for mark in sorted(curve.values)],
    }
    if curve.line:
        record["extrapolated"] = [mark_label(mark) for mark in sorted(curve.line)]
        record["extrapolation_reason"] = "the run stopped before its planned end"
    return record


def _parameters(headline: MetricForecast) -> dict[str, Any]:
    """Parameters and priors of the method, for the metric of record."""
    rule = headline.rule
    return {
        "asymptote_rule": rule.name,
        "asymptote_prior_mean": rule.mean,
        "asymptote_prior_sd": rule.sd,
        "asymptote_grid_upper": rule.upper,
        "asymptote_grid_steps": rule.num_steps,
        "asymptote_posterior_mean": round(headline.asymptote_mean, LOSS_DIGITS),
        "asymptote_posterior_sd": round(headline.asymptote_sd, LOSS_DIGITS),
        "model_error_nats_per_decade": rule.kappa,
        "noise_nats": max(headline.noise),
        "final_noise_nats": headline.noise[-1],
        "tail_constant": TAIL_CONSTANT,
        "tail_noise": TAIL_NOISE,
        "baseline_tail_constant": PUBLIC_TAIL_CONSTANT,
        "axis": "training FLOPs without the output head",
        "levels": list(LEVEL_LABELS),
        "random_seed": "none: exact integration",
    }


def backtest(
    rungs: Sequence[RungCurve],
    *,
    asymptote: AsymptoteName = "relative",
    metric: str | None = None,
) -> list[dict[str, Any]]:
    """Forecast each rung from the smaller ones, with the same code; one dict per rung.

    A few correlated tests, all at short range: they bound the error from below.
    """
    widths = sorted({rung.width for rung in rungs})
    results = []
    for position in range(2, len(widths)):
        smaller = [rung for rung in rungs if rung.width in widths[:position]]
        held_out = [rung for rung in rungs if rung.width == widths[position]]
        target = _as_target(held_out[0])
        metrics = None if metric is None else [metric]
        forecast = forecast_ladder(
            smaller, target, asymptote=asymptote, metrics=metrics, min_rungs=2
        )
        headline = forecast.metrics[forecast.headline]
        actual = by_width(held_out, forecast.headline)[0]
        last = max(actual.values)
        low, high = headline.quantile(0.025, last), headline.quantile(0.975, last)
        outcome = actual.values[last]
        results.append(
            {
                "width": widths[position],
                "from_widths": widths[:position],
                "metric": forecast.headline,
                "mark": mark_label(last),
                "median": headline.quantile(0.5, last),
                "low_95": low,
                "high_95": high,
                "baseline": headline.baseline[headline.marks.index(last)],
                "outcome": outcome,
                "error": headline.quantile(0.5, last) - outcome,
                "inside_95": low <= outcome <= high,
            }
        )
    return results


def _as_target(rung: RungCurve) -> TargetPlan:
    return TargetPlan(
        run_id=rung.run_id,
        width=rung.width,
        steps=rung.steps,
        tokens=0,
        tokens_per_step=0,
        sequence_length=0,
        flops=rung.flops,
        family=rung.family,
        tokens_per_active_param=rung.tokens_per_active_param,
        lr_capped=rung.lr_capped,
        beta2_guard=rung.beta2_guard,
    )
