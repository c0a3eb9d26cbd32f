"""Trees of the right shapes, written down independently of the model."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from portolan.shapes import ModelConfig


def list_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape by path of every parameter of the reference model."""
    d, layers, rank, keys = c.width, c.num_layers, c.gated_norm_rank, c.num_kv_heads * c.head_dim
    latent, inner, outer = c.latent_width, c.expert_width, c.shared_width
    experts = (layers, c.num_experts)
    shared = {}
    for j in range(c.num_shared_experts):
        shared |= {
            f"blocks/shared/{j}/gate": (layers, d, outer),
            f"blocks/shared/{j}/up": (layers, d, outer),
            f"blocks/shared/{j}/down": (layers, outer, d),
        }
    return {
        "embed/table": (c.vocab_size, d),
        "embed_norm/gain": (d,),
        "embed_gnorm/down": (d, rank),
        "embed_gnorm/up": (rank, d),
        "blocks/attn_norm/gain": (layers, d),
        "blocks/attn_gnorm/down": (layers, d, rank),
        "blocks/attn_gnorm/up": (layers, rank, d),
        "blocks/attn/wq": (layers, d, d),
        "blocks/attn/wk": (layers, d, keys),
        "blocks/attn/wv": (layers, d, keys),
        "blocks/attn/wo": (layers, d, d),
        "blocks/attn/head_gate": (layers, d, c.num_heads),
        "blocks/attn/k_conv/taps": (layers, c.conv_taps, keys),
        "blocks/attn_conv/taps": (layers, c.conv_taps, d),
        "blocks/mlp_norm/gain": (layers, d),
        "blocks/mlp_gnorm/down": (layers, d, rank),
        "blocks/mlp_gnorm/up": (layers, rank, d),
        "blocks/moe/router": (layers, d, c.num_experts),
        "blocks/moe/latent_down": (layers, d, latent),
        "blocks/moe/latent_norm/gain": (layers, latent),
        "blocks/moe/latent_up": (layers, latent, d),
        "blocks/moe/experts/gate": (*experts, latent, inner),
        "blocks/moe/experts/up": (*experts, latent, inner),
        "blocks/moe/experts/down": (*experts, inner, latent),
        **shared,
        "blocks/mlp_conv/taps": (layers, c.conv_taps, d),
        "final_norm/gain": (d,),
        "final_gnorm/down": (d, rank),
        "final_gnorm/up": (rank, d),
        "head/proj": (d, c.vocab_size),
    }


def nest(flat: dict[str, object]) -> dict:
    """Nested dicts and lists whose tree paths are the keys of `flat`."""
    root: dict = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        node = root
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    return root


def draw(shapes: dict[str, tuple[int, ...]], seed: int, scale: float = 1.0) -> dict:
    """A nested tree of float32 normal draws."""
    rng = np.random.default_rng(seed)
    return nest(
        {p: jnp.asarray(scale * rng.normal(size=s), jnp.float32) for p, s in shapes.items()}
    )


@pytest.fixture(scope="session")
def shapes_of() -> Callable[[ModelConfig], dict[str, tuple[int, ...]]]:
    return list_shapes


@pytest.fixture(scope="session")
def draw_tree() -> Callable[..., dict]:
    return draw
