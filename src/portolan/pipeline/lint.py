"""Check the numbers of documents against the figures of a project or of an audit folder."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from portolan.console import say
from portolan.pipeline.corpus import find_corpus
from portolan.pipeline.reconcile import known_figures
from portolan.pipeline.sealing_licences import licence_table
from portolan.project import open_project
from portolan.record.audit.figures import Figure
from portolan.record.audit.folder import read_audit
from portolan.record.audit.lint import Resolution, numbers_in, readable_text, resolve
from portolan.record.audit.reconciliation import reconcile_folder
from portolan.record.licences import LicenceRow, unfounded_open_words
from portolan.record.visible import visible
from portolan.report.journal import read_records


def run(root: Path, files: Sequence[Path], claims: Path | None, *, as_json: bool) -> int:
    """Print what does not resolve; returns 1 if anything does not, else 0.

    Args:
        root: the project, used when `claims` is not given.
        files: Markdown or HTML documents.
        claims: folder with a table of claims.
        as_json: print every number with the figures it rests on.
    """
    figures, licences = _known(root, claims)
    reports = [_check(path, figures, licences) for path in files]
    if as_json:
        say(json.dumps([_as_json(*report) for report in reports], indent=2, ensure_ascii=False))
    else:
        for report in reports:
            for line in _lines(*report):
                say(visible(line))
    failed = any(
        open_words or any(not found.figures for found in numbers)
        for _, numbers, open_words in reports
    )
    return int(failed)


Checked = tuple[Path, list[Resolution], list[str]]


def _known(root: Path, claims: Path | None) -> tuple[list[Figure], list[LicenceRow]]:
    """Figures that a number may rest on, and the licences of what may be called open."""
    if claims is not None:
        cases = reconcile_folder(claims).cases
        figures = [figure for case in cases for figure in case.figures]
        return [*read_audit(claims).figures, *figures], []
    project = open_project(root)
    records = read_records(project.record)
    return known_figures(project), licence_table(root, records, find_corpus(project))


def _check(path: Path, figures: list[Figure], licences: list[LicenceRow]) -> Checked:
    numbers = resolve(numbers_in(path), figures)
    text = readable_text(path.read_text("utf-8"), html=path.suffix in (".html", ".htm"))
    return path, numbers, unfounded_open_words(text, licences) if licences else []


def _lines(path: Path, numbers: list[Resolution], open_words: list[str]) -> Iterator[str]:
    for found in numbers:
        if not found.figures:
            yield f"{path}:{found.number.line}: {found.number.text} rests on no recorded figure"
    for sentence in open_words:
        yield f"{path}: called open without a licence that says so: {' '.join(sentence.split())}"
    resolved = sum(bool(found.figures) for found in numbers)
    yield f"{path}: {resolved} of {len(numbers)} numbers rest on recorded figures"


def _as_json(path: Path, numbers: list[Resolution], open_words: list[str]) -> dict[str, Any]:
    return {
        "file": str(path),
        "numbers": [
            {
                "line": found.number.line,
                "text": found.number.text,
                "value": f"{found.number.value:f}",
                "figures": list(found.figures),
            }
            for found in numbers
        ],
        "called_open": open_words,
    }
