"""Runs of trackio, read from its SQLite file without changing it."""

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from portolan.errors import PortolanError, UsageError
from portolan.track.imports.source import Chunk, SourceRun, chunk_of_lines, in_chunks

STEP_FIELD = "step"
TIME_FIELD = "timestamp"


class TrackioRun:
    """One run of a trackio project file (`<project>.db`); `name` may be left out if it is alone."""

    def __init__(self, path: Path, name: str = "") -> None:
        if not path.is_file():
            raise UsageError(f"there is no file {path}", remedy="name a trackio .db file")
        self.path = path
        with self._open() as database:
            rows = database.execute(
                "SELECT run_id, run_name, COUNT(*), MAX(step) FROM metrics GROUP BY 1, 2"
            ).fetchall()
        found = [row for row in rows if name in ("", row[0], row[1])]
        if len(found) != 1:
            names = ", ".join(sorted(row[1] for row in rows)) or "none"
            what = f"{len(found)} runs named {name!r}" if name else f"{len(rows)} runs"
            raise UsageError(f"{path} holds {what}", remedy=f"choose one with --name: {names}")
        self._id, self._name, self._num_lines, self._last_step = found[0]
        self.default_id = self._name

    def describe(self) -> SourceRun:
        """Configuration and length of the run."""
        with self._open() as database:
            row = database.execute(
                "SELECT config, created_at FROM configs WHERE run_id = ?", (self._id,)
            ).fetchone()
        return SourceRun(
            kind="trackio",
            locator=f"file:{self.path.name}",
            name=self._name,
            tool_version=f"sqlite {sqlite3.sqlite_version}",
            query="metrics",
            arguments={"run": self._id},
            anonymous=True,
            created=str(row[1]) if row else "not_stated",
            config=json.loads(row[0]) if row else {},
            num_lines=self._num_lines,
            last_step=self._last_step,
            tracker_field=STEP_FIELD,
        )

    def chunks(self, step_key: str) -> Iterator[Chunk]:
        """Lines in the order in which they were written."""
        line = 0
        for lines in in_chunks(self._lines()):
            yield chunk_of_lines(lines, line, step_key, TIME_FIELD)
            line += len(lines)

    def _lines(self) -> Iterator[dict[str, Any]]:
        with self._open() as database:
            rows = database.execute(
                "SELECT step, timestamp, metrics FROM metrics WHERE run_id = ? ORDER BY id",
                (self._id,),
            )
            for step, moment, metrics in rows:
                seconds = datetime.fromisoformat(moment).timestamp()
                yield {**json.loads(metrics), STEP_FIELD: step, TIME_FIELD: seconds}

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            uri = f"{self.path.absolute().as_uri()}?mode=ro"
            with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
                yield database
        except (sqlite3.Error, ValueError) as error:
            raise PortolanError(
                f"{self.path} is no trackio file: {error}", remedy="name a trackio .db file"
            ) from error
