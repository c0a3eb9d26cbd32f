"""Three clocks, forks, and the intervals of rows that count when attempts replay each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from portolan.errors import PortolanError


class LineageError(PortolanError, ValueError):
    """Attempts, forks or clocks contradict each other."""


def row_of(completed: int) -> int:
    """Zero-based training row written by update number `completed`."""
    return completed - 1


def completed_of(row: int) -> int:
    """Updates completed once training row `row` is written."""
    return row + 1


def tracker_step_of(row: int, table: Mapping[int, int]) -> int:
    """A tracker's own counter for a row, looked up; it is never computed from the row."""
    if row not in table:
        raise LineageError(
            f"the tracker step of row {row} is not in the table",
            remedy="import the tracker's history; its counter cannot be computed",
        )
    return table[row]


@dataclass(frozen=True)
class Interval:
    """Completed updates [start, end) that one attempt or run contributes to the canonical curve."""

    start: int
    end: int

    @property
    def num_rows(self) -> int:
        """Rows in the interval, zero if it is empty."""
        return max(0, self.end - self.start)


def valid_intervals(spans: Sequence[tuple[int, int]]) -> list[Interval]:
    """Canonical rows of attempts given as (restored at s, completed e updates), in order.

    Attempt a counts on [s_a, min(e_a, min over later b of s_b)): a replay supersedes what it
    repeats. The same formula over production runs with s = fork step gives a lineage.
    """
    result: list[Interval] = []
    bound: int | None = None
    for start, end in reversed(spans):
        valid_end = end if bound is None else min(end, bound)
        result.append(Interval(start, max(start, valid_end)))
        bound = start if bound is None else min(bound, start)
    return result[::-1]


def redone_steps(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Updates each attempt repeats: max(0, e of the attempt before - s); zero for the first."""
    before = [spans[0][0], *[end for _, end in spans[:-1]]] if spans else []
    return [max(0, end - start) for end, (start, _) in zip(before, spans, strict=True)]


def check_spans(spans: Sequence[tuple[int, int]], gaps: Sequence[tuple[int, int]] = ()) -> None:
    """Raise LineageError if an attempt starts where no checkpoint can have been.

    A start is the first fork, or a step s with s_a < s <= v_a for an earlier attempt a. A hole
    [first, last) is accepted only when `gaps` names it.
    """
    for index, (start, end) in enumerate(spans):
        if end < start:
            raise LineageError(f"attempt {index + 1} ends at {end}, before its start {start}")
        if start == spans[0][0]:
            continue
        earlier = valid_intervals(spans[:index])
        if any(interval.start < start <= interval.end for interval in earlier):
            continue
        reached = max(interval.end for interval in earlier)
        if start > reached and (reached, start) in gaps:
            continue
        raise LineageError(
            f"attempt {index + 1} starts at step {start}, where no earlier attempt saved one",
            remedy=f"record a log_gap for rows {reached} to {start - 1} if they were trained",
        )
