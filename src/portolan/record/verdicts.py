"""Words of a reconciliation: verdicts, explanations, findings, and the exit codes they give."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Verdict = Literal[
    "agree",
    "agree_within_rounding",
    "explained_by_basis",
    "superseded",
    "explained_by_time",
    "pending",
    "unreachable",
    "unsupported",
    "conflict",
]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""From harmless to worst."""

Explanation = Literal["fact", "inferred"]
"""`fact` only if the public record itself states the definitions or the link."""

EXIT_CODES: dict[Verdict, int] = {
    "agree": 0,
    "agree_within_rounding": 0,
    "explained_by_basis": 0,
    "superseded": 0,
    "explained_by_time": 0,
    "pending": 8,
    "unreachable": 9,
    "unsupported": 9,
    "conflict": 1,
}

MEANINGS: dict[Verdict, str] = {
    "agree": "the same value",
    "agree_within_rounding": "the same value to the digits that are stated",
    "explained_by_basis": "each figure is right under its own definition; they count other things",
    "superseded": "a later record replaces the earlier figure",
    "explained_by_time": "the figures are of another segment, window or moment",
    "pending": "it speaks of an event that has not happened yet",
    "unreachable": "its source is named and cannot be fetched",
    "unsupported": "no evidence and no formula reaches it",
    "conflict": "the figures cannot both be right, and no record says which one counts",
}


@dataclass(frozen=True)
class Finding:
    """The outcome of comparing two figures, or of examining one (`right` is then empty).

    `rule` names what decided, `arithmetic` holds the lines of the calculation, `reason` says it in
    a sentence. `published` marks a conflict that the owners themselves state in public (R10).
    """

    left: str
    right: str
    verdict: Verdict
    explanation: Explanation
    rule: str
    reason: str
    arithmetic: tuple[str, ...] = ()
    published: bool = False

    @property
    def label(self) -> str:
        """The verdict in words, with what qualifies it."""
        words = self.verdict.replace("_", " ")
        marks = [*(["published"] if self.published else [])]
        if self.explanation == "inferred":
            marks.append("inferred")
        return f"{words} ({', '.join(marks)})" if marks else words


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of some verdicts; `agree` for none."""
    place = max((VERDICTS.index(verdict) for verdict in verdicts), default=0)
    return VERDICTS[place]


def exit_code(verdicts: Iterable[Verdict]) -> int:
    """0 all is well or explained, 8 at worst pending, 9 unsupported or unreachable, 1 conflict."""
    return EXIT_CODES[worst(verdicts)]
