"""Alarm quality: incident traces raise their rules and nothing else, clean ones raise nothing."""

import pytest
from tests.health.traces import EXPERTS, INCIDENTS, Story, clean, incident

from portolan.health.monitor import Monitor
from portolan.health.rules import Settings

SETTINGS = Settings(
    num_experts=EXPERTS,
    registered={
        "gradient_norm_max": 2.0,
        "router_bias_max": 400.0,
        "tokens_per_second_min": 2.0e6,
    },
)


def fired(signals):
    return {alarm.rule.id for alarm in Monitor(SETTINGS).run(signals)}


@pytest.mark.parametrize("name", INCIDENTS)
def test_incident(name):
    title, expected, _ = INCIDENTS[name]
    found = fired(incident(name))
    assert expected <= found, f"{name} {title}: missed {expected - found}"
    assert found <= expected | {"H15"}, f"{name} {title}: false {found - expected}"


def test_clean_runs_are_silent():
    wrong = {seed: found for seed in range(30) if (found := fired(clean(seed)))}
    assert not wrong, wrong


def test_a_clean_day_is_silent():
    assert fired(Story(7).start().up().hours(24).finish().signals) == set()
