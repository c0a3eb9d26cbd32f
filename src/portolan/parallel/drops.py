"""Assignments that reached no expert, by cause: counted in int32 on devices, summed in int64 here.

A step of the public run has 17.7 billion assignments over all layers, beyond int32 (parallel.md 7).
No JAX here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from portolan.errors import PortolanError
from portolan.model.drops import Drops

Cause = Literal["sender_cell", "sender_pool", "receiver_capacity", "padding_skipped"]


def layer_causes(drops: Drops, transport: str) -> dict[Cause, NDArray[np.int64]]:
    """Assignments [L] by cause, of the layers' drops; senders of `pooled` share pools of rows."""
    sender, receiver, skipped = (np.atleast_1d(np.asarray(part, np.int64)) for part in drops)
    none = np.zeros_like(sender)
    pooled = transport == "pooled"
    return {
        "sender_cell": none if pooled else sender,
        "sender_pool": sender if pooled else none,
        "receiver_capacity": receiver,
        "padding_skipped": skipped,
    }


DROP_FRACTION = "drops/drop_fraction"
"""Key of the metric that `DropTotals.metrics` has for `drop_fraction`."""


@dataclass(frozen=True)
class DropTotals:
    """Sums over layers, in int64: `assignments` = B * sequence length * K * L, and their causes.

    `worst_layer` has the largest fraction of its valid assignments dropped, `worst_fraction`.
    """

    assignments: int
    sender_cell: int
    sender_pool: int
    receiver_capacity: int
    padding_skipped: int
    worst_layer: int
    worst_fraction: float

    @property
    def valid(self) -> int:
        """Assignments of tokens that are no padding."""
        return self.assignments - self.padding_skipped

    @property
    def sender(self) -> int:
        """Refused before they were sent."""
        return self.sender_cell + self.sender_pool

    @property
    def receiver(self) -> int:
        """Refused by the limits of their expert's owner."""
        return self.receiver_capacity

    @property
    def drop_fraction(self) -> float:
        """Of the valid assignments."""
        return (self.sender + self.receiver) / max(self.valid, 1)

    @property
    def receiver_fraction(self) -> float:
        """Of those that passed the senders."""
        return self.receiver / max(self.valid - self.sender, 1)

    @property
    def skipped_fraction(self) -> float:
        """Padding's share of all assignments."""
        return self.padding_skipped / self.assignments

    def metrics(self) -> dict[str, float]:
        """{metric key: value} of one update."""
        counts = ("sender_cell", "sender_pool", "receiver_capacity", "padding_skipped")
        shares = ("drop_fraction", "receiver_fraction", "skipped_fraction")
        shares = (*shares, "worst_fraction", "worst_layer")
        return {f"drops/{name}": float(getattr(self, name)) for name in (*counts, *shares)}


def total_drops(drops: Drops, transport: str, valid_per_layer: int, per_layer: int) -> DropTotals:
    """Totals of the layers' drops [L].

    `per_layer` = B * sequence length * K; `valid_per_layer` is counted on the host, K for every
    token of a document.

    Raises:
        PortolanError: the devices' counts contradict it, or drop more than there was.
    """
    causes = layer_causes(drops, transport)
    lost = causes["sender_cell"] + causes["sender_pool"] + causes["receiver_capacity"]
    _check(causes, lost, valid_per_layer, per_layer)
    fractions = lost / max(valid_per_layer, 1)
    worst = int(np.argmax(fractions))
    return DropTotals(
        assignments=per_layer * len(lost),
        sender_cell=int(causes["sender_cell"].sum()),
        sender_pool=int(causes["sender_pool"].sum()),
        receiver_capacity=int(causes["receiver_capacity"].sum()),
        padding_skipped=int(causes["padding_skipped"].sum()),
        worst_layer=worst,
        worst_fraction=float(fractions[worst]),
    )


def _check(
    causes: dict[Cause, NDArray[np.int64]], lost: NDArray[np.int64], valid: int, per_layer: int
) -> None:
    """valid + skipped is everything, and no count is negative or above it, layer by layer."""
    wrong: Sequence[tuple[str, NDArray[np.bool_]]] = (
        *((f"{cause} < 0", counts < 0) for cause, counts in causes.items()),
        (f"valid {valid} + skipped != {per_layer}", causes["padding_skipped"] != per_layer - valid),
        (f"dropped > valid {valid}", lost > valid),
    )
    for what, layers in wrong:
        if layers.any():
            layer = int(np.argmax(layers))
            counts = {cause: int(values[layer]) for cause, values in causes.items()}
            raise PortolanError(
                f"the drop counts of layer {layer} contradict the batch: {what} ({counts})",
                remedy="report it with the recipe: the exchange of routed rows is wrong",
            )
