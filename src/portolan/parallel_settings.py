"""Settings of a run on many devices: its mesh, and how routed rows reach their experts."""

import math
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from portolan.errors import UsageError
from portolan.settings import PositiveInt, Settings

Transport = Literal["auto", "grouped", "ring", "cell", "pooled", "ragged"]
Gate = Literal["none", "cell", "receiver", "waterfill"]
CapacityFactor = Annotated[str, Field(pattern=r"^[0-9]*\.?[0-9]+$")]
INFERRED = -1


class MeshSettings(Settings):
    """Devices by axis; -1 for `data` takes those that are left over.

    `replica` holds whole copies of the model, `data` splits its matrices, `context` the positions
    of a row, `expert` the experts, `model` the inner width of each expert.
    """

    replica: PositiveInt = 1
    data: PositiveInt | Literal[-1] = INFERRED
    context: PositiveInt = 1
    expert: PositiveInt = 1
    model: PositiveInt = 1

    @property
    def num_fixed(self) -> int:
        """Devices of all axes whose size is given."""
        sizes = (self.replica, self.data, self.context, self.expert, self.model)
        return math.prod(size for size in sizes if size != INFERRED)

    def sizes_on(self, num_devices: int, *, found: str, remedy: str) -> dict[str, int]:
        """Length of every axis on `num_devices` devices; `found` says in an error where they are.

        Raises:
            UsageError: the axes need more devices.
        """
        sizes = self.model_dump()
        if self.num_fixed > num_devices:
            shape = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
            raise UsageError(
                f"the mesh {shape} needs {self.num_fixed} devices, {found}", remedy=remedy
            )
        if self.data == INFERRED:
            sizes["data"] = num_devices // self.num_fixed
        return sizes


class ParallelSettings(Settings):
    """How a run is spread over devices.

    The mesh says where it runs and changes no more than rounding, unless rows are dropped. `auto`
    is `grouped` where every device holds all experts, else `ragged`. The gate `none` drops
    nothing; `cell`, `receiver` and `waterfill` bound the rows that an expert's owner takes to
    `capacity_factor` times the mean, written as a decimal string because it is read as an exact
    fraction. The transport `pooled` has gates of its own, at the sender (`capacity_factor`) and at
    the receiver (`receive_capacity_factor`, the same unless given). `group_size` experts in a row
    lend each other unused rows under `waterfill`.
    """

    mesh: MeshSettings = MeshSettings()
    transport: Transport = "auto"
    gate: Gate = "none"
    capacity_factor: CapacityFactor = "1.15"
    receive_capacity_factor: CapacityFactor | None = None
    num_chunks: PositiveInt = 1
    num_waves: PositiveInt = 1
    group_size: PositiveInt = 1
    order: Literal["source_major", "round_robin"] = "source_major"

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> "ParallelSettings":
        if self.transport == "cell" and self.gate != "cell":
            raise ValueError("transport 'cell' needs gate 'cell'")
        if self.transport in ("grouped", "pooled") and self.gate != "none":
            raise ValueError(f"transport {self.transport!r} has no gate; leave it out")
        return self

    def transport_on(self, expert_axis: int) -> Transport:
        """The transport on an expert axis of that length: what `auto` stands for."""
        if self.transport != "auto":
            return self.transport
        return "grouped" if expert_axis == 1 and self.gate == "none" else "ragged"

    @property
    def drops_rows(self) -> bool:
        """Whether this plan can drop rows, so that it changes what is learnt."""
        return self.gate != "none" or self.transport == "pooled"

    def identity(self) -> dict[str, Any]:
        """What changes a run beyond rounding, whatever its mesh; empty without drops."""
        return self.model_dump(mode="json", exclude={"mesh"}) if self.drops_rows else {}
