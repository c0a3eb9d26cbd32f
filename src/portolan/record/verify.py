"""Verification of a record and of the files it names: offline, streaming, trusting nothing."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from portolan.files import sha256_file
from portolan.record.blobs import blob_fault
from portolan.record.chain import ChainFault, ChainReader, Record
from portolan.record.grade import Witness, registration_grade
from portolan.record.heads import HeadFile, expected_signer, read_heads
from portolan.record.rules import Rules, blobs_in
from portolan.record.schema import SchemaError
from portolan.record.seal import seal_fault
from portolan.record.signing import Head, signing_available
from portolan.record.types import check_body
from portolan.record.visible import visible
from portolan.record.witness import (
    CheckedWitness,
    check_witnesses,
    independent_witnesses,
    read_held_heads,
)

Word = Literal["ok", "broken", "truncated", "unsigned", "bad_signature", "torn_tail"]

EXIT_CODES: dict[Word, int] = {
    "ok": 0,
    "unsigned": 4,
    "torn_tail": 5,
    "broken": 1,
    "truncated": 1,
    "bad_signature": 1,
}

MAX_GRADED = 20

LIMITS = """\
What this verification cannot show:
- Hashes prove sameness, not truth.
- Pre-registration proves order only if it was witnessed outside the project.
- A cut-off end is undetectable without a head that somebody else holds.
- Self-reported times and metrics are self-reported.
- Sampled evidence says nothing about extremes.
- A complete, signed record of a small run does not show that the method scales to 700 devices.
- Fault injection on CPU imitates, and does not reproduce, faults of network, fabric and storage.
- Bitwise resume is claimed only for CPU with one build.
- The default thresholds of the health rules come from one run.
- Causes marked unknown stay unknown.
- Audits of other people's runs use public evidence only, may lack internal systems, and label
  what is inferred.
- The record states what is withheld and why, who reviewed it, and how independent they were.
"""


@dataclass(frozen=True)
class Verdict:
    """Outcome for a journal: a word, the line it is about and why.

    `num_lines` and `head` describe the good part; `signed_seq` is the last line that a valid
    signature covers, -1 if none does.
    """

    word: Word
    num_lines: int
    head: str
    journal: str
    seq: int = -1
    reason: str = ""
    signed_seq: int = -1

    @property
    def exit_code(self) -> int:
        """0 ok, 4 unsigned, 5 torn tail, 1 everything else."""
        return EXIT_CODES[self.word]

    def __str__(self) -> str:
        detail = {
            "ok": f"({self.num_lines}, {self.head})",
            "broken": f"({self.seq}, {self.reason})",
            "truncated": f"({self.seq}, {self.num_lines})",
        }
        return visible(self.word + detail.get(self.word, ""))


@dataclass(frozen=True)
class Problem:
    """A file, blob or record that is not as the journal says, and the record that says so."""

    place: str
    reason: Literal["missing", "changed", "truncated", "unreadable", "invalid"]
    record: str
    detail: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return visible(f"{self.place}: {self.reason}{detail}")


@dataclass(frozen=True)
class Report:
    """Outcome for a project: the journal's verdict and every file that does not match it.

    `num_absent` counts artifact files that a bundle names and does not hold; `seal` says what the
    newest seal covers; `grades` maps a registration in force to its order grade.
    """

    verdict: Verdict
    problems: tuple[Problem, ...]
    num_files: int
    num_bytes: int
    num_absent: int = 0
    seal: str = ""
    witnesses: tuple[CheckedWitness, ...] = ()
    grades: Mapping[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """1 if anything is changed, missing or broken, else the journal's own code."""
        return 1 if self.problems else self.verdict.exit_code

    def __str__(self) -> str:
        lines = [str(self.verdict), *(str(problem) for problem in self.problems)]
        lines += [self.seal] if self.seal else []
        lines += [str(witness) for witness in self.witnesses]
        lines += [f"{identity[:29]}…: {grade}" for identity, grade in self.grades.items()]
        lines.append(f"{self.num_files} files, {self.num_bytes} bytes checked")
        if self.num_absent:
            lines.append(f"{self.num_absent} files are committed by digest, not available here")
        return visible_lines(lines)


def visible_lines(lines: Sequence[str]) -> str:
    """Lines with nothing in them that could hide or reorder what a terminal shows."""
    return "\n".join(visible(line) for line in lines)


@dataclass
class _Scan:
    """What one pass over the lines keeps: keys, hashes at wanted lines, and the fault if any."""

    reader: ChainReader
    keys: list[tuple[int, str]] = field(default_factory=list)
    hashes: dict[int, str] = field(default_factory=dict)
    fault: ChainFault | None = None
    witnessed: Sequence[Witness] = ()


def verify_journal(folder: Path, known_head: Head | None = None) -> Verdict:
    """Verify chain, ids and signatures of the record in `folder`, in memory of one line.

    `known_head` is a head held elsewhere: only against it can a cut-off end or a chain that was
    rewritten as a whole be noticed when the heads in the folder were rewritten too.
    """
    return _verify_chain(folder, known_head, lambda record: None)[0]


def _verify_chain(
    folder: Path, known_head: Head | None, visit: Callable[[Record], None]
) -> tuple[Verdict, _Scan]:
    """The verdict, and what the one pass over the lines kept; `visit` sees each good record."""
    heads = read_heads(folder)
    scan = _scan(folder, heads, known_head, visit)

    def verdict(word: Word, seq: int = -1, reason: str = "", signed_seq: int = -1) -> Any:
        reader = scan.reader
        found = Verdict(
            word, reader.num_lines, reader.last_hash, reader.journal, seq, reason, signed_seq
        )
        return found, scan

    fault, num_lines = scan.fault, scan.reader.num_lines
    if fault is not None and not fault.torn:
        return verdict("broken", fault.seq, fault.reason)
    if num_lines == 0:
        return verdict("broken", 0, "the journal has no complete line")
    valid, invalid = _split_heads(heads, scan)
    held = [*([known_head] if known_head else []), *(head.head for head in valid if head.head)]
    for head in held:
        if head.journal != scan.reader.journal:
            return verdict("broken", 0, f"the head of line {head.seq} is of another journal")
    beyond = max((head.seq for head in (*held, *scan.witnessed)), default=-1)
    if beyond >= num_lines:
        if fault is not None and fault.terminated:
            return verdict("broken", fault.seq, fault.reason)
        return verdict("truncated", beyond)
    for head in sorted(held, key=lambda head: head.seq):
        if scan.hashes[head.seq] != head.head:
            return verdict("broken", head.seq, "the line is not the one that the head covers")
    if invalid:
        return verdict("bad_signature", invalid[0].seq, f"{invalid[0].path.name} is not valid")
    signed_seq = max((head.seq for head in valid), default=-1) if signing_available() else -1
    if fault is not None:
        return verdict("torn_tail", fault.seq, fault.reason, signed_seq)
    return verdict("ok" if signed_seq >= 0 else "unsigned", signed_seq=signed_seq)


def verify_project(
    project: Path,
    known_head: Head | None = None,
    *,
    tsa_roots: Path | None = None,
    is_bundle: bool = False,
) -> Report:
    """Verify the journal of a project and read again every file that its artifacts name.

    The newest artifact record of a path counts; an artifact that a later record supersedes is
    no longer looked for. Blobs, bodies, the newest seal and the receipts of witnesses are checked
    as well. In a bundle, artifact files may be absent: their digests are there.
    """
    folder = project / "record"
    content = _Content(frozenset(witness.seq for witness in read_held_heads(folder)))
    verdict, scan = _verify_chain(folder, known_head, content.add)
    problems = [*content.problems, *content.blob_problems(folder)]
    num_bytes = num_absent = 0
    for path, (size, sha256, identity) in sorted(content.files().items()):
        if is_bundle and not (project / path).exists():
            num_absent += 1
            continue
        num_bytes += size
        if problem := _check_file(project, path, size, sha256, identity):
            problems.append(problem)
    seal = content.check_seal(folder, problems)
    witnesses = check_witnesses(folder, verdict.journal, scan.hashes, tsa_roots)
    for witness in witnesses:
        if witness.state == "invalid":
            place = f"record/witness/{witness.name}.json"
            problems.append(Problem(place, "invalid", "", witness.remark))
    return Report(
        verdict,
        tuple(problems),
        len(content.files()) - num_absent,
        num_bytes,
        num_absent,
        seal,
        tuple(witnesses),
        content.grades(independent_witnesses(witnesses)),
    )


class _Content:
    """What one pass over the records keeps: files and blobs to look at, the newest seal."""

    def __init__(self, witnessed: frozenset[int]) -> None:
        self.problems: list[Problem] = []
        self.witnessed = witnessed
        self._rules = Rules()
        self._artifacts: dict[str, Record] = {}
        self._blobs: dict[str, tuple[str, int]] = {}
        self._order: list[Record] = []
        self._registrations: dict[str, None] = {}
        self._seal: Record | None = None

    def add(self, record: Record) -> None:
        """Take a record into account; one with an invalid body names no file."""
        found = _check_record(record, self._rules)
        self.problems += found
        for earlier in record.supersedes:
            self._artifacts.pop(earlier, None)
            self._registrations.pop(earlier, None)
        for digest in blobs_in(record.body):
            self._blobs.setdefault(digest, (record.id, record.seq))
        if found:
            return
        if record.type in ("registration", "run", "attempt") or record.seq in self.witnessed:
            self._order.append(record)
        if record.type == "artifact":
            self._artifacts[record.id] = record
        elif record.type == "registration":
            self._registrations[record.id] = None
        elif record.type == "seal":
            self._seal = record

    def files(self) -> dict[str, tuple[int, str, str]]:
        """Size, digest and record of every file that an artifact in force names."""
        return {
            str(entry["path"]): (int(entry["bytes"]), str(entry["sha256"]), record.id)
            for record in self._artifacts.values()
            for entry in record.body.get("files", ())
        }

    def blob_problems(self, folder: Path) -> list[Problem]:
        """Blobs that are missing or not what their name says."""
        problems = []
        for digest, (identity, _) in sorted(self._blobs.items()):
            if state := blob_fault(folder, digest):
                place = f"record/blobs/sha256/{digest[:2]}/{digest}"
                reason = "missing" if state == "missing" else "changed"
                problems.append(Problem(place, reason, identity))
        return problems

    def check_seal(self, folder: Path, problems: list[Problem]) -> str:
        """A line about the newest seal; its fault joins `problems`."""
        if self._seal is None:
            return ""
        body = self._seal.body
        covered = {digest for digest, (_, seq) in self._blobs.items() if seq <= body["head"]["seq"]}
        fault = seal_fault(folder, body, covered)
        if fault:
            place = f"record/journal.jsonl line {self._seal.seq}"
            problems.append(Problem(place, "invalid", self._seal.id, f"the seal: {fault}"))
            return ""
        return f"sealed: lines 0 to {body['head']['seq']}, Merkle root {body['merkle_root']}"

    def grades(self, witnesses: Sequence[Any]) -> dict[str, str]:
        """Order grade of the newest registrations in force."""
        return {
            identity: registration_grade(self._order, identity, witnesses=witnesses)
            for identity in list(self._registrations)[-MAX_GRADED:]
        }


def _scan(
    folder: Path,
    heads: Sequence[HeadFile],
    known_head: Head | None,
    visit: Callable[[Record], None],
) -> _Scan:
    hints = {head.seq: head.head.head for head in heads if head.head is not None}
    if known_head is not None:
        hints[known_head.seq] = known_head.head
    witnessed = read_held_heads(folder)
    wanted = {*hints, *(witness.seq for witness in witnessed)}
    scan = _Scan(ChainReader(hints), witnessed=witnessed)
    path = folder / "journal.jsonl"
    if not path.is_file():
        return scan
    with path.open("rb") as file:
        end = _end_of(file)
        try:
            for record in scan.reader.read(file, end):
                if record.seq in wanted:
                    scan.hashes[record.seq] = record.line_hash
                if record.type in ("genesis", "key"):
                    scan.keys.append((record.seq, str(record.body.get("key", "none"))))
                visit(record)
        except ChainFault as fault:
            scan.fault = fault
    return scan


def _split_heads(heads: Sequence[HeadFile], scan: _Scan) -> tuple[list[HeadFile], list[HeadFile]]:
    """Heads with a valid signature, and the others; without the libraries all count as read."""
    if not signing_available():
        return [head for head in heads if head.head is not None], []
    seqs = [head.seq for head in heads]
    valid: list[HeadFile] = []
    invalid: list[HeadFile] = []
    for head in heads:
        signer = expected_signer(scan.keys, seqs, head.seq)
        (valid if signer != "none" and head.is_signed_by(signer) else invalid).append(head)
    return valid, invalid


def _check_record(record: Record, rules: Rules) -> list[Problem]:
    """Problems of one body: its own schema, then what earlier records demand."""
    place = f"record/journal.jsonl line {record.seq}"
    problems: list[Problem] = []
    try:
        stored = check_body(record.type, record.body)
        if stored != record.body:
            detail = "a secret was not redacted, or a default was left out"
            problems.append(Problem(place, "invalid", record.id, detail))
        rules.check(record.type, record.body, record.supersedes)
    except SchemaError as error:
        problems.append(Problem(place, "invalid", record.id, error.message))
    rules.observe(record)
    return problems


def _check_file(project: Path, path: str, size: int, sha256: str, identity: str) -> Problem | None:
    place = project / path
    try:
        if not place.is_file():
            return Problem(path, "missing", identity)
        if not place.resolve().is_relative_to(project.resolve()):
            return Problem(path, "unreadable", identity, "a symbolic link leads out of the project")
        found = place.stat().st_size
        if found < size:
            return Problem(path, "truncated", identity, f"{found} of {size} bytes")
        if found > size or sha256_file(place) != sha256:
            return Problem(path, "changed", identity)
    except OSError as error:
        return Problem(path, "unreadable", identity, error.strerror or str(error))
    return None


def _end_of(file: BinaryIO) -> int:
    """Size of the journal when no writer is in the middle of a line, where locks are possible.

    Lines before that never change, so that a writer need not wait for the whole verification.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_SH)
    end = file.seek(0, os.SEEK_END)
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)
    return end
