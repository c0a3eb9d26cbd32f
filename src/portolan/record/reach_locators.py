"""Which locators a record cites, and the anonymous request that each of them stands for."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from portolan.errors import PortolanError
from portolan.record.chain import Record
from portolan.record.redact import REDACTED, is_secret_name
from portolan.record.rules import BLOB_PREFIX

NO_LOCATOR = ("unknown", "not_stated", "withheld")

_BARE_HOST = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)*\.[a-z]{2,}(/\S*)?", re.IGNORECASE)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
_HF_KINDS = ("datasets", "spaces")
_SIGNED = re.compile(
    r"(signature|sig|credential|security-token|access_?token|x-amz-.*|x-goog-.*|awsaccesskeyid"
    r"|googleaccessid|key-pair-id|policy)",
    re.IGNORECASE,
)


class LocatorError(PortolanError):
    """A locator that stands for no anonymous request."""


@dataclass
class Citation:
    """A locator, what cites it, and what its bytes should be; None where nothing says so."""

    locator: str
    cited_by: list[str] = field(default_factory=list)
    sha256: str | None = None
    withheld_since: str = ""


def cited_locators(records: Iterable[Record]) -> list[Citation]:
    """Locators of the claims and artifacts in force, in the order of their first mention.

    A claim's snapshot, or the digest of an artifact of one file, says what bytes to expect. An
    artifact that is `metadata_only` or `withheld`, and a claim with the predicate `withheld`
    about a locator, are dated statements that the bytes are not given out.
    """
    found: dict[str, Citation] = {}
    withheld: dict[str, str] = {}
    for record in records_in_force(records):
        for locator, sha256 in _locators_of(record):
            citation = found.setdefault(locator, Citation(locator))
            citation.cited_by.append(record.id)
            citation.sha256 = sha256 or citation.sha256
        withheld |= _withheld_by(record)
    for citation in found.values():
        for prefix, since in withheld.items():
            if citation.locator.startswith(prefix):
                citation.withheld_since = since
    return list(found.values())


def records_in_force(records: Iterable[Record]) -> list[Record]:
    """Records that no later one supersedes, in their order."""
    kept: dict[str, Record] = {}
    for record in records:
        for earlier in record.supersedes:
            kept.pop(earlier, None)
        kept[record.id] = record
    return list(kept.values())


def _locators_of(record: Record) -> Iterator[tuple[str, str | None]]:
    body = record.body
    if record.type == "claim" and isinstance(locator := body.get("locator"), str):
        if locator not in NO_LOCATOR:
            yield locator, _hash_of(body.get("snapshot_digest"))
    elif record.type == "artifact":
        files = body.get("files", ())
        sha256 = str(files[0]["sha256"]) if len(files) == 1 else None
        for locator in body.get("locations", ()):
            if locator not in NO_LOCATOR:
                yield str(locator), sha256


def _withheld_by(record: Record) -> Mapping[str, str]:
    body = record.body
    if record.type == "artifact" and body.get("redistribution") in ("metadata_only", "withheld"):
        return {str(locator): record.time for locator in body.get("locations", ())}
    if record.type == "claim" and body.get("predicate") == "withheld":
        return {str(body.get("subject")): str(body.get("date"))}
    return {}


def _hash_of(reference: Any) -> str | None:
    text = str(reference).removeprefix(BLOB_PREFIX)
    return text if re.fullmatch("[0-9a-f]{64}", text) else None


def request_url(locator: str) -> str:
    """The URL to ask without any login; `file:` locators are returned as they are.

    s3, gs and hf become the public https addresses of their stores. LocatorError for text that is
    no locator, for other schemes, and for a locator that carries a credential.
    """
    try:
        return _request_url(locator.strip())
    except ValueError as error:
        raise LocatorError(f"it is malformed ({error})") from error


def _request_url(locator: str) -> str:
    if "://" not in locator and not locator.startswith("file:"):
        if not _BARE_HOST.fullmatch(locator):
            raise LocatorError("it is not an address that can be asked")
        locator = f"https://{locator}"
    parts = urlsplit(locator)
    scheme = parts.scheme.lower()
    if scheme == "file":
        return locator
    builders = {"http": _plain, "https": _plain, "s3": _s3, "gs": _gs, "hf": _hf}
    if scheme not in builders:
        raise LocatorError(f"the scheme {scheme!r} is not one of {', '.join(builders)}, file")
    url = builders[scheme](locator)
    if "@" in urlsplit(url).netloc or any(_is_secret(name) for name, _ in _query(url)):
        raise LocatorError("it carries a credential, which is never sent")
    return url


def without_signature(url: str) -> str:
    """A URL to be stored: logins and signed query values are replaced, the fragment dropped."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    query = [(name, REDACTED if _is_secret(name) else value) for name, value in _query(url)]
    return urlunsplit((parts.scheme, host, parts.path, urlencode(query), ""))


def _query(url: str) -> list[tuple[str, str]]:
    return parse_qsl(urlsplit(url).query, keep_blank_values=True)


def _is_secret(name: str) -> bool:
    return is_secret_name(name) or bool(_SIGNED.fullmatch(name))


def _plain(locator: str) -> str:
    parts = urlsplit(locator)
    if not parts.hostname:
        raise LocatorError("it names no host")
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
    host = parts.netloc if parts.netloc.isascii() else parts.hostname.encode("idna").decode()
    if parts.port == 0 or not host.isprintable():
        raise LocatorError("its host or port cannot exist")
    return urlunsplit((parts.scheme.lower(), host, path, query, ""))


def _bucket_and_key(locator: str) -> tuple[str, str]:
    bucket, _, key = locator.partition("://")[2].partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise LocatorError(f"{bucket!r} is not the name of a bucket")
    return bucket, quote(key)


def _s3(locator: str) -> str:
    bucket, key = _bucket_and_key(locator)
    # A dot in the name breaks the certificate of the host form.
    if "." in bucket or "_" in bucket:
        return f"https://s3.amazonaws.com/{bucket}/{key}"
    return f"https://{bucket}.s3.amazonaws.com/{key}"


def _gs(locator: str) -> str:
    bucket, key = _bucket_and_key(locator)
    return f"https://storage.googleapis.com/{bucket}/{key}"


def _hf(locator: str) -> str:
    """`hf://[datasets/|spaces/]owner/name[@revision][/path]`; without a path its page."""
    parts = [part for part in locator.partition("://")[2].split("/") if part]
    kind = [parts.pop(0)] if parts and parts[0] in _HF_KINDS else []
    if len(parts) < 2:
        raise LocatorError("it names no repository owner/name")
    name, _, revision = parts[1].partition("@")
    repository = "/".join(quote(part) for part in (*kind, parts[0], name))
    if len(parts) == 2:
        return f"https://huggingface.co/{repository}"
    path = quote("/".join(parts[2:]))
    return (
        f"https://huggingface.co/{repository}/resolve/{quote(revision or 'main', safe='')}/{path}"
    )
