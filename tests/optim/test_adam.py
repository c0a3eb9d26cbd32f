"""Plain Adam steps, the AdamW arm and the clipped gradient, against NumPy in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from portolan.optim import hyperball
from portolan.optim.groups import GroupRow, GroupTable
from portolan.optim.schedule import Rates
from portolan.optim.settings import OptimizerSettings

SHAPES = {"head/proj": (3, 4), "blocks/attn/wq": (2, 3, 3), "embed/table": (4, 3)}
TABLE = GroupTable(
    (
        GroupRow("head/proj", SHAPES["head/proj"], "adamw", None, False),
        GroupRow("blocks/attn/wq", SHAPES["blocks/attn/wq"], "adamw", None, False),
        GroupRow("embed/table", SHAPES["embed/table"], "adam", None, False),
    )
)
SETTINGS = OptimizerSettings(hyperball_scope=None, matrix="adamw", beta2=0.95, epsilon=1e-15)
RATES = Rates(0.7, 0.02, 0.5)
"""The first and the last must not matter here."""


def nest(flat):
    root = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        node = root
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = jnp.asarray(value)
    return root


def expected_updates(weights, gradients, bound=1.0, weight_decay=0.1):
    """Three AdamW updates: the gradient clipped as a whole, decay outside the direction."""
    moments = dict.fromkeys(weights, (0.0, 0.0))
    for count, grads in enumerate(gradients, start=1):
        total = np.sqrt(sum(np.sum(g**2) for g in grads.values()))
        scale = min(1.0, bound / total)
        for path, grad in grads.items():
            grad = grad * scale
            m = 0.9 * moments[path][0] + 0.1 * grad
            v = 0.95 * moments[path][1] + 0.05 * grad**2
            moments[path] = m, v
            adamw = path != "embed/table"
            epsilon = 1e-8 if adamw else 1e-15
            direction = m / (1 - 0.9**count) / (np.sqrt(v / (1 - 0.95**count)) + epsilon)
            decay = weight_decay if adamw else 0.0
            weights = weights | {
                path: weights[path] - RATES.eta_adam * (direction + decay * weights[path])
            }
    return weights


@pytest.mark.parametrize("scale", [0.01, 3.0], ids=["below the clip", "above it"])
def test_adamw_arm(scale):
    generator = np.random.default_rng(0)
    weights = {path: generator.standard_normal(shape) for path, shape in SHAPES.items()}
    gradients = [
        {path: scale * generator.standard_normal(shape) for path, shape in SHAPES.items()}
        for _ in range(3)
    ]
    with jax.enable_x64(True):
        params = nest(weights)
        step = jax.jit(hyperball.build_step(TABLE, SETTINGS))
        state = hyperball.init_state(params, table=TABLE, settings=SETTINGS)
        for grads in gradients:
            params, state = step(nest(grads), state, params, RATES)
        expected = expected_updates(weights, gradients)
        for path in SHAPES:
            found = hyperball.flatten_paths(params)[path]
            np.testing.assert_allclose(found, expected[path], rtol=1e-12, err_msg=path)


def test_clip_can_be_chosen():
    assert SETTINGS.resolved_clip == 1.0
    assert replace(SETTINGS, clip=0.3).resolved_clip == 0.3
    assert replace(SETTINGS, matrix="muonh").resolved_clip is None


def test_a_refused_update_changes_nothing_and_an_accepted_one_copies_nothing():
    """In place: beside gradients and donated arrays, less than one leaf of memory is needed."""
    shape = (256, 256)
    table = GroupTable((GroupRow("head/proj", shape, "adamw", None, False),))
    params = nest({"head/proj": np.ones(shape, np.float32)})
    state = hyperball.init_state(params, table=table, settings=SETTINGS)
    update = hyperball.build_step(table, SETTINGS)
    grads = jax.tree.map(jnp.ones_like, params)

    # What is returned has the order of what is donated: else arrays would change places.
    def step(params, state, accepted):
        return update(grads, state, params, RATES, accepted)

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, True).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 256 * 256
    old = jax.tree.map(np.array, (params, state))
    refused = compiled(params, state, False)
    jax.tree.map(np.testing.assert_array_equal, refused, old)
    assert compiled(*refused, True)[1].count == 1
