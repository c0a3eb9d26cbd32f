"""Forecast of a target's evaluations from its rungs: F2 or F1 quantiles beside the F0 baseline."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
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
from portolan.scaling.domains import SummedMacro, sum_domains
from portolan.scaling.f2 import CurveForecast, PublicLaw, forecast_curves
from portolan.scaling.f2_record import f2_parameters, f2_warnings
from portolan.scaling.interval import (
    LEVEL_LABELS,
    LEVELS,
    NOISE,
    PUBLIC_RULE,
    RELATIVE_MEAN,
    TAIL_CONSTANT,
    TAIL_NOISE,
    AsymptoteRule,
    predict,
    relative_rule,
)
from portolan.scaling.ladder import MIN_FORECAST_STEPS, NUM_MARKS
from portolan.scaling.learnt import excluded_suites, learnt_prior

AsymptoteName = Literal["relative", "public"]
MethodName = Literal["F1", "F2"]

MACRO_LOSS = "macro_loss"
"""Ending of the name of the metric of record."""
MICRO_LOSS, MICRO_NOISE = "micro_loss", 0.002
"""Ending of the name, and noise in nats, of the token-weighted loss."""
MIN_RUNGS = 3
LOSS_DIGITS = 6
"""Decimals kept in a record: a millionth of a nat, far below any noise."""
FLAGS = ("family", "tokens_per_active_param", "lr_capped", "beta2_guard")
RATIO_FLAG = "tokens_per_active_param"
"""F2 has a term for it; F0 and F1 use the rungs of the target's ratio only."""
OWN_SUITES = {"ladder": ("marin",)}
"""Suites from which a forecast of a family of rungs may learn nothing."""
DOMAIN_RATIO = (0.62, 0.08)
"""Asymptote of one domain over its loss on the best rung, beside the public macro asymptote."""


@dataclass(frozen=True)
class MetricForecast:
    """Forecast of one metric: arrays over `marks` (1..20), quantiles of shape [marks, 13].

    `baseline` is F0 at `baseline_marks`; `noise` is the standard deviation of one evaluation of
    one seed that F1 used at each of them. Under F2, `curve` holds all that it says and
    `reference` the final quantiles of F1.
    """

    metric: str
    marks: tuple[int, ...]
    quantiles: np.ndarray
    baseline_marks: tuple[int, ...]
    baseline: tuple[float, ...]
    law: PowerLaw
    rule: AsymptoteRule
    asymptote_mean: float
    asymptote_sd: float
    noise: tuple[float, ...]
    curve: CurveForecast | None = None
    reference: np.ndarray | None = None

    def quantile(self, level: float, mark: int = NUM_MARKS) -> float:
        """One quantile at one mark."""
        return float(self.quantiles[self.marks.index(mark), LEVELS.index(level)])

    @property
    def median(self) -> float:
        """Median of the final evaluation."""
        return self.quantile(0.5)


@dataclass(frozen=True)
class Forecast:
    """All metrics of one target; `headline` names the metric of record.

    `summed_macro` is the mean of the forecasts of its domains, None where they are not all known.
    """

    method: MethodName
    target: TargetPlan
    headline: str
    metrics: dict[str, MetricForecast]
    inputs: tuple[dict[str, Any], ...]
    parameters: dict[str, Any]
    warnings: tuple[str, ...]
    summed_macro: SummedMacro | None = None

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
                for mark, value in zip(forecast.baseline_marks, forecast.baseline, strict=True)
            },
            "A": forecast.law.coefficient,
            "alpha": forecast.law.exponent,
            "E": forecast.law.asymptote,
        }


def forecast_ladder(
    rungs: Sequence[RungCurve],
    target: TargetPlan,
    *,
    method: MethodName = "F2",
    asymptote: AsymptoteName = "relative",
    metrics: Sequence[str] | None = None,
    headline: str | None = None,
    min_rungs: int = MIN_RUNGS,
    live: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Forecast:
    """Forecast every metric of the target at every 5 % mark; deterministic.

    Args:
        rungs: finished or truncated rungs; repeated widths are seeds.
        method: `F2`, or `F1` mark by mark.
        asymptote: `public` gives the macro loss the prior of the public family (1.5 nats);
            every other metric, and every metric under `relative`, has it near 0.60 of its best
            final rung value.
        metrics: names to forecast; by default all losses that every rung has.
        headline: metric of record; by default the one whose name ends in `macro_loss`.
        min_rungs: distinct widths needed; 2 only to register a rung from smaller ones.
        live: per metric, (fraction, value) of evaluations of the target already made, for F2.

    Raises:
        UsageError: too few rungs, a run shorter than 20 steps, or runs of different recipes.
    """
    _check_runs(rungs, target, min_rungs, method)
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
        results[name], notes = _forecast_metric(rungs, target, name, rule, method)
        warnings += [f"{name}: {note}" for note in notes]
    summed = None
    if method == "F2":
        results = _with_curves(rungs, target, results, headline, asymptote, live or {})
        curves = {name: item.curve for name, item in results.items() if item.curve}
        summed = sum_domains(curves, headline, rungs)
        warnings += f2_warnings(curves[headline], summed)
    return Forecast(
        method=method,
        target=target,
        headline=headline,
        metrics=results,
        inputs=tuple(_input_record(rung, headline) for rung in rungs),
        parameters=_parameters(results[headline], rungs[0].family, summed),
        warnings=tuple(warnings),
        summed_macro=summed,
    )


def _with_curves(
    rungs: Sequence[RungCurve],
    target: TargetPlan,
    results: dict[str, MetricForecast],
    headline: str,
    asymptote: AsymptoteName,
    live: Mapping[str, Sequence[tuple[float, float]]],
) -> dict[str, MetricForecast]:
    """F2 in the place of F1 for every metric; the metric of record at full resolution."""
    learnt = learnt_prior(excluded_suites(OWN_SUITES.get(rungs[0].family, ())))
    upgraded = {}
    for name in sorted(results, key=lambda name: name != headline):
        reference = results[name]
        law: Any = learnt
        if asymptote == "public" and name == headline:
            law = PublicLaw()
        elif asymptote == "public":
            best = reference.rule.mean / RELATIVE_MEAN
            slope = upgraded[headline].curve.shapes
            law = PublicLaw(
                asymptote=(DOMAIN_RATIO[0] * best, DOMAIN_RATIO[1] * best),
                slope=(_law_slope(slope), PublicLaw().slope[1]),
            )
        curve = forecast_curves(
            rungs,
            target,
            name,
            law,
            live=live.get(name, ()),
            noise=MICRO_NOISE if name.endswith(MICRO_LOSS) else NOISE,
            coarse=name != headline,
        )
        upgraded[name] = dataclasses.replace(
            reference,
            marks=tuple(range(1, NUM_MARKS + 1)),
            quantiles=curve.quantiles,
            curve=curve,
            reference=reference.quantiles[-1],
        )
    return {name: upgraded[name] for name in results}


def _law_slope(shapes: Mapping[Any, Any]) -> float:
    """Posterior mean of the exponent over the shapes."""
    total = sum(shape.weight for shape in shapes.values())
    return sum(shape.weight * shape.moments["slope"][0] for shape in shapes.values()) / total


def _check_runs(
    rungs: Sequence[RungCurve], target: TargetPlan, min_rungs: int, method: MethodName
) -> None:
    """Refuse ladders that no forecast should be made from."""
    alike = [r for r in rungs if r.tokens_per_active_param == target.tokens_per_active_param]
    varied = method == "F2" and len({r.tokens_per_active_param for r in rungs}) > 1
    widths = sorted({rung.width for rung in (alike if varied else rungs)})
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
            allowed = varied and flag == RATIO_FLAG
            if not allowed and getattr(run, flag) != getattr(rungs[0], flag):
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
    rungs: Sequence[RungCurve],
    target: TargetPlan,
    metric: str,
    rule_name: AsymptoteName,
    method: MethodName,
) -> tuple[MetricForecast, list[str]]:
    """F0 and F1 of one metric at every mark that all widths have.

    Beside F2 they leave out rungs of another ratio, and those cut too early to be extended.
    """
    curves, left_out = _law_curves(rungs, target, metric, method)
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
        baseline_marks=baseline.marks,
        baseline=baseline.values,
        law=baseline.laws[-1],
        rule=rule,
        asymptote_mean=predictive.asymptote_mean,
        asymptote_sd=predictive.asymptote_sd,
        noise=tuple(noises),
    )
    return forecast, [*baseline.warnings, *_curve_warnings(curves, forecast), *left_out]


def _law_curves(
    rungs: Sequence[RungCurve], target: TargetPlan, metric: str, method: MethodName
) -> tuple[list[WidthCurve], list[str]]:
    """Curves by width that F0 and F1 can use, and warnings of those that they leave out."""
    ratio = target.tokens_per_active_param
    curves = by_width([r for r in rungs if r.tokens_per_active_param == ratio], metric)
    complete = [curve for curve in curves if curve.has(NUM_MARKS)]
    cut = [curve.width for curve in curves if not curve.has(NUM_MARKS)]
    if cut and (method == "F1" or len(complete) < 2):
        raise UsageError(
            f"the rung of width {cut[0]} has no final {metric} and lacks the marks from "
            "60 to 80 % that would extend it",
            remedy="finish the rung, or leave its width out",
        )
    notes = [f"width {width} was cut before 80 %: F0 and F1 leave it out" for width in cut]
    return complete, notes


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


def _parameters(
    headline: MetricForecast, family: str, summed: SummedMacro | None
) -> dict[str, Any]:
    """Parameters and priors of the method, for the metric of record."""
    common = {
        "baseline_tail_constant": PUBLIC_TAIL_CONSTANT,
        "axis": "training FLOPs without the output head",
        "levels": list(LEVEL_LABELS),
    }
    if headline.curve is not None and headline.reference is not None:
        return common | f2_parameters(
            headline.curve, headline.reference, summed, OWN_SUITES.get(family, ())
        )
    rule = headline.rule
    return common | {
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
        "random_seed": "none: exact integration",
    }
