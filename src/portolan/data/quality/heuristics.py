"""The offline labeller: rules on lines and words (after Rae et al. 2021, arXiv 2112.11446).

It makes the pipeline runnable; its levels are no claim about quality.
"""

import re
from collections.abc import Callable

from portolan.data.quality.rubric import ContentType, Judgement

NAME = "heuristic-1"
MIN_WORDS, MIN_ALPHANUMERIC = 20, 0.25
TYPES_OF_CATEGORIES: dict[str, ContentType] = {
    "code": "code",
    "math": "math",
    "multilingual": "multilingual",
    "agentic": "agentic",
}
STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
_BULLET = re.compile(r"\s*[-*•‣◦·]\s")
_COMMENT = re.compile(r"(^|\s)(#|//|/\*|--|;|%|<!--|\"\"\"|''')")


class _Text:
    """A document with its lines and words."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = [line for line in text.splitlines() if line.strip()]
        self.words = text.split()

    def share_of_lines(self, holds: Callable[[str], object]) -> float:
        """Share of the lines that are not empty."""
        return sum(1 for line in self.lines if holds(line)) / max(1, len(self.lines))

    def duplicate_lines(self) -> float:
        """Share of the lines that stand earlier already."""
        distinct = {line.strip() for line in self.lines}
        return 1 - len(distinct) / max(1, len(self.lines))

    def mean_word_length(self) -> float:
        """Mean number of characters a word."""
        return sum(map(len, self.words)) / max(1, len(self.words))

    def words_with_letter(self) -> float:
        """Share of the words that hold a letter."""
        holds = (any(map(str.isalpha, word)) for word in self.words)
        return sum(holds) / max(1, len(self.words))


def content_type_of(text: str, category: str) -> ContentType:
    """The type that the category of the source says, else structured if half the lines are rows.

    A row holds a tab, a bar, or 3 commas. This labeller alone may look at the source.
    """
    if category in TYPES_OF_CATEGORIES:
        return TYPES_OF_CATEGORIES[category]
    rows = _Text(text).share_of_lines(
        lambda line: "\t" in line or "|" in line or line.count(",") >= 3
    )
    return "structured" if rows >= 0.5 else "prose"


def is_valid(text: str) -> bool:
    """Whether a text has 20 words, and a letter or digit in a quarter of its characters."""
    alphanumeric = sum(map(str.isalnum, text))
    return len(text.split()) >= MIN_WORDS and alphanumeric >= MIN_ALPHANUMERIC * len(text)


def failed_checks(text: str, content_type: ContentType) -> list[str]:
    """Names of the checks of its type that a text fails."""
    parts = _Text(text)
    checks: dict[str, bool]
    if content_type == "code":
        checks = {
            "longest line": max(map(len, parts.lines), default=0) < 1000,
            "duplicate lines": parts.duplicate_lines() <= 0.3,
            "comment": any(_COMMENT.search(line) for line in parts.lines),
            "lines": 5 <= len(parts.lines) <= 5000,
        }
    elif content_type == "math":
        signs = ("=" in text, "\\" in text, "^" in text, any(map(str.isdigit, text)))
        checks = {"signs": sum(signs) >= 3, "words": 50 <= len(parts.words) <= 100_000}
    else:
        checks = {
            "words": 50 <= len(parts.words) <= 100_000,
            "duplicate lines": parts.duplicate_lines() <= 0.3,
        }
    if content_type in ("prose", "multilingual"):
        checks |= {
            "word length": 3 <= parts.mean_word_length() <= 10,
            "words with a letter": parts.words_with_letter() >= 0.8,
            "ellipses": parts.share_of_lines(_ends_in_ellipsis) <= 0.3,
            "bullets": parts.share_of_lines(_BULLET.match) <= 0.9,
        }
    if content_type == "prose":
        present = STOP_WORDS.intersection(word.lower() for word in parts.words)
        checks["stop words"] = len(present) >= 2
    return [name for name, passed in checks.items() if not passed]


def _ends_in_ellipsis(line: str) -> bool:
    return line.rstrip().endswith(("...", "…"))


def judge(text: str, category: str) -> Judgement:
    """Type, validity and level 5 - min(4, failed checks) of a document of a source's category."""
    content_type = content_type_of(text, category)
    valid = is_valid(text)
    level = 5 - min(4, len(failed_checks(text, content_type)))
    return Judgement.model_validate(
        {"content_type": content_type, "valid": valid, "level": level if valid else 1}
    )
