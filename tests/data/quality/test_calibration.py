"""Calibration: goldens, the public table of cuts, monotone curves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from portolan.data.quality.calibration import (
    DEFAULT,
    EDGES,
    Curve,
    calibrate_scores,
    fit_curve,
    fit_curves,
)
from portolan.errors import UsageError

LEVELS = np.array([1, 2, 3, 4, 5])
PUBLIC_CUTS = {
    "agentic": (0.282, 0.477, 0.561, 0.750),
    "code": (0.282, 0.564, 0.640, 0.747),
    "default": (0.282, 0.460, 0.610, 0.750),
    "math": (0.282, 0.460, 0.704, 0.788),
    "multilingual": (0.282, 0.498, 0.615, 0.699),
    "prose": (0.282, 0.430, 0.608, 0.780),
    "structured": (0.231, 0.417, 0.597, 0.753),
}
CURVES = {kind: Curve(cuts, 0.0, 1.0, 5) for kind, cuts in PUBLIC_CUTS.items()}


def floats(*values):
    return np.array(values, np.float32)


def test_even_medians():
    raw = floats(0.1, 0.3, 0.5, 0.7, 0.9, 0.05, 0.15, 0.85, 0.95)
    curve = fit_curve(raw, np.array([1, 2, 3, 4, 5, 1, 1, 5, 5]))
    np.testing.assert_allclose(curve.cuts, (0.2, 0.4, 0.6, 0.8), atol=1e-6)
    np.testing.assert_allclose(curve.score(floats(0.3, 0.05, 0.95)), (0.3, 0, 1), atol=5e-6)
    assert (curve.lowest, curve.highest, curve.labels) == (float(raw.min()), float(raw.max()), 9)


def test_equal_cuts_step_to_the_upper_value():
    curve = fit_curve(floats(0.5, 0.6, 0.1, 0.6, 0.9), LEVELS)
    np.testing.assert_allclose(curve.cuts, (0.55, 0.55, 0.55, 0.75), atol=1e-6)
    assert curve.bucket(floats(0.54, 0.55)).tolist() == [0, 3]
    below, at = curve.score(floats(0.54, 0.55))
    assert below < 0.2 and at == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("kind", "raw", "bucket"),
    [
        ("prose", 0.282, 1),
        ("prose", 0.356, 1),
        ("prose", 0.608, 3),
        ("prose", 0.607, 2),
        ("code", 0.640, 3),
        ("code", 0.5639, 1),
        ("structured", 0.24, 1),
        *((kind, 0.24, 0) for kind in PUBLIC_CUTS if kind != "structured"),
    ],
)
def test_public_cuts(kind, raw, bucket):
    scores, buckets = calibrate_scores(CURVES, floats(raw), [kind])
    assert buckets.tolist() == [bucket]
    assert sum(edge <= scores[0] for edge in np.float32(EDGES)) == bucket
    if raw == 0.356:
        assert scores[0] == pytest.approx(0.3, abs=1e-6)


def test_unknown_types_use_the_default_curve():
    _, buckets = calibrate_scores(CURVES, floats(0.24, 0.24, 0.24), ["other", None, "structured"])
    assert buckets.tolist() == [0, 0, 1]


@given(
    st.lists(st.floats(-2, 3, width=32), min_size=5, max_size=30),
    st.lists(st.floats(-3, 4, width=32), min_size=2, max_size=30),
)
def test_scores_keep_the_order_and_agree_with_the_buckets(labels, values):
    raw = np.array(labels, np.float32)
    curve = fit_curve(raw, np.resize(LEVELS, len(raw)))
    assert (np.diff(curve.cuts) >= 0).all()
    ordered = np.sort(np.array([*values, *curve.cuts], np.float32))
    scores, buckets = curve.score(ordered), curve.bucket(ordered)
    assert (np.diff(scores) >= 0).all() and scores.min() >= 0 and scores.max() <= 1
    assert (
        buckets == [sum(cut <= value for cut in np.float32(curve.cuts)) for value in ordered]
    ).all()
    assert (buckets == [sum(edge <= score for edge in np.float32(EDGES)) for score in scores]).all()


def test_a_missing_level_is_refused_or_falls_back():
    raw = floats(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    with pytest.raises(UsageError, match="no label has level 4"):
        fit_curve(raw[:5], np.array([1, 2, 3, 5, 5]))
    curves = fit_curves(raw, np.array([1, 2, 3, 4, 5, 5]), ["prose"] * 5 + ["code"])
    assert set(curves) == {DEFAULT, "prose"}
    with pytest.raises(UsageError, match="no label has level 1"):
        fit_curves(raw, np.array([2, 2, 3, 4, 5, 5]), ["prose"] * 6)
