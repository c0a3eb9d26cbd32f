"""Ed25519 keys and heads signed in DSSE envelopes."""

import base64
import binascii
import hashlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portolan.canonical import CanonicalError, canonical, parse
from portolan.errors import PortolanError
from portolan.files import fsync_directory, storage_errors

HEAD_PAYLOAD_TYPE = "application/vnd.portolan.head.v1+json"


class BadSignature(PortolanError):
    """An envelope is malformed or its signature does not belong to the expected key."""


def signing_available() -> bool:
    """Whether the libraries for Ed25519 and DSSE are installed; without them heads are unsigned."""
    return all(importlib.util.find_spec(name) for name in ("cryptography", "securesystemslib"))


def key_id(public_key: str) -> str:
    """SHA-256 of the raw 32-byte public key given in hex."""
    return hashlib.sha256(bytes.fromhex(public_key)).hexdigest()


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """The bytes that DSSE signs (securesystemslib's encoding)."""
    from securesystemslib.dsse import Envelope

    return Envelope(payload, payload_type, {}).pae()


@dataclass(frozen=True)
class SigningKey:
    """A private Ed25519 key; `seed` is its 32 raw bytes and is never printed."""

    seed: bytes

    def __repr__(self) -> str:
        return f"SigningKey(public_key={self.public_key!r})"

    @classmethod
    def generate(cls) -> "SigningKey":
        """A new key from the operating system's random numbers."""
        return cls(os.urandom(32))

    @classmethod
    def load(cls, path: Path) -> "SigningKey":
        """Read the hex seed written by `save`."""
        try:
            seed = bytes.fromhex(path.read_text().strip())
        except ValueError:
            seed = b""
        if len(seed) != 32:
            raise PortolanError(
                f"{path} is not a signing key of 64 hex digits",
                remedy="restore the file from a copy, or rotate the key of the journal",
            )
        return cls(seed)

    def save(self, path: Path) -> None:
        """Create `path` with mode 600; an existing file is never overwritten."""
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(self.seed.hex() + "\n")
                file.flush()
                os.fsync(file.fileno())
            fsync_directory(path.parent)

    @property
    def public_key(self) -> str:
        """Raw public key as 64 hex digits."""
        return self._private().public_key().public_bytes_raw().hex()

    def sign(self, payload: bytes, payload_type: str = HEAD_PAYLOAD_TYPE) -> dict[str, Any]:
        """DSSE envelope of `payload` with one signature."""
        from securesystemslib.dsse import Envelope
        from securesystemslib.signer import Signature  # pyright: ignore[reportPrivateImportUsage]

        envelope = Envelope(payload, payload_type, {})
        signature = self._private().sign(envelope.pae())
        keyid = key_id(self.public_key)
        envelope.signatures[keyid] = Signature(keyid, signature.hex())
        return envelope.to_dict()

    def _private(self) -> Any:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(self.seed)


def envelope_payload(envelope: Any, payload_type: str = HEAD_PAYLOAD_TYPE) -> bytes:
    """Payload bytes of an envelope, signature not yet checked; BadSignature if malformed."""
    if not isinstance(envelope, Mapping) or envelope.get("payloadType") != payload_type:
        raise BadSignature(f"the envelope is not of type {payload_type}")
    return _decode(envelope.get("payload"))


def verify_envelope(envelope: Any, public_key: str, payload_type: str = HEAD_PAYLOAD_TYPE) -> bytes:
    """Check that `public_key` (hex) signed the envelope; return its payload or raise."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    payload = envelope_payload(envelope, payload_type)
    signatures = envelope.get("signatures")
    wanted = key_id(public_key)
    for signature in signatures if isinstance(signatures, list) else []:
        if not isinstance(signature, Mapping) or signature.get("keyid") != wanted:
            continue
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        try:
            signed = pre_authentication_encoding(payload_type, payload)
            key.verify(_decode(signature.get("sig")), signed)
        except InvalidSignature:
            break
        return payload
    raise BadSignature(f"no valid signature by the key {wanted[:16]}…")


@dataclass(frozen=True)
class Head:
    """The state of a journal after line `seq`: `head` is that line's hash, `journal` line 0's."""

    journal: str
    seq: int
    head: str
    time: str = "not_stated"

    def payload(self) -> bytes:
        """Canonical bytes that are signed."""
        return canonical(
            {
                "head": self.head,
                "journal": self.journal,
                "seq": self.seq,
                "time": self.time,
                "v": 1,
            }
        )

    @classmethod
    def from_payload(cls, payload: bytes) -> "Head":
        """Read a payload; BadSignature if it is not a head."""
        try:
            value = parse(payload)
            head = cls(value["journal"], value["seq"], value["head"], value.get("time", ""))
        except (CanonicalError, KeyError, TypeError, AttributeError) as error:
            raise BadSignature("the payload is not a journal head") from error
        texts = (head.journal, head.head, head.time)
        if not all(isinstance(text, str) for text in texts) or type(head.seq) is not int:
            raise BadSignature("the payload is not a journal head")
        return head


def load_head(path: Path) -> Head:
    """Read a held head: a DSSE envelope or plain JSON with journal, seq and head."""
    try:
        value = parse(path.read_bytes())
    except CanonicalError as error:
        raise PortolanError(f"{path} is not a journal head: {error.message}") from error
    signed = isinstance(value, dict) and "payloadType" in value
    payload = envelope_payload(value) if signed else canonical(value)
    return Head.from_payload(payload)


def _decode(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise BadSignature("the envelope is not valid base64") from error
