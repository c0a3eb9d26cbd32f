"""The routed experts in float64 without a transport: expert by expert, over the rows they keep."""

from typing import NamedTuple

import numpy as np
from tests.parallel.transport_cases import Inputs

from portolan.parallel.capacity import Capacities, PooledCapacities
from portolan.parallel.pooled import plan_pooled
from portolan.parallel.routing import count_assignments, keep_mask, plan


class Result(NamedTuple):
    """y [T, H], the gradients of sum(y * u), and the drops (sender, receiver, skipped)."""

    y: np.ndarray
    dx: np.ndarray
    dc: np.ndarray
    dgate: np.ndarray
    dup: np.ndarray
    ddown: np.ndarray
    drops: tuple[int, int, int]


class Kept(NamedTuple):
    """Which assignments [S, A] of an expert group are kept, and those refused at either side."""

    mask: np.ndarray
    sender: int
    receiver: int


def keep(ids: np.ndarray, capacities: Capacities | PooledCapacities) -> Kept:
    """The kept set of one group, ids int[S, A] with E for padding."""
    valid = ids < capacities.shape.num_experts
    if isinstance(capacities, PooledCapacities):
        found = plan_pooled(ids, capacities)
        return Kept(found.kept, *found.dropped(valid))
    counts = np.stack([count_assignments(row, capacities.shape.num_experts) for row in ids])
    accepted = plan(counts, capacities).accepted
    mask = np.stack([keep_mask(row, accepted[s]) for s, row in enumerate(ids)]) & valid
    lost = int(valid.sum() - mask.sum())
    return Kept(mask, *((lost, 0) if capacities.rule.gate == "cell" else (0, lost)))


def apply_dense(inputs: Inputs, masks: np.ndarray, drops: tuple[int, int, int]) -> Result:
    """Over all tokens; masks bool [T, K]."""
    x, u = inputs.x.astype(np.float64), inputs.u.astype(np.float64)
    c = np.asarray(inputs.c, np.float64)
    gate, up, down = (np.asarray(m, np.float64) for m in (inputs.gate, inputs.up, inputs.down))
    y, dx, dc = np.zeros_like(x), np.zeros_like(x), np.zeros_like(c)
    grads = [np.zeros_like(m) for m in (gate, up, down)]
    for e in range(len(gate)):
        t, k = np.nonzero(masks & (inputs.experts == e))
        z, weight = x[t], c[t, k][:, None]
        g, h = z @ gate[e], z @ up[e]
        sigma = 1 / (1 + np.exp(-g))
        inner = g * sigma * h
        out = inner @ down[e]
        np.add.at(y, t, weight * out)
        dc[t, k] = (u[t] * out).sum(axis=1)
        dout = weight * u[t]
        dinner = dout @ down[e].T
        dg, dh = dinner * h * (sigma + g * sigma * (1 - sigma)), dinner * g * sigma
        np.add.at(dx, t, dg @ gate[e].T + dh @ up[e].T)
        for total, part in zip(grads, (z.T @ dg, z.T @ dh, inner.T @ dout), strict=True):
            total[e] = part
    return Result(y, dx, dc, *grads, drops)
