import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from portolan.canonical import (
    CanonicalError,
    canonical,
    decimal,
    digest,
    parse,
    step_key,
    stringify_floats,
)

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=12,
)


def test_golden_bytes():
    value = {"\ue000": 1, "\U0001f600": 2, "b": [True, None, "é\n\u0001/\u007f"], "a": -3}
    expected = (
        "7b2261223a2d332c2262223a5b747275652c6e756c6c2c22c3a95c6e5c75303030312f7f225d2c22f09f9880"
        "223a322c22ee8080223a317d"
    )
    assert canonical(value).hex() == expected
    assert digest(value) == "455261f186c900b2a0d274db0e67fc178376c0ff550659f9fb485015aee55c95"
    assert digest({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


def test_golden_step_key():
    assert step_key("normalise", 1, {"max_whitespace": 128}, []) == "b4ef346465680d76"
    assert step_key("a", 1, {"x": 0.1}, []) == step_key("a", 1, {"x": "0.1"}, [])
    assert step_key("a", 1, {"x": 0.1}, ["k"]) != step_key("a", 1, {"x": 0.1}, [])


@pytest.mark.parametrize(
    "value", [1.0, math.nan, [0.5], {"a": {"b": 2.5}}, 2**53, -(2**53), "\ud800", {1: 2}, b"x"]
)
def test_values_without_canonical_form_are_refused(value):
    with pytest.raises(CanonicalError):
        canonical(value)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":2}',
        "1.0",
        "1e3",
        "NaN",
        "-Infinity",
        "9007199254740992",
        "9" * 5000,
        '"\\ud800"',
        "{",
        "",
        "[" * 100_000,
    ],
)
def test_parser_is_strict(text):
    with pytest.raises(CanonicalError):
        parse(text.encode())


def test_parser_refuses_bytes_that_are_not_utf8():
    with pytest.raises(CanonicalError):
        parse(b'"\xff"')


@given(VALUES)
def test_round_trip_and_order(value):
    content = canonical(value)
    assert parse(content) == value
    assert canonical(json.loads(content)) == content


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_decimal_reads_back_as_the_same_float(value):
    assert float(decimal(value)) == value
    assert "+" not in decimal(value)


def test_decimals_of_settings():
    assert [decimal(x) for x in (5.0, 1e-15, 1e22, 0.1)] == ["5.0", "1e-15", "1e22", "0.1"]
    assert decimal(np.float32(0.1)) == "0.10000000149011612"
    with pytest.raises(CanonicalError):
        decimal(math.inf)


def test_stringify_floats():
    value = {"a": (1.5, np.float32(0.5), np.int64(3)), "b": 2**60, "c": True}
    assert stringify_floats(value) == {"a": ["1.5", "0.5", 3], "b": str(2**60), "c": True}
    with pytest.raises(CanonicalError):
        stringify_floats({"a": object()})
