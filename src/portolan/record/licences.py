"""Licences of what a run used and made, and what a derivative may therefore do.

The four ways to pass something on, from the most open to the most closed, are `public`, `gated`,
`metadata_only` and `withheld`. A derivative is never more open than its inputs and its licence
never broader, unless its row cites a legal basis.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from portolan.errors import PortolanError

NO_ASSERTION = "NOASSERTION"
SOURCE_ROW = "source "
"""Names of the rows of sources of the corpus begin so."""
MAX_NAMED = 3
"""Problems of a table that an error spells out."""

Redistribution = Literal["public", "gated", "metadata_only", "withheld"]
REDISTRIBUTION: tuple[Redistribution, ...] = get_args(Redistribution)
Subject = Literal["code", "corpus", "evaluation", "tokenizer", "weights", "measurements", "other"]

_WORDS: Mapping[str, str] = {
    "code": "code|source",
    "corpus": "corpus|data|dataset|datasets",
    "evaluation": "evaluation|benchmark|held-out",
    "tokenizer": "tokenizer|vocabulary",
    "weights": "weights|model|models|checkpoint|checkpoints",
    "measurements": "metrics|measurements|curves",
}
_OPEN = re.compile(r"\bopen(?:ly|ed)?\b", re.IGNORECASE)
_SENTENCE = re.compile(r"[^.!?\n]+")


class LicenceError(PortolanError):
    """A licence table grants more than the inputs allow."""


@dataclass(frozen=True)
class LicenceRow:
    """What is known of the licence of one thing.

    Args:
        name: unique in its table; `derived_from` names other rows.
        title: what a person calls it; the name when it is empty.
        declared: SPDX expression that the author states, or NOASSERTION.
        concluded: SPDX expression after looking, or NOASSERTION.
        basis: how that was concluded.
        obligations: what a user must do, e.g. attribution.
        legal_basis: citation that allows more than the inputs do; empty for none.
    """

    name: str
    subject: Subject
    declared: str = NO_ASSERTION
    concluded: str = NO_ASSERTION
    basis: str = "not_stated"
    obligations: tuple[str, ...] = ()
    redistribution: Redistribution = "withheld"
    derived_from: tuple[str, ...] = ()
    legal_basis: str = ""
    title: str = ""

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.title or self.name

    @property
    def may_be_called_open(self) -> bool:
        """Whether anyone may have it, on terms that are known."""
        return self.concluded != NO_ASSERTION and self.redistribution == "public"

    def to_json(self) -> dict[str, Any]:
        """The row as the record stores it."""
        return {
            "name": self.name,
            "title": self.label,
            "subject": self.subject,
            "declared": self.declared,
            "concluded": self.concluded,
            "basis": self.basis,
            "obligations": list(self.obligations),
            "redistribution": self.redistribution,
            "derived_from": list(self.derived_from),
            "legal_basis": self.legal_basis or "none",
        }


def licence_problems(rows: Sequence[LicenceRow], class_number: Callable[[str], int]) -> list[str]:
    """What is wrong with a table, one sentence each.

    Comparing every row with its direct inputs suffices: what holds for each step holds along a
    chain of derivatives.

    Args:
        rows: the table.
        class_number: position of an SPDX expression in the order from open to closed; an unknown
            expression and NOASSERTION count as more closed than the known ones.
    """
    table = {row.name: row for row in rows}
    problems: list[str] = []
    if len(table) != len(rows):
        problems.append("two rows have the same name")
    for row in rows:
        unknown = sorted(set(row.derived_from) - table.keys())
        if unknown:
            problems.append(f"{row.label} derives from {unknown[0]}, which has no row")
        if row.name in row.derived_from:
            problems.append(f"{row.label} derives from itself")
        if row.legal_basis:
            continue
        for source in (table[name] for name in row.derived_from if name in table):
            problems += _compare(row, source, class_number)
    return problems


def _compare(
    row: LicenceRow, source: LicenceRow, class_number: Callable[[str], int]
) -> Iterable[str]:
    if REDISTRIBUTION.index(row.redistribution) < REDISTRIBUTION.index(source.redistribution):
        yield (
            f"{row.label} is {row.redistribution}, its input {source.label} only "
            f"{source.redistribution}, and no legal basis is cited"
        )
    asserts = row.concluded != NO_ASSERTION
    if asserts and class_number(row.concluded) < class_number(source.concluded):
        yield (
            f"{row.label} is concluded as {row.concluded}, which is broader than "
            f"{source.concluded} of its input {source.label}, and no legal basis is cited"
        )


def check_licences(rows: Sequence[LicenceRow], class_number: Callable[[str], int]) -> None:
    """Raise LicenceError with everything that is wrong with a table."""
    if problems := licence_problems(rows, class_number):
        more = len(problems) - MAX_NAMED
        raise LicenceError(
            "the licence table grants more than its inputs allow: "
            + "; ".join(problems[:MAX_NAMED])
            + (f"; and {more} more" if more > 0 else ""),
            remedy="narrow the derivative, or cite the legal basis in its row",
        )


def unfounded_open_words(text: str, rows: Sequence[LicenceRow]) -> list[str]:
    """Sentences that call something open although its licence or its access does not say so.

    A subject without any row counts as NOASSERTION.
    """
    founded = {
        subject: bool(own := [row for row in rows if row.subject == subject])
        and all(row.may_be_called_open for row in own)
        for subject in _WORDS
    }
    found = []
    for sentence in _SENTENCE.findall(text):
        if not _OPEN.search(sentence):
            continue
        subjects = [
            name
            for name, words in _WORDS.items()
            if re.search(rf"\b(?:{words})\b", sentence, re.IGNORECASE)
        ]
        if any(not founded[name] for name in subjects):
            found.append(sentence.strip())
    return found
