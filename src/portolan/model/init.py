"""Initial parameters. Each leaf draws from its own key, whatever else the tree holds.

Matrices: init_std * TruncatedNormal(-3, 3); gains 1; head gates 0; convolutions the identity.
"""

import functools
import zlib

import jax
import jax.numpy as jnp

from portolan.model.tree import Params, abstract, flatten_paths, unflatten_paths
from portolan.shapes import ModelConfig

TRUNCATION = 3.0
"""Matrices are drawn within this many standard deviations."""


def init(config: ModelConfig, seed: int) -> Params:
    """Fresh parameters, float32.

    The key of a leaf is (seed, path, layer), so that changing the depth or switching a component
    leaves every other leaf bitwise equal. May be traced inside `jax.jit` for sharded outputs.
    """
    tree = abstract(config)
    leaves = {
        path: _draw(path, leaf.shape, config.init_std, jax.random.key(seed))
        for path, leaf in flatten_paths(tree).items()
    }
    return unflatten_paths(tree, leaves)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _draw(path: str, shape: tuple[int, ...], std: float, key: jax.Array) -> jax.Array:
    if path.endswith("/gain"):
        return jnp.ones(shape)
    if path.endswith("/head_gate"):
        return jnp.zeros(shape)
    if path.endswith("/taps"):
        return jnp.zeros(shape).at[..., 0, :].set(1.0)
    key = jax.random.fold_in(key, zlib.crc32(path.encode()))

    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return std * jax.random.truncated_normal(key, -TRUNCATION, TRUNCATION, shape)

    if not path.startswith("blocks/"):
        return draw(key, shape)
    # One program per layer, not one over the stack: its rounding cannot depend on the depth.
    layers = jnp.arange(shape[0])
    return jax.lax.map(lambda layer: draw(jax.random.fold_in(key, layer), shape[1:]), layers)
