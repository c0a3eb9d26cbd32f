"""On which devices and with how many processes a run is trained."""

from dataclasses import dataclass
from typing import Any

from portolan.errors import UsageError
from portolan.parallel_settings import INFERRED, MeshSettings, ParallelSettings

HEARTBEAT_SECONDS = 20
"""Without a sign of life for this long a process counts as lost."""
START_SECONDS = 600
"""How long a process waits for the others to start."""


@dataclass(frozen=True)
class Machine:
    """What the command line says about it.

    `mesh` names axes and sizes, `expert=4,data=2`; empty takes the recipe's. `coordinator` is
    HOST:PORT of process 0; with `detect` all three come from Slurm, MPI or Kubernetes. A batch is
    worked off in `num_micro_batches`.
    """

    mesh: str = ""
    coordinator: str = ""
    num_processes: int | None = None
    process_id: int | None = None
    detect: bool = False
    num_micro_batches: int = 1

    def __post_init__(self) -> None:
        """Refuse half of a description."""
        named = (self.coordinator or None, self.num_processes, self.process_id)
        given = [value is not None for value in named]
        if any(given) and not all(given):
            raise UsageError(
                "--coordinator, --num-processes and --process-id belong together",
                remedy="give all three, or --distributed to read them from the scheduler",
            )
        if self.detect and any(given):
            raise UsageError("--distributed reads what --coordinator says", remedy="give one")

    @property
    def is_shared(self) -> bool:
        """Whether other processes train the same run."""
        return self.detect or bool(self.coordinator)

    def join(self) -> None:
        """Meet the other processes; before anything else uses JAX.

        Raises:
            UsageError: they do not come, or no scheduler says who they are.
        """
        if not self.is_shared:
            return
        import jax

        from portolan.console import console

        try:
            jax.distributed.initialize(
                self.coordinator or None,
                self.num_processes,
                self.process_id,
                initialization_timeout=START_SECONDS,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            )
        except (RuntimeError, ValueError) as error:
            raise UsageError(
                f"the processes of this run did not meet: {str(error).splitlines()[0]}",
                remedy="start all of them, each with its own --process-id and one --coordinator",
            ) from error
        console.quiet = jax.process_index() > 0

    def devices(self, settings: ParallelSettings) -> Any:
        """The mesh to train on, or None for one device."""
        from portolan.train.devices import find_devices

        if self.mesh:
            settings = settings.model_copy(update={"mesh": parse_mesh(self.mesh)})
        return find_devices(settings, self.num_micro_batches)


ONE_PROCESS = Machine()


def parse_mesh(text: str) -> MeshSettings:
    """`expert=4,data=2` as a mesh; an axis that is not named has length 1.

    Raises:
        UsageError: an unknown axis, or a length that is none.
    """
    sizes: dict[str, int] = {"data": 1}
    axes = ", ".join(MeshSettings.model_fields)
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        number = int(size) if size.lstrip("-").isdigit() else 0
        inferred = number == INFERRED and name == "data"
        if name not in MeshSettings.model_fields or not (number > 0 or inferred):
            raise UsageError(
                f"--mesh {text!r}: {part!r} is no axis with its length",
                remedy=f"write it as expert=4,data=2; axes are {axes}, and data=-1 takes the rest",
            )
        sizes[name] = number
    return MeshSettings(**sizes)  # type: ignore[arg-type]
