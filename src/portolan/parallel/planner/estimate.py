"""The plan of a recipe on a mesh, and what a machine makes of it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from portolan.accounting import FLOAT32_BYTES
from portolan.errors import UsageError
from portolan.parallel.capacity import INT32_LIMIT
from portolan.parallel.planner import memory as memory_plans
from portolan.parallel.planner.exchange import (
    Exchange,
    Routing,
    describe_routing,
    num_waves,
    plan_exchange,
)
from portolan.parallel.planner.goodput import Failures, failures_of_job
from portolan.parallel.planner.machines import Machine
from portolan.parallel.planner.memory import Kernels, Master, MemoryPlan, share_of_state
from portolan.parallel.planner.mesh import (
    Leaf,
    Load,
    MeshSizes,
    describe_misfits,
    list_leaves,
    resolve_mesh,
    share_of_batch,
)
from portolan.parallel.planner.roofline import (
    DeviceFlops,
    StepTime,
    count_flops,
    memory_traffic,
    time_step,
)
from portolan.parallel.planner.traffic import Flow, list_flows
from portolan.recipe import Recipe
from portolan.shapes import ModelConfig

MAX_MEMORY_SHARE = 0.9
"""A plan above this share of the device's memory is refused unless forced."""


@dataclass(frozen=True)
class ParallelPlan:
    """A target on a mesh: what one device gets of the batch and of every parameter."""

    recipe: Recipe
    config: ModelConfig
    batch_sequences: int
    steps: int
    mesh: MeshSizes
    load: Load
    leaves: tuple[Leaf, ...]

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        config: ModelConfig,
        batch_sequences: int,
        steps: int,
        num_devices: int | None = None,
        num_micro_batches: int = 1,
    ) -> "ParallelPlan":
        """The plan of a target on the recipe's mesh, an update in so many micro-batches.

        Raises:
            UsageError: the mesh does not fit the devices, the batch, the rows or the experts.
        """
        mesh = resolve_mesh(recipe.parallel.mesh, num_devices)
        load = share_of_batch(mesh, batch_sequences, config.sequence_length, num_micro_batches)
        plan = cls(
            recipe,
            config,
            batch_sequences,
            steps,
            mesh,
            load,
            list_leaves(recipe, config, mesh),
        )
        if config.mlp != "dense":
            plan.exchange(plan.kernels("cuda"))
        assignments = plan.tokens_per_step // num_micro_batches * config.experts_per_token
        if mesh.num_devices > 1 and assignments >= INT32_LIMIT:
            raise UsageError(
                f"{assignments:,} assignments of a layer do not fit the 32-bit counts of drops",
                remedy="use a smaller batch",
            )
        return plan

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one update."""
        return self.batch_sequences * self.config.sequence_length

    @property
    def transport(self) -> str:
        """What moves routed rows; `dense` where there are none."""
        if self.config.mlp == "dense":
            return "dense"
        return self.recipe.parallel.transport_on(self.mesh.expert)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What does not divide, and what is computed more than once."""
        lines = describe_misfits(self.config, self.mesh)
        if self.mesh.model > 1:
            lines.append(
                f"model {self.mesh.model} splits the experts alone: the rest of every layer is "
                f"computed {self.mesh.model} times"
            )
        return tuple(lines)

    def kernels(self, platform: str) -> Kernels:
        """What programs do on a platform."""
        return Kernels.of(platform, self.recipe.train.compute_dtype, context=self.mesh.context)

    def routing(self, kernels: Kernels) -> Routing | None:
        """Sizes of the exchange; None in a dense model."""
        if self.config.mlp == "dense":
            return None
        return describe_routing(
            self.recipe.parallel, self.config, self.mesh, self.load, kernels.value_bytes
        )

    def exchange(self, kernels: Kernels) -> Exchange | None:
        """The exchange of the recipe's transport."""
        routing = self.routing(kernels)
        return routing and plan_exchange(routing, self.transport, on_cpu=kernels.on_cpu)

    def alternatives(self, kernels: Kernels) -> Iterator[tuple[str, Exchange | UsageError]]:
        """(name, exchange or why it is impossible) of every transport and gate between devices."""
        routing = self.routing(kernels)
        if routing is None or self.mesh.expert == 1:
            return
        waves = num_waves(routing)
        cases = [
            ("ring", "ring", routing),
            ("cell", "cell", routing),
            (f"pooled, {waves} waves", "pooled", replace(routing, num_waves=waves)),
        ]
        for gate, name in (("receiver",) * 2, ("waterfill",) * 2, ("none", "no gate")):
            rule = replace(routing.rule, gate=gate)
            cases.append((f"ragged, {name}", "ragged", replace(routing, rule=rule)))
        for name, transport, one in cases:
            try:
                yield name, plan_exchange(one, transport, on_cpu=kernels.on_cpu)
            except UsageError as error:
                yield name, error

    def flows(self, kernels: Kernels, exchange: Exchange | None = None) -> tuple[Flow, ...]:
        """Bytes that leave a device in one update."""
        return list_flows(
            self.config,
            self.leaves,
            self.mesh,
            self.load,
            self.recipe.train.remat,
            exchange or self.exchange(kernels),
            value_bytes=kernels.value_bytes,
        )

    def memory(
        self, master: Master, kernels: Kernels, exchange: Exchange | None = None
    ) -> MemoryPlan:
        """Memory of one device."""
        work = memory_plans.plan_work(
            self.config,
            self.leaves,
            self.mesh,
            self.load,
            self.recipe.train.remat,
            kernels,
            exchange or self.exchange(kernels),
        )
        on_host = work.saved_activations if self.recipe.train.offload_carries else 0
        work = replace(work, saved_activations=work.saved_activations - on_host)
        found = memory_plans.plan_memory(
            master, self.leaves, self.mesh, work, value_bytes=kernels.value_bytes
        )
        return replace(found, host=found.host + on_host)

    def flops(self, kernels: Kernels) -> DeviceFlops:
        """FLOPs of one device and update."""
        remat = self.recipe.train.remat
        exchange = self.exchange(kernels)
        return count_flops(self.config, self.leaves, self.mesh, self.load, remat, exchange)

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Parameters and optimizer state of one replica, float32."""
        return FLOAT32_BYTES * sum(
            leaf.size * (2 if leaf.group == "muonh" else 3) for leaf in self.leaves
        )

    def on(self, machine: Machine, master: Master = "resident") -> "MachinePlan":
        """What a machine makes of this plan."""
        kernels = self.kernels(machine.platform)
        flows = self.flows(kernels)
        traffic = memory_traffic(
            self.config,
            self.leaves,
            self.mesh,
            self.load,
            self.recipe.train.remat,
            self.exchange(kernels),
            value_bytes=kernels.value_bytes,
        )
        flops = self.flops(kernels)
        return MachinePlan(
            plan=self,
            machine=machine,
            kernels=kernels,
            memory=self.memory(master, kernels),
            flows=flows,
            flops=flops,
            step=time_step(machine, self.mesh, flops, traffic, flows),
        )


@dataclass(frozen=True)
class MachinePlan:
    """A plan on a machine: whether it fits, how long an update takes, what failures cost."""

    plan: ParallelPlan
    machine: Machine
    kernels: Kernels
    memory: MemoryPlan
    flows: tuple[Flow, ...]
    flops: DeviceFlops
    step: StepTime

    @property
    def memory_share(self) -> float:
        """Peak over the memory of a device."""
        return self.memory.peak / self.machine.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak leaves room."""
        return self.memory_share <= MAX_MEMORY_SHARE

    def mfu(self, step_seconds: float) -> float | None:
        """Model FLOPs utilisation at a step time, published convention; None on a CPU."""
        if self.machine.platform == "cpu":
            return None
        return self.flops.model / (step_seconds * self.machine.peak_flops_per_second)

    def seconds_at(self, mfu: float) -> float:
        """Step time at a utilisation."""
        return self.flops.model / (mfu * self.machine.peak_flops_per_second)

    @cached_property
    def failures(self) -> Failures:
        """Failures of the whole job; a checkpoint stops training while all devices write it."""
        devices = self.plan.mesh.num_devices
        seconds = self.plan.checkpoint_bytes / devices / self.machine.checkpoint_bytes_per_second
        return failures_of_job(
            devices,
            self.machine.mean_hours_between_failures,
            self.machine.restart_seconds,
            seconds,
        )

    @property
    def goodput(self) -> float:
        """Share of the time that trains, at the recipe's checkpoint interval."""
        return self.failures.goodput(self.plan.recipe.train.temporary_checkpoint_seconds)

    def run_seconds(self, step_seconds: float) -> float:
        """Seconds of the whole run at a step time, failures included; infinite where none ends."""
        return self.plan.steps * step_seconds / self.goodput if self.goodput else math.inf

    def refuse_misfit(self) -> None:
        """Raises UsageError where the peak is above 90 % of a device's memory."""
        if self.fits:
            return
        raise UsageError(
            f"{gib(self.memory.peak)} GiB a device are {100 * self.memory_share:.0f} % of the "
            f"{gib(self.machine.memory_bytes)} GiB of {self.machine.name}; the limit is "
            f"{100 * MAX_MEMORY_SHARE:.0f} %",
            remedy="use more devices, train.remat = 'layer', more chunks, or --master device; "
            "--force plans it all the same",
        )


def gib(num_bytes: float) -> str:
    """Bytes in GiB with two decimals."""
    return f"{num_bytes / 2**30:,.2f}"


def summary_of_state(plan: ParallelPlan) -> dict[str, dict[str, int]]:
    """Float32 bytes of parameters and optimizer state of one device, by part."""
    return {
        share.part: {
            "parameters": FLOAT32_BYTES * share.parameters,
            "optimizer": FLOAT32_BYTES * share.moments,
        }
        for share in share_of_state(plan.leaves, plan.mesh)
    }
