"""The offline labeller, check by check."""

import pytest

from portolan.data.quality.heuristics import content_type_of, failed_checks, is_valid, judge

PROSE = "\n".join(
    f"The ship number {i} went to the harbour of the town and stayed there." for i in range(8)
)
CODE = """import math

# area of a circle
def area(r):
    square = r**2
    return math.pi * square

print(area(2))
"""


def test_types():
    assert content_type_of(PROSE, "web") == "prose"
    assert content_type_of("a\tb\nc | d\nplain\ne,f,g,h", "specialized") == "structured"
    assert content_type_of("a\tb", "code") == "code"
    for category in ("math", "multilingual", "agentic"):
        assert content_type_of(PROSE, category) == category


def test_validity():
    assert is_valid(PROSE)
    assert not is_valid("too short")
    assert not is_valid("... " * 400 + "word " * 20)


@pytest.mark.parametrize(
    ("text", "content_type", "failed"),
    [
        (PROSE, "prose", []),
        (PROSE[:100], "prose", ["words"]),
        ("supercalifragilistic " * 60 + "the of", "prose", ["word length"]),
        ("1234 " * 60 + "the of", "prose", ["words with a letter"]),
        (f"{PROSE}\n" * 3, "prose", ["duplicate lines"]),
        (PROSE.replace("there.", "there..."), "prose", ["ellipses"]),
        (PROSE.replace("The ship", "- The ship"), "prose", ["bullets"]),
        ("ship harbour town rope " * 20, "prose", ["stop words"]),
        ("ship harbour town rope " * 20, "multilingual", []),
        (CODE, "code", []),
        (CODE.replace("# area of a circle\n", ""), "code", ["comment"]),
        (CODE + "x" * 1000, "code", ["longest line"]),
        (CODE[:40], "code", ["lines"]),
        (CODE + "print(1)\n" * 9, "code", ["duplicate lines"]),
        ("x = 1 \\ y^2 " * 20, "math", []),
        ("x = y " * 30, "math", ["signs"]),
        ("a\tb\n" * 40, "structured", ["duplicate lines"]),
        ("short", "agentic", ["words"]),
    ],
)
def test_checks(text, content_type, failed):
    assert failed_checks(text, content_type) == failed


def test_levels():
    assert judge(PROSE, "web").level == 5
    assert judge("ship harbour town rope " * 20, "web").level == 4
    worst = judge("- xx1... \n" * 25, "web")
    assert (worst.valid, worst.level) == (True, 1)
    invalid = judge("tiny", "code")
    assert (invalid.valid, invalid.level, invalid.content_type) == (False, 1, "code")
