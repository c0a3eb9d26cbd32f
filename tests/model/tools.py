"""Small models and a compiler setting that favours short compilation."""

import jax
import jax.numpy as jnp
import numpy as np

from portolan.model import transformer
from portolan.shapes import ModelConfig, derive_shape

QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def quick_jit(function, **options):
    """`jax.jit` without code optimisation: tests run each program once or twice."""
    return jax.jit(function, compiler_options=QUICK, **options)


def small_config(**overrides) -> ModelConfig:
    """Two layers (local, global), both grouped heads and head truncation."""
    fields = {"vocab_size": 61, "sequence_length": 24, "window": 6, "num_layers": 2} | overrides
    return derive_shape("small", 64, **fields)


def random_params(config: ModelConfig, seed: int = 0, scale: float = 0.3) -> transformer.Params:
    """Every leaf random, gates and taps included, so that nothing is an identity."""
    generator = np.random.default_rng(seed)

    def draw(leaf):
        return jnp.asarray(scale * generator.standard_normal(leaf.shape), jnp.float32)

    return jax.tree.map(draw, transformer.abstract(config))
