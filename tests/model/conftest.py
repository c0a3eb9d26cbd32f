"""One model with every irregularity at once, compiled once for all tests of this folder."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.model import plain
from tests.model.tools import quick_jit

from portolan.model import transformer
from portolan.model.tree import flatten_paths, parameter_shapes, unflatten_paths
from portolan.shapes import ModelConfig

CONFIG = ModelConfig(
    vocab_size=41,
    sequence_length=18,
    width=96,
    num_layers=5,  # local, global, local, global, global
    num_heads=12,
    head_dim=8,
    num_kv_heads_local=6,
    num_kv_heads_global=2,
    num_experts=10,
    experts_per_token=3,
    latent_width=20,
    expert_width=24,
    num_shared_experts=3,
    shared_width=28,
    gated_norm_rank=6,
    conv_taps=5,
    window=4,
    global_every=2,
    qk_multiplier=1.3,
    qb_bins=64,
)


@dataclasses.dataclass
class Case:
    """A configuration, float64 parameters by path and one batch."""

    config: ModelConfig
    leaves: dict[str, np.ndarray]
    beta: np.ndarray
    tokens: np.ndarray
    segments: np.ndarray
    weights: np.ndarray

    def params(self, dtype):
        cast = {path: leaf.astype(dtype) for path, leaf in self.leaves.items()}
        return unflatten_paths(transformer.abstract(self.config), cast)

    def plain(self, leaves=None):
        leaves = self.leaves if leaves is None else leaves
        return plain.forward(leaves, self.beta, self.tokens, self.segments, self.config)

    def plain_loss(self, leaves):
        return plain.loss(self.plain(leaves).logits, self.tokens, self.weights)[0]


@pytest.fixture(scope="session")
def case():
    """Several documents a row, single-token documents, padding, weights of any size."""
    generator = np.random.default_rng(2)
    leaves = {}
    for path, shape in parameter_shapes(CONFIG).items():
        leaf = generator.standard_normal(shape) * (0.15 if path.endswith("gain") else 0.2)
        leaf += path.endswith("gain")
        if path.endswith("taps"):
            leaf[..., 0, :] += 1
        leaves[path] = leaf
    tokens = generator.integers(0, CONFIG.vocab_size, (3, 18)).astype(np.int32)
    segments = np.array(
        [
            [0] * 7 + [1] * 11,
            [0] + [1] * 9 + [2] * 5 + [-1] * 3,
            [4] * 3 + [5] * 8 + [6] + [7] * 2 + [-1] * 4,
        ],
        np.int32,
    )
    weights = (generator.random((3, 18)) * (segments >= 0)).astype(np.float32)
    weights[:, -1] = 0
    beta = 0.2 * generator.standard_normal((CONFIG.num_layers, CONFIG.num_experts))
    return Case(CONFIG, leaves, beta, tokens, segments, weights)


@pytest.fixture(scope="session")
def double_run(case):
    """(loss, aux, gradient by path, gradient with respect to beta) in float64."""
    with jax.enable_x64(True):
        batch = transformer.Batch(*map(jnp.asarray, (case.tokens, case.segments, case.weights)))

        def loss(params, beta):
            return transformer.loss(params, beta, batch, case.config, compute_dtype=jnp.float64)

        step = quick_jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (value, aux), (gradient, beta) = step(case.params(np.float64), jnp.asarray(case.beta))
        gradient = {path: np.asarray(leaf) for path, leaf in flatten_paths(gradient).items()}
        return float(value), jax.tree.map(np.asarray, aux), gradient, np.asarray(beta)


@pytest.fixture(scope="session")
def single_logits(case):
    """Function (tokens, segments) -> float32 logits of the model of `case`, compiled once."""
    params, beta = case.params(np.float32), jnp.asarray(case.beta, jnp.float32)

    @quick_jit
    def logits(params, beta, tokens, segments):
        return transformer.logits(
            params, beta, tokens, segments, case.config, compute_dtype=jnp.float32
        )

    return lambda tokens, segments: np.asarray(logits(params, beta, tokens, segments))
