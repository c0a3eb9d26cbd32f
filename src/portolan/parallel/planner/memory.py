"""What one device holds: state by group, and what meets at the peak of an update (parallel.md 8).

A model of the gradient program, not a measurement: `portolan plan --compile` shows what the
compiler reserves.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from portolan import accounting
from portolan.accounting import FLOAT32_BYTES
from portolan.parallel.planner.exchange import Exchange
from portolan.parallel.planner.mesh import Leaf, Load, MeshSizes
from portolan.shapes import ModelConfig, Remat

Master = Literal["resident", "device", "host_master"]
MASTERS: dict[Master, str] = {
    "resident": "float32 parameters and optimizer state on the device: what `train` does",
    "device": "float32 parameters on the device, optimizer state in pinned host memory",
    "host_master": "a bfloat16 copy on the device, float32 master and optimizer state on the host",
}
"""Where the state lives (parallel.md 10)."""
ACTIVATIONS_OVER_WIDTH = 10
"""Rows of model width, in float32, that the gradient of one layer holds beside the experts."""
SCORE_COPIES = 3
"""Of the attention weights where no fused kernel computes them."""


@dataclass(frozen=True)
class StateShare:
    """Entries of one part of the parameters on one device, and of their optimizer state."""

    part: str
    parameters: int
    moments: int


def share_of_state(leaves: Iterable[Leaf], mesh: MeshSizes) -> tuple[StateShare, ...]:
    """Shares of the experts, the split matrices and the replicated leaves."""
    leaves = tuple(leaves)
    return tuple(
        StateShare(
            part,
            sum(leaf.local_size(mesh) for leaf in leaves if leaf.part == part),
            sum(
                leaf.local_size(mesh) * (1 if leaf.group == "muonh" else 2)
                for leaf in leaves
                if leaf.part == part
            ),
        )
        for part in ("experts", "matrices", "replicated")
    )


@dataclass(frozen=True)
class Kernels:
    """What a machine's programs do: bytes of an activation, entries of a block of logits, and
    whether attention weights exist."""

    value_bytes: int
    logits_entries: int
    fused_attention: bool
    on_cpu: bool

    @classmethod
    def of(cls, platform: str, compute_dtype: str, *, context: int) -> "Kernels":
        """Those of `cuda`, `tpu` or `cpu`; `auto` computes in bfloat16 but on a CPU."""
        on_cpu = platform == "cpu"
        wide = compute_dtype == "float32" or (compute_dtype == "auto" and on_cpu)
        return cls(
            value_bytes=FLOAT32_BYTES if wide else FLOAT32_BYTES // 2,
            logits_entries=accounting.CPU_LOGITS_ENTRIES
            if on_cpu
            else accounting.ACCELERATOR_LOGITS_ENTRIES,
            fused_attention=platform == "cuda" and not wide and context == 1,
            on_cpu=on_cpu,
        )


@dataclass(frozen=True)
class Work:
    """Temporaries of the gradient program of one device, in bytes.

    The saved activations and the parameters outside the layers meet either the logits block or the
    work of one layer: its gathered weights and their gradients, its activations, and the larger of
    its attention weights and its expert exchange. `accumulated` is what micro-batches leave: a
    second gradient, and every layer's histograms of router margins.
    """

    saved_activations: int
    outside_layers: int
    logits_block: int
    layer_weights: int
    layer_activations: int
    attention_weights: int
    exchange_forward: int
    exchange_backward: int
    accumulated: int

    @property
    def layer(self) -> int:
        """Work of one layer."""
        exchange = self.exchange_forward + self.exchange_backward
        return self.layer_weights + self.layer_activations + max(self.attention_weights, exchange)

    @property
    def total(self) -> int:
        """All that is alive at the worst moment of the gradient program."""
        held = self.saved_activations + self.outside_layers + self.accumulated
        return held + max(self.layer, self.logits_block)


def plan_work(
    config: ModelConfig,
    leaves: Iterable[Leaf],
    mesh: MeshSizes,
    load: Load,
    remat: Remat,
    kernels: Kernels,
    exchange: Exchange | None,
) -> Work:
    """Temporaries of the gradient program."""
    leaves = tuple(leaves)
    layer = sum(leaf.gathered_size(mesh) for leaf in leaves if leaf.in_layers) // config.num_layers
    copied = [
        leaf.gathered_size(mesh)
        for leaf in leaves
        if not leaf.in_layers and (kernels.value_bytes < FLOAT32_BYTES or any(leaf.gathered_axes))
    ]
    per_token = accounting.saved_bytes_per_token(config, remat, kernels.value_bytes)
    rows_kept = exchange.kept if exchange and remat == "none" else 0
    scores = load.tokens * config.sequence_length * config.num_heads * FLOAT32_BYTES
    if mesh.context == 1:
        scores //= 2
    block = min(load.tokens, max(1, kernels.logits_entries // config.vocab_size))
    rows = ACTIVATIONS_OVER_WIDTH * config.width + 2 * config.num_experts
    return Work(
        saved_activations=round(config.num_layers * (load.tokens * per_token + rows_kept)),
        outside_layers=kernels.value_bytes * sum(copied),
        logits_block=accounting.LOGITS_COPIES * FLOAT32_BYTES * block * config.vocab_size,
        layer_weights=2 * kernels.value_bytes * layer,
        layer_activations=FLOAT32_BYTES * load.tokens * rows,
        attention_weights=0 if kernels.fused_attention else SCORE_COPIES * scores,
        exchange_forward=exchange.buffer_bytes if exchange else 0,
        exchange_backward=exchange.backward if exchange else 0,
        accumulated=_accumulated_bytes(config, leaves, mesh, load),
    )


def _accumulated_bytes(
    config: ModelConfig, leaves: Iterable[Leaf], mesh: MeshSizes, load: Load
) -> int:
    if load.num_micro_batches == 1:
        return 0
    histograms = config.num_layers * config.num_balance_biases * config.qb_bins
    entries = sum(leaf.local_size(mesh) for leaf in leaves)
    return FLOAT32_BYTES * (entries + load.num_micro_batches * histograms)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one device and of its share of a host, and the peak of an update.

    `update` is what the optimizer needs beside the state: with the state on the device as much as
    the state once more; else three tensors of the largest leaf at a time.
    """

    master: Master
    parameters: int
    gradients: int
    optimizer: int
    host: int
    update: int
    work: Work

    @property
    def resident(self) -> int:
        """What lies on the device through the whole update."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """The most that is alive at once."""
        return self.resident + max(self.work.total, self.update)

    def as_dict(self) -> dict:
        """All terms, for JSON."""
        return dataclasses.asdict(self) | {"resident": self.resident, "peak": self.peak}


def plan_memory(
    master: Master, leaves: Iterable[Leaf], mesh: MeshSizes, work: Work, *, value_bytes: int
) -> MemoryPlan:
    """Memory of one device with the state in a place of `MASTERS`."""
    leaves = tuple(leaves)
    shares = share_of_state(leaves, mesh)
    parameters = sum(share.parameters for share in shares)
    optimizer = FLOAT32_BYTES * sum(share.moments for share in shares)
    largest = max(leaf.local_size(mesh) for leaf in leaves)
    on_host = master != "resident"
    master_bytes = FLOAT32_BYTES * parameters if master == "host_master" else 0
    return MemoryPlan(
        master=master,
        parameters=(value_bytes if master == "host_master" else FLOAT32_BYTES) * parameters,
        gradients=(value_bytes if master == "host_master" else FLOAT32_BYTES) * parameters,
        optimizer=0 if on_host else optimizer,
        host=optimizer + master_bytes if on_host else 0,
        update=3 * FLOAT32_BYTES * largest if on_host else optimizer,
        work=work,
    )
