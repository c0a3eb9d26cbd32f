"""A file server and a small copy of the hub, on this machine, with faults on demand."""

import hashlib
import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Site:
    """Files by path, and what goes wrong with them.

    `cut`: bytes after which a reply breaks off, once a path. `change`: a path whose content becomes
    another one when its first bytes have been read. `ranges` off: every reply is the whole file.
    """

    files: dict[str, bytes]
    cut: dict[str, int] = field(default_factory=dict)
    change: dict[str, bytes] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    ranges: bool = True
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    url: str = ""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        """A client that leaves early is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.site.requests.append((self.command, path, self.headers.get("Range", "")))
        if path.startswith("/api/datasets/"):
            self._api(path)
        elif path.endswith("/"):
            self._listing(path)
        else:
            parts = path.split("/resolve/")
            name = parts[0] if len(parts) == 1 else "/" + parts[1].split("/", 1)[1]
            self._file(name.lstrip("/"))

    def _send(self, status, content, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def _api(self, path):
        """The tree of the repository at one commit, or its facts."""
        _, _, _, _, _, what, revision, *rest = [*path.split("/"), "", ""][:10]
        if revision != COMMIT:
            self._send(404, b"{}", X_Error_Code="RevisionNotFound")
        elif what == "revision":
            self._send(200, json.dumps({"id": "acme/notes", "sha": COMMIT}).encode())
        else:
            folder = "/".join(part for part in rest if part)
            entries = [self._entry(name) for name in _children(self.site.files, folder)]
            self._send(200, json.dumps(entries).encode(), Content_Type="application/json")

    def _entry(self, name):
        if name not in self.site.files:
            return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
        content = self.site.files[name]
        oid = hashlib.sha1(content).hexdigest()
        return {"type": "file", "oid": oid, "size": len(content), "path": name}

    def _listing(self, path):
        names = _children(self.site.files, path.strip("/"))
        links = [f"{n}/" if n not in self.site.files else n for n in names]
        rows = "".join(f'<a href="/{urllib.parse.quote(n)}">{n}</a>\n' for n in links)
        page = f'<a href="?C=N;O=D">Name</a><a href="../">up</a>{rows}'
        self._send(200 if names else 404, page.encode(), Content_Type="text/html")

    def _file(self, name):
        content = self.site.files.get(name)
        if content is None or name in self.site.gone:
            self._send(404, b"")
            return
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        headers = {"ETag": etag, "Accept_Ranges": "bytes" if self.site.ranges else "none"}
        wanted = self.headers.get("Range", "")
        if not wanted or not self.site.ranges:
            self._body(name, 200, content, headers)
            return
        first, last = wanted.removeprefix("bytes=").split("-")
        begin, end = int(first), min(int(last or len(content)), len(content) - 1)
        headers["Content_Range"] = f"bytes {begin}-{end}/{len(content)}"
        self._body(name, 206, content[begin : end + 1], headers)

    def _body(self, name, status, content, headers):
        if self.command == "GET" and name in self.site.cut:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: self.site.cut.pop(name)])
            self.close_connection = True
            return
        self._send(status, content, **headers)
        if self.command == "GET" and name in self.site.change:
            self.site.files[name] = self.site.change.pop(name)


def _children(files, folder):
    prefix = f"{folder}/" if folder else ""
    rest = {name[len(prefix) :].split("/")[0] for name in files if name.startswith(prefix)}
    return sorted(prefix + name for name in rest)


@contextmanager
def serve(files: dict[str, bytes]) -> Iterator[Site]:
    """Serve files at `site.url` until the block ends."""
    site = Site(files)
    handler = type("Handler", (_Handler,), {"site": site})
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        site.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()
