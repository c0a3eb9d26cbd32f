"""What is shipped from other suites, and that a suite never teaches its own forecast."""

import json

import numpy as np
import pytest

from portolan.errors import UsageError
from portolan.scaling import learnt
from portolan.scaling.drifting_law import Ladder

SUITES = learnt.learnt_table()["suites"]


def test_table_is_small_and_complete():
    assert len(SUITES) >= 10
    assert len(json.dumps(learnt.learnt_table())) < 20_000
    for entry in SUITES.values():
        assert np.shape(entry["log_scores"]) == (len(learnt.NOISES), len(learnt.DRIFTS))
        assert 0.2 < entry["asymptote_ratio"] < 0.95


def test_names_that_exclude_a_suite():
    assert learnt.excluded_suites(["olmo_ladder"]) == {"olmo_ladder"}
    assert learnt.excluded_suites(["olmo/13xC"]) == {"olmo_ladder"}
    marin = learnt.excluded_suites(["marin"])
    assert {"marin_optimizers", "marin_moe_v16"} <= marin
    assert "olmo_ladder" not in marin
    assert learnt.excluded_suites(["", "never seen"]) == frozenset()
    with pytest.raises(UsageError, match="never seen"):
        learnt.check_names(["never seen"])


def test_an_excluded_suite_changes_nothing():
    """The prior without a suite is the combination of the other entries, whatever it says."""
    for suite in SUITES:
        others = [entry for name, entry in SUITES.items() if name != suite]
        assert learnt.learnt_prior(frozenset([suite])) == learnt.combine(others)
    assert learnt.learnt_prior() != learnt.learnt_prior(frozenset(["olmo_ladder"]))
    assert learnt.combine([]) == learnt.START


def test_learning_finds_what_the_ladders_show():
    """Ladders drawn with E = 0.7 of the best rung, noise 0.2 %: the entry says so."""
    rng = np.random.default_rng(1)
    x = np.array([1e18, 1e19, 1e20, 1e21])
    ladders = []
    for _ in range(6):
        losses = 2.1 + 0.9 * (x / 1e20) ** -0.1
        losses *= np.exp(0.002 * rng.standard_normal(4))
        ladders.append((Ladder(x[:3], losses[:3], 1e21), float(losses[3])))
    entry = learnt.learn_suite(ladders, 0.7)
    assert entry["asymptote_ratio"] == pytest.approx(0.7, abs=0.06)
    scores = np.array(entry["log_scores"])
    assert np.unravel_index(scores.argmax(), scores.shape)[0] == 0
    assert entry["decline"] == pytest.approx(np.log(3.0 / 2.815) / np.log(10), abs=3e-3)


def test_shipped_table_is_what_the_script_writes(shared_data):
    """Two suites again from the public file."""
    tasks = json.loads((shared_data / "scaling" / "tasks.json").read_text())
    for suite in ("nanochat", "marin_optimizers"):
        ladders = []
        for task in tasks:
            if task["suite"] == suite:
                ladder = Ladder(
                    np.array(task["rung_x"]), np.array(task["rung_loss"]), task["target_x"]
                )
                ladders.append((ladder, task["true"]))
        entry = learnt.learn_suite(ladders, learnt.START.asymptote_ratio)
        for name in ("asymptote_ratio", "decline", "num_ladders"):
            assert entry[name] == pytest.approx(SUITES[suite][name], abs=2e-4)
        np.testing.assert_allclose(entry["log_scores"], SUITES[suite]["log_scores"], atol=2e-3)
