"""What a process that does not lead has in place of tracker and record."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class SilentTracker:
    """Takes metrics and keeps none: the lead logs them."""

    def log(self, row: int, values: Mapping[str, Any]) -> None:
        """Nothing."""

    def flush_segment(self) -> list[Path]:
        """Nothing."""
        return []

    def close(self) -> None:
        """Nothing."""


class SilentRecorder:
    """Is told what happened and writes none of it: the lead does."""

    def last_attempt(self, run_id: str) -> int:
        """Unknown here."""
        del run_id
        return 0

    def attempt_started(self, run_id: str, ordinal: int, start: int, restored: str) -> None:
        """Nothing."""

    def attempt_ended(self, run_id: str, ordinal: int, completed: int, reason: str) -> None:
        """Nothing."""

    def event(self, run_id: str, kind: str, completed: int, text: str) -> None:
        """Nothing."""

    def checkpoint_saved(self, run_id: str, saved: Any) -> None:
        """Nothing."""
