"""The journal: an append-only file of hash-chained records with one writer at a time."""

import contextlib
import fcntl
import json
import os
import time as clock
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from portolan.canonical import canonical
from portolan.errors import PortolanError, StorageError, UsageError
from portolan.files import storage_errors, write_bytes_atomic
from portolan.record.bases import NOT_STATED, registry_change, registry_digest
from portolan.record.blobs import add_blob, read_blob
from portolan.record.chain import (
    MAX_LINE_BYTES,
    NO_LINE,
    ChainFault,
    ChainReader,
    Record,
    encode_line,
    record_id,
)
from portolan.record.heads import expected_signer, head_path, read_heads
from portolan.record.merkle import merkle_root
from portolan.record.rules import BLOB_PREFIX, Rules, blobs_in
from portolan.record.schema import Body
from portolan.record.signing import Head, SigningKey, signing_available
from portolan.record.times import check_time, now
from portolan.record.types import check_body

LOCK_TIMEOUT_SECONDS = 30.0
KEY_NAME = "key.ed25519"
_FILE = "journal.jsonl"
_RECOVERY = ".recovery.json"


class JournalDamaged(PortolanError):
    """The journal cannot be continued: a line inside it, or its end, is not what was written."""


def default_key_path(folder: Path) -> Path:
    """The private key lies beside the record folder, never inside what is published."""
    return folder.absolute().parent / ".portolan" / KEY_NAME


class Journal:
    """A record folder: `append` adds a record, `records` reads them, `sign_head` signs the end.

    Every append takes an exclusive lock, reads what other processes added, writes one line and
    fsyncs it. Use `create`, `open` or `open_or_create`.
    """

    def __init__(self, folder: Path, key_path: Path | None, *, schema: bool) -> None:
        self.folder = folder
        self.path = folder / _FILE
        self.key_path = key_path or default_key_path(folder)
        self.damage = ""
        self._schema = schema
        self._reader = ChainReader()
        self._rules = Rules()
        self._keys: list[tuple[int, str]] = []
        self._registry = NOT_STATED

    @classmethod
    def create(
        cls,
        folder: Path,
        name: str,
        *,
        key_path: Path | None = None,
        body: Mapping[str, Any] | None = None,
        time: str | None = None,
        schema: bool = True,
    ) -> "Journal":
        """Start a journal with its genesis line and, if none is there, a new signing key.

        `body` replaces the default genesis body; an existing journal raises UsageError.
        """
        journal = cls(folder, key_path, schema=schema)
        if journal.path.exists():
            raise UsageError(f"{journal.path} exists already", remedy="open it instead")
        public_key = "none"
        if signing_available():
            if not journal.key_path.exists():
                SigningKey.generate().save(journal.key_path)
            public_key = SigningKey.load(journal.key_path).public_key
        genesis = body or check_body(
            "genesis",
            {"name": name, "key": public_key, "basis_registry": registry_digest()},
        )
        _, line = encode_line(0, NO_LINE, "genesis", genesis, (), time or now())
        write_bytes_atomic(journal.path, line + b"\n")
        journal._load()
        return journal

    @classmethod
    def open(cls, folder: Path, *, key_path: Path | None = None, schema: bool = True) -> "Journal":
        """Open a journal and verify its chain.

        An unfinished last line is moved to a blob and recorded. With a wrong hash inside, the
        journal can be read up to there, `damage` says why, and `append` raises JournalDamaged.
        """
        journal = cls(folder, key_path, schema=schema)
        if journal.path.is_symlink():
            raise UsageError(
                f"{journal.path} is a symbolic link: the lines would go somewhere else",
                remedy="put the journal itself into the record folder",
            )
        if not journal.path.is_file():
            raise UsageError(
                f"there is no journal at {journal.path}",
                remedy="run the command inside a project folder, or start one with portolan init",
            )
        journal._load()
        return journal

    @classmethod
    def open_or_create(cls, folder: Path, name: str, *, key_path: Path | None = None) -> "Journal":
        """Open the journal of `folder`, or start it when there is none."""
        if (folder / _FILE).exists():
            return cls.open(folder, key_path=key_path)
        return cls.create(folder, name, key_path=key_path)

    @property
    def head(self) -> Head:
        """Number and hash of the last line that was read or written, and the journal's id."""
        reader = self._reader
        return Head(reader.journal, reader.num_lines - 1, reader.last_hash)

    @property
    def public_key(self) -> str:
        """Public key in force (hex), or `none` for an unsigned journal."""
        return self._keys[-1][1]

    def __contains__(self, identity: str) -> bool:
        return identity in self._rules.ids

    def __len__(self) -> int:
        return self._reader.num_lines

    def append(
        self,
        record_type: str,
        body: Mapping[str, Any] | Body,
        *,
        supersedes: Sequence[str] = (),
        time: str | None = None,
    ) -> str:
        """Add a record and return its id; a record that exists already is not written again.

        Raises SchemaError for a body that breaks the rules, StorageError for a full or read-only
        disk (the file keeps its old end), JournalDamaged if the chain is broken.
        """
        if record_type == "genesis":
            raise UsageError("a journal has one genesis, its line 0")
        if isinstance(body, Body) or self._schema:
            value = check_body(record_type, body)
        else:
            value = dict(body)
        identity = record_id(record_type, value, supersedes)
        moment = check_time(time) if time else now()
        with self._locked(os.O_RDWR) as file:
            self._catch_up(file)
            if identity in self._rules.ids:
                return identity
            if self._schema:
                before = self._rules.check(record_type, value, supersedes)
                if self._registry != registry_digest():
                    before.insert(0, ("change", registry_change(self._registry)))
                for first_type, first in before:
                    self._write(file, first_type, check_body(first_type, first), (), moment)
            self._write(file, record_type, value, supersedes, moment)
        return identity

    def records(self) -> Iterator[Record]:
        """Records from the first to the last known line, read from disk one at a time."""
        with self.path.open("rb") as file:
            yield from ChainReader().read(file, self._reader.offset)

    def get(self, identity: str) -> Record:
        """The record of this id; KeyError if the journal has none."""
        for record in self.records() if identity in self else ():
            if record.id == identity:
                return record
        raise KeyError(identity)

    def add_blob(self, content: bytes) -> str:
        """Store bytes and return the reference `sha256:<digest>` to be used in a body."""
        return BLOB_PREFIX + add_blob(self.folder, content)

    def read_blob(self, reference: str) -> bytes:
        """Bytes of a blob named by `add_blob`, checked against their name."""
        return read_blob(self.folder, reference.removeprefix(BLOB_PREFIX))

    def merkle_root(self) -> str:
        """RFC 6962 root over the lines in order, then the referenced blobs' digests ascending."""
        digests: set[str] = set()
        for record in self.records():
            digests |= blobs_in(record.body)
        return merkle_root(self._leaves(sorted(digests)))

    def sign_head(self, *, time: str | None = None) -> Path | None:
        """Sign the present end; returns the file, or None for a journal without signatures.

        Signing the same end again returns the existing file. A missing or foreign private key
        raises PortolanError.
        """
        with self._locked(os.O_RDWR) as file:
            self._catch_up(file)
            path = head_path(self.folder, self.head.seq)
            if path.exists():
                return path
            seqs = [head.seq for head in read_heads(self.folder)]
            wanted = expected_signer(self._keys, seqs, self.head.seq)
            if wanted == "none" or not signing_available():
                return None
            here = self.head
            head = Head(here.journal, here.seq, here.head, check_time(time) if time else now())
            write_bytes_atomic(path, canonical(self._key(wanted).sign(head.payload())) + b"\n")
            self._settle_key_file()
        return path

    def rotate_key(self, reason: str) -> str:
        """Replace the signing key; the head that covers the change is signed by the old one."""
        following = self._next_key_path()
        if not following.exists():
            SigningKey.generate().save(following)
        public_key = SigningKey.load(following).public_key
        body = {"key": public_key, "reason": reason, "text": "the signing key changes"}
        identity = self.append("key", body)
        self.sign_head()
        return identity

    def _leaves(self, blob_digests: Sequence[str]) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            while file.tell() < self._reader.offset:
                yield file.readline().removesuffix(b"\n")
        for digest in blob_digests:
            yield bytes.fromhex(digest)

    def _load(self) -> None:
        with self._locked(os.O_RDONLY) as file, contextlib.suppress(JournalDamaged):
            self._catch_up(file)

    @contextlib.contextmanager
    def _locked(self, flags: int) -> Iterator[BinaryIO]:
        with storage_errors(self.path):
            descriptor = os.open(self.path, flags)
        with os.fdopen(descriptor, "rb" if flags == os.O_RDONLY else "rb+", buffering=0) as raw:
            deadline = clock.monotonic() + LOCK_TIMEOUT_SECONDS
            while True:
                try:
                    fcntl.flock(raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if clock.monotonic() > deadline:
                        raise StorageError(
                            f"{self.path} is locked by another process since "
                            f"{LOCK_TIMEOUT_SECONDS:.0f} s",
                            remedy="wait for that process or end it",
                        ) from None
                    clock.sleep(0.01)
            yield raw  # closing the file releases the lock

    def _catch_up(self, file: BinaryIO) -> None:
        """Read lines that were added since; recover from an unfinished one."""
        if self.damage:
            self._refuse()
        size = os.fstat(file.fileno()).st_size
        if size < self._reader.offset:
            self._refuse(f"it shrank from {self._reader.offset} to {size} bytes")
        heads = read_heads(self.folder) if size > self._reader.offset else []
        last_signed = max((head.seq for head in heads), default=-1)
        self._reader.hints = {head.seq: head.head.head for head in heads if head.head is not None}
        try:
            with open(self.path, "rb") as buffered:  # noqa: PTH123
                for record in self._reader.read(buffered):
                    self._observe(record)
        except ChainFault as fault:
            if not fault.torn or fault.seq == 0 or last_signed >= fault.seq:
                self._refuse(fault.message)
            self._recover(fault)
            return
        if last_signed >= self._reader.num_lines:
            self._refuse(f"a signed head covers line {last_signed}, which is missing")
        if (self.folder / _RECOVERY).exists():
            self._finish_recovery()

    def _observe(self, record: Record) -> None:
        self._rules.observe(record)
        if record.type in ("genesis", "key"):
            self._keys.append((record.seq, str(record.body.get("key", "none"))))
        if record.type in ("genesis", "change"):
            self._registry = str(record.body.get("basis_registry", self._registry))

    def _refuse(self, reason: str = "") -> None:
        self.damage = self.damage or reason
        raise JournalDamaged(
            f"{self.path} is damaged and can only be read: {self.damage}",
            remedy="run portolan verify, then restore the record folder from a copy",
        )

    def _recover(self, fault: ChainFault) -> None:
        """Move the unfinished tail to a blob, then say so in the journal.

        The note beside the journal survives a crash between the two steps.
        """
        with self.path.open("rb") as file:
            file.seek(fault.offset)
            tail = file.read()
        body = {
            "text": "an unfinished line at the end of the journal was moved to a blob",
            "kind": "journal_recovery",
            "step": "not_stated",
            "evidence": [BLOB_PREFIX + add_blob(self.folder, tail)],
            "detail": {"line": fault.seq, "bytes": len(tail)},
        }
        write_bytes_atomic(self.folder / _RECOVERY, json.dumps(body).encode())
        with storage_errors(self.path), self.path.open("rb+") as file:
            file.truncate(fault.offset)
            os.fsync(file.fileno())
        self._finish_recovery()

    def _finish_recovery(self) -> None:
        note = self.folder / _RECOVERY
        body = check_body("event", json.loads(note.read_bytes()))
        if record_id("event", body, ()) not in self._rules.ids:
            with storage_errors(self.path), self.path.open("rb+", buffering=0) as file:
                self._write(file, "event", body, (), now())
        note.unlink()

    def _write(
        self,
        file: BinaryIO,
        record_type: str,
        body: Mapping[str, Any],
        supersedes: Sequence[str],
        moment: str,
    ) -> None:
        reader = self._reader
        record, line = encode_line(
            reader.num_lines, reader.last_hash, record_type, body, supersedes, moment
        )
        if len(line) >= MAX_LINE_BYTES:
            raise UsageError(
                f"this {record_type} is {len(line)} bytes long", remedy="put the bulk into a blob"
            )
        append_bytes(file.fileno(), line + b"\n", reader.offset, self.path)
        reader.advance(record, len(line) + 1)
        self._observe(record)

    def _key(self, wanted: str) -> SigningKey:
        for path in (self.key_path, self._next_key_path()):
            if path.exists():
                key = SigningKey.load(path)
                if key.public_key == wanted:
                    return key
        raise PortolanError(
            f"{self.key_path} does not hold the private key of {wanted[:16]}…",
            remedy="copy the key file from the machine that started this project",
        )

    def _next_key_path(self) -> Path:
        return self.key_path.with_name(self.key_path.name + ".next")

    def _settle_key_file(self) -> None:
        """Once the covering head exists, the new key takes the old one's place."""
        following = self._next_key_path()
        if following.exists() and SigningKey.load(following).public_key == self.public_key:
            following.replace(self.key_path)


def append_bytes(descriptor: int, content: bytes, offset: int, path: Path) -> None:
    """Write `content` at `offset` and fsync; on failure cut the file back, raise StorageError."""
    with storage_errors(path):
        try:
            written = 0
            while written < len(content):
                written += os.pwrite(descriptor, content[written:], offset + written)
            os.fsync(descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, offset)
            raise
