"""How firmly a registration is shown to precede its runs: witnessed, chained or retrospective."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from portolan.files import read_json, write_json_atomic
from portolan.record.chain import Record
from portolan.record.times import check_time, parse_time

Grade = Literal["witnessed", "chained", "retrospective"]

_NAME = re.compile(r"(\d+)-([a-z0-9]+)\.json")


@dataclass(frozen=True)
class Witness:
    """An outside party's word that the head at line `seq` existed at `time`."""

    seq: int
    kind: str
    time: str
    head: str
    receipt: str = "not_stated"


def write_witness(folder: Path, witness: Witness) -> Path:
    """Store a receipt under witness/ in the record folder."""
    check_time(witness.time)
    path = folder / "witness" / f"{witness.seq}-{witness.kind}.json"
    write_json_atomic(path, vars(witness))
    return path


def read_witnesses(folder: Path) -> list[Witness]:
    """All receipts of a record folder in the order of their lines."""
    paths = [path for path in (folder / "witness").glob("*.json") if _NAME.fullmatch(path.name)]
    found = [Witness(**read_json(path)) for path in paths]
    return sorted(found, key=lambda witness: (witness.seq, witness.kind))


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
