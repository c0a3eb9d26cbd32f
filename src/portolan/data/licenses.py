"""Licence facts: SPDX expressions, their class, and what a distribution's metadata states."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from portolan.source_settings import LICENSE_CLASSES

NO_ASSERTION = "NOASSERTION"
UNKNOWN_CLASS = LICENSE_CLASSES.index("unknown")
CUSTOM_CLASS = LICENSE_CLASSES.index("custom-terms")
# A "BSD" statement without a clause count is one of two licences of the same class.
UNSPECIFIED_BSD = "LicenseRef-BSD"
# Prefix for terms that restrict the use of a model's outputs, as synthetic sources carry them.
MODEL_OUTPUT_PREFIX = "licenseref-model-output"

_IDENTIFIERS_BY_CLASS: Mapping[str, str] = {
    "public-domain": "CC0-1.0 PDDL-1.0 Unlicense 0BSD CC-PDDC LicenseRef-US-Gov-PD",
    "permissive": "MIT MIT-0 Apache-2.0 BSD-2-Clause BSD-3-Clause ISC Zlib PSF-2.0 Python-2.0 "
    "BSL-1.0 HPND NCSA PostgreSQL Unicode-3.0 CC-BY-3.0 CC-BY-4.0 ODC-By-1.0 "
    f"CDLA-Permissive-2.0 {UNSPECIFIED_BSD}",
    "share-alike": "CC-BY-SA-3.0 CC-BY-SA-4.0 ODbL-1.0 MPL-2.0",
    "no-derivatives": "CC-BY-ND-4.0",
    "non-commercial": "CC-BY-NC-4.0 CC-BY-NC-SA-4.0 CC-BY-NC-ND-4.0",
    "unknown": NO_ASSERTION,
}
_CLASS_OF = {
    identifier.lower(): LICENSE_CLASSES.index(name)
    for name, identifiers in _IDENTIFIERS_BY_CLASS.items()
    for identifier in identifiers.split()
}
_SHARE_ALIKE_FAMILY = re.compile(r"(a|l)?gpl-\d.*|gfdl-1\.3-.*", re.IGNORECASE)

_TITLES: Mapping[str, str] = {
    "mit": "MIT",
    "mit no attribution license (mit-0)": "MIT-0",
    "apache": "Apache-2.0",
    "apache 2": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache version 2.0": "Apache-2.0",
    "apache software": "Apache-2.0",
    "apache software 2.0": "Apache-2.0",
    "bsd": UNSPECIFIED_BSD,
    "2-clause bsd": "BSD-2-Clause",
    "bsd 2-clause": "BSD-2-Clause",
    "simplified bsd": "BSD-2-Clause",
    "3-clause bsd": "BSD-3-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "new bsd": "BSD-3-Clause",
    "modified bsd": "BSD-3-Clause",
    "isc": "ISC",
    "isc (iscl)": "ISC",
    "iscl": "ISC",
    "python software foundation": "PSF-2.0",
    "psf": "PSF-2.0",
    "mozilla public 2.0 (mpl 2.0)": "MPL-2.0",
    "mpl 2.0": "MPL-2.0",
    "the unlicense (unlicense)": "Unlicense",
    "unlicense": "Unlicense",
    "zlib/libpng": "Zlib",
    "boost software 1.0 (bsl-1.0)": "BSL-1.0",
    "historical permission notice and disclaimer (hpnd)": "HPND",
    "university of illinois/ncsa open source": "NCSA",
    "cc0 1.0 universal (cc0 1.0) public domain dedication": "CC0-1.0",
    "gnu general public v2 (gplv2)": "GPL-2.0-only",
    "gnu general public v2 or later (gplv2+)": "GPL-2.0-or-later",
    "gnu general public v3 (gplv3)": "GPL-3.0-only",
    "gnu general public v3 or later (gplv3+)": "GPL-3.0-or-later",
    "gnu lesser general public v2 (lgplv2)": "LGPL-2.0-only",
    "gnu lesser general public v2 or later (lgplv2+)": "LGPL-2.0-or-later",
    "gnu lesser general public v3 (lgplv3)": "LGPL-3.0-only",
    "gnu lesser general public v3 or later (lgplv3+)": "LGPL-3.0-or-later",
    "gnu affero general public v3": "AGPL-3.0-only",
    "gnu affero general public v3 or later (agplv3+)": "AGPL-3.0-or-later",
}
_TOKEN = re.compile(r"\s*([()]|[A-Za-z0-9.+:-]+)")


class LicenseSyntaxError(ValueError):
    """The text is not an SPDX expression."""


@dataclass(frozen=True)
class LicenseFacts:
    """Class number of an expression and the identifiers in it that the table does not know."""

    expression: str
    number: int
    unknown: tuple[str, ...] = ()

    @property
    def license_class(self) -> str:
        """Name of the class."""
        return LICENSE_CLASSES[self.number]


def _class_of_identifier(identifier: str, unknown: list[str]) -> int:
    name = identifier.lower().rstrip("+")
    if name in _CLASS_OF:
        return _CLASS_OF[name]
    if _SHARE_ALIKE_FAMILY.fullmatch(name):
        return LICENSE_CLASSES.index("share-alike")
    if name.startswith(MODEL_OUTPUT_PREFIX):
        return LICENSE_CLASSES.index("model-output-terms")
    if name.startswith("licenseref-"):
        return CUSTOM_CLASS
    unknown.append(identifier)
    return UNKNOWN_CLASS


class _Parser:
    """Recursive descent over `or := and (OR and)*`, `and := with (AND with)*`, `with`, brackets."""

    def __init__(self, expression: str) -> None:
        self.tokens = _TOKEN.findall(expression)
        if "".join(self.tokens) != re.sub(r"\s+", "", expression):
            raise LicenseSyntaxError(expression)
        self.expression = expression
        self.position = 0
        self.unknown: list[str] = []

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        if not token:
            raise LicenseSyntaxError(self.expression)
        self.position += 1
        return token

    def parse(self) -> int:
        number = self.any_of()
        if self.peek():
            raise LicenseSyntaxError(self.expression)
        return number

    def any_of(self) -> int:
        number = self.all_of()
        while self.peek().upper() == "OR":
            self.take()
            number = min(number, self.all_of())
        return number

    def all_of(self) -> int:
        number = self.single()
        while self.peek().upper() == "AND":
            self.take()
            number = max(number, self.single())
        return number

    def single(self) -> int:
        token = self.take()
        if token == "(":
            number = self.any_of()
            if self.take() != ")":
                raise LicenseSyntaxError(self.expression)
            return number
        if token == ")" or token.upper() in ("AND", "OR", "WITH"):
            raise LicenseSyntaxError(self.expression)
        number = _class_of_identifier(token, self.unknown)
        if self.peek().upper() == "WITH":
            self.take()
            self.take()
        return number


def classify_license(expression: str) -> LicenseFacts:
    """Class of an SPDX expression: the larger number of `A AND B`, the smaller of `A OR B`.

    An exception after WITH does not change the class. An empty, unknown or malformed expression
    is of class `unknown`.
    """
    if not expression.strip():
        return LicenseFacts(NO_ASSERTION, UNKNOWN_CLASS)
    try:
        parser = _Parser(expression)
        number = parser.parse()
    except LicenseSyntaxError:
        return LicenseFacts(expression, UNKNOWN_CLASS, (expression,))
    return LicenseFacts(expression, number, tuple(sorted(set(parser.unknown))))


def join_expressions(expressions: Iterable[str]) -> str:
    """Conjunction of the distinct expressions, sorted; NOASSERTION when there is none."""
    distinct = sorted(set(expressions))
    if len(distinct) <= 1:
        return distinct[0] if distinct else NO_ASSERTION
    return " AND ".join(f"({one})" if " " in one else one for one in distinct)


def _from_title(title: str) -> str | None:
    """SPDX id of a licence's everyday name, or None."""
    name = title.strip().lower().replace(",", "")
    name = re.sub(r"\b(the |licen[cs]e\b|licensed\b)", "", name)
    return _TITLES.get(re.sub(r"\s+", " ", name).strip())


def license_from_metadata(
    expression: str | None, license_field: str | None, classifiers: Iterable[str]
) -> tuple[str, str]:
    """SPDX expression of a distribution and the statement that it was read from.

    The order is License-Expression, then a License field that is an expression or a known name,
    then trove classifiers (several of them all hold), else NOASSERTION.
    """
    if expression:
        return expression.strip(), expression.strip()
    stated = (license_field or "").strip()
    first_line = stated.splitlines()[0].strip() if stated else ""
    if first_line:
        facts = classify_license(first_line)
        if not facts.unknown and facts.number != UNKNOWN_CLASS:
            return first_line, first_line
        if named := _from_title(first_line):
            return named, first_line
    titles = [text.rsplit("::", 1)[-1].strip() for text in classifiers if "License ::" in text]
    named = [_from_title(title) or NO_ASSERTION for title in titles if title != "OSI Approved"]
    if named:
        return join_expressions(named), "; ".join(titles)
    return NO_ASSERTION, first_line[:100]
