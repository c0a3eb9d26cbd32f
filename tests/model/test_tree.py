"""Names, order, shapes and sizes of the parameter tree; shapes only, nothing is allocated."""

import math

import jax
import pytest
from tests.model import golden
from tests.model.conftest import CONFIG

from portolan.accounting import total_parameters
from portolan.model.tree import abstract, flatten_paths, parameter_shapes
from portolan.shapes import derive_shape

SHAPES = {
    **{f"ladder {width}": derive_shape("ladder", width) for width in (384, 512, 768, 1024)},
    **{f"ladder {width}": derive_shape("ladder", width) for width in (1280, 1536, 2048)},
    "ladder 6144": derive_shape("ladder", 6144, num_layers=48),
    **{f"small {width}": derive_shape("small", width) for width in (32, 64, 128, 256, 384)},
    "micro 64": derive_shape("micro", 64),
    "golden": golden.CONFIG,
    "irregular": CONFIG,
}
BEFORE_SHARED = """
embed/table embed_norm/gain embed_gnorm/down embed_gnorm/up
blocks/attn_norm/gain blocks/attn_gnorm/down blocks/attn_gnorm/up
blocks/attn/wq blocks/attn/wk blocks/attn/wv blocks/attn/wo blocks/attn/head_gate
blocks/attn/k_conv/taps blocks/attn_conv/taps
blocks/mlp_norm/gain blocks/mlp_gnorm/down blocks/mlp_gnorm/up
blocks/moe/router blocks/moe/latent_down blocks/moe/latent_norm/gain blocks/moe/latent_up
blocks/moe/experts/gate blocks/moe/experts/up blocks/moe/experts/down
""".split()
AFTER_SHARED = """
blocks/mlp_conv/taps final_norm/gain final_gnorm/down final_gnorm/up head/proj
""".split()


@pytest.mark.parametrize("name", SHAPES)
def test_leaves_and_balance_state_add_up_to_the_formula(name):
    config = SHAPES[name]
    leaves = jax.tree.leaves(abstract(config))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    trained = sum(math.prod(leaf.shape) for leaf in leaves)
    assert trained + config.num_layers * config.num_experts == total_parameters(config)


@pytest.mark.parametrize("num_shared", [0, 1, 2, 3])
def test_paths_and_their_order(num_shared):
    shared = [
        f"blocks/shared/{j}/{name}" for j in range(num_shared) for name in ("gate", "up", "down")
    ]
    config = derive_shape("small", 32, num_shared_experts=num_shared)
    assert list(flatten_paths(abstract(config))) == BEFORE_SHARED + shared + AFTER_SHARED


def test_shapes_of_a_model_where_all_dimensions_differ():
    """V 41, D 96, L 5, N 12, H 8, M 6, E 10, R 20, F 24, shared 28, rank 6, taps 5."""
    expected = {
        "embed/table": (41, 96),
        "embed_norm/gain": (96,),
        "embed_gnorm/down": (96, 6),
        "embed_gnorm/up": (6, 96),
        "blocks/attn_norm/gain": (5, 96),
        "blocks/attn_gnorm/down": (5, 96, 6),
        "blocks/attn_gnorm/up": (5, 6, 96),
        "blocks/attn/wq": (5, 96, 96),
        "blocks/attn/wk": (5, 96, 48),
        "blocks/attn/wv": (5, 96, 48),
        "blocks/attn/wo": (5, 96, 96),
        "blocks/attn/head_gate": (5, 96, 12),
        "blocks/attn/k_conv/taps": (5, 5, 48),
        "blocks/attn_conv/taps": (5, 5, 96),
        "blocks/mlp_norm/gain": (5, 96),
        "blocks/mlp_gnorm/down": (5, 96, 6),
        "blocks/mlp_gnorm/up": (5, 6, 96),
        "blocks/moe/router": (5, 96, 10),
        "blocks/moe/latent_down": (5, 96, 20),
        "blocks/moe/latent_norm/gain": (5, 20),
        "blocks/moe/latent_up": (5, 20, 96),
        "blocks/moe/experts/gate": (5, 10, 20, 24),
        "blocks/moe/experts/up": (5, 10, 20, 24),
        "blocks/moe/experts/down": (5, 10, 24, 20),
        "blocks/mlp_conv/taps": (5, 5, 96),
        "final_norm/gain": (96,),
        "final_gnorm/down": (96, 6),
        "final_gnorm/up": (6, 96),
        "head/proj": (96, 41),
    }
    for j in range(3):
        expected[f"blocks/shared/{j}/gate"] = expected[f"blocks/shared/{j}/up"] = (5, 96, 28)
        expected[f"blocks/shared/{j}/down"] = (5, 28, 96)
    assert parameter_shapes(CONFIG) == expected
