"""Plans of packaged recipes for the tests of the planner."""

from portolan.parallel.planner.estimate import ParallelPlan
from portolan.pipeline.plan import plan_width
from portolan.recipe import find_recipe, load_recipe


def plan_of(name, *overrides, num_devices=None, num_micro_batches=1):
    """The target of a recipe on its mesh."""
    recipe = load_recipe(find_recipe(name), overrides)
    rung = plan_width(recipe, recipe.model.width)
    return ParallelPlan.of(
        recipe,
        rung.config,
        rung.batch_sequences,
        rung.steps,
        num_devices,
        num_micro_batches,
    )
