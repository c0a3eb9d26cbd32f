"""How much of a series a source gave, and what may be concluded from a part of it (rule R8)."""

import re

_SAMPLED = re.compile(r"sampled ([1-9]\d*) of ([1-9]\d*)")
_EXTREMES = re.compile(
    r"\b(never|always|maxim(um|a|al)|minim(um|a|al)|max|min|peak(ed|s)?|highest|lowest|largest"
    r"|smallest|worst|at (most|least)|no spikes?|without (a )?spikes?|not once)\b",
    re.IGNORECASE,
)


def check_completeness(text: str) -> str:
    """Return `text` if it is `full`, `truncated` or `sampled <n> of <m>` with n < m."""
    match = _SAMPLED.fullmatch(text)
    if text not in ("full", "truncated") and (not match or int(match[1]) >= int(match[2])):
        raise ValueError(f"{text!r} is not full, truncated or 'sampled <n> of <m>' with n < m")
    return text


def classify_rows(num_points: int, first_row: int, last_row: int) -> str:
    """Completeness of `num_points` distinct rows spread over first_row..last_row.

    847 points over rows 0 to 13,527 are `sampled 847 of 13528`; one point a row is `full`.
    """
    expected = last_row - first_row + 1
    if num_points < 1 or num_points > expected:
        raise ValueError(f"{num_points} points do not fit rows {first_row} to {last_row}")
    return "full" if num_points == expected else f"sampled {num_points} of {expected}"


def speaks_of_extremes(text: str) -> bool:
    """Whether a statement says never, always, maximum, minimum, peak, no spike or the like."""
    return bool(_EXTREMES.search(text))


def can_support(statement: str, completeness: str) -> bool:
    """Sampled or truncated evidence supports no statement about extremes."""
    return completeness == "full" or not speaks_of_extremes(statement)
