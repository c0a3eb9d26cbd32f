"""Scalars of TensorBoard event files: a folder of files, each written by one process."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from portolan.errors import PortolanError, UsageError
from portolan.track.imports.source import CHUNK_LINES, Chunk, SourceRun

STEP_FIELD = "step"


class TensorBoardFolder:
    """The event files of one folder, oldest first; each file is an attempt of its own.

    A damaged end of a file, as a killed writer leaves it, ends that file. Memory: one chunk.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder}", remedy="name a log directory")
        self.folder = folder
        self.default_id = folder.resolve().name
        self.files = sorted(folder.glob("*tfevents*"), key=_created)
        if not self.files:
            raise UsageError(
                f"{folder} holds no event file", remedy="name the folder with the *tfevents* files"
            )

    def describe(self) -> SourceRun:
        """Names of the files."""
        return SourceRun(
            kind="tensorboard",
            locator=f"file:{self.folder.name}",
            name=self.folder.name,
            tool_version=f"tensorboard {_version()}",
            query="event files",
            arguments={"files": ", ".join(path.name for path in self.files)},
            anonymous=True,
        )

    def chunks(self, step_key: str) -> Iterator[Chunk]:
        """Events in the order of the files; `step_key` must be the format's own `step`."""
        if step_key != STEP_FIELD:
            raise UsageError(
                f"event files have no field {step_key!r}", remedy=f"use --step-key {STEP_FIELD}"
            )
        line = 0
        for attempt, path in enumerate(self.files, start=1):
            held: list[tuple[int, int, str, float]] = []
            skipped: Counter[str] = Counter()
            for event in _events(path):
                held.extend(_scalars(event, skipped))
                if len(held) >= CHUNK_LINES:
                    yield _chunk(held, line, skipped, attempt)
                    line += len(held)
                    held, skipped = [], Counter()
            if held or skipped:
                yield _chunk(held, line, skipped, attempt)
                line += len(held)


def _created(path: Path) -> tuple[int, str]:
    """Time in the name of an event file, `events.out.tfevents.<seconds>.<host>...`."""
    match = re.search(r"tfevents\.(\d+)", path.name)
    return (int(match[1]) if match else 0, path.name)


def _version() -> str:
    import importlib.metadata

    return importlib.metadata.version("tensorboard")


def _events(path: Path) -> Iterator[Any]:
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    except ImportError as error:
        raise UsageError(
            "TensorBoard is not installed",
            remedy="install the extra: pip install 'portolan[tensorboard]'",
        ) from error
    try:
        yield from EventFileLoader(str(path)).Load()
    except (ValueError, RuntimeError) as error:
        raise PortolanError(
            f"{path} is no event file: {error}", remedy="remove it from the folder"
        ) from error


def _scalars(event: Any, skipped: Counter[str]) -> Iterator[tuple[int, int, str, float]]:
    """(step, ms, tag, value) of the scalars of an event; images, texts and the like are counted."""
    from tensorboard.util import tensor_util

    moment = math.floor(event.wall_time * 1000)
    for value in event.summary.value:
        if value.HasField("simple_value"):
            yield event.step, moment, value.tag, float(value.simple_value)
        elif value.HasField("tensor") and not value.tensor.tensor_shape.dim:
            array = tensor_util.make_ndarray(value.tensor)
            if array.dtype.kind in "fiub":
                yield event.step, moment, value.tag, float(array)
            else:
                skipped[value.tag] += 1
        else:
            skipped[value.tag] += 1


def _chunk(
    held: list[tuple[int, int, str, float]], line: int, skipped: Counter[str], attempt: int
) -> Chunk:
    import polars as pl

    steps, times, keys, values = zip(*held, strict=True) if held else ((), (), (), ())
    frame = pl.DataFrame(
        {"step": steps, "time": times, "key": keys, "value": values},
        schema={"step": pl.Int64, "time": pl.Int64, "key": pl.String, "value": pl.Float64},
    ).with_row_index("line", offset=line)
    frame = frame.with_columns(pl.col("line").cast(pl.Int64))
    raw = [
        json.dumps({"key": k, "step": s, "time": t, "value": v if math.isfinite(v) else repr(v)})
        for s, t, k, v in held
    ]
    return Chunk(
        frame.select("line", "step", "time", "key", "value"),
        "".join(text + "\n" for text in raw).encode(),
        len(held),
        skipped,
        attempt,
    )
