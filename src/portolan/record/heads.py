"""Signed heads of a record folder, and which key must have signed each of them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portolan.canonical import CanonicalError, parse
from portolan.record.signing import BadSignature, Head, envelope_payload, verify_envelope

MAX_HEAD_BYTES = 1 << 16

_NAME = re.compile(r"(0|[1-9]\d*)\.dsse\.json")


@dataclass(frozen=True)
class HeadFile:
    """A file under heads/; `head` is None when its content is not a head of that number."""

    seq: int
    path: Path
    envelope: Any
    head: Head | None

    def is_signed_by(self, public_key: str) -> bool:
        """Whether the envelope carries a valid signature of this key (hex)."""
        try:
            verify_envelope(self.envelope, public_key)
        except (BadSignature, ValueError):
            return False
        return self.head is not None


def head_path(folder: Path, seq: int) -> Path:
    """Place of the signed head that covers lines 0 to `seq`."""
    return folder / "heads" / f"{seq}.dsse.json"


def read_heads(folder: Path) -> list[HeadFile]:
    """All heads of a record folder by line number, signatures not yet checked."""
    heads: list[HeadFile] = []
    for path in (folder / "heads").glob("*.dsse.json"):
        if match := _NAME.fullmatch(path.name):
            heads.append(_read_head(path, int(match[1])))
    return sorted(heads, key=lambda head: head.seq)


def _read_head(path: Path, seq: int) -> HeadFile:
    if path.stat().st_size > MAX_HEAD_BYTES:
        return HeadFile(seq, path, None, None)
    try:
        envelope = parse(path.read_bytes())
        head = Head.from_payload(envelope_payload(envelope))
    except (CanonicalError, BadSignature):
        return HeadFile(seq, path, None, None)
    return HeadFile(seq, path, envelope, head if head.seq == seq else None)


def expected_signer(keys: Sequence[tuple[int, str]], head_seqs: Sequence[int], seq: int) -> str:
    """Public key that must sign the head at `seq`.

    `keys` holds (line, public key) from the genesis on. The first head that covers a key change
    is signed by the key before it, later heads by the new one.
    """
    index = max(i for i, (line, _) in enumerate(keys) if line <= seq)
    while index > 0 and not any(keys[index][0] <= other < seq for other in head_seqs):
        index -= 1
    return keys[index][1]
