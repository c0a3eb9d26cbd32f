"""Lines of a journal: their bytes, their ids, and the hash chain that links them."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from portolan.canonical import CanonicalError, canonical, parse
from portolan.errors import PortolanError
from portolan.record.times import check_time

MAX_LINE_BYTES = 16 << 20
MAX_DEPTH = 64
NO_LINE = "0" * 64

_KEYS = {"body", "id", "prev", "seq", "supersedes", "time", "type", "v"}
_LINE = b'{"body":%b,"id":"%b","prev":"%b","seq":%d,"supersedes":%b,"time":"%b","type":"%b","v":1}'
_TYPE = re.compile(r"[a-z_]+")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Record:
    """One line of the journal; `line_hash` is the SHA-256 of its bytes without the newline."""

    seq: int
    id: str
    type: str
    time: str
    body: dict[str, Any]
    supersedes: tuple[str, ...]
    prev: str
    line_hash: str


class ChainFault(PortolanError):
    """The chain does not hold at line `seq`; `torn` means only the unfinished end is bad.

    `offset` is the size in bytes of the good part; `terminated` tells whether the bad bytes end
    with a newline.
    """

    def __init__(self, seq: int, reason: str, offset: int, *, torn: bool, terminated: bool) -> None:
        super().__init__(f"journal line {seq}: {reason}")
        self.seq = seq
        self.reason = reason
        self.offset = offset
        self.torn = torn
        self.terminated = terminated


def record_id(record_type: str, body: Mapping[str, Any], supersedes: Sequence[str]) -> str:
    """`type:` and the digest of body, supersedes and type; the time of writing has no part."""
    return _content_id(record_type, canonical(body), canonical(list(supersedes)))


def encode_line(
    seq: int,
    prev: str,
    record_type: str,
    body: Mapping[str, Any],
    supersedes: Sequence[str],
    time: str,
) -> tuple[Record, bytes]:
    """A record and its canonical line without the newline."""
    _check_depth(body)
    return _encode(canonical, seq, prev, record_type, body, supersedes, time)


def _encode(
    to_bytes: Callable[[Any], bytes],
    seq: int,
    prev: str,
    record_type: str,
    body: Mapping[str, Any],
    supersedes: Sequence[str],
    time: str,
) -> tuple[Record, bytes]:
    body_bytes = to_bytes(body)
    supersedes_bytes = to_bytes(list(supersedes)) if supersedes else b"[]"
    identity = _content_id(record_type, body_bytes, supersedes_bytes)
    # The other fields are plain ASCII by their patterns, so quotes suffice.
    line = _LINE % (
        body_bytes,
        identity.encode(),
        prev.encode(),
        seq,
        supersedes_bytes,
        time.encode(),
        record_type.encode(),
    )
    line_hash = hashlib.sha256(line).hexdigest()
    record = Record(
        seq, identity, record_type, time, dict(body), tuple(supersedes), prev, line_hash
    )
    return record, line


def decode_line(line: bytes) -> Record:
    """Read one line and check all that it can prove alone; CanonicalError says what is wrong."""
    value = parse(line)
    # Few lines have that many brackets at all; counting them costs nothing.
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    if not isinstance(value, dict) or value.keys() != _KEYS:
        raise CanonicalError("its keys are not those of a journal line")
    body, supersedes, record_type = value["body"], value["supersedes"], value["type"]
    if type(value["seq"]) is not int or type(value["v"]) is not int or value["v"] != 1:
        raise CanonicalError("seq or v is wrong")
    if not isinstance(body, dict) or not isinstance(supersedes, list):
        raise CanonicalError("body or supersedes has the wrong form")
    texts = (record_type, value["time"], value["prev"], value["id"], *supersedes)
    if not all(isinstance(text, str) for text in texts) or not _HASH.fullmatch(value["prev"]):
        raise CanonicalError("type, time, prev, id or supersedes has the wrong form")
    try:
        check_time(value["time"])
    except ValueError as error:
        raise CanonicalError(str(error)) from error
    # `parse` has refused floats, and keys of ASCII sort alike in UTF-16 and by code point: the
    # standard library then writes the same bytes as RFC 8785, ten times faster.
    to_bytes = _dump_ascii if line.isascii() else canonical
    record, expected = _encode(
        to_bytes, value["seq"], value["prev"], record_type, body, supersedes, value["time"]
    )
    if record.id != value["id"]:
        raise CanonicalError("its id does not match its content")
    if expected != line:
        raise CanonicalError("its bytes are not canonical")
    return record


@dataclass
class ChainReader:
    """Reads a journal from its start, or onwards from where the last reading stopped.

    `offset`, `num_lines` and `last_hash` describe the good part read so far. `hints` maps line
    numbers to hashes held elsewhere (signed heads); they only help to name the first bad line.
    """

    hints: Mapping[int, str] = field(default_factory=dict)
    offset: int = 0
    num_lines: int = 0
    last_hash: str = NO_LINE
    journal: str = ""

    def read(self, file: BinaryIO, end: int | None = None) -> Iterator[Record]:
        """Yield the records from `offset` up to byte `end`; raise ChainFault at the first fault.

        Memory holds one line before and one after the present one, whatever the length.
        """
        file.seek(self.offset)
        previous_line = b""
        while end is None or self.offset < end:
            line = file.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            record = self._check(line, previous_line, file)
            previous_line = line
            self.advance(record, len(line))
            yield record

    def advance(self, record: Record, num_bytes: int) -> None:
        """Count a record of `num_bytes` (newline included) as read."""
        if record.seq == 0:
            self.journal = record.line_hash
        self.offset += num_bytes
        self.num_lines += 1
        self.last_hash = record.line_hash

    def _check(self, line: bytes, previous_line: bytes, file: BinaryIO) -> Record:
        seq = self.num_lines
        terminated = line.endswith(b"\n")
        if not terminated:
            if len(line) > MAX_LINE_BYTES:
                raise self._fault(seq, f"it is longer than {MAX_LINE_BYTES} bytes", terminated)
            raise self._fault(seq, "it has no end", terminated, torn=True)
        try:
            record = decode_line(line[:-1])
        except CanonicalError as error:
            torn = not file.read(1) and not _is_json(line)
            raise self._fault(seq, error.message, terminated, torn=torn) from error
        if record.seq == seq and record.prev == self.last_hash:
            if (record.type == "genesis") == (seq == 0):
                return record
            raise self._fault(seq, "only line 0 is the genesis, and it must be", terminated)
        bad, reason = seq, f"it says seq {record.seq} and does not follow line {seq - 1}"
        if seq > 0 and self._is_confirmed(record, file):
            if record.seq == seq:
                bad, reason = seq - 1, f"line {seq} holds another hash of it: it was changed"
            elif record.seq == seq - 1 and line != previous_line:
                bad, reason = seq - 1, "the line after it has the same seq: it was inserted"
        raise self._fault(bad, reason, terminated)

    def _is_confirmed(self, record: Record, file: BinaryIO) -> bool:
        """Whether the next line, or a hash held elsewhere, vouches for this one's bytes."""
        if self.hints.get(record.seq) == record.line_hash:
            return True
        following = file.readline(MAX_LINE_BYTES + 1)
        try:
            return decode_line(following.removesuffix(b"\n")).prev == record.line_hash
        except CanonicalError:
            return False

    def _fault(self, seq: int, reason: str, terminated: bool, *, torn: bool = False) -> ChainFault:
        return ChainFault(seq, reason, self.offset, torn=torn, terminated=terminated)


def _dump_ascii(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return text.encode()


def _content_id(record_type: str, body: bytes, supersedes: bytes) -> str:
    if not _TYPE.fullmatch(record_type):
        raise CanonicalError(f"the record type {record_type!r} is not lower-case letters")
    content = b'{"body":%b,"supersedes":%b,"type":"%b"}' % (body, supersedes, record_type.encode())
    return f"{record_type}:{hashlib.sha256(content).hexdigest()}"


def _check_depth(value: Any) -> None:
    """Refuse nesting that functions which call themselves could not follow."""
    stack = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise CanonicalError(f"not accepted: it is nested more than {MAX_DEPTH} levels deep")
        children = item.values() if isinstance(item, Mapping) else item
        stack += [(child, depth + 1) for child in children if isinstance(child, Mapping | list)]


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(parse(line), dict)
    except CanonicalError:
        return False
