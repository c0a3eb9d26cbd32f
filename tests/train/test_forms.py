"""Every switch of the model and of the optimizer trains, and its state survives a checkpoint."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.model.forms import FORMS
from tests.model.tools import quick_jit

from portolan.model import transformer
from portolan.optim.hyperball import build_step
from portolan.optim.norms import NORM_DRIFT_LIMIT, max_norm_drift
from portolan.optim.schedule import PeakRates, Rates
from portolan.optim.settings import OptimizerSettings
from portolan.shapes import derive_shape
from portolan.train.checkpoint import CheckpointStore
from portolan.train.state import (
    RunSettings,
    flatten_state,
    group_table,
    initial_state,
    restore_state,
)
from portolan.tree import flatten_paths

UPDATES = 20
PEAK = PeakRates(hyperball=0.03, adam=0.01, beta1=0.9, beta2=0.95, epsilon=1e-15)
ARMS = {
    **{name: (form.fields, {}) for name, form in FORMS.items()},
    "reference": ({}, {}),
    "adamh": ({}, {"matrix": "adamh"}),
    "adamw": ({}, {"matrix": "adamw"}),
    "gated-norm-adam": ({}, {"gnorm": "adam"}),
    "gated-norm-adamh": ({}, {"gnorm": "adamh"}),
    "dense-adamw": ({"mlp": "dense"}, {"matrix": "adamw"}),
}


def run_of(name):
    """An arm at width 32, short rows."""
    fields, rule = ARMS[name]
    config = derive_shape("small", 32, **{"sequence_length": 24, "window": 12} | fields)
    optimizer = OptimizerSettings(hyperball_scope="per_expert", ns_dtype="float32", **rule)
    return RunSettings(
        run_id=name, role="trial", config=config, batch_sequences=4, steps=UPDATES, peak=PEAK,
        warmup_steps=1, min_ratio=0.05, optimizer=optimizer.with_law(PEAK), seed=0,
        compute_dtype="float32", z_weight=1e-4, remat="none", norm_interval_steps=1,
        temporary_checkpoint_seconds=900.0, permanent_checkpoint_steps=UPDATES,
    )  # fmt: skip


def make_batch(config):
    """Text of one rule: the next token is the last one times 3, plus 1."""
    start = np.arange(4)[:, None] * 50
    tokens = start.repeat(24, axis=1)
    for t in range(1, 24):
        tokens[:, t] = (3 * tokens[:, t - 1] + 1) % config.vocab_size
    weights = np.ones((4, 24), np.float32)
    weights[:, -1] = 0
    return transformer.Batch(
        jnp.asarray(tokens, jnp.int32), jnp.zeros((4, 24), jnp.int32), jnp.asarray(weights)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ARMS)
def test_arm_trains(name):
    """Finite, downhill, constrained norms kept, and every leaf moves."""
    run = run_of(name)
    table, batch = group_table(run), make_batch(run.config)
    state = initial_state(run, table)
    loss = functools.partial(transformer.loss, batch=batch, config=run.config)
    gradients = quick_jit(
        jax.value_and_grad(lambda params, beta: loss(params, beta=beta), has_aux=True)
    )
    update = quick_jit(build_step(table, run.optimizer))
    params, opt, beta, losses = state.params, state.opt, state.beta, []
    for _ in range(UPDATES):
        (value, aux), grads = gradients(params, beta)
        before = params
        params, opt = update(grads, opt, params, Rates(PEAK.hyperball, PEAK.adam, 0.02))
        assert max_norm_drift(before, params, table) < NORM_DRIFT_LIMIT
        beta = aux.new_beta
        losses.append(float(value))
    assert np.all(np.isfinite(losses))
    assert losses[-1] < losses[0] - 1
    start = flatten_paths(state.params)
    still = {p for p, leaf in flatten_paths(params).items() if np.array_equal(leaf, start[p])}
    assert not still
    assert beta.shape == (run.config.num_layers, run.config.num_balance_biases)


@pytest.mark.parametrize("name", ["dense", "no-balance", "adamw"])
def test_state_survives_a_checkpoint(tmp_path, name):
    run = run_of(name)
    table = group_table(run)
    state = initial_state(run, table)
    flat = {path: np.asarray(leaf) for path, leaf in flatten_state(state).items()}
    store = CheckpointStore(tmp_path)
    store.save(flat, 1, metadata={"groups": table.to_json()})
    found = store.restore()
    store.close()
    assert found is not None
    arrays, metadata = found
    table.check_equal(metadata["groups"])
    restored = flatten_state(restore_state(state, arrays))
    assert restored.keys() == flat.keys()
    for path, leaf in flat.items():
        np.testing.assert_array_equal(restored[path], leaf, err_msg=path)
    assert flat["router_state/beta"].shape == (2, 8 if name == "adamw" else 0)
