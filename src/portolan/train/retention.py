"""When to save, what to keep, and how much room a save needs: arithmetic only."""

import math
import time
from collections.abc import Callable, Iterable

KEPT_VERIFIED = 2
NUM_PERMANENT = 64
TEMPORARY_SECONDS = 15 * 60.0
RETRY_SECONDS = 60.0


def required_free_bytes(
    checkpoint_bytes: float, growth_bytes_per_second: float = 0.0, seconds_to_prune: float = 0.0
) -> int:
    """Room that must be free before a save: two checkpoints plus other growth until the next prune.

    Below it health rule H18 fires, while one more save still fits.
    """
    return math.ceil(2 * checkpoint_bytes + growth_bytes_per_second * seconds_to_prune)


def permanent_interval(num_steps: int) -> int:
    """Steps between permanent saves: a run keeps about 64 of them."""
    return max(1, math.ceil(num_steps / NUM_PERMANENT))


def kept_steps(
    temporary: Iterable[int],
    permanent: Iterable[int],
    *,
    keep_temporary: int,
    pinned: Iterable[int] = (),
) -> set[int]:
    """Temporary steps that must stay, given the steps that can be trusted in each root.

    These are the newest `keep_temporary`, those among the newest two over both roots, and pinned
    ones (hand-overs, rollback anchors, milestones, steps that a claim cites).
    """
    temporary = sorted(set(temporary), reverse=True)
    newest = sorted({*temporary, *permanent}, reverse=True)[:KEPT_VERIFIED]
    return set(temporary) & {*temporary[:keep_temporary], *newest, *pinned}


class SaveSchedule:
    """Which steps to save: permanent by step number, temporary by wall time.

    A request stays due until `marked` is called, so a failed save is asked for again, after a
    minute. The wall-time interval counts from the last marked save.

    Args:
        num_steps: planned optimizer updates; the last one is always saved.
        permanent_every: steps between permanent saves; default ceil(num_steps / 64).
        start: completed updates at the beginning of this attempt.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        permanent_every: int | None = None,
        temporary_seconds: float = TEMPORARY_SECONDS,
        start: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_steps = num_steps
        self.permanent_every = permanent_every or permanent_interval(num_steps)
        self.temporary_seconds = temporary_seconds
        self._clock = clock
        self._permanent = self._marked = start
        self._marked_at = clock()
        self._not_before = -math.inf

    def due(self, completed: int) -> str | None:
        """`"permanent"`, `"temporary"` or None after `completed` updates."""
        if completed == self.num_steps:
            return "permanent" if completed > self._permanent else None
        if completed <= self._marked or self._clock() < self._not_before:
            return None
        every = self.permanent_every
        if completed // every > self._permanent // every:
            return "permanent"
        waited = self._clock() - self._marked_at
        return "temporary" if waited >= self.temporary_seconds else None

    def marked(self, completed: int, kind: str) -> None:
        """Consume the request: this save has its marker."""
        self._marked = completed
        self._marked_at = self._clock()
        if kind == "permanent":
            self._permanent = completed

    def failed(self) -> None:
        """Keep the request and ask again in a minute; the final step is asked for at once."""
        self._not_before = self._clock() + RETRY_SECONDS
