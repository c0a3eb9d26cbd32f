"""Parameters on a mesh, against the tree of the model and the layout that training uses."""

import math

import pytest

from portolan import accounting
from portolan.errors import UsageError
from portolan.model.tree import parameter_shapes
from portolan.parallel.layout import local_shape
from portolan.parallel.mesh import resolve_sizes
from portolan.parallel.planner.mesh import (
    MeshSizes,
    describe_misfits,
    leaf_shapes,
    list_leaves,
    resolve_mesh,
    share_of_batch,
)
from portolan.parallel_settings import MeshSettings
from portolan.recipe import find_recipe, load_recipe
from portolan.shapes import derive_shape

SWITCHES = (
    {},
    {"mlp": "dense"},
    {"latent": False, "head_gate": False, "gated_norm": False, "balance": "softmax_aux"},
    {"conv_sites": ("k", "v"), "conv_layers": "global", "latent_norm": False},
)
MESHES = (MeshSizes(1, 1, 1, 1, 1), MeshSizes(2, 2, 2, 4, 2), MeshSizes(3, 5, 1, 8, 1))


@pytest.mark.parametrize("switches", SWITCHES)
def test_shapes_are_those_of_the_model_in_its_order(switches):
    for family, width in (("micro", 48), ("small", 64), ("ladder", 512)):
        config = derive_shape(family, width, **switches)
        assert list(leaf_shapes(config).items()) == list(parameter_shapes(config).items())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_device_holds_what_training_gives_it(mesh):
    recipe = load_recipe(find_recipe("pocket"))
    config = recipe.shape(recipe.model.width)
    leaves = list_leaves(recipe, config, mesh)
    for leaf in leaves:
        local = local_shape(leaf.path, leaf.shape, mesh.as_dict())
        assert leaf.local_size(mesh) == math.prod(local)
        kept = ("expert", "model") if leaf.part == "experts" else ()
        whole = leaf.size // mesh.size(*(axis for axis in leaf.axes if axis in kept))
        assert leaf.gathered_size(mesh) == whole
    groups = accounting.count_optimizer_groups(config)
    for name in ("muonh", "adamh", "adam"):
        assert sum(leaf.size for leaf in leaves if leaf.group == name) == getattr(groups, name)


@pytest.mark.parametrize("arm", ["adamw", "adamh"])
def test_groups_follow_the_recipe(arm):
    recipe = load_recipe(find_recipe("pocket"), (f"optimizer.matrix={arm}",))
    config = recipe.shape(recipe.model.width)
    leaves = list_leaves(recipe, config, MESHES[0])
    groups = accounting.count_optimizer_groups(config, arm)
    assert sum(leaf.size for leaf in leaves if leaf.group == arm) == getattr(groups, arm)


def test_sizes_are_resolved_as_training_resolves_them():
    for settings, devices in (
        (MeshSettings(), 6),
        (MeshSettings(replica=2, expert=4), 17),
        (MeshSettings(data=2, context=2), 8),
    ):
        assert resolve_mesh(settings, devices).as_dict() == resolve_sizes(settings, devices)
    assert resolve_mesh(MeshSettings(expert=4)).data == 1
    with pytest.raises(UsageError, match="replica 2 x expert 4 needs 8 devices, --devices says 4"):
        resolve_mesh(MeshSettings(replica=2, expert=4), 4)


def test_rows_and_positions_must_divide():
    load = share_of_batch(MeshSizes(11, 1, 1, 64, 1), 11_264, 4096)
    assert (load.rows, load.tokens) == (16, 65_536)
    assert share_of_batch(MeshSizes(1, 2, 4, 1, 2), 8, 64).tokens == 4 * 16
    with pytest.raises(UsageError, match="12 sequences of a batch do not divide over 8"):
        share_of_batch(MeshSizes(2, 2, 1, 2, 1), 12, 64)
    with pytest.raises(UsageError, match="63 positions of a row"):
        share_of_batch(MeshSizes(1, 1, 2, 1, 1), 12, 63)


def test_what_does_not_divide_is_listed():
    config = derive_shape("micro", 48)
    lines = describe_misfits(config, MeshSizes(1, 5, 1, 1, 1))
    assert any(line.startswith("blocks/attn/wq (4, 48, 48) stays whole") for line in lines)
    assert not any("embed" in line for line in lines)
    assert describe_misfits(config, MeshSizes(1, 2, 1, 2, 1)) == []
