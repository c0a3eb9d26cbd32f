"""Canonical JSON (RFC 8785 restricted to integers), digests and step keys."""

import hashlib
import json
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import rfc8785

from portolan.errors import PortolanError

MAX_INTEGER = 2**53 - 1


class CanonicalError(PortolanError, ValueError):
    """A value has no canonical form: a float, a large integer, a lone surrogate, a repeated key."""


def decimal(value: float) -> str:
    """Shortest decimal string that reads back as the same float64: `5.0`, `1e-15`, `1e22`.

    A float32 is widened first. NaN and infinities raise CanonicalError: they belong in blobs.
    """
    number = float(value)
    if not math.isfinite(number):
        raise CanonicalError(
            f"{number} has no decimal form", remedy="store it in a blob, or name it as unknown"
        )
    return float.__repr__(number).replace("e+", "e")


def stringify_floats(value: Any) -> Any:
    """Copy a JSON-like value with floats and integers above 2^53-1 as decimal strings.

    Tuples become lists and NumPy scalars become plain numbers; other types raise CanonicalError.
    """
    if value is None or isinstance(value, bool | str):
        return value if not isinstance(value, str) else str(value)
    if isinstance(value, Mapping):
        return {_key(name): stringify_floats(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [stringify_floats(item) for item in value]
    if isinstance(value, numbers.Integral):
        number = int(value)
        return number if abs(number) <= MAX_INTEGER else str(number)
    if isinstance(value, numbers.Real):
        return decimal(float(value))
    raise CanonicalError(
        f"{value!r} of type {type(value).__name__} cannot be stored as JSON",
        remedy="convert it to text, a number, a list or a mapping first",
    )


def canonical(value: Any) -> bytes:
    """Canonical UTF-8 bytes of a JSON value; floats are refused (see stringify_floats)."""
    try:
        _refuse_floats(value, "")
        return rfc8785.dumps(value)
    except rfc8785.CanonicalizationError as error:
        raise CanonicalError(f"no canonical JSON: {error}") from error
    except RecursionError as error:
        raise CanonicalError("no canonical JSON: the value is nested too deeply") from error


def digest(value: Any) -> str:
    """SHA-256 of the canonical bytes, 64 lower-case hex digits."""
    return hashlib.sha256(canonical(value)).hexdigest()


def step_key(name: str, version: int, params: Mapping[str, Any], inputs: Sequence[str]) -> str:
    """First 16 hex digits of the digest of a step: whatever changes its bytes is in `params`."""
    step = {"inputs": list(inputs), "name": name, "params": params, "version": version}
    return digest(stringify_floats(step))[:16]


def parse(content: bytes | str) -> Any:
    """Read JSON strictly: repeated keys, floats, big integers and lone surrogates are errors."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_float=_refuse_number,
            parse_constant=_refuse_number,
            parse_int=_small_integer,
        )
        if "\\u" in text or isinstance(content, str):
            canonical(value)
    except UnicodeDecodeError as error:
        raise CanonicalError(f"not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise CanonicalError(f"not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise CanonicalError("not accepted: the value is nested too deeply") from error
    return value


def _refuse_floats(value: Any, place: str) -> None:
    if isinstance(value, float):
        raise CanonicalError(
            f"{place or 'the value'} is the float {value!r}",
            remedy="store it as a decimal string (portolan.canonical.decimal)",
        )
    if isinstance(value, dict):
        for name, item in value.items():
            _refuse_floats(item, f"{place}.{_key(name)}" if place else _key(name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _refuse_floats(item, f"{place}[{index}]")
    elif value is not None and not isinstance(value, str | int):
        raise CanonicalError(f"{place or 'the value'} has type {type(value).__name__}")


def _key(name: Any) -> str:
    if not isinstance(name, str):
        raise CanonicalError(f"the key {name!r} is not text")
    return name


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise CanonicalError(f"the key {repeated!r} is repeated")
    return result


def _refuse_number(text: str) -> NoReturn:
    raise CanonicalError(f"the number {text} is not an integer", remedy="write it as a string")


def _small_integer(text: str) -> int:
    if len(text) > 17 or abs(number := int(text)) > MAX_INTEGER:
        raise CanonicalError(f"the integer {text[:20]} exceeds 2^53-1", remedy="write it as text")
    return number
