"""The record of a project as the page shows it: entries, order grade and verification."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portolan.record.chain import ChainFault, ChainReader, Record
from portolan.record.grade import read_witnesses, registration_grade
from portolan.record.verify import verify_journal
from portolan.record.witness import check_witnesses, default_roots, independent_witnesses
from portolan.report.facts import Entry, Verification
from portolan.report.values import as_text, first

if TYPE_CHECKING:
    from portolan.record.verify import Report

_TEXT_FIELDS = ("text", "title", "question", "statement", "reason", "name")


def read_records(folder: Path) -> list[Record]:
    """Records up to the first fault of the chain; none when there is no journal."""
    path = folder / "journal.jsonl"
    records: list[Record] = []
    if path.is_file():
        with path.open("rb") as file, contextlib.suppress(ChainFault):
            records.extend(ChainReader().read(file))
    return records


def as_entry(record: Record) -> Entry:
    """What the page says of a record."""
    body = record.body
    fields = ("name",) if record.type == "genesis" else _TEXT_FIELDS
    refs = body.get("refs")
    return Entry(
        seq=record.seq,
        id=record.id,
        type=record.type,
        time=record.time,
        text=as_text(first(body, *fields)),
        kind=as_text(first(body, "kind", "role", "verdict")),
        refs=tuple(str(ref) for ref in refs) if isinstance(refs, list | tuple) else (),
        supersedes=record.supersedes,
    )


def order_grade(folder: Path, records: Sequence[Record], forecast_id: str) -> str:
    """Grade of the registration that names the forecast, else of the newest; empty without one."""
    registrations = [record for record in records if record.type == "registration"]
    if not registrations:
        return ""
    hashes = {record.seq: record.line_hash for record in records}
    checked = check_witnesses(folder, records[0].line_hash, hashes, default_roots(folder))
    named = [r for r in registrations if forecast_id in (r.body.get("forecasts") or ())]
    chosen = (named or registrations)[-1]
    return registration_grade(records, chosen.id, witnesses=independent_witnesses(checked))


def count_witnesses(folder: Path) -> int:
    """Receipts of outside witnesses."""
    return len(read_witnesses(folder))


def check(folder: Path, report: "Report | None") -> Verification | None:
    """A finished verification of the project, or else that of the journal alone."""
    if report is None and not (folder / "journal.jsonl").is_file():
        return None
    verdict = report.verdict if report else verify_journal(folder)
    checked = [("journal lines", verdict.num_lines)]
    problems = [verdict.reason] if verdict.reason else []
    if report:
        checked.append(("files", report.num_files))
        problems += [str(problem) for problem in report.problems]
    return Verification(
        state=verdict.word.replace("_", " "),
        ok=verdict.word in ("ok", "unsigned") and not problems,
        problems=tuple(problems),
        checked=tuple(checked),
        files_checked=report is not None,
    )


def project_name(records: Sequence[Record]) -> str:
    """Name that the genesis line gives the journal."""
    body: Mapping[str, Any] = records[0].body if records else {}
    return as_text(body.get("name"))
