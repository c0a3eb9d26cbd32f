"""A local server that speaks as much of the Weights & Biases protocol as reading a run needs."""

import contextlib
import http.server
import json
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ServedRun:
    """History lines of run lab/project/abc, the most that a page gives, and requests seen."""

    lines: Sequence[dict[str, Any]]
    state: str = "finished"
    line_count: int | None = None
    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextlib.contextmanager
def serve(run: ServedRun) -> Iterator[str]:
    """Address of a server on loopback for the time of the context."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            match = re.search(r"query\s+(\w+)", request["query"])
            operation, variables = match[1] if match else "", request.get("variables") or {}
            run.seen.append((operation, variables))
            run.headers.append(dict(self.headers))
            body = json.dumps({"data": _answer(run, operation, variables)}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _answer(run: ServedRun, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
    if operation in ("Viewer", "GetDefaultEntity"):
        teams = {"edges": []}
        viewer = {"id": "u", "entity": "lab", "username": "u", "email": "", "flags": "{}"}
        return {"viewer": viewer | {"teams": teams}}
    last_step = run.lines[-1]["_step"] if run.lines else -1
    keys = {"keys": {}, "lastStep": last_step, "sets": []}
    answers: dict[str, dict[str, Any]] = {
        "Run": _description(run) | {"historyKeys": keys},
        "RunHistoryKeys": {"historyKeys": keys},
        "RunParquetHistory": {"parquetHistory": {"parquetUrls": [], "liveData": []}},
    }
    if operation == "HistoryPage":
        low, high = variables["minStep"], variables["maxStep"]
        page = [line for line in run.lines if low <= line["_step"] < high]
        answers["HistoryPage"] = {"history": [json.dumps(line) for line in page]}
    if operation == "RunFullHistory":
        every = max(1, -(-len(run.lines) // variables["samples"]))
        answers["RunFullHistory"] = {"history": [json.dumps(x) for x in run.lines[::every]]}
    if operation not in answers or variables.get("name", variables.get("run", "abc")) != "abc":
        return {"project": {"run": None}}
    return {"project": {"run": answers[operation]}}


def _description(run: ServedRun) -> dict[str, Any]:
    count = len(run.lines) if run.line_count is None else run.line_count
    text = ("sweepName", "group", "jobType", "commit", "description", "notes")
    return dict.fromkeys(text) | {
        "id": "UnVuOmFiYw==",
        "tags": [],
        "name": "abc",
        "displayName": "their-run",
        "state": run.state,
        "config": json.dumps({"lr": {"value": 0.5}}),
        "readOnly": True,
        "createdAt": "2026-08-20T02:05:00Z",
        "heartbeatAt": "2026-08-20T03:05:00Z",
        "systemMetrics": "{}",
        "summaryMetrics": json.dumps({"loss": 1.5}),
        "historyLineCount": count,
        "user": {"name": "u", "username": "u"},
        "projectId": 7,
    }
