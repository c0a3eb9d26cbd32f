"""Products of rows sorted by expert with the matrix of their expert; group sizes are traced.

Shapes: N rows, E experts of a shard, R columns in, F columns out, B blocks of P rows.

On CPU `jax.lax.ragged_dot` multiplies every row with every expert; there the rows of each expert
are padded to blocks, and a loop walks through the blocks in use (parallel.md 6.1). Elsewhere it is
`ragged_dot`: one instruction on TPUs, and on CUDA where XLA has a kernel for it; jaxlib 0.10.2
expands it there too (see `portolan.model.kernels`), to E times the products.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from portolan.model.kernels import platform
from portolan.parallel.capacity import choose_block_rows
from portolan.parallel.transports.rows import permute, zeros_after


class BlockPlan(NamedTuple):
    """Where rows lie in blocks; -1 is none.

    `row` [B*P] is the row of each place, `place` [N] its inverse, `expert` [B] the expert of each
    block. The first `num_used` blocks hold rows.
    """

    row: jax.Array
    place: jax.Array
    expert: jax.Array
    num_used: jax.Array


def plan_blocks(sizes: jax.Array, num_rows: int, block_rows: int) -> BlockPlan:
    """Blocks for groups of `sizes` int32[E] that begin at row 0 and hold at most `num_rows`."""
    num_experts = sizes.size
    num_blocks = (num_rows + num_experts * (block_rows - 1)) // block_rows
    blocks = (sizes + block_rows - 1) // block_rows
    end_block, end_row = jnp.cumsum(blocks), jnp.cumsum(sizes)
    first_block, first_row = end_block - blocks, end_row - sizes

    def owner(ends: jax.Array, count: int) -> jax.Array:
        index = jnp.arange(count, dtype=jnp.int32)
        found = jnp.sum(ends <= index[:, None], axis=1, dtype=jnp.int32)
        return jnp.minimum(found, num_experts - 1)

    block_expert = owner(end_block, num_blocks)
    rank = (jnp.arange(num_blocks, dtype=jnp.int32) - first_block[block_expert]) * block_rows
    rank = rank[:, None] + jnp.arange(block_rows, dtype=jnp.int32)
    row = jnp.where(
        rank < sizes[block_expert][:, None], first_row[block_expert][:, None] + rank, -1
    )
    expert = owner(end_row, num_rows)
    index = jnp.arange(num_rows, dtype=jnp.int32)
    place = first_block[expert] * block_rows + index - first_row[expert]
    place = jnp.where(index < end_row[-1], place, -1)
    return BlockPlan(row.reshape(-1), place, block_expert, end_block[-1])


@jax.custom_vjp
def multiply_blocks(x_BPR: jax.Array, matrix_ERF: jax.Array, plan: BlockPlan) -> jax.Array:
    """Every block times the matrix of its expert, [B, P, F]; blocks that are not in use are 0."""

    def multiply(index, y_BPF):
        return y_BPF.at[index].set(x_BPR[index] @ matrix_ERF[plan.expert[index]])

    shape = (*x_BPR.shape[:2], matrix_ERF.shape[2])
    return jax.lax.fori_loop(0, plan.num_used, multiply, zeros_after(x_BPR, shape))


def _forward(x_BPR, matrix_ERF, plan):
    return multiply_blocks(x_BPR, matrix_ERF, plan), (x_BPR, matrix_ERF, plan)


def _backward(saved, grad_BPF):
    """The matrices' gradient is summed in float32, in place."""
    x_BPR, matrix_ERF, plan = saved

    def add(index, carry):
        dx_BPR, dmatrix_ERF = carry
        expert, grad_PF = plan.expert[index], grad_BPF[index]
        product = jnp.matmul(x_BPR[index].T, grad_PF, preferred_element_type=jnp.float32)
        dx_PR = grad_PF @ matrix_ERF[expert].T
        return dx_BPR.at[index].set(dx_PR), dmatrix_ERF.at[expert].add(product)

    zero = zeros_after(grad_BPF, ())
    zeros = (
        jnp.broadcast_to(zero, x_BPR.shape),
        jnp.broadcast_to(zero.astype(jnp.float32), matrix_ERF.shape),
    )
    dx_BPR, dmatrix_ERF = jax.lax.fori_loop(0, plan.num_used, add, zeros)
    return dx_BPR, dmatrix_ERF.astype(matrix_ERF.dtype), None


multiply_blocks.defvjp(_forward, _backward)


class Layout(NamedTuple):
    """How the rows of a buffer lie while they are multiplied: in blocks, or as they are.

    `sizes` [E] add up to N: rows without an expert, zeros at the end, count as the last expert's.
    """

    sizes: jax.Array
    blocks: BlockPlan | None

    def enter(self, rows: jax.Array) -> jax.Array:
        """Rows [N, R] as `multiply` wants them."""
        if self.blocks is None:
            return rows
        packed = permute(rows, self.blocks.row, self.blocks.place)
        return packed.reshape(self.blocks.expert.size, -1, rows.shape[1])

    def multiply(self, x: jax.Array, matrix_ERF: jax.Array) -> jax.Array:
        """Every row times the matrix of its expert."""
        if self.blocks is None:
            return jax.lax.ragged_dot(x, matrix_ERF, self.sizes)
        return multiply_blocks(x, matrix_ERF, self.blocks)

    def leave(self, y: jax.Array) -> jax.Array:
        """Rows [N, F] in their order again."""
        if self.blocks is None:
            return y
        return permute(y.reshape(-1, y.shape[-1]), self.blocks.place, self.blocks.row)


def choose_layout(sizes: jax.Array, num_rows: int, expected_rows: int) -> Layout:
    """Blocks on CPU, plain rows elsewhere, for groups of `sizes` int32[E] from row 0 on.

    About `expected_rows` of the `num_rows` are likely to be in groups.
    """
    if platform() == "cpu":
        block_rows = choose_block_rows(expected_rows, sizes.size)
        return Layout(sizes, plan_blocks(sizes, num_rows, block_rows))
    return Layout(sizes.at[-1].add(num_rows - sizes.sum(dtype=sizes.dtype)), None)


def grouped_matmul(x_NR: jax.Array, matrix_ERF: jax.Array, sizes: jax.Array) -> jax.Array:
    """Rows sorted by expert times the matrix of their expert, [N, F]; 0 beyond the groups if x is.

    Group e holds `sizes[e]` rows; the groups begin at row 0.
    """
    layout = choose_layout(sizes, x_NR.shape[0], x_NR.shape[0])
    return layout.leave(layout.multiply(layout.enter(x_NR), matrix_ERF))
