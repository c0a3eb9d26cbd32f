"""The mesh of a plan: its sizes, the share of a device, and what it holds of every parameter."""

import dataclasses
import math
from dataclasses import dataclass

from portolan.errors import UsageError
from portolan.optim.groups import components_of, resolve_groups
from portolan.optim.settings import OptimizerSettings
from portolan.parallel.layout import BATCH_AXES, EXPERTS, MESH_AXES, leaf_axes, unsplit_leaves
from portolan.parallel_settings import MeshSettings
from portolan.recipe import Recipe
from portolan.shapes import ModelConfig


@dataclass(frozen=True)
class MeshSizes:
    """Devices along each axis, from the slowest link to the fastest."""

    replica: int
    data: int
    context: int
    expert: int
    model: int

    def size(self, *axes: str) -> int:
        """Product of the sizes of `axes`."""
        return math.prod(getattr(self, axis) for axis in axes)

    def used(self, *axes: str) -> tuple[str, ...]:
        """Those of `axes` that are longer than 1."""
        return tuple(axis for axis in axes if getattr(self, axis) > 1)

    @property
    def num_devices(self) -> int:
        """All devices of the mesh."""
        return self.size(*MESH_AXES)

    def as_dict(self) -> dict[str, int]:
        """Length by axis."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lengths = [f"{axis} {getattr(self, axis)}" for axis in self.used(*MESH_AXES)]
        return " x ".join(lengths) or "one device"


def resolve_mesh(settings: MeshSettings, num_devices: int | None = None) -> MeshSizes:
    """Length of every axis; without a device count an inferred `data` is 1.

    Raises:
        UsageError: the axes need more devices than there are.
    """
    available = settings.num_fixed if num_devices is None else num_devices
    return MeshSizes(
        **settings.sizes_on(
            available,
            found=f"--devices says {available}",
            remedy="choose another one, such as --set parallel.mesh.replica=1",
        )
    )


@dataclass(frozen=True)
class Load:
    """What one device holds of a micro-batch: parts of `rows` rows, `tokens` T in all; an update
    has `num_micro_batches` of them, one after the other."""

    rows: int
    tokens: int
    num_micro_batches: int = 1

    @property
    def tokens_of_update(self) -> int:
        """Tokens of a device in all micro-batches."""
        return self.tokens * self.num_micro_batches


def share_of_batch(
    mesh: MeshSizes, batch_sequences: int, length: int, num_micro_batches: int = 1
) -> Load:
    """The share of a device: rows over the batch axes, positions over `context`.

    Raises:
        UsageError: rows or positions do not divide.
    """
    parts = mesh.size(*BATCH_AXES) * num_micro_batches
    devices = "devices of replica x data x expert"
    if num_micro_batches > 1:
        devices += f" x {num_micro_batches} micro-batches"
    for number, what, divisor, axes in (
        (batch_sequences, "sequences of a batch", parts, devices),
        (length, "positions of a row", mesh.context, "devices of context"),
    ):
        if number % divisor:
            raise UsageError(
                f"{number:,} {what} do not divide over {divisor} {axes}",
                remedy="choose another mesh with --set parallel.mesh.AXIS=N, or change the recipe",
            )
    rows = batch_sequences // parts
    return Load(rows, rows * (length // mesh.context), num_micro_batches)


@dataclass(frozen=True)
class Leaf:
    """One parameter: tree path, whole shape, the axes that split each dimension, optimizer group.

    Axes of length 1 are left out.
    """

    path: str
    shape: tuple[int, ...]
    split: tuple[tuple[str, ...], ...]
    group: str

    @property
    def part(self) -> str:
        """`experts`, `matrices` (split inside a replica, FSDP) or `replicated`."""
        if self.path.startswith(EXPERTS):
            return "experts"
        return "matrices" if any(self.split) else "replicated"

    @property
    def in_layers(self) -> bool:
        """Whether the scan over layers reads it, one layer at a time."""
        return self.path.startswith("blocks/")

    @property
    def size(self) -> int:
        """Entries of the whole leaf."""
        return math.prod(self.shape)

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that split it."""
        return tuple(axis for axes in self.split for axis in axes)

    @property
    def gathered_axes(self) -> tuple[tuple[str, ...], ...]:
        """Axes over which each dimension is gathered before use: experts keep their own."""
        kept = ("expert", "model") if self.part == "experts" else ()
        return tuple(tuple(axis for axis in axes if axis not in kept) for axes in self.split)

    def local_size(self, mesh: MeshSizes) -> int:
        """Entries on one device."""
        return self.size // mesh.size(*self.axes)

    def gathered_size(self, mesh: MeshSizes) -> int:
        """Entries that a device computes with, of all layers."""
        gathered = (axis for axes in self.gathered_axes for axis in axes)
        return self.local_size(mesh) * mesh.size(*gathered)


def leaf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Whole shape of every parameter by path, in the order of the tree."""
    width, layers = config.width, config.num_layers
    shapes: dict[str, tuple[int, ...]] = {}

    def norm(path: str, *stack: int) -> None:
        shapes[f"{path}norm/gain"] = (*stack, width)
        if config.gated_norm:
            shapes[f"{path}gnorm/down"] = (*stack, width, config.gated_norm_rank)
            shapes[f"{path}gnorm/up"] = (*stack, config.gated_norm_rank, width)

    shapes["embed/table"] = (config.vocab_size, width)
    norm("embed_")
    norm("blocks/attn_", layers)
    shapes |= _attention_shapes(config)
    norm("blocks/mlp_", layers)
    shapes |= _feed_forward_shapes(config)
    norm("final_")
    shapes["head/proj"] = (width, config.vocab_size)
    return shapes


def _taps(config: ModelConfig, site: str, path: str, channels: int) -> dict:
    shape = (config.num_conv_layers, config.conv_taps, channels)
    return {f"blocks/{path}/taps": shape} if site in config.conv_sites else {}


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    layers, width = config.num_layers, config.width
    query, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "blocks/attn/wq": (layers, width, query),
        "blocks/attn/wk": (layers, width, keys),
        "blocks/attn/wv": (layers, width, keys),
        "blocks/attn/wo": (layers, query, width),
    }
    if config.head_gate:
        shapes["blocks/attn/head_gate"] = (layers, width, config.num_heads)
    shapes |= _taps(config, "k", "attn/k_conv", keys) | _taps(config, "v", "attn/v_conv", keys)
    return shapes | _taps(config, "attn", "attn_conv", width)


def _feed_forward_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    layers, width, latent = config.num_layers, config.width, config.latent_width

    def swiglu(path: str, inner: int, *experts: int, outer: int = width) -> dict:
        inward, outward = (layers, *experts, outer, inner), (layers, *experts, inner, outer)
        return {f"{path}/gate": inward, f"{path}/up": inward, f"{path}/down": outward}

    shapes: dict[str, tuple[int, ...]] = {}
    if config.mlp == "dense":
        shapes |= swiglu("blocks/mlp", config.dense_width)
    else:
        shapes["blocks/moe/router"] = (layers, width, config.num_experts)
        if config.latent:
            shapes["blocks/moe/latent_down"] = (layers, width, latent)
        if config.latent_norm:
            shapes["blocks/moe/latent_norm/gain"] = (layers, latent)
        if config.latent:
            shapes["blocks/moe/latent_up"] = (layers, latent, width)
        experts = EXPERTS.removesuffix("/")
        shapes |= swiglu(experts, config.expert_width, config.num_experts, outer=latent)
    for index in range(config.num_shared_experts):
        shapes |= swiglu(f"blocks/shared/{index}", config.shared_width)
    return shapes | _taps(config, "mlp", "mlp_conv", width)


def list_leaves(recipe: Recipe, config: ModelConfig, mesh: MeshSizes) -> tuple[Leaf, ...]:
    """Every parameter of a shape as it lies on a mesh, with its optimizer group."""
    shapes = leaf_shapes(config)
    gates = recipe.optimizer.gated_norm
    settings = OptimizerSettings(
        hyperball_scope=recipe.optimizer.hyperball_scope,
        matrix=recipe.optimizer.matrix,
        gnorm=None if gates == "muonh" else gates,
    )
    table = resolve_groups(
        shapes,
        scope=recipe.optimizer.hyperball_scope,
        settings=settings,
        components=components_of(config),
    )
    sizes = mesh.as_dict()
    return tuple(
        Leaf(
            path,
            shape,
            tuple(mesh.used(*axes) for axes in leaf_axes(path, shape, sizes)),
            table[path].group,
        )
        for path, shape in shapes.items()
    )


def describe_misfits(config: ModelConfig, mesh: MeshSizes) -> list[str]:
    """One warning for each parameter with a dimension that its axes do not divide."""
    shapes = leaf_shapes(config)
    return [
        f"{path} {shapes[path]} stays whole where {' and '.join('x'.join(a) for a in axes if a)} "
        "do not divide it"
        for path, axes in unsplit_leaves(shapes, mesh.as_dict()).items()
    ]
