"""What the training loop asks for, and what it gives back."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from portolan.files import read_json

FINISHED = "finished.json"


class BatchSource(Protocol):
    """Where batches come from: the step number is its whole state."""

    def batches(self, start: int, stop: int, *, rows: slice = ...) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch or these rows of it) for start <= step < stop."""
        ...


class MetricLog(Protocol):
    """Where metrics go: a tracker, or nowhere in a process that does not lead."""

    def log(self, row: int, values: Mapping[str, Any]) -> None:
        """Record numbers of a training row."""
        ...

    def flush_segment(self) -> list[Path]:
        """Write what was logged since the last call."""
        ...

    def close(self) -> None:
        """Write the rest and stop."""
        ...


class Recorder(Protocol):
    """What the loop tells the record, and what it asks."""

    def last_attempt(self, run_id: str) -> int:
        """Ordinal of the newest attempt that the record knows, 0 if none."""
        ...

    def attempt_started(self, run_id: str, ordinal: int, start: int, restored: str) -> None:
        """An attempt begins at `start` completed updates."""
        ...

    def attempt_ended(self, run_id: str, ordinal: int, completed: int, reason: str) -> None:
        """An attempt ends after `completed` updates."""
        ...

    def event(self, run_id: str, kind: str, completed: int, text: str) -> None:
        """Something happened that a reader of the record should know."""
        ...

    def checkpoint_saved(self, run_id: str, saved: Any) -> None:
        """A permanent checkpoint is verified on disk."""
        ...


@dataclass(frozen=True)
class Progress:
    """One report of a running loop, for a terminal or a log line."""

    run_id: str
    completed: int
    steps: int
    loss: float
    tokens_per_second: float
    seconds_left: float
    evaluation: float | None


@dataclass(frozen=True)
class Outcome:
    """What a finished run left: its last evaluation and where its bytes are.

    `program_bytes` is the memory of the larger program of a step, 0 where not known.
    """

    run_id: str
    completed: int
    evaluation: dict[str, float]
    content_digest: str
    train_seconds: float
    resumed: bool
    program_bytes: int = 0


def finished_outcome(folder: Path) -> Outcome | None:
    """The outcome of a run that has its success mark, else None."""
    path = folder / FINISHED
    return Outcome(**read_json(path)) if path.is_file() else None
