"""The reader of compiled programs, on real ones and on lines that CPUs do not print."""

import subprocess
import sys

import pytest

from portolan.parallel.planner.hlo import Collective, mesh_axes, parse_collectives, summarise
from portolan.parallel.planner.mesh import MeshSizes

MESH = MeshSizes(2, 1, 1, 4, 1)
PROGRAM = """
import jax, jax.numpy as jnp
import numpy as np
from functools import partial
from jax.sharding import Mesh, PartitionSpec as P

axes = ("replica", "data", "context", "expert", "model")
mesh = Mesh(np.array(jax.devices()).reshape(2, 1, 1, 4, 1), axes)
rows = P(("replica", "expert"))

@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=(rows, P("expert")), out_specs=rows, check_vma=False)
def program(x, w):
    w = jax.lax.all_gather(w, "expert", axis=0, tiled=True)
    x = jax.lax.all_gather(x, "replica", axis=0, tiled=True)
    x = jax.lax.psum_scatter(x, "replica", tiled=True)
    def outer(x, _):
        def inner(x, _):
            return jax.lax.all_to_all(x @ w, "expert", 0, 0, tiled=True), None
        x = jax.lax.scan(inner, x, None, length=3)[0]
        x = jax.lax.psum(x, ("replica", "expert")).astype(jnp.int32)
        x = jax.lax.ppermute(x, "expert", [(i, (i + 1) % 4) for i in range(4)])
        return x.astype(jnp.float32), None
    return jax.lax.scan(outer, x, None, length=5)[0]

x, w = jnp.ones((64, 16)), jnp.ones((16, 16))
print(program.lower(x, w).compile().as_text())
"""


@pytest.fixture(scope="module")
def compiled():
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout


def test_a_compiled_program(compiled):
    found = {one.kind: one for one in parse_collectives(compiled)}
    # x is [64, 16] float32 on 8 devices: 512 bytes each.
    row = range(4)
    assert found["all-to-all"] == Collective("all-to-all", "f32", 512, (*row,), 4, 15, True)
    assert found["all-reduce"] == Collective("all-reduce", "f32", 512, (*range(8),), 8, 5, True)
    assert found["reduce-scatter"] == Collective("reduce-scatter", "f32", 512, (0, 4), 2, 1, False)
    permute = found["collective-permute"]
    assert (permute.element_type, permute.times, permute.group) == ("s32", 5, (0, 1))
    gathers = {one.group: one.num_bytes for one in parse_collectives(compiled)
               if one.kind == "all-gather"}  # fmt: skip
    assert gathers == {(0, 1, 2, 3): 1024, (0, 4): 1024}


def test_sums_by_axis(compiled):
    sums = {(one.kind, one.axes): one for one in summarise(parse_collectives(compiled), MESH)}
    assert sums["all-to-all", ("expert",)].moved_bytes == 15 * 512 * 3 // 4
    assert sums["all-reduce", ("replica", "expert")].moved_bytes == 5 * 2 * 512 * 7 // 8
    assert sums["all-gather", ("replica",)].moved_bytes == 512
    assert sums["reduce-scatter", ("replica",)].moved_bytes == 512
    assert sums["collective-permute", ("expert",)].executions == 5


TEXT = """\
HloModule step, is_scheduled=true, replica_count=1, num_partitions=16

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (p: bf16[8,4]) -> bf16[32,4] {
  ROOT %ag = bf16[32,4]{1,0} all-gather(%p), replica_groups=[4,4]<=[4,4]T(1,0), dimensions={0}
}

%body (t: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %rs = (bf16[8,4]{1,0}, bf16[2,4]{1,0}) reduce-scatter-start(%t), replica_groups=[4,4]<=[16]
  %rd = bf16[2,4]{1,0} reduce-scatter-done(%rs)
  %f8 = f8e4m3fn[64]{0} all-to-all(%x), replica_groups={}
  %r = bf16[8,4]{1,0:T(8,128)(2,1)} ragged-all-to-all(%a, %b), replica_groups=[8,2]<=[16]
}

%condition (t: (s32[], bf16[8,4])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: bf16[8,4]) -> bf16[8,4] {
  %a = ((bf16[8,4]), bf16[32,4], u32[]) async-start(%x), calls=%wrapped
  %w = (s32[], bf16[8,4]{1,0}) while(%t), condition=%condition, body=%body
  %ar = (f32[16]{0}, f32[]) all-reduce-start(%y, %z), replica_groups={{0,8},{1,9}}, to_apply=%add
}

%unused (p: f32[4]) -> f32[4] {
  ROOT %never = f32[4]{0} all-reduce(%p), replica_groups={}, to_apply=%add
}
"""


def test_what_accelerators_print():
    found = {(one.kind, one.element_type): one for one in parse_collectives(TEXT)}
    gather = found["all-gather", "bf16"]
    assert (gather.num_bytes, gather.group, gather.group_size) == (256, (0, 4, 8, 12), 4)
    scatter = found["reduce-scatter", "bf16"]
    assert (scatter.num_bytes, scatter.group, scatter.moved_bytes) == (16, (0, 1, 2, 3), 48)
    assert found["all-to-all", "f8e4m3fn"].group == tuple(range(16))
    assert found["all-to-all", "f8e4m3fn"].num_bytes == 64
    ragged = found["ragged-all-to-all", "bf16"]
    assert (ragged.group, ragged.in_loop, ragged.times) == ((0, 1), True, 1)
    reduce = found["all-reduce", "f32"]
    assert (reduce.num_bytes, reduce.group, reduce.in_loop) == (68, (0, 8), False)
    assert len(found) == 5


@pytest.mark.parametrize(
    ("groups", "first"),
    [
        ("mesh['axis_0'=4,'axis_1'=2], device_ids=([2,2,2]T(0,2,1)) {'axis_0'}", (0, 1, 4, 5)),
        ("mesh['axis_0'=4,'axis_1'=2], device_ids=([2,2,2]T(0,2,1)) {'axis_1'}", (0, 2)),
        ("mesh['a'=2,'b'=4] {'b'}", (0, 1, 2, 3)),
        ("mesh['a'=2,'b'=4] {'a','b'}", tuple(range(8))),
        ("mesh['a'=8] {'a':(2)2}", (0, 2)),
        ("mesh['a'=8] {'a':(1)2}", (0, 4)),
        ("{{3,1},{2,0}}", (3, 1)),
        ("[2,4]<=[8]", (0, 1, 2, 3)),
    ],
)
def test_forms_of_replica_groups(groups, first):
    text = TEXT.replace("replica_groups={{0,8},{1,9}}", f"replica_groups={groups}")
    (found,) = [one for one in parse_collectives(text) if one.kind == "all-reduce"]
    assert (found.group, found.group_size) == (first, len(first))


def test_axes_of_a_group():
    mesh = MeshSizes(2, 2, 1, 4, 1)
    assert mesh_axes((0, 1, 2, 3), mesh) == ("expert",)
    assert mesh_axes((0, 4), mesh) == ("data",)
    assert mesh_axes((3, 11), mesh) == ("replica",)
    assert mesh_axes(range(16), mesh) == ("replica", "data", "expert")
    assert mesh_axes((5,), mesh) == ()
