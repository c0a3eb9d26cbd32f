"""Timed signals of a run, live or recorded: what the monitor reads.

A trace is a file of JSON lines `{"time", "name", "value", "row", "source"}` in order of time, so
that an incident can be replayed at any speed. Names of metrics are those of the tracker; a layer
stands in `source`.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portolan.errors import UsageError
from portolan.files import write_bytes_atomic

Value = float | int | str | dict[str, Any]

LAYERED = ("router/",)
"""Prefixes of metrics whose last part is a layer."""
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True)
class Signal:
    """One value at `time` (seconds since 1970): `row` is the zero-based update it belongs to.

    `source` says where: a layer, host, link, domain, or the full name of an evaluation.
    """

    time: float
    name: str
    value: Value
    row: int | None = None
    source: str = ""


def from_metric(time: float, key: str, value: float, row: int) -> Signal:
    """Signal of a tracker's value: evaluations are named `evaluation`, layers become sources."""
    if key.startswith("eval_"):
        return Signal(time, "evaluation", value, row, key)
    if key.startswith(LAYERED):
        name, _, layer = key.rpartition("/")
        return Signal(time, name, value, row, layer)
    return Signal(time, key, value, row)


def encode(signal: Signal) -> str:
    """One line of a trace, without its end."""
    value = signal.value
    if isinstance(value, float) and not math.isfinite(value):
        value = repr(value)
    fields: dict[str, Any] = {"time": signal.time, "name": signal.name, "value": value}
    if signal.row is not None:
        fields["row"] = signal.row
    if signal.source:
        fields["source"] = signal.source
    return json.dumps(fields, sort_keys=True)


def write_trace(path: Path, signals: Iterable[Signal]) -> None:
    """Write a trace, atomically."""
    write_bytes_atomic(path, "".join(f"{encode(signal)}\n" for signal in signals).encode())


def read_trace(path: Path) -> Iterator[Signal]:
    """Signals of a trace, one line at a time.

    Raises:
        UsageError: a line is no signal, or time runs backwards.
    """
    last = -math.inf
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                item = json.loads(line)
                value = item["value"]
                if isinstance(value, str):
                    value = _SPECIAL.get(value, value)
                signal = Signal(
                    time=float(item["time"]),
                    name=str(item["name"]),
                    value=value,
                    row=None if item.get("row") is None else int(item["row"]),
                    source=str(item.get("source", "")),
                )
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(
                    f"{path}, line {number} is not a signal: {error}",
                    remedy='write {"time": seconds, "name": text, "value": ...} a line',
                ) from error
            if signal.time < last:
                raise UsageError(
                    f"{path}, line {number}: time {signal.time:.3f} comes after {last:.3f}",
                    remedy="sort the trace by time",
                )
            last = signal.time
            yield signal
