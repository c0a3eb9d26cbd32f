"""Outside witnesses of the journal: who else holds a head, and since when.

A witness is given the canonical bytes of `{head, journal, seq, time: not_stated, v}`, which anyone
can compute again from the journal. Only a party with a clock of its own proves a time.
"""

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from portolan.errors import PortolanError
from portolan.files import write_bytes_atomic
from portolan.record.grade import (
    MAX_RECEIPT_BYTES,
    Witness,
    read_witness,
    witness_path,
    write_witness,
)
from portolan.record.signing import Head

KINDS: Mapping[str, str] = {
    "folder": "portolan.record.witness_folder",
    "git": "portolan.record.witness_git",
    "rfc3161": "portolan.record.witness_rfc3161",
}
"""Kind of witness and the module that asks and checks it."""

MAX_WITNESSES = 10_000


class WitnessError(PortolanError):
    """A witness could not be had, or its receipt does not show what it should."""


class Unchecked(PortolanError):
    """A receipt that this installation cannot judge; it then proves nothing."""


@dataclass(frozen=True)
class Receipt:
    """What an outside party returned: its own bytes, their suffix, and the time they state."""

    content: bytes
    suffix: str
    time: str


@dataclass(frozen=True)
class Testimony:
    """What the bytes of a receipt show: a time, whose clock it is, and a remark."""

    time: str
    independent: bool
    remark: str


class WitnessKind(Protocol):
    """A plug-in: asks a party for a receipt, and checks one without asking anybody."""

    def obtain(self, statement: bytes, head: Head, place: str) -> Receipt:
        """Receipt for `statement`; `place` is a folder, repository or URL. WitnessError if not."""
        ...

    def check(self, content: bytes, statement: bytes, roots: Path | None) -> Testimony:
        """Judge a receipt. WitnessError if it is false, Unchecked if it cannot be judged."""
        ...


@dataclass(frozen=True)
class CheckedWitness:
    """A receipt after checking. `independent` says that its time is another party's."""

    name: str
    seq: int
    kind: str
    state: Literal["valid", "unchecked", "invalid"]
    remark: str
    time: str = "not_stated"
    head: str = ""
    independent: bool = False

    def __str__(self) -> str:
        return f"witness {self.name}: {self.state} ({self.remark})"


def statement_of(head: Head) -> bytes:
    """The bytes that a witness sees: a head without the time of its signature."""
    return Head(head.journal, head.seq, head.head).payload()


def plug_in(kind: str) -> WitnessKind:
    """The module of a kind; WitnessError for an unknown one."""
    if kind not in KINDS:
        raise WitnessError(f"{kind!r} is no kind of witness", remedy=f"use {', '.join(KINDS)}")
    module: Any = importlib.import_module(KINDS[kind])
    return module


def add_witness(folder: Path, head: Head, kind: str, place: str) -> Path:
    """Ask a witness for the present head and store its receipt; an existing one is kept."""
    path = witness_path(folder, head.seq, kind)
    if path.exists():
        return path
    receipt = plug_in(kind).obtain(statement_of(head), head, place)
    content = witness_path(folder, head.seq, kind, receipt.suffix)
    write_bytes_atomic(content, receipt.content)
    return write_witness(folder, Witness(head.seq, kind, receipt.time, head.head, content.name))


def read_held_heads(folder: Path) -> list[Witness]:
    """Receipts whose lines the journal must hold."""
    return [witness for path in _paths(folder) if (witness := read_witness(path)) is not None]


def default_roots(folder: Path) -> Path | None:
    """Authorities that the owner of this record trusts: for the own page, never for a stranger's.

    The file `.portolan/tsa-roots.pem` lies beside the record folder and is not published.
    """
    path = folder.absolute().parent / ".portolan" / "tsa-roots.pem"
    return path if path.is_file() else None


def check_witnesses(
    folder: Path, journal: str, hashes: Mapping[int, str], roots: Path | None = None
) -> list[CheckedWitness]:
    """Judge every receipt of a record folder offline.

    Args:
        folder: the record folder.
        journal: id of the journal.
        hashes: line number to hash, at least for the lines that receipts name.
        roots: certificates (PEM) of authorities that the reader trusts.
    """
    checked = []
    for path in _paths(folder):
        witness = read_witness(path)
        if witness is None:
            checked.append(_invalid(path.stem, -1, "unknown", "the receipt is malformed"))
        elif hashes.get(witness.seq) != witness.head:
            remark = "it is of another line than the journal has there"
            checked.append(_invalid(path.stem, witness.seq, witness.kind, remark))
        else:
            statement = statement_of(Head(journal, witness.seq, witness.head))
            checked.append(_check(path, witness, statement, roots))
    return checked


def independent_witnesses(checked: Iterable[CheckedWitness]) -> list[Witness]:
    """Those that prove a time: valid, by a clock that is not the project's own."""
    return [
        Witness(item.seq, item.kind, item.time, item.head)
        for item in checked
        if item.state == "valid" and item.independent
    ]


def _check(path: Path, witness: Witness, statement: bytes, roots: Path | None) -> CheckedWitness:
    # The name in the receipt is not used as a path: it could point anywhere.
    beside = [p for p in path.parent.glob(f"{path.stem}.*") if p != path]
    if len(beside) != 1 or beside[0].stat().st_size > MAX_RECEIPT_BYTES:
        return _invalid(path.stem, witness.seq, witness.kind, "the party's own file is missing")
    try:
        testimony = plug_in(witness.kind).check(beside[0].read_bytes(), statement, roots)
    except Unchecked as error:
        return CheckedWitness(path.stem, witness.seq, witness.kind, "unchecked", error.message)
    except WitnessError as error:
        return _invalid(path.stem, witness.seq, witness.kind, error.message)
    if testimony.time != witness.time:
        remark = f"it says {witness.time}, the party's own file {testimony.time}"
        return _invalid(path.stem, witness.seq, witness.kind, remark)
    return CheckedWitness(
        path.stem,
        witness.seq,
        witness.kind,
        "valid",
        testimony.remark,
        testimony.time,
        witness.head,
        testimony.independent,
    )


def _invalid(name: str, seq: int, kind: str, remark: str) -> CheckedWitness:
    return CheckedWitness(name, seq, kind, "invalid", remark)


def _paths(folder: Path) -> list[Path]:
    paths = sorted((folder / "witness").glob("*.json"))
    if len(paths) > MAX_WITNESSES:
        raise WitnessError(f"{folder / 'witness'} holds more than {MAX_WITNESSES} receipts")
    return paths
