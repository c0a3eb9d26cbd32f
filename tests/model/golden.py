"""The golden model: parameters, inputs and reference figures given by closed formulas."""

import numpy as np

from portolan.model.tree import Params, abstract, flatten_paths, unflatten_paths
from portolan.shapes import ModelConfig

CONFIG = ModelConfig(
    vocab_size=50,
    sequence_length=12,
    width=64,
    num_layers=2,
    num_heads=8,
    head_dim=8,
    num_kv_heads_local=2,
    num_kv_heads_global=1,
    num_experts=8,
    experts_per_token=2,
    latent_width=32,
    expert_width=32,
    num_shared_experts=2,
    shared_width=32,
    gated_norm_rank=16,
    conv_taps=4,
    window=4,
    global_every=4,
    qk_multiplier=1.3,
    qb_bins=10_000,
)


def values(index: int, path: str, shape: tuple[int, ...]) -> np.ndarray:
    j = np.arange(np.prod(shape), dtype=np.int64)
    residue = (1103 * j * j + 7919 * j + 104729 * (index + 1)) % 65521
    u = (2 * (residue / 65521) - 1).reshape(shape)
    if path.endswith("gain"):
        return 1 + 0.1 * u
    if path.endswith("taps"):
        out = 0.1 * u
        out[..., 0, :] += 1
        return out
    return 0.3 * u


def leaves(config: ModelConfig = CONFIG) -> dict[str, np.ndarray]:
    shapes = {path: leaf.shape for path, leaf in flatten_paths(abstract(config)).items()}
    return {path: values(i, path, shape) for i, (path, shape) in enumerate(shapes.items())}


def params(dtype: type = np.float32) -> Params:
    arrays = {path: array.astype(dtype) for path, array in leaves().items()}
    return unflatten_paths(abstract(CONFIG), arrays)


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """tokens, segments and loss weights, [2, 12]."""
    b, t = np.arange(2)[:, None], np.arange(12)
    tokens = ((7 * b + 11 * t + 3 * t * t) % 50).astype(np.int32)
    segments = np.array([[0] * 7 + [1] * 5, [0] * 9 + [-1] * 3], np.int32)
    weights = np.zeros((2, 12), np.float32)
    weights[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, :-1] >= 0)
    return tokens, segments, weights


def beta() -> np.ndarray:
    layer, expert = np.arange(2)[:, None], np.arange(8)
    return 0.05 * ((3 * expert + 5 * layer) % 7)


LOSS, CROSS_ENTROPY, MEAN_SQUARE_LSE = 4.3536845486, 4.3519321507, 17.5239794150
HIDDEN_NORMS = {  # layer: (row 0, the nine valid tokens of row 1)
    0: (42.763161, 30.272884),
    1: (55.763805, 45.138394),
}
LOGITS = [-0.942693, -0.423622, -0.796823, -0.074162]  # [0, 3, 0:4]
SELECTED = {0: "26 75 07 62 25 35 04", 1: "36 07 15 13 13 14 13"}
WEIGHTS = {0: (1.346914, 1.153086), 1: (1.279607, 1.220393)}
NEW_BETA = np.array(
    [
        [
            "-0.125479",
            "0.019019",
            "0.093866",
            "-0.225833",
            "0.118954",
            "-0.080992",
            "0.469834",
            "-0.102899",
        ],
        [
            "0.087464",
            "0.431521",
            "-0.331047",
            "0.104774",
            "-0.012391",
            "-0.171230",
            "-0.062067",
            "0.087702",
        ],
    ],
    float,
)
GLOBAL_GRADIENT_NORM = 4.69551737
GRADIENT_NORMS = {
    "blocks/attn/wq": 0.702925,
    "blocks/attn/wk": 0.693922,
    "blocks/attn/wv": 1.297721,
    "blocks/attn/wo": 1.080787,
    "blocks/attn/head_gate": 0.387048,
    "blocks/attn/k_conv/taps": 0.193658,
    "blocks/attn_gnorm/down": 0.471764,
    "blocks/moe/router": 0.201951,
    "blocks/moe/latent_down": 1.726174,
    "blocks/moe/latent_norm/gain": 0.251287,
    "blocks/moe/experts/gate": 1.169261,
    "blocks/moe/experts/down": 1.224396,
    "blocks/shared/0/gate": 0.346515,
    "blocks/mlp_conv/taps": 0.345250,
    "embed/table": 2.255300,
    "head/proj": 0.982146,
}
ROUTER_GRADIENT_000 = 5.439127e-3
