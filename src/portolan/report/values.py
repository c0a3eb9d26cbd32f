"""Lenient reading of values that other parts of the project, or other tools, have written."""

import json
import math
from collections.abc import Mapping
from typing import Any


def as_number(value: Any) -> float | None:
    """A finite float from a number or a decimal string, else None."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def as_count(value: Any) -> int | None:
    """An integer from an integer, an integral float or its decimal string, else None."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = as_number(value)
    return int(number) if number is not None and number == int(number) else None


def as_text(value: Any) -> str:
    """Text of a scalar; a typed quantity gives its value, anything else its JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and "value" in value:
        return as_text(value["value"])
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def first(table: Any, *names: str) -> Any:
    """Value of the first name that a table has and that is not None."""
    if isinstance(table, Mapping):
        for name in names:
            if table.get(name) is not None:
                return table[name]
    return None
