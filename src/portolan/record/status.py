"""The terminal status of an attempt, derived from several sources and believed from none."""

from dataclasses import dataclass
from typing import Literal

Reading = bool | None
"""True, False, or None for a source that cannot be read (never taken as False)."""


@dataclass(frozen=True)
class Signals:
    """What the sources say when an attempt is looked at.

    Args:
        mark: the program's last statement, an explicit mark of success, exists.
        final_step: the last completed update equals the planned one.
        final_checkpoint: the final checkpoint is verified byte by byte.
        final_row: the final row is in the local metrics.
        exit_success: exit code or scheduler state says success; None if unreachable.
        error: exception, watchdog or kill evidence is in the logs.
        fresh: the process lives and its progress is recent.
        cancelled: a decision to cancel was recorded before the end.
        ended: the process has ended; read from `exit_success` when not given.
    """

    mark: Reading
    final_step: Reading
    final_checkpoint: Reading
    final_row: Reading
    exit_success: Reading
    error: Reading
    fresh: bool = False
    cancelled: bool = False
    ended: bool | None = None


@dataclass(frozen=True)
class Status:
    """A derived status, whether sources contradict each other, and the reasons in words."""

    word: Literal["running", "succeeded", "cancelled", "failed", "unknown"]
    disputed: bool
    reasons: tuple[str, ...]


def derive_status(signals: Signals) -> Status:
    """Apply the first rule that matches: running, succeeded, cancelled, failed, else unknown."""
    if signals.fresh:
        return Status("running", False, ())
    reasons = _reasons(signals)
    parts = (signals.mark, signals.final_step, signals.final_checkpoint, signals.final_row)
    says_success = any(part is True for part in (*parts, signals.exit_success))
    says_otherwise = bool(reasons) or signals.exit_success is False
    disputed = says_success and says_otherwise
    ended = signals.exit_success is not None if signals.ended is None else signals.ended
    if all(part is True for part in parts) and signals.error is False:
        return Status("succeeded", disputed, reasons)
    if signals.cancelled:
        return Status("cancelled", disputed, reasons)
    if ended and reasons:
        return Status("failed", disputed, reasons)
    return Status("unknown", disputed, reasons)


def _reasons(signals: Signals) -> tuple[str, ...]:
    found = {
        "error_evidence": signals.error is True,
        "no_success_mark": signals.mark is False,
        "final_step_not_reached": signals.final_step is False,
        "missing_artifact": signals.final_checkpoint is False,
        "final_row_missing": signals.final_row is False,
    }
    return tuple(reason for reason, present in found.items() if present)
