"""The kept set of the pooled-wave transport, over flat expert ids (parallel.md 6.4).

It is no function of the counts: senders drop by the rank of a row among all rows to one owner,
receivers by its rank among the rows of one expert, counted position by position over the senders.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from portolan.parallel.capacity import PooledCapacities
from portolan.parallel.routing import rank_in_class


@dataclass(frozen=True)
class PooledPlan:
    """Fate of every assignment of S shards: all arrays are [S,A].

    `wave` and `position` int32 say where a row travels, `sent` and `kept` bool whether it passed
    the sender and the receiver, `rank` int32 its place in the receiver's rows of its expert.
    """

    wave: NDArray[np.int32]
    position: NDArray[np.int32]
    sent: NDArray[np.bool_]
    rank: NDArray[np.int32]
    kept: NDArray[np.bool_]

    def dropped(self, valid: NDArray[np.bool_]) -> tuple[int, int]:
        """Assignments lost at the senders and at the receivers."""
        at_sender = int(np.count_nonzero(valid & ~self.sent))
        return at_sender, int(np.count_nonzero(self.sent & ~self.kept))


def plan_pooled(ids: NDArray[np.integer[Any]], capacities: PooledCapacities) -> PooledPlan:
    """Reference of the pooled gate for ids int[S,A]; ids >= E are padding."""
    shape, waves = capacities.shape, capacities.num_waves
    valid = ids < shape.num_experts
    owner = np.where(valid, ids // shape.local_experts, shape.num_shards)
    rank = np.stack([rank_in_class(row, shape.num_shards) for row in owner])
    wave, position = (rank % waves).astype(np.int32), (rank // waves).astype(np.int32)
    send_limit = capacities.send.logical(valid.sum(axis=1), np)
    sent = valid & (position < np.asarray(send_limit)[:, None])
    receive_limit = int(capacities.receive.logical(valid.sum(), np))
    arrival = np.zeros(ids.shape, np.int32)
    senders = np.broadcast_to(np.arange(shape.num_shards)[:, None], ids.shape)
    order = np.lexsort((senders[sent], position[sent]))
    classes = (wave[sent].astype(np.int64) * shape.num_experts + ids[sent])[order]
    ranks = np.empty(len(order), np.int32)
    ranks[order] = rank_in_class(classes, waves * shape.num_experts)
    arrival[sent] = ranks
    return PooledPlan(wave, position, sent, arrival, sent & (arrival < receive_limit))
