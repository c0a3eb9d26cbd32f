"""Which numbers of a document are looked at, and which figures they rest on."""

import pytest

from portolan.errors import UsageError
from portolan.record.audit.figures import Figure
from portolan.record.audit.lint import numbers_in, resolve


def figure(identity, value, unit="tokens", name="tokens trained"):
    return Figure(identity, name, value, unit, "tokens.planned", "claimed", source="x")


FIGURES = [
    figure("exact", "18005144633344"),
    figure("loss", "2.6813640556849685", "nats/token", "macro loss"),
    figure("share", "17.5", "%", "share of drops"),
    figure("fraction", "0.035", "fraction", "share of drops"),
    figure("racks", "11", "racks", "racks"),
    figure("word", "linear", "category", "schedule"),
]


@pytest.fixture
def found(tmp_path):
    def lint(text, name="a.md"):
        path = tmp_path / name
        path.write_text(text)
        numbers = resolve(numbers_in(path), FIGURES)
        return [(item.number.text, item.figures) for item in numbers]

    return lint


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("18,005,144,633,344 tokens", ("exact",)),
        ("18\u202f005\u202f144\u202f633\u202f344 tokens", ("exact",)),
        ("18.0 trillion", ("exact",)),
        ("18.02T", ()),
        ("1.8005e13", ("exact",)),
        ("1.8005 × 10¹³", ("exact",)),
        ("1.8005 x 10^13", ("exact",)),
        ("a loss of 2.6814", ("loss",)),
        ("a loss of 2.68", ("loss",)),
        ("a loss of 2.682", ()),
        ("17.5 %", ("share",)),
        ("3.5 percent", ("fraction",)),
        ("17.5", ("share",)),
        ("11 racks", ("racks",)),
        ("11 apples", ()),
        ("-11 racks", ()),
    ],
)
def test_a_number_rests_on_what_it_rounds(found, text, ids):
    ((_, figures),) = found(f"There are {text} here.")
    assert figures == ids


@pytest.mark.parametrize(
    "text",
    [
        "on 2026-10-07, at 12:30, in 2024",
        "version 3, v1.2, Python 3.11, release 0.9.1, 1.2.3",
        "see section 4.2, table 3, rule 7, lines 5 to 9, [3], #8435",
        "models d768 and 535B-A23B on H200 with sha256 and 8x7B",
        "`batch = 32` and ``a ` 5`` and <!-- 77 -->",
        "[a link](https://example.org/1234/56) and https://example.org/99",
        "```\n12345\n```",
        "~~~sh\nrun 12345\n~~~",
        "1. first\n2. second\n## 3.1 third\n- 4) fourth",
        "| a | b |\n|---|--:|\n| x | y |",
        '<img width="40" alt="x">',
    ],
)
def test_what_is_left_out(found, text):
    assert found(text) == []


def test_lines_are_counted_through_what_is_left_out(tmp_path):
    path = tmp_path / "a.md"
    path.write_text("# A\n```\n5\n```\n<!-- 6\n7 -->\nA loss of 2.68 at last.\n")
    (number,) = numbers_in(path)
    assert (number.line, number.text, str(number.place)) == (7, "2.68", "0.01")


def test_html_shows_its_visible_text_only(found):
    page = (
        "<html><head><title>12</title><style>p {top: 3px}</style></head><body>\n"
        "<p>A loss of <b>2.6814</b></p><script>var x = 14;</script>\n"
        "<pre>15</pre><svg><text>16</text></svg><td>11</td><td>9</td></body></html>"
    )
    assert found(page, "a.html") == [("2.6814", ("loss",)), ("11", ()), ("9", ())]


def test_documents_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="not a document"):
        numbers_in(tmp_path / "none.md")
    (tmp_path / "bad.md").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        numbers_in(tmp_path / "bad.md")


def test_time_grows_with_the_document_only(tmp_path):
    """A hundred thousand numbers and ten thousand figures: no comparison of all with all."""
    path = tmp_path / "long.md"
    path.write_text("\n".join(f"{n}.5 and {'(' * 20}" for n in range(50_000)))
    many = [figure(str(n), f"{n}.5") for n in range(10_000)]
    numbers = resolve(numbers_in(path), many)
    assert sum(bool(item.figures) for item in numbers) == 10_000
