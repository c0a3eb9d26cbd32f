"""What every import source gives: who the run is, and its history in chunks of bounded size."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import polars as pl

CHUNK_LINES = 5_000
"""Lines of history held in memory at once."""
NUMBER_WORDS = {
    "NaN": math.nan,
    "nan": math.nan,
    "Infinity": math.inf,
    "inf": math.inf,
    "-Infinity": -math.inf,
    "-inf": -math.inf,
}


@dataclass(frozen=True)
class SourceRun:
    """A run as its source describes it; `num_lines` is the length that the source reports.

    `query` and `arguments` repeat the request; `state` is the source's own word, not a status.
    `tracker_field` is the field with the tracker's own counter, if the source has one.
    """

    kind: str
    locator: str
    name: str
    tool_version: str
    query: str
    arguments: dict[str, str]
    anonymous: bool
    state: str = "not_stated"
    created: str = "not_stated"
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    num_lines: int | None = None
    last_step: int | None = None
    sampled: bool = False
    tracker_field: str = ""


@dataclass(frozen=True)
class Chunk:
    """Some lines of a history.

    `frame` has a row per number, in the order of the source: line (int64, counted over the
    whole history), step (int64 or null), time (ms since 1970 or null), key, value (float64).
    `attempt` is the ordinal that the source itself gives, else None. `raw` is what came from the
    source, for the snapshot.
    """

    frame: "pl.DataFrame"
    raw: bytes
    num_lines: int
    skipped: Counter[str]
    attempt: int | None = None


class HistorySource(Protocol):
    """One run of a tracker; `default_id` is the id that it gets here unless the user names one."""

    default_id: str

    def describe(self) -> SourceRun:
        """Everything but the history."""
        ...

    def chunks(self, step_key: str) -> Iterator[Chunk]:
        """The history in order; `step_key` names the field that counts steps."""
        ...


def as_number(value: Any) -> float | None:
    """A float of a number, a truth value or a word for NaN or infinity; None of anything else."""
    if isinstance(value, int | float):
        return float(value)
    return NUMBER_WORDS.get(value) if isinstance(value, str) else None


def as_step(value: Any) -> int | None:
    """A whole number, also when written as a float; None of anything else."""
    number = as_number(value)
    return int(number) if number is not None and number.is_integer() else None


def chunk_of_lines(
    lines: Iterable[Mapping[str, Any]],
    first_line: int,
    step_key: str,
    time_key: str,
) -> Chunk:
    """A chunk from JSON objects: each number is a value; other fields are counted and skipped.

    Times are in seconds. The step and the time are kept as values too, so that the tracker's own
    counter of every row can be looked up later.
    """
    import polars as pl

    columns: dict[str, list[Any]] = {"line": [], "step": [], "time": [], "key": [], "value": []}
    skipped: Counter[str] = Counter()
    raw = []
    for number, line in enumerate(lines, start=first_line):
        raw.append(json.dumps(line, sort_keys=True, ensure_ascii=False, default=str))
        step = as_step(line.get(step_key))
        moment = as_number(line.get(time_key))
        finite = moment is not None and math.isfinite(moment)
        milliseconds = math.floor(moment * 1000) if finite and moment else None
        for key, item in line.items():
            value = as_number(item)
            if value is None:
                skipped[key] += 1
                continue
            for name, entry in zip(columns, (number, step, milliseconds, key, value), strict=True):
                columns[name].append(entry)
    kinds = {"line": pl.Int64, "step": pl.Int64, "time": pl.Int64, "key": pl.String}
    frame = pl.DataFrame(columns, schema=kinds | {"value": pl.Float64})
    content = "".join(text + "\n" for text in raw).encode()
    return Chunk(frame, content, len(raw), skipped)


def in_chunks(lines: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Lists of at most CHUNK_LINES lines."""
    held: list[Mapping[str, Any]] = []
    for line in lines:
        held.append(line)
        if len(held) == CHUNK_LINES:
            yield held
            held = []
    if held:
        yield held
