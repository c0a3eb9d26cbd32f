"""A local server that misbehaves on request, and remembers what it was sent."""

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BODY = b"step,loss\n1,2.5\n" * 100
SHA256 = hashlib.sha256(BODY).hexdigest()
TERMS = b"<html><form action=/ok>Accept the licence terms</form></html>"
LOGIN = b"<html><form><input type='password'></form></html>"


@dataclass
class Web:
    """Address of the server, and (method, path, headers) of every request."""

    url: str
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    def asked(self, path: str, method: str = "GET") -> int:
        """How often a path was asked for."""
        return sum(seen[:2] == (method, path) for seen in self.requests)


class Handler(BaseHTTPRequestHandler):
    """`/status/<code>`, `/to/<code>/<path>` and a few paths with a behaviour of their own."""

    protocol_version = "HTTP/1.1"
    web: Web

    def log_message(self, format, *arguments):
        pass

    def do_HEAD(self):
        if self._note().startswith("/no-head"):
            return self._reply(405)
        if self.path == "/large.csv":
            return self._reply(200, length=10**12)
        return self.do_GET(head=True)

    def do_GET(self, head=False):
        path = self.path if head else self._note()
        parts = path.partition("?")[0].strip("/").split("/")
        if parts[0] == "status":
            return self._reply(int(parts[1]), {"Retry-After": "7"} if parts[1] == "429" else {})
        if parts[0] == "to":
            return self._reply(int(parts[1]), {"Location": "/" + "/".join(parts[2:])})
        if path.startswith("/cookie"):
            return self._reply(302, {"Set-Cookie": "session=1; Path=/", "Location": "/data.csv"})
        actions = {
            "/gated.bin": lambda: self._reply(403, {"X-Error-Code": "GatedRepo"}),
            "/busy-once": lambda: self._reply(503 if self.web.asked(path) < 2 else 200, body=BODY),
            "/slow": lambda: time.sleep(1.5),
            "/drip": self._drip,
            "/cut": lambda: self._reply(200, {"Content-Length": "5000"}, body=BODY[:1000]),
            "/terms.csv": lambda: self._reply(200, {"Content-Type": "text/html"}, body=TERMS),
            "/login.csv": lambda: self._reply(200, {"Content-Type": "text/html"}, body=LOGIN),
            "/error.csv": lambda: self._reply(200, {"Content-Type": "text/html"}, body=b"oops"),
            "/packed": lambda: self._reply(200, {"Content-Encoding": "gzip"}, body=BODY),
            "/large.csv": self._range,
            "/elsewhere": lambda: self._reply(302, {"Location": "ftp://example.org/x"}),
            "/malformed": lambda: self._reply(302, {"Location": "http://[x/"}),
            "/no-port": lambda: self._reply(302, {"Location": "http://127.0.0.1:99999/"}),
            "/with-login": lambda: self._reply(302, {"Location": "http://me:pw@127.0.0.1/x"}),
        }
        if path.startswith("/endless"):
            return self._reply(302, {"Location": f"{path}x"})
        return actions.get(path, lambda: self._reply(200, body=b"" if head else BODY))()

    def do_POST(self):
        self._note()
        self._reply(404)

    def _range(self):
        if "Range" in self.headers:
            return self._reply(416 if self.web.asked("/large.csv") == 1 else 206, body=BODY)
        return self._reply(200, body=BODY)

    def _drip(self):
        self._reply(200, {"Content-Length": "1000"})
        with contextlib.suppress(OSError):
            for _ in range(40):
                self.wfile.write(b"x")
                time.sleep(0.05)

    def _note(self) -> str:
        self.web.requests.append((self.command, self.path, dict(self.headers)))
        return self.path

    def _reply(self, status, headers=None, body=b"", length=None):
        headers = {"Content-Type": "text/csv", **(headers or {})}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextlib.contextmanager
def serving(handler: type[Handler] = Handler) -> Iterator[Web]:
    """Serve on a free port of the loopback address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    web = Web(f"http://127.0.0.1:{server.server_address[1]}")
    handler.web = web
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield web
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
