"""Anonymous, bounded HTTP: no login, cookie, proxy or redirect that the caller did not ask for."""

import contextlib
import functools
import ipaddress
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpcore2

from portolan import __version__
from portolan.errors import PortolanError

USER_AGENT = f"portolan-reach/{__version__}"
CHUNK_BYTES = 1 << 16


class RequestFailed(PortolanError):
    """No complete reply arrived; `again` tells whether another try can help."""

    def __init__(self, message: str, *, again: bool = True) -> None:
        super().__init__(message)
        self.again = again


@dataclass
class Reply:
    """Status and headers of one request; `chunks` yields the body as it arrives."""

    status: int
    headers: Mapping[str, str]
    _response: Any = field(repr=False)

    def header(self, name: str) -> str:
        """Value of a header, empty when it was not sent."""
        return self.headers.get(name, "")

    @property
    def length(self) -> int | None:
        """Size in bytes that the server states."""
        text = self.header("content-length")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None

    def chunks(self) -> Iterator[bytes]:
        """The bytes of the body; RequestFailed when it ends too early or too late."""
        with _failures():
            for part in self._response.iter_stream():
                for start in range(0, len(part), CHUNK_BYTES):
                    yield part[start : start + CHUNK_BYTES]


@dataclass(frozen=True)
class AnonymousClient:
    """Sends single requests with a fixed set of headers and nothing else.

    Environment, netrc, proxies and cookie jars are never read: there is no code that could. Each
    request has its own connection and a deadline that covers name, connection, headers and body.

    Args:
        request_seconds: deadline of one request, its body included.
        idle_seconds: longest silence within it.
        allow_private: also connect to addresses that are not public ones.
    """

    request_seconds: float = 120.0
    idle_seconds: float = 15.0
    allow_private: bool = False

    @contextlib.contextmanager
    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> Iterator[Reply]:
        """Send one request and yield its reply, whatever the status; redirects are not followed."""
        with _failures():
            host = _host(url)
        sent = {
            "Host": host,
            "User-Agent": USER_AGENT,
            "Accept": "*/*",
            "Accept-Encoding": "identity",
            "Connection": "close",
            **(headers or {}),
        }
        backend = _Backend(time.monotonic() + self.request_seconds, self.allow_private)
        waits = dict.fromkeys(("connect", "read", "write", "pool"), self.idle_seconds)
        with contextlib.ExitStack() as stack:
            with _failures():
                pool = stack.enter_context(
                    httpcore2.ConnectionPool(ssl_context=_tls(), network_backend=backend)
                )
                response = stack.enter_context(
                    pool.stream(
                        method,
                        url,
                        headers=tuple(sent.items()),
                        content=content,
                        extensions={"timeout": waits},
                    )
                )
                received = {
                    name.decode("latin-1").lower(): value.decode("latin-1")
                    for name, value in response.headers
                }
            yield Reply(response.status, received, response)


class _Backend(httpcore2.NetworkBackend):
    """Connects to the address that it checked, so that a second look-up cannot change it."""

    def __init__(self, deadline: float, allow_private: bool) -> None:
        self.deadline = deadline
        self.allow_private = allow_private
        self.inner = httpcore2.SyncBackend()

    def connect_tcp(self, host: str, port: int, timeout=None, local_address=None, **options):
        """Resolve, refuse what is not public, connect to the first address that answers."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
        if not self.allow_private and not all(ipaddress.ip_address(a).is_global for a in addresses):
            raise RequestFailed(
                "its host has a private address, which a stranger cannot reach", again=False
            )
        failure: Exception = httpcore2.ConnectError("no address")
        for address in dict.fromkeys(addresses):
            try:
                stream = self.inner.connect_tcp(
                    address, port, _left(self.deadline, timeout), local_address, **options
                )
                return _Stream(stream, self.deadline)
            except httpcore2.NetworkError as error:
                failure = error
        raise failure


class _Stream(httpcore2.NetworkStream):
    """A stream whose operations all end at one deadline: a trickle of bytes cannot extend it."""

    def __init__(self, inner: httpcore2.NetworkStream, deadline: float) -> None:
        self.inner = inner
        self.deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self.inner.read(max_bytes, _left(self.deadline, timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self.inner.write(buffer, _left(self.deadline, timeout))

    def close(self) -> None:
        self.inner.close()

    def start_tls(self, ssl_context, server_hostname=None, timeout=None):
        limit = _left(self.deadline, timeout)
        return _Stream(self.inner.start_tls(ssl_context, server_hostname, limit), self.deadline)

    def get_extra_info(self, info: str) -> Any:
        return self.inner.get_extra_info(info)


@functools.cache
def _tls() -> ssl.SSLContext:
    """The system's certificate authorities; reading them takes longer than a request."""
    return ssl.create_default_context()


def _left(deadline: float, timeout: float | None) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise httpcore2.ReadTimeout("the request took too long")
    return left if timeout is None else min(left, timeout)


def _host(url: str) -> str:
    parsed = httpcore2.URL(url)
    host, port = parsed.host.decode("ascii"), parsed.port
    return host if port is None else f"{host}:{port}"


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Turn what the network does into RequestFailed with a short reason."""
    try:
        yield
    except httpcore2.TimeoutException:
        raise RequestFailed("it timed out") from None
    except httpcore2.RemoteProtocolError as error:
        raise RequestFailed(f"the reply was cut off or malformed ({error})") from None
    except (httpcore2.NetworkError, httpcore2.ProxyError, OSError) as error:
        raise RequestFailed(f"no connection ({error or type(error).__name__})") from None
    except (httpcore2.UnsupportedProtocol, httpcore2.ProtocolError, ValueError) as error:
        raise RequestFailed(f"the address cannot be asked ({error})", again=False) from None
