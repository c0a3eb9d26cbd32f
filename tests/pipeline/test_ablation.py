"""The ablation suite: its arms, budgets and sweeps, and one small suite killed and resumed."""

import json
import math
import re
import signal
from pathlib import Path

import pytest
from tests.pipeline.tools import Running, run_command

from portolan.accounting import forward_flops_per_token
from portolan.errors import UsageError
from portolan.pipeline.ablation_arms import ARMS, Arm
from portolan.pipeline.ablation_suite import (
    BASELINE_ARM,
    DIVERGED,
    Suite,
    arm_recipe,
    changed,
    final_loss,
    make_suite,
    next_rate,
)
from portolan.pipeline.corpus import Corpus
from portolan.project import Project
from portolan.recipe import find_recipe, load_recipe
from portolan.record.journal import Journal

HEADLINE = "eval_dropless/heldout/macro_loss"
ARM = {arm.name: arm for arm in ARMS}
SUITE = ("ablate", "--widths", "48", "--seeds", "2", "--arms", "tuned,no-decay")


@pytest.fixture
def suite(tmp_path) -> Suite:
    """All arms of the pocket recipe at width 64 over a corpus of which only digests exist."""
    project = Project(tmp_path, load_recipe(find_recipe("pocket")))
    digests = {"digest": "0" * 64}
    corpus = Corpus(project, {"store": digests, "tokenizer": digests, "heldout": digests})
    return make_suite(project, corpus, arms=(), widths=(64,), num_seeds=3)


def finish(suite: Suite, arm: Arm, rate: float, loss: float) -> None:
    """Make a run of the first seed look finished, or diverged when the loss is infinite."""
    run = suite.trial(arm, 64, 0, "tokens", rate).run
    folder = suite.project.runs / run.run_id
    folder.mkdir(parents=True)
    name, content = "finished.json", {"evaluation": {HEADLINE: loss}}
    if loss == math.inf:
        name, content = DIVERGED, {"reason": "the loss is not finite"}
    (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_every_arm_changes_the_recipe_and_nothing_that_it_does_not_name(arm, suite):
    recipe = suite.project.recipe
    changed_recipe = arm_recipe(recipe, arm)
    before, after = recipe.canonical(), changed_recipe.canonical()
    named = {key.split(".")[0] for key in arm.settings}
    assert {section for section in before if before[section] != after[section]} == named
    run = suite.trial(arm, 64, 0, "tokens").run
    assert run.rung.steps == suite.baseline_rung(64).steps
    assert run.rung.hyperball == pytest.approx(
        suite.baseline_rung(64).hyperball * arm.settings.get("optimizer.rate_multiplier", 1.0)
    )
    assert run.rung.adam == suite.baseline_rung(64).adam * run.rung.rate_multiplier


def test_reported_effects_are_named_with_a_source():
    assert len({arm.name for arm in ARMS}) == len(ARMS)
    for arm in ARMS:
        if re.search(r"\d", arm.reported):
            assert arm.scale and re.match(r"#\d|arXiv|fast_track", arm.source), arm.name


def test_equal_flops_follow_from_the_flops_of_a_token(suite):
    baseline = suite.baseline_rung(64)
    ours = forward_flops_per_token(baseline.config, "full")
    run = suite.trial(ARM["one-shared"], 64, 1, "flops").run
    theirs = forward_flops_per_token(run.rung.config, "full")
    assert theirs < ours
    assert run.rung.steps == round(baseline.steps * ours / theirs) > baseline.steps
    budgets = (baseline.steps * ours, run.rung.steps * theirs)
    assert budgets[0] == pytest.approx(budgets[1], rel=1e-3)
    assert (run.order.steps, run.seed) == (baseline.steps, 1)


def test_arm_of_equal_cost_has_one_run_for_both_budgets(suite):
    first, second = (suite.trial(ARM["no-z-loss"], 64, 0, budget) for budget in ("tokens", "flops"))
    assert first.run == second.run


def test_arm_that_rounds_to_another_one_is_not_trained_twice(suite):
    twin = suite.twin(ARM["no-latent-equal-flops"], 32)
    assert twin.name == "no-latent"
    assert suite.twin(ARM["no-latent-equal-flops"], 96).name == "no-latent-equal-flops"
    runs = [suite.trial(arm, 32, 0, "tokens").run for arm in (ARM["no-latent-equal-flops"], twin)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("losses", "following"),
    [
        ({0.5: 3.0, 1.0: 2.9, 2.0: 3.1}, None),
        ({0.5: 3.0, 1.0: 3.1, 2.0: 3.2}, 0.25),
        ({0.5: 3.3, 1.0: 3.1, 2.0: 3.0}, 4.0),
        ({0.5: 3.0, 1.0: 3.1, 2.0: math.inf}, 0.25),
        ({0.125: 3.0, 0.25: 3.1}, None),
        ({0.5: 3.0, 1.0: None, 2.0: 3.2}, None),
        ({0.5: math.inf, 1.0: math.inf}, None),
    ],
)
def test_sweep_grows_until_its_best_is_inside(losses, following):
    assert next_rate(losses) == following


def test_best_rate_of_the_first_seed_serves_all_seeds(suite):
    arm = ARM["adamw"]
    assert len(suite.missing(arm, 64)) == 3
    for rate, loss in ((0.5, 3.0), (1.0, 3.2), (2.0, math.inf)):
        finish(suite, arm, rate, loss)
    (quarter,) = suite.missing(arm, 64)
    assert quarter.project.recipe.optimizer.rate_multiplier == 0.25
    finish(suite, arm, 0.25, 3.1)
    assert suite.rate(arm, 64) == 0.5
    missing = suite.missing(arm, 64)
    assert {t.project.recipe.optimizer.rate_multiplier for t in missing} == {0.5}
    assert [t.run.seed for t in missing] == [1, 2]
    assert final_loss(suite.trial(arm, 64, 0, "tokens", 2.0)) == math.inf


def test_contradiction_names_the_keys(suite):
    with pytest.raises(UsageError, match=r"model.moe.combine.*no router"):
        changed(suite.project.recipe, {"model.mlp": "dense", "model.moe.combine": "softmax"})


def test_unknown_arm_lists_the_known_ones(suite):
    with pytest.raises(UsageError, match="'no-such' is unknown") as caught:
        make_suite(suite.project, suite.corpus, arms=["no-such"], widths=(), num_seeds=1)
    assert "tuned" in caught.value.remedy
    assert make_suite(
        suite.project, suite.corpus, arms=["adamh", "dense"], widths=(), num_seeds=1
    ).widths == (32, 48)


def test_baseline_is_the_rung_of_the_recipe(suite):
    run = suite.trial(BASELINE_ARM, 64, 0, "flops").run
    rung = suite.baseline_rung(64)
    assert (run.rung.steps, run.rung.tokens, run.rung.config) == (
        rung.steps, rung.tokens, rung.config
    )  # fmt: skip


def losses_of(project: Path) -> dict[str, float]:
    """Final loss of every run of the suite by run id."""
    found = {}
    for path in (project / "runs").glob("*/finished.json"):
        if json.loads((path.parent / "run.json").read_text())["role"] == "ablation":
            found[path.parent.name] = json.loads(path.read_text())["evaluation"][HEADLINE]
    return found


@pytest.mark.slow
def test_suite_is_killed_resumed_recorded_and_shown(project, finished, tmp_path):
    def call(*options: str) -> str:
        done = run_command("-C", project, *SUITE, *options, environment=finished.environment)
        assert (done.code, done.err) == (0, ""), done.out
        return done.out

    assert "width 48: 8 runs, 8 missing: 160 updates" in call("--dry-run")
    running = Running(tmp_path / "log", "-C", project, *SUITE, environment=finished.environment)
    running.wait_until(lambda: len(losses_of(project)) >= 3, "three finished runs")
    running.process.send_signal(signal.SIGKILL)
    running.process.wait()
    kept = losses_of(project)
    out = call("--json")
    assert not set(kept) & set(re.findall(r"^(\S+): macro loss", out, re.MULTILINE))
    assert kept.items() < losses_of(project).items()
    check_table(json.loads(out[out.index("{\n") :]), project)
    again = call()
    assert "nothing to train: every run of this suite is done" in again
    assert "Width 48, equal tokens" in again and "table: ablations/" in again
    assert len(list((project / "ablations").glob("*.json"))) == 1
    assert run_command("-C", project, "verify").out.startswith("ok(")


def check_table(table: dict, project: Path) -> None:
    """The baseline equals the rungs of equal width; the record names the table; the page exists."""
    (width,) = table["widths"]
    rungs = {
        path.name.split("-")[2].removeprefix("s"): json.loads((path / "finished.json").read_text())
        for path in (project / "runs").glob("rung-d48-*")
    }
    baseline = {seed: float(loss) for seed, loss in width["baseline"]["losses"].items()}
    assert baseline == {seed: rung["evaluation"][HEADLINE] for seed, rung in rungs.items()}
    for row in width["arms"]:
        losses = {seed: float(loss) for seed, loss in row["tokens"]["losses"].items()}
        mean = sum(losses[seed] - baseline[seed] for seed in baseline) / 2
        assert float(row["tokens"]["difference"]) == pytest.approx(mean, abs=1e-12)
        assert row["tokens"] == row["flops"]
    assert table["law"] is not None
    records = list(Journal.open(project / "record").records())
    (check,) = [r for r in records if r.type == "check" and r.body["rule"] == "ablation"]
    (path,) = (project / "ablations").glob("*.json")
    assert check.body["inputs"]["table"].startswith(path.stem)
    roles = {r.body["role"] for r in records if r.type == "run" and "tuned" in r.body["name"]}
    assert roles == {"ablation"}
    assert "tuned" in (project / "site" / "ablation.html").read_text()
