"""How firmly a registration is shown to precede its runs: witnessed, chained or retrospective."""

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from portolan.canonical import CanonicalError, parse
from portolan.files import write_json_atomic
from portolan.record.chain import Record
from portolan.record.times import check_time, parse_time

Grade = Literal["witnessed", "chained", "retrospective"]

MAX_RECEIPT_BYTES = 1 << 20
_NAME = re.compile(r"(0|[1-9]\d{0,15})-([a-z0-9]+)\.json")


@dataclass(frozen=True)
class Witness:
    """An outside party's word that the head at line `seq` existed at `time`."""

    seq: int
    kind: str
    time: str
    head: str
    receipt: str = "not_stated"


def witness_path(folder: Path, seq: int, kind: str, suffix: str = ".json") -> Path:
    """Place of a receipt, or of the outside party's own file beside it."""
    return folder / "witness" / f"{seq}-{kind}{suffix}"


def write_witness(folder: Path, witness: Witness) -> Path:
    """Store a receipt under witness/ in the record folder."""
    check_time(witness.time)
    path = witness_path(folder, witness.seq, witness.kind)
    write_json_atomic(path, asdict(witness))
    return path


def read_witnesses(folder: Path) -> list[Witness]:
    """All well-formed receipts of a record folder in the order of their lines.

    They are statements, not yet proofs: see `record.witness.check_witnesses`.
    """
    paths = [path for path in (folder / "witness").glob("*.json") if _NAME.fullmatch(path.name)]
    found = [witness for path in paths if (witness := read_witness(path)) is not None]
    return sorted(found, key=lambda witness: (witness.seq, witness.kind))


def read_witness(path: Path) -> Witness | None:
    """One receipt, or None when it is not what its name says."""
    match = _NAME.fullmatch(path.name)
    if match is None or path.stat().st_size > MAX_RECEIPT_BYTES:
        return None
    with contextlib.suppress(CanonicalError, TypeError, ValueError):
        witness = Witness(**parse(path.read_bytes()))
        texts = (witness.kind, witness.time, witness.head, witness.receipt)
        if not all(isinstance(text, str) for text in texts) or type(witness.seq) is not int:
            return None
        check_time(witness.time)
        if (str(witness.seq), witness.kind) == match.groups():
            return witness
    return None


def registration_grade(
    records: Iterable[Record],
    identity: str,
    *,
    witnesses: Iterable[Witness] = (),
    external_traces: Mapping[str, str] | None = None,
) -> Grade:
    """Grade of the registration `identity` among the records of a journal.

    Its runs are those of its lineage, and those that either refers to. `chained`: its line comes
    before their first attempt. `witnessed`: in addition a witness of a line at or after it, with
    the hash that the journal has there, is dated before the first externally dated trace of any
    of those runs (`external_traces`, run name to time); with no such trace, the witnessed line
    itself must come before the first attempt.
    """
    kept = list(records)
    own = next(record for record in kept if record.id == identity)
    hashes = {record.seq: record.line_hash for record in kept}
    runs = {
        record.body["name"]
        for record in kept
        if record.type == "run"
        and (
            record.body.get("lineage") == own.body.get("lineage")
            or identity in record.body.get("refs", ())
            or record.id in own.body.get("refs", ())
        )
    }
    attempts = [r.seq for r in kept if r.type == "attempt" and r.body.get("run") in runs]
    first_attempt = min(attempts, default=None)
    if first_attempt is not None and own.seq > first_attempt:
        return "retrospective"
    traces = [parse_time(at) for run, at in (external_traces or {}).items() if run in runs]
    for witness in witnesses:
        if witness.seq < own.seq or hashes.get(witness.seq) != witness.head:
            continue
        before_trace = bool(traces) and parse_time(witness.time) < min(traces)
        before_attempt = first_attempt is None or witness.seq < first_attempt
        if before_trace or (not traces and before_attempt):
            return "witnessed"
    return "chained"
