"""Tasks on a Ray cluster: plain tasks with path arguments, scheduled and retried by Ray."""

import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from portolan.data.engine.executors import TASKS_IN_FLIGHT_PER_WORKER, WorkerDied, item_name
from portolan.errors import PortolanError, UsageError

MAX_RETRIES = 3
SILENCE_SECONDS = 60.0
Item = TypeVar("Item")
Result = TypeVar("Result")


class RayExecutor:
    """Runs items as Ray tasks of one CPU each; every node must see the project folder.

    Args:
        address: of a running cluster, as `ray.init` takes it; None starts one in processes of this
            machine, which `close` ends.
        num_cpus: CPUs of a cluster that is started here.
    """

    def __init__(self, address: str | None = None, num_cpus: int | None = None) -> None:
        self.ray = _import_ray()
        self.connected = not self.ray.is_initialized()
        if self.connected:
            try:
                self.ray.init(
                    address or "local",
                    num_cpus=None if address else num_cpus,
                    include_dashboard=False if address is None else None,
                    log_to_driver=False,
                    configure_logging=False,
                )
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise UsageError(
                    f"no Ray cluster at {address or 'this machine'}: {error.__cause__ or error}",
                    remedy="start it with `ray start --head` and name its address; where it asks "
                    "for a token, set RAY_AUTH_MODE=token",
                ) from error

    def close(self) -> None:
        """Disconnect; only a cluster that this executor started ends with it."""
        if self.connected:
            self.ray.shutdown()
            self.connected = False

    def completed(
        self, function: Callable[[Item], Result], items: Sequence[Item]
    ) -> Generator[tuple[int, Result]]:
        """(index, result) as the items finish; at most 2 items a CPU are in flight.

        Raises:
            WorkerDied: an item was lost with its worker more often than Ray retries.
            PortolanError: for a minute nothing ran and the cluster has no CPU.
        """
        ray = self.ray
        remote = ray.remote(num_cpus=1, max_retries=MAX_RETRIES)(function)
        waiting = iter(range(len(items)))
        flying: dict[Any, int] = {}
        try:
            while True:
                room = TASKS_IN_FLIGHT_PER_WORKER * max(1, self._num_cpus()) - len(flying)
                for index in itertools.islice(waiting, max(0, room)):
                    flying[remote.remote(items[index])] = index
                if not flying:
                    return
                done, _ = ray.wait(list(flying), num_returns=1, timeout=SILENCE_SECONDS)
                if not done and not self._num_cpus():
                    raise PortolanError(
                        f"the Ray cluster has had no CPU for {SILENCE_SECONDS:.0f} seconds",
                        remedy="start its nodes and run the same command again; finished tasks "
                        "are kept",
                    )
                for reference in done:
                    index = flying.pop(reference)
                    yield index, self._result(reference, items[index])
        finally:
            for reference in flying:
                ray.cancel(reference)
            if flying:
                ray.wait(list(flying), num_returns=len(flying), timeout=SILENCE_SECONDS)

    def _num_cpus(self) -> int:
        return int(self.ray.cluster_resources().get("CPU", 0))

    def _result(self, reference: Any, item: object) -> Any:
        exceptions = self.ray.exceptions
        try:
            return self.ray.get(reference)
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, ImportError):
                raise UsageError(
                    f"a Ray worker cannot run {item_name(item)}: {error.cause}",
                    remedy="install the same version of portolan on every node of the cluster",
                ) from error
            raise error.cause or error from None
        except exceptions.RayError as error:
            raise WorkerDied(
                f"Ray lost {item_name(item)} {1 + MAX_RETRIES} times: {error}",
                remedy="look at the Ray logs of the node, then run the same command again; "
                "finished tasks are kept",
            ) from error


def _import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise UsageError(
            f"Ray is not installed: {error}", remedy="pip install 'portolan[ray]'"
        ) from error
    return ray
