"""The provenance page: every source with its terms, by class of licence."""

from collections.abc import Mapping, Sequence
from typing import Any

from portolan.report.data_map.overview import compact
from portolan.report.words import MISSING, count, percent, plural, size
from portolan.source_settings import LICENSE_CLASSES

COLUMNS: tuple[tuple[str, str, bool], ...] = (
    ("key", "Source", False),
    ("license_class", "Class", False),
    ("license_spdx", "SPDX", False),
    ("tokens", "Tokens", True),
    ("documents", "Documents", True),
    ("bytes", "Text", True),
    ("category", "Category", False),
    ("upstream", "Upstream", False),
    ("subset", "Subset", False),
    ("revision", "Revision", False),
    ("made", "Made by", False),
    ("transform", "Changes", False),
    ("license_raw", "Licence as found", False),
    ("license_per_document", "Per document", False),
    ("accept_reason", "Accepted because", False),
    ("evidence_url", "Evidence", False),
    ("retrieved_on", "Retrieved", False),
    ("row_hash", "Row", False),
)
NUMBERS = {"tokens": count, "documents": count, "bytes": size}
DIGITS = 16
SHORT, LONG = 30, 44
"""Characters shown of a text, and those from which on it is folded."""
Row = Mapping[str, Any]


def shown_columns(rows: Sequence[Row]) -> list[tuple[str, str, bool]]:
    """Columns with something in them."""
    return [column for column in COLUMNS if any(_cell(row, column[0]) for row in rows)]


def _cell(row: Row, name: str) -> Any:
    """Text of a cell; a link is a mapping with `url`, a long text one with `text` and `start`."""
    if name == "made":
        kinds = [word.replace("_", " ") for word in ("synthetic", "machine_translated", "pdf")
                 if row.get(word)]  # fmt: skip
        return " · ".join([*kinds, *([row["generator"]] if row.get("generator") else [])])
    value = row.get(name)
    if name in NUMBERS:
        return NUMBERS[name](value)
    if name in ("revision", "row_hash"):
        return str(value or "")[:DIGITS]
    text = str(value or "")
    if name == "evidence_url" and text.startswith(("https://", "http://")):
        return {"url": text}
    if name == "license_raw" and text == str(row.get("license_spdx") or ""):
        return ""
    return {"text": text, "start": text[:SHORT].rstrip() + " …"} if len(text) > LONG else text


def classes(rows: Sequence[Row]) -> list[tuple[str, int, str]]:
    """Classes in use from the most open: name, sources, tokens."""
    found = []
    for name in LICENSE_CLASSES:
        mine = [row for row in rows if row["license_class"] == name]
        if mine:
            tokens = sum(row["tokens"] or 0 for row in mine)
            found.append((name, len(mine), compact(tokens) + " tokens"))
    return found


def source_rows(rows: Sequence[Row]) -> list[tuple[int, list[Any]]]:
    """Number of the class among those in use, and the cells of the shown columns."""
    names = [name for name, _, _ in classes(rows)]
    columns = shown_columns(rows)
    return [
        (
            names.index(row["license_class"]) + 1,
            [_cell(row, name) or MISSING for name, _, _ in columns],
        )
        for row in sorted(rows, key=lambda row: -(row["tokens"] or 0))
    ]


def lead(rows: Sequence[Row]) -> str:
    """One sentence on how much of the text is open."""
    total = sum(row["tokens"] or 0 for row in rows)
    open_classes = LICENSE_CLASSES[:3]
    open_tokens = sum(row["tokens"] or 0 for row in rows if row["license_class"] in open_classes)
    share = percent(open_tokens / total) if total else MISSING
    return (
        f"{plural(len(rows), 'source')}; {share} of the tokens are in the public domain, "
        "permissive or share-alike."
    )
