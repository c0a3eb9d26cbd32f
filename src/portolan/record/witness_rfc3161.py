"""Witness: a time-stamping authority (RFC 3161), whose signed clock proves that a head existed.

Needs the library of the extra `witness` to ask and to check; without it, or without a trusted root
for the authority, a receipt stays unchecked. By hand: `openssl ts -verify`.
"""

import hashlib
import warnings
from pathlib import Path
from typing import Any

from portolan.errors import UsageError
from portolan.record.signing import Head
from portolan.record.times import format_time
from portolan.record.witness import Receipt, Testimony, Unchecked, WitnessError

SUFFIX = ".tsr"
MAX_RESPONSE_BYTES = 1 << 20
_INSTALL = "pip install 'portolan[witness]'"


def obtain(statement: bytes, head: Head, place: str) -> Receipt:
    """Ask the authority at the URL `place` for a time stamp of the statement's SHA-256."""
    from portolan.record.anonymous import AnonymousClient, RequestFailed

    library = _library()
    if library is None:
        raise WitnessError("the library for time stamps is not installed", remedy=_INSTALL)
    request = library.TimestampRequestBuilder(
        data=statement, hash_algorithm=library.HashAlgorithm.SHA256
    ).build()
    # The person who names an authority on a private address means it.
    client = AnonymousClient(request_seconds=60.0, allow_private=True)
    headers = {
        "Content-Type": "application/timestamp-query",
        "Content-Length": str(len(request.as_bytes())),
    }
    content = b""
    try:
        with client.request("POST", place, headers=headers, content=request.as_bytes()) as reply:
            if reply.status != 200:
                raise WitnessError(f"{place} answered with status {reply.status}")
            for chunk in reply.chunks():
                content += chunk
                if len(content) > MAX_RESPONSE_BYTES:
                    raise WitnessError(f"{place} sent more than {MAX_RESPONSE_BYTES} bytes")
    except RequestFailed as error:
        raise WitnessError(f"{place}: {error.message}") from error
    token = _stamp(library, content, statement)
    if token.nonce != request.nonce:
        raise WitnessError(f"{place} answered another request (its nonce differs)")
    return Receipt(content, SUFFIX, format_time(token.gen_time))


def check(content: bytes, statement: bytes, roots: Path | None) -> Testimony:
    """The stamp must be over the statement and signed under a root that the reader trusts."""
    library = _library()
    if library is None:
        raise Unchecked(f"the library for time stamps is not installed: {_INSTALL}")
    token = _stamp(library, content, statement)
    trusted = _trusted_roots(roots)
    if not trusted:
        raise Unchecked("no trusted root certificate: give one with --tsa-root FILE")
    builder = library.VerifierBuilder(roots=trusted)
    try:
        response = library.decode_timestamp_response(content)
        builder.build().verify(response, hashlib.sha256(statement).digest())
    except (library.VerificationError, ValueError) as error:
        raise Unchecked(
            f"its authority is not under a trusted root ({_first_line(error)}); "
            "give the root with --tsa-root FILE"
        ) from error
    return Testimony(
        format_time(token.gen_time), independent=True, remark=f"time stamp by {_signer(response)}"
    )


def _signer(response: Any) -> str:
    """Subject of the certificate that signed, of several the first by name."""
    from cryptography import x509

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        certificates = map(x509.load_der_x509_certificate, response.signed_data.certificates)
        return min(certificate.subject.rfc4514_string() for certificate in certificates)


def _stamp(library: Any, content: bytes, statement: bytes) -> Any:
    """The signed part of a granted response over the statement; its signature is not checked."""
    try:
        response = library.decode_timestamp_response(content)
        if library.PKIStatus(response.status) != library.PKIStatus.GRANTED:
            raise WitnessError("the authority did not grant a time stamp")
        token = response.tst_info
    except ValueError as error:
        raise WitnessError(f"the time stamp is malformed ({_first_line(error)})") from error
    if token.message_imprint.message != hashlib.sha256(statement).digest():
        raise WitnessError("the time stamp is of something else")
    return token


def _trusted_roots(roots: Path | None) -> list[Any]:
    from cryptography import x509

    if roots is None:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return x509.load_pem_x509_certificates(roots.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{roots} holds no certificate in PEM form", remedy="name a file of the authority"
        ) from error


def _library() -> Any:
    try:
        import rfc3161_client
    except ImportError:
        return None
    return rfc3161_client


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
