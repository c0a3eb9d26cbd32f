"""Verification of a record and of the files it names: offline, streaming, trusting nothing."""

import contextlib
import fcntl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from portolan.files import sha256_file
from portolan.record.blobs import blob_fault
from portolan.record.chain import ChainFault, ChainReader, Record
from portolan.record.heads import HeadFile, expected_signer, read_heads
from portolan.record.rules import Rules, blobs_in
from portolan.record.schema import SchemaError
from portolan.record.signing import Head, signing_available
from portolan.record.types import check_body

Word = Literal["ok", "broken", "truncated", "unsigned", "bad_signature", "torn_tail"]

EXIT_CODES: dict[Word, int] = {
    "ok": 0,
    "unsigned": 4,
    "torn_tail": 5,
    "broken": 1,
    "truncated": 1,
    "bad_signature": 1,
}

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
        return self.word + detail.get(self.word, "")


@dataclass(frozen=True)
class Problem:
    """A file, blob or record that is not as the journal says, and the record that says so."""

    place: str
    reason: Literal["missing", "changed", "truncated", "unreadable", "invalid"]
    record: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}{f' ({self.detail})' if self.detail else ''}"


@dataclass(frozen=True)
class Report:
    """Outcome for a project: the journal's verdict and every file that does not match it."""

    verdict: Verdict
    problems: tuple[Problem, ...]
    num_files: int
    num_bytes: int

    @property
    def exit_code(self) -> int:
        """1 if anything is changed, missing or broken, else the journal's own code."""
        return 1 if self.problems else self.verdict.exit_code

    def __str__(self) -> str:
        lines = [str(self.verdict), *(str(problem) for problem in self.problems)]
        lines.append(f"{self.num_files} files, {self.num_bytes} bytes checked")
        return "\n".join(lines)


@dataclass
class _Scan:
    """What one pass over the lines keeps: keys, hashes at wanted lines, and the fault if any."""

    reader: ChainReader
    keys: list[tuple[int, str]] = field(default_factory=list)
    hashes: dict[int, str] = field(default_factory=dict)
    fault: ChainFault | None = None


def verify_journal(folder: Path, known_head: Head | None = None) -> Verdict:
    """Verify chain, ids and signatures of the record in `folder`, in memory of one line.

    `known_head` is a head held elsewhere: only against it can a cut-off end or a chain that was
    rewritten as a whole be noticed when the heads in the folder were rewritten too.
    """
    heads = read_heads(folder)
    scan = _scan(folder, heads, known_head)

    def verdict(word: Word, seq: int = -1, reason: str = "", signed_seq: int = -1) -> Verdict:
        reader = scan.reader
        return Verdict(
            word, reader.num_lines, reader.last_hash, reader.journal, seq, reason, signed_seq
        )

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
    beyond = max((head.seq for head in held), default=-1)
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


def verify_project(project: Path, known_head: Head | None = None) -> Report:
    """Verify the journal of a project and read again every file that its artifacts name.

    The newest artifact record of a path counts; an artifact that a later record supersedes is
    no longer looked for. Blobs and bodies are checked as well.
    """
    folder = project / "record"
    verdict = verify_journal(folder, known_head)
    rules = Rules()
    artifacts: dict[str, Record] = {}
    blobs: dict[str, str] = {}
    problems: list[Problem] = []
    for record in _good_records(folder):
        problems += _check_record(record, rules)
        for earlier in record.supersedes:
            artifacts.pop(earlier, None)
        if record.type == "artifact":
            artifacts[record.id] = record
        for digest in blobs_in(record.body):
            blobs.setdefault(digest, record.id)
    for digest, identity in sorted(blobs.items()):
        if state := blob_fault(folder, digest):
            place = f"record/blobs/sha256/{digest[:2]}/{digest}"
            reason = "missing" if state == "missing" else "changed"
            problems.append(Problem(place, reason, identity))
    files = {
        str(entry["path"]): (int(entry["bytes"]), str(entry["sha256"]), record.id)
        for record in artifacts.values()
        for entry in record.body.get("files", ())
    }
    num_bytes = 0
    for path, (size, sha256, identity) in sorted(files.items()):
        num_bytes += size
        if problem := _check_file(project, path, size, sha256, identity):
            problems.append(problem)
    return Report(verdict, tuple(problems), len(files), num_bytes)


def _scan(folder: Path, heads: Sequence[HeadFile], known_head: Head | None) -> _Scan:
    hints = {head.seq: head.head.head for head in heads if head.head is not None}
    if known_head is not None:
        hints[known_head.seq] = known_head.head
    wanted = set(hints)
    scan = _Scan(ChainReader(hints))
    path = folder / "journal.jsonl"
    if not path.is_file():
        return scan
    with path.open("rb") as file, _shared_lock(file):
        try:
            for record in scan.reader.read(file):
                if record.seq in wanted:
                    scan.hashes[record.seq] = record.line_hash
                if record.type in ("genesis", "key"):
                    scan.keys.append((record.seq, str(record.body.get("key", "none"))))
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


def _good_records(folder: Path) -> Iterator[Record]:
    path = folder / "journal.jsonl"
    if path.is_file():
        with path.open("rb") as file, contextlib.suppress(ChainFault):
            yield from ChainReader().read(file)


def _check_record(record: Record, rules: Rules) -> list[Problem]:
    """Problems of one body: its own schema, then what earlier records demand."""
    place = f"record/journal.jsonl line {record.seq}"
    problems: list[Problem] = []
    try:
        stored = check_body(record.type, record.body)
        if stored != record.body:
            problems.append(Problem(place, "invalid", record.id, "a secret was not redacted"))
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
        found = place.stat().st_size
        if found < size:
            return Problem(path, "truncated", identity, f"{found} of {size} bytes")
        if found > size or sha256_file(place) != sha256:
            return Problem(path, "changed", identity)
    except OSError as error:
        return Problem(path, "unreadable", identity, error.strerror or str(error))
    return None


@contextlib.contextmanager
def _shared_lock(file: BinaryIO) -> Iterator[None]:
    """Wait for a writer in the middle of a line; go on without a lock where none is possible."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_SH)
    yield
