"""The parameter tree: nested dataclasses whose field names are the path names.

A component that a shape leaves out is None in its place: it has no path, no leaf, no count.

Shapes: V vocabulary, D width, L layers, N query heads, M key/value heads, H head size,
R latent width, F expert width, E experts, G gate rank, W taps. A leading L is the stack of layers;
for convolutions, of the layers that have them.
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
    head_gate: Leaf | None
    k_conv: Conv | None
    v_conv: Conv | None


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
    latent_down: Leaf | None
    latent_norm: Norm | None
    latent_up: Leaf | None
    experts: GatedMlp


@_node
class Block:
    """One layer, or all of them stacked along a leading axis; `mlp` or `moe` and `shared`."""

    attn_norm: Norm
    attn_gnorm: Gate | None
    attn: Attention
    attn_conv: Conv | None
    mlp_norm: Norm
    mlp_gnorm: Gate | None
    mlp: GatedMlp | None
    moe: Moe | None
    shared: list[GatedMlp]
    mlp_conv: Conv | None


@_node
class Head:
    """Output projection, [D, V]; not tied to the embedding."""

    proj: Leaf


@_node
class Params:
    """All trained parameters."""

    embed: Embedding
    embed_norm: Norm
    embed_gnorm: Gate | None
    blocks: Block
    final_norm: Norm
    final_gnorm: Gate | None
    head: Head


def abstract(config: ModelConfig, dtype: Any = jnp.float32) -> Params:
    """The tree of `config` as `jax.ShapeDtypeStruct`, without allocating anything."""
    width = config.width

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    return Params(
        embed=Embedding(leaf(config.vocab_size, width)),
        embed_norm=Norm(leaf(width)),
        embed_gnorm=_gate(config, leaf),
        blocks=_blocks(config, leaf),
        final_norm=Norm(leaf(width)),
        final_gnorm=_gate(config, leaf),
        head=Head(leaf(width, config.vocab_size)),
    )


def _gate(config: ModelConfig, leaf: Any) -> Gate | None:
    if not config.gated_norm:
        return None
    rank = config.gated_norm_rank
    return Gate(leaf(config.width, rank), leaf(rank, config.width))


def _blocks(config: ModelConfig, leaf: Any) -> Block:
    width = config.width

    def stacked(*shape: int) -> jax.ShapeDtypeStruct:
        return leaf(config.num_layers, *shape)

    def conv(site: str, channels: int) -> Conv | None:
        if site not in config.conv_sites:
            return None
        return Conv(leaf(config.num_conv_layers, config.conv_taps, channels))

    def swiglu(inner: int) -> GatedMlp:
        return GatedMlp(stacked(width, inner), stacked(width, inner), stacked(inner, width))

    query, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    dense = config.mlp == "dense"
    return Block(
        attn_norm=Norm(stacked(width)),
        attn_gnorm=_gate(config, stacked),
        attn=Attention(
            wq=stacked(width, query),
            wk=stacked(width, keys),
            wv=stacked(width, keys),
            wo=stacked(query, width),
            head_gate=stacked(width, config.num_heads) if config.head_gate else None,
            k_conv=conv("k", keys),
            v_conv=conv("v", keys),
        ),
        attn_conv=conv("attn", width),
        mlp_norm=Norm(stacked(width)),
        mlp_gnorm=_gate(config, stacked),
        mlp=swiglu(config.dense_width) if dense else None,
        moe=None if dense else _moe(config, stacked),
        shared=[swiglu(config.shared_width) for _ in range(config.num_shared_experts)],
        mlp_conv=conv("mlp", width),
    )


def _moe(config: ModelConfig, stacked: Any) -> Moe:
    width, latent, experts = config.width, config.latent_width, config.num_experts
    inner = config.expert_width
    return Moe(
        router=stacked(width, experts),
        latent_down=stacked(width, latent) if config.latent else None,
        latent_norm=Norm(stacked(latent)) if config.latent_norm else None,
        latent_up=stacked(latent, width) if config.latent else None,
        experts=GatedMlp(
            gate=stacked(experts, latent, inner),
            up=stacked(experts, latent, inner),
            down=stacked(experts, inner, latent),
        ),
    )


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """{path: shape} in the order of the tree."""
    return {path: leaf.shape for path, leaf in flatten_paths(abstract(config)).items()}
