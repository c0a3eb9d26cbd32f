"""The processes that train one run together. One of them leads: it alone writes to the project.

Decisions that depend on time, on the disk or on a signal are the lead's; the others are told, so
that all processes run the same programs in the same order.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from portolan import __version__
from portolan.errors import PeerLost, PortolanError, StorageError

FAILURE = "failure"


@dataclass(frozen=True)
class Crew:
    """Processes of this run: their number, and which one this is."""

    size: int
    index: int

    @classmethod
    def of_jax(cls) -> "Crew":
        """The processes that `jax.distributed` joined; one without it."""
        return cls(jax.process_count(), jax.process_index())

    @property
    def leads(self) -> bool:
        """Whether this process decides and writes."""
        return self.index == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process."""
        return self.size == 1

    def wait(self, name: str, seconds: float) -> None:
        """Wait for all processes, on the hosts: collectives of devices give up after 30 s.

        Raises:
            PeerLost: names the processes that did not come.
        """
        if self.is_alone:
            return
        import orbax.checkpoint as ocp

        barrier = ocp.multihost.get_barrier_sync_fn()
        try:
            barrier(key=f"portolan-{name}", timeout_ms=int(1000 * seconds))
        except jax.errors.JaxRuntimeError as error:
            raise PeerLost(
                f"not all {self.size} processes came to {name!r} within {seconds:g} s: {error}",
                remedy="see the output of the absent ones, then start all of them again",
            ) from error

    def tell(self, value: Any) -> Any:
        """The lead's JSON value, in every process."""
        if self.is_alone:
            return value
        text = json.dumps(value if self.leads else None).encode()
        length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
        buffer = np.zeros(length, np.uint8)
        if self.leads:
            buffer[:] = np.frombuffer(text, np.uint8)
        told = np.asarray(multihost_utils.broadcast_one_to_all(buffer))
        return json.loads(told.astype(np.uint8).tobytes())

    def decide(self, choose: Callable[[], Any]) -> Any:
        """What the lead chose; its failure is everybody's.

        Raises:
            PortolanError: the lead's error, or in the others one that repeats its words; a
                StorageError where the disk was to blame.
        """
        if self.is_alone:
            return choose()
        if not self.leads:
            told = self.tell(None)
            if FAILURE in told:
                kind = StorageError if told["storage"] else PortolanError
                raise kind(f"the lead process failed: {told[FAILURE]}")
            return told["value"]
        try:
            value = choose()
        except BaseException as error:
            text = getattr(error, "message", None) or repr(error)
            self.tell({FAILURE: text, "storage": isinstance(error, StorageError | OSError)})
            raise
        self.tell({"value": value})
        return value

    def together(self, work: Callable[[], None]) -> None:
        """Write to the disk in every process and wait for all; a failure in one is everybody's.

        Raises:
            Exception: what `work` raised here, else a StorageError that names the processes.
        """
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            if self.is_alone:
                raise
            failure = error
        if self.is_alone:
            return
        failed = multihost_utils.process_allgather(np.bool_(failure is not None))
        if failure is not None:
            raise failure
        if failed.any():
            names = ", ".join(str(index) for index in np.flatnonzero(failed))
            raise StorageError(f"process {names} of {self.size} failed", remedy="see its output")

    def check_agreement(self, what: str, digest: str) -> None:
        """Refuse processes that were started with different settings or code.

        Raises:
            PortolanError: names the processes that differ from the lead.
        """
        if self.is_alone:
            return
        mine = np.frombuffer(bytes.fromhex(digest)[:16], np.uint32)
        every = np.asarray(multihost_utils.process_allgather(mine)).reshape(self.size, -1)
        differing = np.flatnonzero((every != every[0]).any(axis=1))
        if differing.size:
            names = ", ".join(map(str, differing))
            raise PortolanError(
                f"process {names} of {self.size} has another {what} than process 0",
                remedy="start all processes with the same code, recipe and versions",
            )


def versions() -> dict[str, str]:
    """What must be equal in all processes beside the run."""
    return {"portolan": __version__, "jax": jax.__version__, "numpy": np.__version__}


PEER_SIGNS = (
    "closed by peer",
    "Connection reset",
    "Connection refused",
    "Broken pipe",
    "heartbeat",
    "Gloo",
    "gloo",
    "NCCL",
    "coordination service",
    "DEADLINE_EXCEEDED",
    "UNAVAILABLE",
)
"""Words by which a collective says that another process is gone."""


def peer_loss(error: BaseException, crew: Crew) -> PeerLost | None:
    """The error of a collective as the loss of a process, if it is one."""
    text = str(error)
    if crew.is_alone or not isinstance(error, jax.errors.JaxRuntimeError | RuntimeError):
        return None
    if not any(sign in text for sign in PEER_SIGNS):
        return None
    first = text.strip().splitlines()[0][:200]
    return PeerLost(
        f"process {crew.index} of {crew.size} lost another one: {first}",
        remedy="start all processes again; training goes on from the newest checkpoint",
    )
