"""Which numbers of a document rest on a recorded figure, and which on nothing.

Looked at: the prose and tables of Markdown, and the visible text of HTML. Left out, in this order:

- code (blocks and spans), scripts, styles, comments, addresses of links;
- dates, clock times, versions, and years from 1900 to 2099 written as four digits;
- numbers of lists and headings, and references such as `#12`, section 3, line 4 or [5];
- names with digits in them, such as d768, H200, R2 or 535B-A23B.

A number rests on a figure if the figure, rounded to the digits that are written, is that number. A
whole number below 100 must also share a word with the figure's unit or name in its sentence, since
small numbers agree with everything.
"""

import bisect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from html.parser import HTMLParser
from pathlib import Path

from portolan.errors import UsageError
from portolan.record.audit.figures import Figure
from portolan.record.quantities import last_place, significant_digits

MAX_DOCUMENT_BYTES = 64 << 20
SMALL = 100

_SPACE = "\u202f\u2009\u00a0"
_NUMBER = re.compile(
    rf"(?<![\w.,\-/#])(?P<sign>[-−+]?)(?P<digits>\d{{1,3}}(?:[,{_SPACE}]\d{{3}})+(?!\d)|\d+)"
    r"(?P<fraction>\.\d+)?(?P<exponent>[eE][-+]?\d+)?"
    r"(?:\s?[×x]\s?10(?P<power>\^?[-−]?\d+|[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+))?"
    r"(?:\s?(?P<suffix>%|per cent\b|percent\b|trillion\b|billion\b|million\b|thousand\b|[TBMk]\b))?"
    r"(?P<glued>[\w-]*[^\W\d_][\w-]*)?"
)
_SUFFIXES = {
    "trillion": 12, "billion": 9, "million": 6, "thousand": 3, "T": 12, "B": 9, "M": 6, "k": 3,
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹−", "-0123456789-")
_LEFT_OUT = tuple(
    re.compile(pattern, re.IGNORECASE | re.MULTILINE)
    for pattern in (
        r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?Z?)?",
        r"\b\d{1,2}:\d\d(?::\d\d)?\b",
        r"\b(?:v|version|release|python|cuda|rfc|arxiv|iso)[ :-]?\d+(?:\.\d+)*",
        r"\b\d+\.\d+\.\d+(?:\.\d+)*\b",
        r"^\s*(?:#+\s*)?(?:[-*+]\s+)?\d{1,3}[.)]\s",
        r"^\s*#+\s*\d+(?:\.\d+)*\b",
        r"#\d+\b",
        r"\[\d+\]",
        r"\b(?:sections?|chapters?|tables?|figures?|appendix|items?|lines?|notes?|rules?"
        r"|pages?|step no\.)\s\d+(?:\.\d+)*(?:\s?(?:and|to|or|–|-)\s?\d+(?:\.\d+)*)*",
    )
)
_MARKDOWN = tuple(
    re.compile(pattern, re.DOTALL | re.MULTILINE)
    for pattern in (
        r"^(?P<fence>```+|~~~+).*?^(?P=fence)",
        r"<!--.*?-->",
        r"(?P<tick>`+)(?!`).*?(?<!`)(?P=tick)(?!`)",
        r"(?<=\])\([^)\n]*\)",
        r"<?\bhttps?://[^\s>)\]]+>?",
        r"^\s*\|?[\s:|-]+\|[\s:|-]*$",
        r"<[^>\n]+>",
    )
)


@dataclass(frozen=True)
class Number:
    """A number of a document: its line, as written, its value and the place of its last digit."""

    line: int
    text: str
    value: Decimal
    place: Decimal
    is_percent: bool
    sentence: str


@dataclass(frozen=True)
class Resolution:
    """A number and the ids of the figures that it rests on; none if it is unresolved."""

    number: Number
    figures: tuple[str, ...]


def numbers_in(path: Path) -> list[Number]:
    """Numbers of a Markdown (or plain text) or HTML file, in order; see the module for the rules.

    Raises:
        UsageError: the file is missing, too large or not UTF-8.
    """
    if not path.is_file() or path.stat().st_size > MAX_DOCUMENT_BYTES:
        raise UsageError(f"{path} is not a document of at most {MAX_DOCUMENT_BYTES >> 20} MiB")
    try:
        content = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    return list(find_numbers(readable_text(content, html=path.suffix in (".html", ".htm"))))


def readable_text(content: str, *, html: bool) -> str:
    """What a reader sees, line for line; whatever is left out becomes spaces."""
    if html:
        parser = _VisibleText()
        parser.feed(content)
        parser.close()
        return "".join(parser.parts)
    for pattern in _MARKDOWN:
        content = pattern.sub(_blank, content)
    return content


def find_numbers(text: str) -> Iterator[Number]:
    """Numbers of a readable text."""
    for pattern in _LEFT_OUT:
        text = pattern.sub(_blank, text)
    for line_number, line in enumerate(text.split("\n"), 1):
        for match in _NUMBER.finditer(line):
            number = _number(match, line_number, line)
            if number is not None:
                yield number


def resolve(numbers: Sequence[Number], figures: Sequence[Figure]) -> list[Resolution]:
    """The figures that each number rests on; a logarithmic search for each number."""
    table = sorted(
        ((number, figure) for figure in figures for number in _values(figure)),
        key=lambda entry: entry[0],
    )
    values = [value for value, _ in table]
    found = []
    for number in numbers:
        scaled = number.value / 100 if number.is_percent else number.value
        ids: dict[str, None] = {}
        for wanted, place, unit in (
            (number.value, number.place, "%" if number.is_percent else ""),
            *([(scaled, number.place / 100, "fraction")] if number.is_percent else []),
        ):
            low = bisect.bisect_left(values, wanted - place / 2)
            high = bisect.bisect_right(values, wanted + place / 2)
            for _, figure in table[low:high]:
                if _fits(number, figure, unit):
                    ids[figure.id] = None
        found.append(Resolution(number, tuple(ids)))
    return found


def _values(figure: Figure) -> tuple[Decimal, ...]:
    number = figure.number
    return () if number is None else (number,)


def _fits(number: Number, figure: Figure, unit: str) -> bool:
    """Whether a figure of equal value can be what the sentence speaks of."""
    if (figure.unit == "%") != (unit == "%") and number.is_percent and unit == "%":
        return False
    whole = number.value == number.value.to_integral_value()
    if not whole or abs(number.value) >= SMALL or number.place:
        return True
    words = {_stem(word) for word in re.findall(r"[a-z]+", number.sentence.lower())}
    own = re.findall(r"[a-z]{3,}", f"{figure.unit} {figure.name}".lower())
    return bool(words & {_stem(word) for word in own})


def _stem(word: str) -> str:
    return word.removesuffix("s")


def _number(match: re.Match[str], line: int, text: str) -> Number | None:
    glued = match["glued"] or ""
    digits = re.sub(f"[,{_SPACE}]", "", match["digits"])
    plain = not (match["fraction"] or match["exponent"] or match["power"] or match["suffix"])
    if glued or (plain and len(match["digits"]) == 4 and 1900 <= int(digits) <= 2099):
        return None
    sign = "-" if match["sign"] in ("-", "−") else ""
    written = f"{sign}{digits.lstrip('0') or '0'}{match['fraction'] or ''}"
    exponent = int((match["exponent"] or "e0")[1:])
    exponent += int((match["power"] or "0").lstrip("^").translate(_SUPERSCRIPTS))
    exponent += _SUFFIXES.get(match["suffix"] or "", 0)
    if abs(exponent) > 400 or len(written) > 60:
        return None
    value = Decimal(written).scaleb(exponent)
    rounded = "." in written or exponent != 0
    stated = f"{written}e0" if rounded else written
    place = last_place(stated, significant_digits(stated)).scaleb(exponent)
    percent = (match["suffix"] or "") in ("%", "per cent", "percent")
    return Number(line, match[0].strip(), value, place, percent, text)


def _blank(match: re.Match[str]) -> str:
    """Spaces of the same shape, so that lines keep their numbers."""
    return re.sub(r"[^\n]", " ", match[0])


class _VisibleText(HTMLParser):
    """Text of an HTML document outside code, scripts and styles, newlines kept."""

    _HIDDEN = frozenset({"script", "style", "code", "pre", "svg", "template", "head", "noscript"})
    _INLINE = frozenset({"a", "b", "em", "i", "span", "strong", "small", "sub", "sup", "abbr"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._hidden += tag in self._HIDDEN
        if tag not in self._INLINE:
            self.parts.append("   ")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = max(0, self._hidden - (tag in self._HIDDEN))
        if tag not in self._INLINE:
            self.parts.append("   ")

    def handle_data(self, data: str) -> None:
        self.parts.append("\n" * data.count("\n") if self._hidden else data)
