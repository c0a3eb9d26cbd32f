"""The plan of the public run, from the command line, without JAX."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from portolan import accounting
from portolan.errors import UsageError
from portolan.pipeline.plan import ladder_share, plan_width, print_plan
from portolan.pipeline.plan_drops import DropOptions, print_drops
from portolan.pipeline.plan_mesh import MeshOptions
from portolan.recipe import find_recipe, load_recipe
from portolan.track.tracker import Tracker

COMMAND = """
import sys
from portolan.cli import main
sys.argv = ["portolan", "plan", "--recipe", "marin-535b"]
try:
    main()
finally:
    assert "jax" not in sys.modules, "planning must not import JAX"
"""


def test_plan_prints_the_published_counts_with_their_conventions() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for number in (
        "535,477,106,688",
        "22,762,487,808",
        "23,550,492,672",
        "390,251",
        "18,005,144,633,344",
        "2.696e+24",
        "2.6109e+24",
        "0.357 %",
        "0.421 %",
    ):
        assert number in done.stdout, number
    for convention in ("published convention", "axis of the loss forecast", "rule of thumb"):
        assert convention in done.stdout


def test_pocket_target_is_twice_its_largest_rung_and_no_rung_is_capped() -> None:
    recipe = load_recipe(find_recipe("pocket"))
    rungs = [plan_width(recipe, width) for width in recipe.ladder.widths]
    target = plan_width(recipe, recipe.model.width)
    assert len(rungs) >= 3
    assert recipe.ladder.seeds[str(rungs[0].width)] >= 2
    assert target.active_params >= 2 * rungs[-1].active_params
    assert not any(rung.lr_capped for rung in (*rungs, target))
    assert ladder_share(recipe)["no_head"] < 0.5


def test_marin_rungs_follow_the_rules_of_their_own_width() -> None:
    recipe = load_recipe(find_recipe("marin-535b"))
    found = {width: plan_width(recipe, width) for width in recipe.ladder.widths}
    assert [found[w].steps for w in (768, 1024, 1536, 2048)] == [11_420, 15_276, 15_128, 20_072]
    assert accounting.total_parameters(found[2048].config) == 27_742_902_528


def planned(capsys: pytest.CaptureFixture, recipe: str, options: MeshOptions, **kind: bool) -> str:
    """What `portolan plan` prints."""
    print_plan(load_recipe(find_recipe(recipe)), options, as_json=kind.get("as_json", False))
    return capsys.readouterr().out


def test_tables_of_the_mesh_fit_a_hundred_columns(capsys: pytest.CaptureFixture) -> None:
    options = MeshOptions(machine="gb200-nvl72", master="device")
    text = planned(capsys, "marin-535b", options)
    mesh = text[text.index("mesh: replica 11 x expert 64 = 704 devices") :]
    assert max(len(line) for line in mesh.splitlines()) <= 100
    for figure in ("14.63", "10.35", "3.171", "60.728", "913.217", "98.43 %", "14.67 s", "20.5"):
        assert figure in mesh, figure


def test_json_holds_what_the_tables_show(capsys: pytest.CaptureFixture) -> None:
    plan = json.loads(planned(capsys, "marin-535b", MeshOptions(), as_json=True))["parallel"]
    assert plan["num_devices"] == 704
    assert plan["memory"]["device"]["work"]["saved_activations"] == 36 * 2**30
    assert {flow["name"] for flow in plan["flows"]} >= {"expert rows", "gradients", "weights"}
    assert plan["machines"]["gb200-nvl72"]["step_seconds"]["limit"] == "compute"
    assert not plan["machines"]["gb200-nvl72"]["fits"]
    assert plan["exchanges"]["ragged, receiver"]["buffer_bytes"] == 15_703_486_464
    assert len(plan["public"]) == 28


def test_a_plan_that_does_not_fit_is_refused_unless_forced(capsys: pytest.CaptureFixture) -> None:
    options = MeshOptions(machine="h100-node")
    with pytest.raises(UsageError, match=r"239 % of the 79\.00 GiB"):
        planned(capsys, "marin-535b", options)
    forced = planned(capsys, "marin-535b", dataclasses.replace(options, force=True))
    assert "239 % !" in forced
    for wrong, text in (({"master": "moon"}, "--master 'moon'"), ({"mfu": 25.0}, "not a share")):
        with pytest.raises(UsageError, match=text):
            planned(capsys, "pocket", MeshOptions(**wrong))


def test_drops_of_synthetic_skews(capsys: pytest.CaptureFixture) -> None:
    recipe = load_recipe(find_recipe("rack"))
    target = plan_width(recipe, recipe.model.width)
    print_drops(recipe, target, None, None, DropOptions(0.1, 0.4), as_json=True)
    found = json.loads(capsys.readouterr().out)
    (row,) = [row for row in found["drops"] if row["capacity_factor"] == 1.15]
    assert 0.10 < row["mean"]["cell"] < 0.12
    assert found["source"] == "synthetic skew"
    print_drops(recipe, target, None, None, DropOptions(), as_json=False)
    assert "synthetic skew: 0.1; by sender 0.2" in capsys.readouterr().out
    pocket = load_recipe(find_recipe("pocket"))
    with pytest.raises(UsageError, match="one device holds all experts"):
        print_drops(pocket, plan_width(pocket, 96), None, None, DropOptions(), as_json=False)
    with pytest.raises(UsageError, match="--skew -1"):
        print_drops(recipe, target, None, None, DropOptions(-1.0), as_json=False)


def test_drops_of_what_a_run_recorded(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    recipe = load_recipe(find_recipe("pocket"), ("parallel.mesh.expert=4",))
    rung = plan_width(recipe, recipe.model.width)
    folder = tmp_path / "rung-d96-s0"
    layers = rung.config.num_layers
    rows = rung.tokens_per_expert
    entropy = [math.log(rung.config.num_experts) - (0.2 + 0.1 * i) ** 2 / 2 for i in range(layers)]
    with Tracker.open(folder, 1, 0) as tracker:
        for row in range(20):
            noise = 1 / rows / 2 if row >= 15 else 1.0
            tracker.log(row, {f"router/entropy/{i}": h - noise for i, h in enumerate(entropy)})
    run = {"width": 96, "model": dataclasses.asdict(rung.config), "plan": rung.plan()}
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "finished.json").write_text("{}")
    print_drops(recipe, rung, None, tmp_path, DropOptions(), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["source"].endswith("as rung-d96-s0 recorded it")
    skews = [skew["expert"] for skew in found["skews"]]
    assert skews == pytest.approx([0.2 + 0.1 * i for i in range(layers)], rel=0.05)
