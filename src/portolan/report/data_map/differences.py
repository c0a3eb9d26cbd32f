"""Two texts laid beside each other: equal stretches, and the words that differ between them."""

import difflib
import re
from collections.abc import Iterator, Sequence

Segment = tuple[str] | tuple[str, str] | tuple[int]
"""(text,) equal in both; (removed text, kept text) differs; (number,) equal words left out."""

MAX_CHARACTERS = 200_000
"""Characters of a text that are compared."""
MAX_WORDS = 3_000
"""Longer unequal stretches are shown as a whole instead of word by word."""
CONTEXT_WORDS = 14
RUN_WORDS = 90
"""Words shown of a stretch that stands on one side only."""
SEGMENT_CHARACTERS = 4_000
"""Characters of all segments of a pair."""

_UNIT = re.compile(r".+?(?:[.!?;]\s+|\n+|$)|\s+", re.DOTALL)
_WORD = re.compile(r"\s*\S+|\s+")


def align(removed: str, kept: str) -> tuple[Segment, ...]:
    """Segments that rebuild both texts, but for what is left out as equal or too long.

    Sentences and lines are matched first, words inside those that differ, so that the time grows
    with the length of the texts and with the square of what differs, at most 3,000 words a place.
    """
    left, right = removed[:MAX_CHARACTERS], kept[:MAX_CHARACTERS]
    return tuple(_bounded(_condensed(_joined(_compare_units(left, right)))))


def _compare_units(left: str, right: str) -> Iterator[tuple[str, str, bool]]:
    """(text of the left, text of the right, equal) over sentences and lines, then words."""
    a, b = _UNIT.findall(left), _UNIT.findall(right)
    for tag, i, j, k, m in _opcodes(a, b):
        if tag == "equal":
            yield "".join(a[i:j]), "".join(b[k:m]), True
        else:
            yield from _compare_words("".join(a[i:j]), "".join(b[k:m]))


def _compare_words(left: str, right: str) -> Iterator[tuple[str, str, bool]]:
    a, b = _WORD.findall(left), _WORD.findall(right)
    if max(len(a), len(b)) > MAX_WORDS or not (a and b):
        yield left, right, False
        return
    for tag, i, j, k, m in _opcodes(a, b):
        yield "".join(a[i:j]), "".join(b[k:m]), tag == "equal"


def _opcodes(a: Sequence[str], b: Sequence[str]) -> Sequence[tuple[str, int, int, int, int]]:
    """Difflib's instructions; white space around a unit does not make it differ."""
    left, right = ([" ".join(unit.split()) for unit in units] for units in (a, b))
    return difflib.SequenceMatcher(None, left, right).get_opcodes()


def _joined(parts: Iterator[tuple[str, str, bool]]) -> Iterator[tuple[str, str, bool]]:
    """Neighbours of one kind as one part."""
    held = ("", "", True)
    for left, right, equal in parts:
        if equal == held[2]:
            held = (held[0] + left, held[1] + right, equal)
            continue
        if held[0] or held[1]:
            yield held
        held = (left, right, equal)
    if held[0] or held[1]:
        yield held


def _condensed(parts: Iterator[tuple[str, str, bool]]) -> Iterator[Segment]:
    """Equal stretches keep some words of context at their ends, one-sided ones their ends."""
    for left, right, equal in parts:
        if not equal:
            yield _ends(left), _ends(right)
            continue
        words = _WORD.findall(right)
        if len(words) <= 3 * CONTEXT_WORDS:
            yield (right,)
            continue
        yield ("".join(words[:CONTEXT_WORDS]),)
        yield (len(words) - 2 * CONTEXT_WORDS,)
        yield ("".join(words[-CONTEXT_WORDS:]),)


def _ends(text: str) -> str:
    words = _WORD.findall(text)
    if len(words) <= RUN_WORDS:
        return text
    head, tail = RUN_WORDS * 2 // 3, RUN_WORDS // 3
    left_out = f" […{len(words) - head - tail:,} words…] "
    return "".join(words[:head]) + left_out + "".join(words[-tail:])


def _bounded(segments: Iterator[Segment]) -> Iterator[Segment]:
    """As many segments as fit; the last one is cut where the room ends."""
    room = SEGMENT_CHARACTERS
    for segment in segments:
        size = sum(len(part) for part in segment if isinstance(part, str))
        if size > room:
            yield tuple(f"{part[:room]} […]" for part in segment)  # pyright: ignore
            return
        room -= size
        yield segment
