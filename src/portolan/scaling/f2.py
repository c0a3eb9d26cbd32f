"""F2: forecast of every mark of a target from the rungs' whole curves, with intervals.

Cut rungs enter with the marks they have, repeated rungs as runs of their own, and evaluations of
the target itself, where there are any, as further rows of the same model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from portolan.scaling.curve_fit import CurvePosterior, Node, fit_curves, weighted_quantiles
from portolan.scaling.curve_model import SHAPES, Array, CurveData, LawPrior, Shape
from portolan.scaling.curves import RungCurve, TargetPlan, pooled_seed_sd, snap
from portolan.scaling.drifting_law import (
    ASYMPTOTE_OFFSETS,
    ASYMPTOTE_SD,
    OUTCOME_NOISE,
    SLOPE_PRIOR,
    SPREAD,
    DriftPrior,
    Ladder,
    distances,
    drift_covariance,
    normalised,
)
from portolan.scaling.interval import LEVELS, NOISE, PUBLIC_RULE
from portolan.scaling.ladder import NUM_MARKS

FRACTIONS = np.arange(1, NUM_MARKS + 1) / NUM_MARKS
NUM_ASYMPTOTES = 15
COARSE_ASYMPTOTES = 9
ASYMPTOTE_REACH = 3.0
"""Half-width of the asymptote grid in prior standard deviations."""
ASYMPTOTE_MARGIN = 0.05
"""Nats kept between the public asymptote and the smallest loss."""
MAX_RATIO = 0.95
PUBLIC_SLOPE = (0.09, 0.015)
PUBLIC_RUNG_SD = 0.003
"""Of rho, in ln(loss - E)."""
SHAPE_DISCREPANCY = 0.02
SHAPE_DISCREPANCY_RELATIVE = 0.008
"""Of the target's curve at its start, falling to 0 at its end: nats, or over the best rung loss.

Per decade beyond the largest rung, and at least that of one decade.
"""
TRANSIENT_STEPS = 1500.0
TRANSIENT_SHARE = 0.1
"""The transient is centred at 1,500 steps, or at this share of the shortest run if that is less."""
NOISE_PRIOR_COUNT = 10
NOISE_FROM_MARK = 6
RATIO_SD = 0.1
STEPS_SD = 0.05
"""Per e-fold of tokens per parameter, and of steps at equal tokens, in ln(loss - E)."""


@dataclass(frozen=True)
class PublicLaw:
    """Priors of the public family: asymptote in nats, exponent, discrepancy per decade."""

    asymptote: tuple[float, float] = (PUBLIC_RULE.mean, PUBLIC_RULE.sd)
    slope: tuple[float, float] = PUBLIC_SLOPE
    rung_sd: float = PUBLIC_RUNG_SD
    kappa: float = PUBLIC_RULE.kappa


@dataclass(frozen=True)
class ShapeSummary:
    """One of the rival shapes by itself: posterior share and median trajectory [mark]."""

    weight: float
    medians: tuple[float, ...]
    moments: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Completion:
    """Where a rung ends, or would have ended: quantiles of its noise-free loss at 100 %."""

    run_id: str
    last_mark: int
    quantiles: tuple[float, ...]


@dataclass(frozen=True)
class CurveForecast:
    """Quantiles [mark, level] of one evaluation of the target at marks 1..20.

    `noise` is the sd of an evaluation, `seed_sd` that between repeated rungs, None without any.
    """

    metric: str
    quantiles: Array
    shapes: dict[Shape, ShapeSummary]
    completions: tuple[Completion, ...]
    noise: float
    seed_sd: float | None
    asymptote: tuple[float, float]
    progress: float
    law: PublicLaw | DriftPrior

    def quantile(self, level: float, mark: int = NUM_MARKS) -> float:
        """One quantile at one mark."""
        return float(self.quantiles[mark - 1, LEVELS.index(level)])


def forecast_curves(
    rungs: Sequence[RungCurve],
    target: TargetPlan,
    metric: str,
    law: PublicLaw | DriftPrior,
    *,
    live: Sequence[tuple[float, float]] = (),
    shapes: Sequence[Shape] = SHAPES,
    noise: float = NOISE,
    coarse: bool = False,
) -> CurveForecast:
    """Forecast one metric at every 5 % mark; deterministic.

    Args:
        law: `PublicLaw` for the macro loss of the public family, else what other suites teach.
        live: (fraction, value) of evaluations of the target; those below 5 % are not used.
        noise: prior sd of one evaluation, nats.
        coarse: fewer asymptotes and one setting; for the many metrics beside that of record.
    """
    rungs = sorted(rungs, key=lambda rung: (rung.flops, rung.steps, rung.run_id))
    curves = [snap(rung.points[metric]) for rung in rungs]
    seen = [(f, value) for f, value in live if f >= FRACTIONS[0] - 1e-9]
    data = _collect(rungs, curves, target, seen)
    finals = _common_level(curves)
    sd = evaluation_noise(curves, noise)
    seed_sd = pooled_seed_sd(rungs, metric, NUM_MARKS)
    if isinstance(law, PublicLaw):
        nodes = _public_nodes(rungs, target, law, finals, coarse)
        floor_scale = SHAPE_DISCREPANCY
    else:
        nodes = _relative_nodes(rungs, target, law, finals, seed_sd or 0.0, coarse)
        floor_scale = SHAPE_DISCREPANCY_RELATIVE * float(finals.min())
    shortest = float(min(rung.steps for rung in rungs))
    posterior = fit_curves(
        data, nodes, shapes, sd, min(TRANSIENT_STEPS, TRANSIENT_SHARE * shortest)
    )
    progress = max((fraction for fraction, _ in seen), default=0.0)
    return CurveForecast(
        metric=metric,
        quantiles=_target_quantiles(posterior, len(rungs), sd, progress, floor_scale),
        shapes=_summaries(posterior, len(rungs)),
        completions=_completions(posterior, rungs, curves),
        noise=sd,
        seed_sd=seed_sd,
        asymptote=_asymptote(posterior),
        progress=progress,
        law=law,
    )


def evaluation_noise(curves: Sequence[dict[int, float]], prior: float) -> float:
    """Sd of one evaluation: second differences from 30 % on (mean of squares over 6), shrunk.

    The prior counts like ten second differences.
    """
    squares = [
        (curve[k - 1] - 2 * curve[k] + curve[k + 1]) ** 2 / 6
        for curve in curves
        for k in range(NOISE_FROM_MARK + 1, NUM_MARKS)
        if {k - 1, k, k + 1} <= set(curve)
    ]
    total = NOISE_PRIOR_COUNT * prior**2 + sum(squares)
    return math.sqrt(total / (NOISE_PRIOR_COUNT + len(squares)))


def _collect(
    rungs: Sequence[RungCurve],
    curves: Sequence[dict[int, float]],
    target: TargetPlan,
    seen: Sequence[tuple[float, float]],
) -> CurveData:
    """Rows of all rungs and of the target, whose run comes last."""
    rows = [
        (run, mark / NUM_MARKS, curve[mark])
        for run, curve in enumerate(curves)
        for mark in sorted(curve)
    ]
    rows += [(len(rungs), fraction, value) for fraction, value in sorted(seen)]
    run, fraction, loss = zip(*rows, strict=True)
    return CurveData(
        run=np.array(run),
        fraction=np.array(fraction, dtype=float),
        loss=np.array(loss, dtype=float),
        steps=np.array([rung.steps for rung in rungs] + [target.steps], dtype=float),
        log_flops=np.log(np.array([rung.flops for rung in rungs] + [target.flops], dtype=float)),
    )


def _common_level(curves: Sequence[dict[int, float]]) -> Array:
    """A rough final loss of every rung; a cut one is scaled by the ratio of finished ones."""
    finished = [curve for curve in curves if NUM_MARKS in curve] or list(curves)
    levels = []
    for curve in curves:
        last = max(curve)
        ratios = [c[max(c)] / c[last] for c in finished if last in c]
        levels.append(curve[last] * (float(np.mean(ratios)) if ratios else 1.0))
    return np.array(levels)


def _terms(rungs: Sequence[RungCurve], target: TargetPlan) -> Array:
    """Columns [run, term] for ratio and steps, each only if the ladder varies it by itself."""
    runs = [*rungs, target]
    ratio = np.log([run.tokens_per_active_param / target.tokens_per_active_param for run in runs])
    columns = [RATIO_SD * ratio] if np.ptp(ratio[:-1]) > 0 else []
    steps = np.log([run.steps / target.steps for run in runs])
    plans = {(rung.width, rung.tokens_per_active_param) for rung in rungs}
    budgets = {(rung.width, rung.tokens_per_active_param, rung.steps) for rung in rungs}
    if len(budgets) > len(plans):
        columns.append(STEPS_SD * steps)
    return np.stack(columns, axis=1) if columns else np.zeros((len(runs), 0))


def _public_nodes(
    rungs: Sequence[RungCurve], target: TargetPlan, law: PublicLaw, finals: Array, coarse: bool
) -> list[Node]:
    mean, sd = law.asymptote
    low = max(0.01, mean - ASYMPTOTE_REACH * sd)
    high = min(float(finals.min()) - ASYMPTOTE_MARGIN, mean + ASYMPTOTE_REACH * sd)
    largest = max(rung.flops for rung in rungs)
    decades = max(0.0, math.log10(target.flops / largest))
    distance = np.log([target.flops / flops for flops in (*(r.flops for r in rungs), target.flops)])
    nodes = []
    for asymptote in np.linspace(low, high, COARSE_ASYMPTOTES if coarse else NUM_ASYMPTOTES):
        prior = LawPrior(
            asymptote=float(asymptote),
            distance=distance,
            slope=law.slope,
            level=_level_guess(distance, finals, asymptote, law.slope[0]),
            root=law.rung_sd * np.eye(len(rungs) + 1),
            level_discrepancy=law.kappa * decades,
            shape_discrepancy=SHAPE_DISCREPANCY * max(1.0, decades),
            extra=_terms(rungs, target),
        )
        nodes.append(Node(prior, -0.5 * ((asymptote - mean) / sd) ** 2, 0))
    return nodes


def _relative_nodes(
    rungs: Sequence[RungCurve],
    target: TargetPlan,
    law: DriftPrior,
    finals: Array,
    seed_sd: float,
    coarse: bool,
) -> list[Node]:
    """Nodes of the drifting law, for every asymptote and every size of noise and drift."""
    flops = np.array([rung.flops for rung in rungs], dtype=float)
    distance = np.append(distances(Ladder(flops, finals, float(target.flops))), 0.0)
    spread = math.hypot(ASYMPTOTE_SD, ASYMPTOTE_OFFSETS[-1])
    low = max(0.05, law.asymptote_ratio - ASYMPTOTE_REACH * spread)
    high = min(MAX_RATIO, law.asymptote_ratio + ASYMPTOTE_REACH * spread)
    width = np.array([rung.width for rung in rungs])
    reach = max(1.0, math.log10(target.flops / float(flops.max())))
    nodes = []
    for setting, factor in enumerate((1.0,) if coarse else SPREAD):
        shared = (factor * law.rung_noise) ** 2 * (width[:, None] == width)
        drift = (factor * law.drift) ** 2 * drift_covariance(distance)
        for ratio in np.linspace(low, high, COARSE_ASYMPTOTES if coarse else NUM_ASYMPTOTES):
            asymptote = float(ratio * finals.min())
            level = _level_guess(distance, finals, asymptote, SLOPE_PRIOR[0])
            losses = np.append(finals, asymptote + math.exp(level))
            jacobian = losses / (losses - asymptote)
            own = np.append((seed_sd / finals) ** 2 + OUTCOME_NOISE**2, OUTCOME_NOISE**2)
            own[-1] += float(np.mean((seed_sd / finals) ** 2))
            covariance = drift + np.diag(own)
            covariance[:-1, :-1] += shared
            offsets = ratio - law.asymptote_ratio - np.array(ASYMPTOTE_OFFSETS)
            prior = LawPrior(
                asymptote=asymptote,
                distance=distance,
                slope=SLOPE_PRIOR,
                level=level,
                root=np.asarray(
                    np.linalg.cholesky(covariance * np.outer(jacobian, jacobian)), float
                ),
                level_discrepancy=0.0,
                shape_discrepancy=SHAPE_DISCREPANCY_RELATIVE * reach * float(finals.min()),
                extra=_terms(rungs, target),
            )
            log_weight = np.log(np.exp(-0.5 * (offsets / ASYMPTOTE_SD) ** 2).sum())
            nodes.append(Node(prior, float(log_weight), setting))
    return nodes


def _level_guess(distance: Array, finals: Array, asymptote: float, slope: float) -> float:
    """ln(Lstar - E) of the target by the line through the rungs, or the prior slope from one."""
    excess = np.log(finals - asymptote)
    if np.ptp(distance[:-1]) == 0:
        return float(excess.mean() - slope * distance[0])
    return float(np.polyfit(distance[:-1], excess, 1)[1])


def _target_quantiles(
    posterior: CurvePosterior, run: int, noise: float, progress: float, floor_scale: float
) -> Array:
    """Quantiles of one evaluation, medians made non-increasing from 10 % on, floor applied."""
    losses, weights = posterior.trajectories(run, FRACTIONS)
    # The noise of the evaluation: one more dimension, paired with the draws by a golden-ratio
    # sequence, so that it is the same in every process.
    share = np.mod((np.arange(len(losses)) + 0.5) * (math.sqrt(5) - 1) / 2, 1.0)
    noisy = losses + noise * ndtri(share)[:, None]
    quantiles = weighted_quantiles(noisy, weights, LEVELS)
    middle = LEVELS.index(0.5)
    if progress > 0:
        mean = weights @ noisy
        normal_width = ndtri(LEVELS[-3]) - ndtri(LEVELS[2])
        sd = np.minimum(
            np.sqrt(weights @ (noisy - mean) ** 2),
            (quantiles[:, -3] - quantiles[:, 2]) / normal_width,
        )
        ahead = np.maximum(FRACTIONS - progress, 0.0)
        factor = np.maximum(1.0, np.hypot(noise, floor_scale * ahead) / sd)[:, None]
        median = quantiles[:, middle : middle + 1]
        quantiles = median + (quantiles - median) * factor
    return _monotone(quantiles, middle)


def _monotone(quantiles: Array, middle: int) -> Array:
    """Rows shifted so that the medians do not rise from the 10 % mark on."""
    medians = quantiles[:, middle].copy()
    medians[1:] = np.minimum.accumulate(medians[1:])
    return quantiles + (medians - quantiles[:, middle])[:, None]


def _summaries(posterior: CurvePosterior, run: int) -> dict[Shape, ShapeSummary]:
    result = {}
    for shape, weight in posterior.shape_weights.items():
        if any(fit.model.shape == shape for fit in posterior.fits):
            losses, weights = posterior.trajectories(run, FRACTIONS, shape)
            medians = weighted_quantiles(losses, weights, (0.5,))[:, 0]
            result[shape] = ShapeSummary(
                weight, tuple(float(value) for value in medians), posterior.moments(shape)
            )
    return result


def _completions(
    posterior: CurvePosterior, rungs: Sequence[RungCurve], curves: Sequence[dict[int, float]]
) -> tuple[Completion, ...]:
    result = []
    for run, (rung, curve) in enumerate(zip(rungs, curves, strict=True)):
        losses, weights = posterior.trajectories(run, FRACTIONS[-1:])
        row = weighted_quantiles(losses, weights, LEVELS)[0]
        result.append(Completion(rung.run_id, max(curve), tuple(float(value) for value in row)))
    return tuple(result)


def _asymptote(posterior: CurvePosterior) -> tuple[float, float]:
    weights = normalised(np.log([fit.weight for fit in posterior.fits]))
    values = np.array([fit.node.law.asymptote for fit in posterior.fits])
    mean = float(weights @ values)
    return mean, math.sqrt(float(weights @ (values - mean) ** 2))
