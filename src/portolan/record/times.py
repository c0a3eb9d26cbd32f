"""Times as RFC 3339 UTC text with milliseconds and a final Z."""

import re
from datetime import UTC, datetime

_PATTERN = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", re.ASCII)


def format_time(moment: datetime) -> str:
    """`2026-01-31T12:00:00.000Z`; a time without a zone raises ValueError."""
    if moment.tzinfo is None:
        raise ValueError(f"the time {moment} has no time zone")
    text = moment.astimezone(UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def now() -> str:
    """The present time in the format of the record."""
    return format_time(datetime.now(UTC))


def parse_time(text: str) -> datetime:
    """Read a time of the record; any other form (naive, offset, no milliseconds) is refused."""
    if not _PATTERN.fullmatch(text):
        raise ValueError(f"the time {text!r} is not of the form 2026-01-31T12:00:00.000Z")
    return datetime.fromisoformat(text)


def check_time(text: str) -> str:
    """Return `text` if it is a time of the record, else raise ValueError."""
    parse_time(text)
    return text
