"""The live tail: one JSON line a value, appended while a run is under way."""

import contextlib
import json
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from portolan.files import storage_errors

FSYNC_SECONDS = 5.0
FSYNC_ROWS = 1000

_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Entry:
    """One value: `row` is zero-based, `completed` = row + 1, `time` in milliseconds since 1970."""

    row: int
    attempt: int
    time: int
    key: str
    value: float


def milliseconds(moment: datetime) -> int:
    """Milliseconds since 1970 of an aware time."""
    return math.floor(moment.timestamp() * 1000)


def time_text(time: int) -> str:
    """RFC 3339 UTC with milliseconds and Z."""
    seconds, rest = divmod(time, 1000)
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{rest:03d}Z"


def encode_values(row: int, attempt: int, time: int, values: Mapping[str, float]) -> bytes:
    """JSON lines of one call of `log`; NaN and infinities are the texts nan, inf and -inf."""
    start = f'{{"row":{row},"completed":{row + 1},"attempt":{attempt},"time":"{time_text(time)}"'
    lines = []
    for key, value in values.items():
        shown = repr(value) if math.isfinite(value) else f'"{value!r}"'
        lines.append(f'{start},"key":{json.dumps(key)},"value":{shown}}}\n')
    return "".join(lines).encode()


def read_tail(path: Path) -> tuple[list[Entry], int]:
    """Entries of a tail, and the number of unreadable lines dropped.

    A last line without its end counts as dropped; so does a line that is no entry.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    end = content.rfind(b"\n") + 1
    dropped = int(end < len(content))
    entries: list[Entry] = []
    for line in content[:end].splitlines():
        entry = _decode(line)
        if entry is None:
            dropped += 1
        else:
            entries.append(entry)
    return entries, dropped


def _decode(line: bytes) -> Entry | None:
    try:
        item: Any = json.loads(line)
        value = item["value"]
        return Entry(
            row=int(item["row"]),
            attempt=int(item["attempt"]),
            time=milliseconds(datetime.fromisoformat(item["time"])),
            key=str(item["key"]),
            value=_SPECIAL[value] if isinstance(value, str) else float(value),
        )
    except (ValueError, KeyError, TypeError):
        return None


class TailWriter:
    """Appends to a tail with one write a call; a thread fsyncs, so that a slow disk never waits.

    What `write` returned from survives the death of the process; fsync, every 5 s or 1,000
    rows, makes it survive the death of the machine.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._offset = 0
        self._rows_since_fsync = 0
        self._due = threading.Event()
        self._stopping = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._fsync_loop, name="metrics-fsync", daemon=True)
        self._thread.start()

    def write(self, content: bytes) -> None:
        """Append whole lines; on a full disk cut back to the last whole line and raise."""
        with storage_errors(self.path):
            try:
                written = 0
                while written < len(content):
                    where = self._offset + written
                    written += os.pwrite(self._descriptor, content[written:], where)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self._offset)
                raise
        self._offset += len(content)
        self._rows_since_fsync += 1
        if self._rows_since_fsync >= FSYNC_ROWS:
            self._rows_since_fsync = 0
            self._due.set()

    def clear(self) -> None:
        """Empty the tail after its content has become a segment."""
        with storage_errors(self.path):
            os.ftruncate(self._descriptor, 0)
        self._offset = 0

    def close(self) -> None:
        """Make everything durable and stop the thread."""
        self._stopping = True
        self._due.set()
        self._thread.join()
        with storage_errors(self.path):
            try:
                os.fsync(self._descriptor)
            finally:
                os.close(self._descriptor)

    def _fsync_loop(self) -> None:
        synced = self._offset
        while not self._stopping:
            self._due.wait(FSYNC_SECONDS)
            self._due.clear()
            if self._offset != synced and not self._stopping:
                synced = self._offset
                # A failing disk shows itself to the writer at the next write or at close.
                with contextlib.suppress(OSError):
                    os.fsync(self._descriptor)
