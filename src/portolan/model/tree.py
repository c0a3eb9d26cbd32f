"""The parameter tree: nested dataclasses whose field names are the path names.

Shapes: V vocabulary, D width, L layers, N query heads, M key/value heads, H head size,
R latent width, F expert width, E experts, G gate rank, W taps. A leading L is the stack of layers.
"""

from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp

from portolan.shapes import ModelConfig
from portolan.tree import flatten_paths, unflatten_paths

__all__ = ["Params", "abstract", "flatten_paths", "parameter_shapes", "unflatten_paths"]

Leaf = Any
"""An array, an abstract array, or whatever a mapping over the tree put in its place."""

Node = TypeVar("Node")


@dataclass_transform()
def _node(cls: type[Node]) -> type[Node]:
    """A dataclass that JAX sees as a tree."""
    return jax.tree_util.register_dataclass(dataclass(cls))


@_node
class Norm:
    """Gain of an RMS norm, [D] (or [R])."""

    gain: Leaf


@_node
class Gate:
    """Low-rank gate of a gated norm: down [D, G], up [G, D]."""

    down: Leaf
    up: Leaf


@_node
class Embedding:
    """Token embedding, table [V, D]."""

    table: Leaf


@_node
class Conv:
    """Taps of a depthwise causal convolution, [W, channels]; tap 0 is the current position."""

    taps: Leaf


@_node
class Attention:
    """wq [D, N*H], wk and wv [D, M*H], wo [N*H, D], head_gate [D, N]; columns are head-major."""

    wq: Leaf
    wk: Leaf
    wv: Leaf
    wo: Leaf
    head_gate: Leaf
    k_conv: Conv


@_node
class GatedMlp:
    """silu(x gate) * (x up), then down. Experts carry a leading E."""

    gate: Leaf
    up: Leaf
    down: Leaf


@_node
class Moe:
    """Router [D, E], the latent pair [D, R] and [R, D] around the experts."""

    router: Leaf
    latent_down: Leaf
    latent_norm: Norm
    latent_up: Leaf
    experts: GatedMlp


@_node
class Block:
    """One layer, or all of them stacked along a leading axis."""

    attn_norm: Norm
    attn_gnorm: Gate
    attn: Attention
    attn_conv: Conv
    mlp_norm: Norm
    mlp_gnorm: Gate
    moe: Moe
    shared: list[GatedMlp]
    mlp_conv: Conv


@_node
class Head:
    """Output projection, [D, V]; not tied to the embedding."""

    proj: Leaf


@_node
class Params:
    """All trained parameters."""

    embed: Embedding
    embed_norm: Norm
    embed_gnorm: Gate
    blocks: Block
    final_norm: Norm
    final_gnorm: Gate
    head: Head


def abstract(config: ModelConfig, dtype: Any = jnp.float32) -> Params:
    """The tree of `config` as `jax.ShapeDtypeStruct`, without allocating anything."""

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    width, rank = config.width, config.gated_norm_rank
    return Params(
        embed=Embedding(leaf(config.vocab_size, width)),
        embed_norm=Norm(leaf(width)),
        embed_gnorm=Gate(leaf(width, rank), leaf(rank, width)),
        blocks=_abstract_blocks(config, leaf),
        final_norm=Norm(leaf(width)),
        final_gnorm=Gate(leaf(width, rank), leaf(rank, width)),
        head=Head(leaf(width, config.vocab_size)),
    )


def _abstract_blocks(config: ModelConfig, leaf: Any) -> Block:
    layers, width, rank = config.num_layers, config.width, config.gated_norm_rank
    latent, inner, shared = config.latent_width, config.expert_width, config.shared_width
    experts, taps = config.num_experts, config.conv_taps
    query = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    return Block(
        attn_norm=Norm(leaf(layers, width)),
        attn_gnorm=Gate(leaf(layers, width, rank), leaf(layers, rank, width)),
        attn=Attention(
            wq=leaf(layers, width, query),
            wk=leaf(layers, width, keys),
            wv=leaf(layers, width, keys),
            wo=leaf(layers, query, width),
            head_gate=leaf(layers, width, config.num_heads),
            k_conv=Conv(leaf(layers, taps, keys)),
        ),
        attn_conv=Conv(leaf(layers, taps, width)),
        mlp_norm=Norm(leaf(layers, width)),
        mlp_gnorm=Gate(leaf(layers, width, rank), leaf(layers, rank, width)),
        moe=Moe(
            router=leaf(layers, width, experts),
            latent_down=leaf(layers, width, latent),
            latent_norm=Norm(leaf(layers, latent)),
            latent_up=leaf(layers, latent, width),
            experts=GatedMlp(
                gate=leaf(layers, experts, latent, inner),
                up=leaf(layers, experts, latent, inner),
                down=leaf(layers, experts, inner, latent),
            ),
        ),
        shared=[
            GatedMlp(
                leaf(layers, width, shared),
                leaf(layers, width, shared),
                leaf(layers, shared, width),
            )
            for _ in range(config.num_shared_experts)
        ],
        mlp_conv=Conv(leaf(layers, taps, width)),
    )


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """{path: shape} in the order of the tree."""
    return {path: leaf.shape for path, leaf in flatten_paths(abstract(config)).items()}
