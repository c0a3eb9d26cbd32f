"""Which mesh axes split which dimension of a parameter (parallel.md 2). No JAX here.

Of a dense matrix the model-width dimension is split over `data` and `expert` (sharded inside a
replica, FSDP) and the other one over `model`; experts are split over `expert` first. Nothing is
split over `replica` or `context`, and never the stack of layers.
"""

import math
from collections.abc import Mapping

MESH_AXES = ("replica", "data", "context", "expert", "model")
"""In the order in which devices are laid out: neighbours share `model`, then `expert`."""
BATCH_AXES = ("replica", "data", "expert")
"""Axes that split the rows of a batch."""
COUNT_AXES = (*BATCH_AXES, "context")
"""Axes that split the tokens of a batch."""
SHARDED_AXES = ("data", "expert")
"""Axes that split the matrices outside the experts."""

STACK_AXES = tuple(axis for axis in MESH_AXES if axis != "replica")
"""Axes that share the matrices of a stack for Newton-Schulz; every replica repeats it."""
EXPERTS = "blocks/moe/experts/"
"""Where the paths of the experts' matrices begin."""

Axes = tuple[str, ...]

INWARD: tuple[Axes, ...] = (SHARDED_AXES, ("model",))
OUTWARD: tuple[Axes, ...] = (("model",), SHARDED_AXES)
RULES: dict[str, tuple[Axes, ...]] = {
    "head/proj": INWARD,
    "attn/wq": INWARD,
    "attn/wk": INWARD,
    "attn/wv": INWARD,
    "attn/wo": OUTWARD,
    "mlp/gate": INWARD,
    "mlp/up": INWARD,
    "mlp/down": OUTWARD,
    "moe/latent_down": INWARD,
    "moe/latent_up": OUTWARD,
    "experts/gate": (("expert",), ("data",), ("model",)),
    "experts/up": (("expert",), ("data",), ("model",)),
    "experts/down": (("expert",), ("model",), ("data",)),
}
"""Axes of the last dimensions of a leaf, by the end of its path; other leaves lie whole."""


def wanted_axes(path: str) -> tuple[Axes, ...]:
    """Axes of the last dimensions of a leaf, whether or not they fit it."""
    parts = path.split("/")
    if "shared" in parts:
        return OUTWARD if parts[-1] == "down" else INWARD
    return RULES.get("/".join(parts[-2:]), ())


def leaf_axes(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[Axes, ...]:
    """Mesh axes that split each dimension of a leaf; () where one does not divide."""
    wanted = wanted_axes(path)
    padded = ((),) * (len(shape) - len(wanted)) + wanted
    return tuple(
        axes if axes and dim % math.prod(sizes[a] for a in axes) == 0 else ()
        for dim, axes in zip(shape, padded, strict=True)
    )


def unsplit_leaves(
    shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]
) -> dict[str, tuple[Axes, ...]]:
    """Leaves with a dimension that its axes do not divide, with the axes that were wanted."""
    return {
        path: wanted
        for path, shape in shapes.items()
        if (wanted := wanted_axes(path))
        and sum(map(bool, leaf_axes(path, shape, sizes))) < len(wanted)
    }


def local_shape(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of the part of a leaf that one device holds."""
    split = leaf_axes(path, shape, sizes)
    return tuple(
        dim // math.prod(sizes[a] for a in axes) for dim, axes in zip(shape, split, strict=True)
    )
