"""The plan of the public run, from the command line, without JAX."""

import subprocess
import sys

from portolan import accounting
from portolan.pipeline.plan import ladder_share, plan_width
from portolan.recipe import find_recipe, load_recipe

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
