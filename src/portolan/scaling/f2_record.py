"""What a registration says of F2: parameters, priors, rival shapes, completions, warnings."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from portolan.scaling.curve_fit import DRAW_SEED, LOG2_DRAWS
from portolan.scaling.curve_model import CORRELATION, SHAPES
from portolan.scaling.curves import mark_label
from portolan.scaling.domains import SummedMacro
from portolan.scaling.f2 import (
    SHAPE_DISCREPANCY,
    SHAPE_DISCREPANCY_RELATIVE,
    CurveForecast,
    PublicLaw,
)
from portolan.scaling.interval import LEVEL_LABELS, LEVELS
from portolan.scaling.ladder import NUM_MARKS

DIGITS = 6
WIDE = 0.1
"""Width of the 95 % interval over the median, from which a forecast is called wide."""


def f2_parameters(
    curve: CurveForecast,
    reference: np.ndarray,
    summed: SummedMacro | None,
    not_learnt_from: Sequence[str],
) -> dict[str, Any]:
    """Parameters of the metric of record; `reference` are the final quantiles of F1."""
    law = curve.law
    record: dict[str, Any] = {
        "law": "public asymptote" if isinstance(law, PublicLaw) else "drifting law, learnt",
        "law_prior": {
            name: list(value) if isinstance(value, tuple) else round(value, DIGITS)
            for name, value in vars(law).items()
        },
        "not_learnt_from": list(not_learnt_from),
        "asymptote_posterior_mean": round(curve.asymptote[0], DIGITS),
        "asymptote_posterior_sd": round(curve.asymptote[1], DIGITS),
        "evaluation_noise_nats": round(curve.noise, DIGITS),
        "final_noise_nats": round(max(curve.noise, curve.seed_sd or 0.0), DIGITS),
        "evaluation_correlation": CORRELATION,
        "seed_sd_nats": "not measured" if curve.seed_sd is None else round(curve.seed_sd, DIGITS),
        "shape_discrepancy": SHAPE_DISCREPANCY,
        "shape_discrepancy_relative": SHAPE_DISCREPANCY_RELATIVE,
        "random_seed": DRAW_SEED,
        "draws_per_node": 2**LOG2_DRAWS,
        "shapes": _shapes(curve),
        "completions": {
            item.run_id: {
                "last_mark": mark_label(item.last_mark),
                "median": round(item.quantiles[LEVELS.index(0.5)], DIGITS),
                "low_95": round(item.quantiles[LEVELS.index(0.025)], DIGITS),
                "high_95": round(item.quantiles[LEVELS.index(0.975)], DIGITS),
            }
            for item in curve.completions
            if item.last_mark < NUM_MARKS
        },
        "F1_final": {
            label: round(float(value), DIGITS)
            for label, value in zip(LEVEL_LABELS, reference, strict=True)
        },
    }
    if curve.progress > 0:
        record["conditioned_up_to"] = mark_label(round(curve.progress * NUM_MARKS))
    if summed is not None:
        record["summed_macro"] = {
            "median": round(summed.median, DIGITS),
            "sd": round(summed.sd, DIGITS),
            "num_domains": len(summed.domains),
            "disagrees": summed.disagrees,
        }
    return record


def _shapes(curve: CurveForecast) -> dict[str, Any]:
    """Prior and posterior share of each rival shape, and what it says alone."""
    record = {}
    for name in SHAPES:
        shape = curve.shapes.get(name)
        record[name] = {"prior_weight": round(1 / len(SHAPES), DIGITS)}
        if shape is None:
            record[name] |= {"weight": 0}
            continue
        record[name] |= {
            "weight": round(shape.weight, DIGITS),
            "medians": {
                mark_label(mark): round(value, DIGITS)
                for mark, value in enumerate(shape.medians, start=1)
            },
            **{
                f"{key}_{kind}": round(value, DIGITS)
                for key, pair in shape.moments.items()
                for kind, value in zip(("mean", "sd"), pair, strict=True)
            },
        }
    return record


def f2_warnings(curve: CurveForecast, summed: SummedMacro | None) -> list[str]:
    """A wide interval, shapes that differ, domains that do not add up to the macro loss."""
    warnings = []
    low, median, high = (curve.quantile(level) for level in (0.025, 0.5, 0.975))
    if high - low > WIDE * median:
        warnings.append(
            f"the 95 % interval is {100 * (high - low) / median:.0f} % of the median wide"
        )
    medians = [shape.medians for shape in curve.shapes.values()]
    if len(medians) > 1:
        gap = float(np.abs(np.diff(np.array(medians), axis=0)).max())
        if gap > curve.noise:
            warnings.append(f"the two shapes differ by up to {gap:.4f} nats along the target")
    if summed is not None and summed.disagrees:
        warnings.append(
            f"the mean of the domains' medians, {summed.median:.4f}, is more than one standard "
            f"deviation from the macro median {median:.4f}"
        )
    return warnings
