"""Reach: can a stranger fetch what the record cites, and are the bytes the ones it names?"""

import hashlib
import mimetypes
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urldefrag, urljoin, urlsplit

from portolan.record.anonymous import AnonymousClient, Reply, RequestFailed
from portolan.record.reach_locators import (
    Citation,
    LocatorError,
    request_url,
    without_signature,
)
from portolan.record.times import format_time, now

Reachability = Literal[
    "public", "moved", "changed", "gated", "auth", "withheld_by_policy", "gone", "unknown"
]
FETCHABLE: tuple[Reachability, ...] = ("public", "moved")
"""Classes in which a stranger gets the bytes that the record means."""

PERMANENT = (301, 308)
TEMPORARY = (302, 303, 307)
AGAIN = (408, 425, 429)
HEAD_BYTES = 1 << 16

_FORM = re.compile(rb"<form\b", re.IGNORECASE)
_TERMS = re.compile(rb"licen[cs]e|terms of use|i agree|accept the", re.IGNORECASE)
_LOGIN = re.compile(rb"type=[\"']?password", re.IGNORECASE)


@dataclass(frozen=True)
class Limits:
    """Bounds of one `reach`.

    Args:
        total_seconds: locators that are not asked by then stay `unknown`.
        max_bytes: a body is hashed up to here, then the connection is closed and that is said.
        max_hops: redirects followed.
        tries: requests per locator while the answer is `unknown`.
        pause_seconds: least time between two requests, and the base of the wait before a retry.
        max_retry_after_seconds: longest wait that a server may ask for.
    """

    total_seconds: float = 900.0
    max_bytes: int = 256 << 20
    max_hops: int = 10
    tries: int = 3
    pause_seconds: float = 0.5
    max_retry_after_seconds: float = 30.0


@dataclass
class Finding:
    """What happened to one locator. `status` is the first answer, `hops` what followed it."""

    locator: str
    cited_by: tuple[str, ...]
    reachability: Reachability = "unknown"
    reason: str = "not asked"
    status: int | None = None
    hops: list[tuple[int, str]] = field(default_factory=list)
    sha256: str | None = None
    num_bytes: int | None = None
    complete: bool = False
    content_type: str = "not_stated"
    expires: str = "not_stated"
    tries: int = 0
    time: str = "not_stated"

    def to_json(self) -> dict[str, Any]:
        """The finding as the record stores it; absent facts are `unknown`."""
        return {
            "locator": self.locator,
            "cited_by": list(self.cited_by),
            "class": self.reachability,
            "reason": self.reason,
            "status": "unknown" if self.status is None else self.status,
            "hops": [{"status": status, "to": url} for status, url in self.hops],
            "sha256": self.sha256 or "unknown",
            "bytes": "unknown" if self.num_bytes is None else self.num_bytes,
            "completeness": "full" if self.complete else "truncated",
            "content_type": self.content_type,
            "expires": self.expires,
            "tries": self.tries,
            "time": self.time,
        }


@dataclass
class _Answer:
    """End of one chain of redirects."""

    status: int
    first_status: int
    hops: list[tuple[int, str]]
    headers: Mapping[str, str]
    sha256: str | None = None
    num_bytes: int | None = None
    complete: bool = False
    start: bytes = b""


class Reacher:
    """Asks for locators one after another, at a bounded rate and within a bounded time."""

    def __init__(
        self,
        root: Path,
        client: AnonymousClient | None = None,
        limits: Limits | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.root = root
        self.client = client or AnonymousClient()
        self.limits = limits or Limits()
        self._sleep = sleep
        self._deadline = time.monotonic() + self.limits.total_seconds
        self._last_request = -1e9

    def reach_all(self, citations: Iterable[Citation]) -> Iterator[Finding]:
        """One finding per citation, in order; never raises for what a server does."""
        for citation in citations:
            yield self.reach(citation)

    def reach(self, citation: Citation) -> Finding:
        """Ask for one locator: HEAD, then GET with redirects followed by hand."""
        finding = Finding(citation.locator, tuple(citation.cited_by), time=now())
        if _is_file(citation.locator, self.root):
            _reach_file(finding, citation, self.root)
            return finding
        try:
            url = request_url(citation.locator)
        except LocatorError as error:
            credential = "credential" in error.message
            finding.reachability = "auth" if credential else "unknown"
            finding.reason = error.message
            return finding
        finding.expires = url_expiry(url)
        stated = self._stated_length(url)
        while finding.tries < self.limits.tries:
            wait = self.limits.pause_seconds * 2**finding.tries
            finding.tries += 1
            try:
                answer = self._follow(url, stated)
            except RequestFailed as error:
                finding.reason = error.message
                if not error.again:
                    break
            else:
                again = self._classify(finding, citation, url, answer)
                if finding.reachability != "unknown" or not again:
                    break
                wait = max(wait, _retry_after(answer.headers))
            if finding.tries < self.limits.tries:
                self._wait(min(wait, self.limits.max_retry_after_seconds))
        return finding

    def _stated_length(self, url: str) -> int | None:
        """Size that a HEAD request states. A server may refuse HEAD; GET decides."""
        try:
            with self._ask("HEAD", url) as reply:
                return reply.length if reply.status == 200 else None
        except RequestFailed:
            return None

    def _follow(self, url: str, stated: int | None) -> _Answer:
        hops: list[tuple[int, str]] = []
        seen = {url}
        first = 0
        while True:
            partial = stated is not None and stated > self.limits.max_bytes
            wanted = {"Range": f"bytes=0-{self.limits.max_bytes - 1}"} if partial else None
            with self._ask("GET", url, wanted) as reply:
                first = first or reply.status
                location = reply.header("location")
                if reply.status not in PERMANENT + TEMPORARY or not location:
                    if reply.status == 416 and partial:
                        stated = None
                        continue
                    return self._read(reply, first, hops)
                url = self._next(url, location, seen, hops, reply.status)

    def _next(
        self, url: str, location: str, seen: set[str], hops: list[tuple[int, str]], status: int
    ) -> str:
        try:
            target = urldefrag(urljoin(url, location)).url
            hops.append((status, without_signature(target)))
        except ValueError as error:
            raise RequestFailed("it redirects to a malformed address", again=False) from error
        if urlsplit(target).scheme not in ("http", "https"):
            raise RequestFailed("it redirects to an address that is not http", again=False)
        if "@" in urlsplit(target).netloc:
            raise RequestFailed("it redirects to an address with a login", again=False)
        if target in seen:
            raise RequestFailed("it redirects in a circle", again=False)
        if len(hops) > self.limits.max_hops:
            raise RequestFailed(f"it redirects more than {self.limits.max_hops} times", again=False)
        seen.add(target)
        return target

    def _read(self, reply: Reply, first: int, hops: list[tuple[int, str]]) -> _Answer:
        answer = _Answer(reply.status, first, hops, reply.headers)
        if reply.status not in (200, 206, 203):
            return answer
        digest = hashlib.sha256()
        size = 0
        complete = reply.status != 206
        for chunk in reply.chunks():
            if size + len(chunk) > self.limits.max_bytes:
                chunk, complete = chunk[: self.limits.max_bytes - size], False
            digest.update(chunk)
            answer.start += chunk[: max(0, HEAD_BYTES - size)]
            size += len(chunk)
            if not complete and size >= self.limits.max_bytes:
                break
        answer.sha256, answer.num_bytes, answer.complete = digest.hexdigest(), size, complete
        return answer

    def _classify(self, finding: Finding, citation: Citation, url: str, answer: _Answer) -> bool:
        """Fill in the finding; returns whether another try can help."""
        finding.status, finding.hops = answer.first_status, answer.hops
        finding.content_type = answer.headers.get("content-type", "not_stated") or "not_stated"
        finding.reason = f"status {answer.status}"
        if answer.status in (401, 403, 407):
            gated = answer.headers.get("x-error-code", "").lower() == "gatedrepo"
            finding.reachability = "gated" if gated else "auth"
            if citation.withheld_since:
                finding.reachability = "withheld_by_policy"
                finding.reason += f", withheld by a statement of {citation.withheld_since}"
        elif answer.status in (404, 410):
            finding.reachability = "gone"
        elif answer.status in AGAIN or answer.status >= 500:
            return True
        elif answer.sha256 is not None:
            return self._classify_bytes(finding, citation, url, answer)
        return False

    def _classify_bytes(
        self, finding: Finding, citation: Citation, url: str, answer: _Answer
    ) -> bool:
        finding.sha256, finding.num_bytes = answer.sha256, answer.num_bytes
        finding.complete = answer.complete
        if answer.headers.get("content-encoding", "identity").lower() not in ("identity", ""):
            finding.reason = "the server packed the bytes although it was asked not to"
            return False
        if _is_wrong_type(url, finding.content_type):
            finding.reason = f"a page ({finding.content_type}) came instead of the file"
            if _LOGIN.search(answer.start):
                finding.reachability = "auth"
            elif _FORM.search(answer.start) and _TERMS.search(answer.start):
                finding.reachability = "gated"
            return True
        if not answer.complete:
            finding.reason = f"only the first {answer.num_bytes} bytes were read (the limit)"
            finding.reachability = "unknown" if citation.sha256 else "public"
            return False
        permanent = any(status in PERMANENT for status, _ in answer.hops)
        if citation.sha256 not in (None, answer.sha256):
            finding.reachability, finding.reason = "changed", "the bytes have another digest"
        elif permanent:
            finding.reachability = "moved"
            finding.reason = f"moved to {answer.hops[-1][1]}"
        else:
            finding.reachability = "public"
            finding.reason = "equal digest" if citation.sha256 else "first seen"
        return False

    def _ask(self, method: str, url: str, headers: Mapping[str, str] | None = None):
        self._wait(self._last_request + self.limits.pause_seconds - time.monotonic())
        if time.monotonic() >= self._deadline:
            raise RequestFailed("the time for all locators is used up", again=False)
        self._last_request = time.monotonic()
        return self.client.request(method, url, headers=headers)

    def _wait(self, seconds: float) -> None:
        seconds = min(seconds, self._deadline - time.monotonic())
        if seconds > 0:
            self._sleep(seconds)


def url_expiry(url: str) -> str:
    """Time until which a signed URL is valid, read from its query; `not_stated` without one."""
    query = {name.lower(): values[0] for name, values in parse_qs(urlsplit(url).query).items()}
    try:
        for vendor in ("amz", "goog"):
            if f"x-{vendor}-expires" in query:
                start = datetime.strptime(query[f"x-{vendor}-date"], "%Y%m%dT%H%M%SZ")
                lifetime = timedelta(seconds=int(query[f"x-{vendor}-expires"]))
                return format_time(start.replace(tzinfo=UTC) + lifetime)
        if "expires" in query:
            return format_time(datetime.fromtimestamp(int(query["expires"]), UTC))
    except (KeyError, ValueError, OverflowError, OSError):
        return "unknown"
    return "not_stated"


def _is_file(locator: str, root: Path) -> bool:
    """Whether a locator names a file: by its scheme, or as a path that the project has."""
    if "://" in locator or locator.startswith("file:"):
        return locator.lower().startswith("file:")
    name = locator.partition("#")[0]
    return bool(name) and len(name) < 1024 and (root / name).is_file()


def _reach_file(finding: Finding, citation: Citation, root: Path) -> None:
    """A file of the project travels with it; any other is out of a stranger's reach."""
    base = root.resolve()
    name = unquote(urlsplit(finding.locator).path)
    path = (base / name).resolve()
    finding.tries = 1
    if urlsplit(finding.locator).netloc or not path.is_relative_to(base):
        finding.reason = "it names a file outside the project, which a stranger does not have"
    elif not path.is_file():
        finding.reachability, finding.reason = "gone", "the project has no such file"
    else:
        with path.open("rb") as file:
            finding.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        finding.num_bytes, finding.complete = path.stat().st_size, True
        differs = citation.sha256 not in (None, finding.sha256)
        finding.reachability = "changed" if differs else "public"
        finding.reason = "the bytes have another digest" if differs else "a file of the project"


def _is_wrong_type(url: str, content_type: str) -> bool:
    """Whether a web page came where the name promises another kind of file."""
    expected = mimetypes.guess_type(urlsplit(url).path)[0]
    if expected is None:
        suffix = Path(urlsplit(url).path).suffix.lower()
        expected = "application/octet-stream" if suffix in _DATA_SUFFIXES else None
    is_page = content_type.partition(";")[0].strip().lower() in ("text/html", _XHTML)
    return is_page and expected not in (None, "text/html", _XHTML)


_XHTML = "application/xhtml+xml"
_DATA_SUFFIXES = (".parquet", ".arrow", ".safetensors", ".jsonl", ".zst", ".bin", ".toml", ".yaml")


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that the server asks to wait; a date counts as a minute."""
    text = headers.get("retry-after", "")
    if not text:
        return 0.0
    return float(text) if text.isascii() and text.isdigit() and len(text) < 9 else 60.0
