"""Gates against the public cases and the formulas behind them."""

import math

import numpy as np
import pytest

from portolan.errors import UsageError
from portolan.scaling.ablation import effective_speedup
from portolan.scaling.baseline import PowerLaw
from portolan.scaling.gates import (
    data_study,
    exact_rate_bound,
    hang_safety,
    paired_gate,
    rate_bound,
    steps_needed,
    survival_by_luck,
)


def series(mean, largest, count=200):
    """Differences with this mean whose largest deviation from 0 is `largest`."""
    values = np.full(count, mean)
    values[0], values[1] = largest, 2 * mean - largest
    return values


# Public change: mean, largest, predicted, drop fraction, MFU (new, control).
PUBLIC = {
    "launch mode": (-3.8e-5, 3.8e-4, 0.0, None, (23.62, 23.03)),
    "main": (3.06e-4, 8.2e-4, 0.0, None, None),
    "attention kernel": (3.6e-4, 8.8e-4, 0.0, None, (26.75, 24.10)),
    "transport": (-0.0065, -0.0065, -0.006, 7.8e-5, (23.11, 21.46)),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_changes_are_accepted(name):
    mean, largest, predicted, drops, mfu = PUBLIC[name]
    gate = paired_gate(
        series(mean, largest), predicted=predicted, drop_fraction=drops, utilisation=mfu
    )
    assert gate.accepted, gate.reasons
    assert gate.mean == pytest.approx(mean) and gate.num_pairs == 200
    assert "evaluation" in gate.not_exercised


@pytest.mark.parametrize(
    ("values", "more"),
    [
        (series(0.003, 0.0031), {"predicted": 0.0}),
        (np.where(np.arange(200) == 50, 0.004, 0.0), {}),
        (np.zeros(200), {"drop_fraction": 2e-3}),
        (np.zeros(200), {"utilisation": (20.0, 21.0)}),
        (np.zeros(200), {"faults": ["hang at step 71"]}),
        (np.zeros(199), {}),
        (np.where(np.arange(200) == 3, np.nan, 0.0), {}),
    ],
)
def test_others_are_rolled_back(values, more):
    gate = paired_gate(values, **more)
    assert not gate.accepted and gate.reasons


def test_standard_error_counts_neighbouring_steps_once():
    """Ten equal neighbours are one observation."""
    blocks = np.random.default_rng(0).normal(0, 1e-4, 20)
    gate = paired_gate(np.repeat(blocks, 10))
    assert gate.standard_error == pytest.approx(blocks.std(ddof=1) / math.sqrt(20))
    with pytest.raises(UsageError):
        paired_gate([0.0] * 19)


def test_rule_of_three_and_hang_safety():
    assert rate_bound(200) == pytest.approx(0.015)
    assert exact_rate_bound(200) == pytest.approx(0.01487, abs=5e-6)
    assert [round(survival_by_luck(n, 1500), 3) for n in (200, 1590, 2052)] == [
        0.875, 0.346, 0.255,
    ]  # fmt: skip
    assert steps_needed(1500) == 4500
    assert hang_safety(4500, 1500) == "accepted"
    assert hang_safety(4499, 1500) == "accepted_stability_unproved"
    assert rate_bound(5000) < 1 / 1500


def test_data_study():
    control = {0: 2.0, 1: 2.1, 2: 2.2, 3: 2.0}
    assert data_study({s: x + 0.05 + 0.01 * s for s, x in control.items()}, control) == "harm"
    assert data_study({s: x - 0.05 - 0.01 * s for s, x in control.items()}, control) == "gain"
    assert data_study({s: x + 0.05 * (-1) ** s for s, x in control.items()}, control) == "no_harm"
    with pytest.raises(UsageError):
        data_study({0: 2.0, 1: 2.0}, control)


def test_effective_speedup_golden():
    law = PowerLaw(88.32, 0.0941, 1.6, 0.0)
    found = effective_speedup(law, baseline=(3.4339, 3.82e17, 1.0), variant=(3.3988, 3.82e17, 1.0))
    assert found == pytest.approx(1.2280, abs=5e-5)
