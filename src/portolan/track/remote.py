"""Remote trackers behind a bounded queue: they may be slow, dead or wrong, training never waits."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

QUEUE_ROWS = 10_000
FINISH_SECONDS = 30.0
RETRIES = 5
FIRST_RETRY_SECONDS = 0.5
CIRCUIT_SECONDS = 60.0


class Adapter(Protocol):
    """What a remote tracker offers. Both calls may block or raise.

    `log` must not rely on the remote accepting a lower step than before: rows are replayed
    after a restart, so `row`, `completed` and `attempt` travel as ordinary values.
    """

    name: str

    def log(self, row: int, attempt: int, values: Mapping[str, float]) -> None:
        """Send one row."""
        ...

    def finish(self) -> None:
        """Send what is buffered and close the remote run."""
        ...


@dataclass(frozen=True)
class Gap:
    """Rows that did not reach a remote tracker; they are complete in the local files."""

    adapter: str
    from_row: int
    to_row: int
    count: int

    def detail(self) -> dict[str, int | str]:
        """Fields of a `tracker_gap` event."""
        return {
            "adapter": self.adapter,
            "from_row": self.from_row,
            "to_row": self.to_row,
            "count": self.count,
        }


class _GapCounter:
    """Collects lost rows into one open gap, closed by the next row that gets through."""

    def __init__(self, adapter: str) -> None:
        self._adapter = adapter
        self._lock = threading.Lock()
        self._open: Gap | None = None
        self._closed: list[Gap] = []

    def lose(self, row: int) -> None:
        with self._lock:
            gap = self._open or Gap(self._adapter, row, row, 0)
            self._open = Gap(
                self._adapter, min(gap.from_row, row), max(gap.to_row, row), gap.count + 1
            )

    def close(self) -> None:
        with self._lock:
            if self._open is not None:
                self._closed.append(self._open)
                self._open = None

    def take(self) -> list[Gap]:
        with self._lock:
            taken, self._closed = self._closed, []
        return taken


class RemoteQueue:
    """One adapter with its queue, its thread and its circuit breaker.

    A full queue, or an adapter that fails after five tries, loses *remote* rows only: they are
    counted and reported to `on_gap`, from the adapter's thread or from `finish`. After a failure
    the circuit stays open for a minute, during which rows are lost at once.
    """

    def __init__(
        self,
        adapter: Adapter,
        on_gap: Callable[[Gap], None],
        *,
        capacity: int = QUEUE_ROWS,
        retry_seconds: float = FIRST_RETRY_SECONDS,
        circuit_seconds: float = CIRCUIT_SECONDS,
    ) -> None:
        self.adapter = adapter
        self.num_lost = 0
        self._on_gap = on_gap
        self._retry_seconds = retry_seconds
        self._circuit_seconds = circuit_seconds
        self._capacity = capacity
        self._circuit_open_until = 0.0
        self._rows: deque[tuple[int, int, Mapping[str, float]]] = deque()
        self._changed = threading.Condition()
        self._overflow = _GapCounter(adapter.name)
        self._failures = _GapCounter(adapter.name)
        self._in_flight: int | None = None
        self._stopping = threading.Event()
        self._abandoned = False
        self._thread = threading.Thread(
            target=self._work, name=f"tracker-{adapter.name}", daemon=True
        )
        self._thread.start()

    def submit(self, row: int, attempt: int, values: Mapping[str, float]) -> None:
        """Hand over a row; returns at once, whatever the remote does."""
        with self._changed:
            if len(self._rows) >= self._capacity or self._abandoned:
                self.num_lost += 1
                self._overflow.lose(row)
                return
            self._rows.append((row, attempt, values))
            self._changed.notify()
        self._overflow.close()

    def finish(self, timeout_seconds: float = FINISH_SECONDS) -> None:
        """Wait for the queue to drain, at most `timeout_seconds`; what is left becomes a gap."""
        if self._abandoned:
            return
        with self._changed:
            self._stopping.set()
            self._changed.notify()
        self._thread.join(timeout_seconds)
        with self._changed:
            self._abandoned = True
            left = [] if self._in_flight is None else [self._in_flight]
            left += [row for row, _, _ in self._rows]
            self._rows.clear()
            self.num_lost += len(left)
        for row in left:
            self._failures.lose(row)
        self._failures.close()
        self._overflow.close()
        self._report()

    def _work(self) -> None:
        while (item := self._take()) is not None:
            row = item[0]
            sent = self._send(*item)
            with self._changed:
                if self._abandoned:
                    return
                self._in_flight = None
                self.num_lost += not sent
            if sent:
                self._failures.close()
            else:
                self._failures.lose(row)
            self._report()
        self._try(self.adapter.finish)

    def _take(self) -> tuple[int, int, Mapping[str, float]] | None:
        """The next row, or None once the queue is empty and nothing more will come."""
        with self._changed:
            while not self._rows:
                if self._stopping.is_set():
                    return None
                self._changed.wait()
            item = self._rows.popleft()
            self._in_flight = item[0]
            return item

    def _send(self, row: int, attempt: int, values: Mapping[str, float]) -> bool:
        if time.monotonic() < self._circuit_open_until:
            return False
        for number in range(RETRIES):
            if self._try(lambda: self.adapter.log(row, attempt, values)):
                return True
            if number + 1 < RETRIES and self._stopping.wait(self._retry_seconds * 2**number):
                break
        self._circuit_open_until = time.monotonic() + self._circuit_seconds
        return False

    def _report(self) -> None:
        for gap in (*self._overflow.take(), *self._failures.take()):
            self._try(lambda gap=gap: self._on_gap(gap))

    @staticmethod
    def _try(action: Callable[[], object]) -> bool:
        try:
            action()
        except Exception:
            return False
        return True
