"""Stages made of tasks: one that is finished stays finished when its stage is killed."""

import contextlib
import errno
import fcntl
import json
import pickle
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portolan.data.documents import (
    FAILED,
    MANIFEST,
    WORK,
    Stage,
    hidden_path,
    run_stage,
    stage_fields,
)
from portolan.data.engine.core import Engine, StageProgress
from portolan.data.engine.dataset import Dataset
from portolan.errors import PortolanError, StorageError
from portolan.files import PARTIAL_SUFFIX, STORAGE_REMEDIES, read_json, write_json_atomic

RECORDS, LOCK = f"{WORK}/tasks", f"{WORK}/lock"
MAX_RETRIES, RETRY_SECONDS = 3, 1.0


@dataclass(frozen=True)
class Task:
    """A piece of a stage: `function(folder, *arguments)` writes files and returns its record.

    The record is plain JSON; its `files`, if any, are manifest entries of what was written in the
    folder. A record is used again only for a task of the same name and `identity`. `documents` and
    `bytes` are what the task reads, for the progress report; a record may say `documents` better.
    """

    name: str
    function: Callable[..., dict[str, Any]]
    arguments: tuple[Any, ...] = ()
    documents: int = 0
    bytes: int = 0
    identity: str = ""


class TaskFailed(PortolanError):
    """A task raised an exception that is no PortolanError: the message names both."""


@dataclass(frozen=True)
class _Failure:
    """What a task raised, in a form that every executor can carry."""

    task: str
    kind: str
    message: str
    number: int | None
    trace: str
    error: PortolanError | None
    is_transient: bool

    @classmethod
    def of(cls, task: str, error: Exception) -> "_Failure":
        return cls(
            task,
            type(error).__name__,
            str(error),
            getattr(error, "errno", None),
            traceback.format_exc(),
            error if isinstance(error, PortolanError) else None,
            isinstance(error, ConnectionError | TimeoutError)
            or getattr(error, "errno", None) == errno.ESTALE,
        )

    def named(self, stage: str, folder: Path) -> PortolanError:
        """The error to raise, which names stage and task."""
        place = f"{stage}, task {self.task}"
        if self.error is not None:
            error = self.error
            error.message = f"{place}: {error.message}"
            error.args = (str(PortolanError(error.message, remedy=error.remedy)),)
        elif self.number in STORAGE_REMEDIES:
            remedy = STORAGE_REMEDIES[self.number]
            error = StorageError(f"{place}: cannot write {folder}: {self.message}", remedy=remedy)
        else:
            error = TaskFailed(
                f"{place}: {self.kind}: {self.message}",
                remedy="finished tasks are kept: remove the cause and run the same command again",
            )
        error.add_note(self.trace)
        return error


@dataclass(frozen=True)
class _Item:
    """A task and the folder it works in, as one argument."""

    folder: str
    task: Task

    @property
    def name(self) -> str:
        return f"task {self.task.name}"


def _run(item: _Item) -> dict[str, Any] | _Failure:
    """Run a task and record it; again, after a failure of a network or its file system."""
    for _ in range(MAX_RETRIES):
        result = _try(Path(item.folder), item.task)
        if not (isinstance(result, _Failure) and result.is_transient):
            return result
        time.sleep(RETRY_SECONDS)
    return _try(Path(item.folder), item.task)


def _try(folder: Path, task: Task) -> dict[str, Any] | _Failure:
    try:
        record = task.function(folder, *task.arguments)
        record["task"] = task.identity
        path = _record_path(folder, task.name)
        hidden = hidden_path(path)
        # Without fsync: what it names is durable already, and a lost record costs one task.
        hidden.write_text(json.dumps(record))
        hidden.replace(path)
        return record
    except Exception as error:
        return _Failure.of(task.name, error)


def _record_path(folder: Path, name: str) -> Path:
    return folder / RECORDS / f"{name}.json"


def _read_record(folder: Path, task: Task) -> dict[str, Any] | None:
    """The record of a finished task whose files are all there, or None."""
    try:
        record = read_json(_record_path(folder, task.name))
        if record["task"] != task.identity:
            return None
        for file in record.get("files", ()):
            if (folder / file["name"]).stat().st_size != file["bytes"]:
                return None
    except (OSError, ValueError, KeyError):
        return None
    return record


def check_function(function: Callable[..., Any]) -> None:
    """Refuse a function that no other process could run, before anything starts.

    Raises:
        PortolanError: it cannot be pickled: a lambda or a function inside a function.
    """
    try:
        pickle.dumps(function)
    except Exception as error:
        raise PortolanError(
            f"{function!r} cannot be sent to another process: {error}",
            remedy="define it at the top level of a module",
        ) from error


def check_inputs(stage: Stage, inputs: Sequence[Dataset]) -> None:
    """Refuse a stage whose key does not depend on what it reads."""
    for dataset in inputs:
        if dataset.key not in stage.inputs:
            raise PortolanError(
                f"stage {stage.name!r} reads {dataset.folder.name}, whose key is not in its inputs",
                remedy="add dataset.key to the inputs of the Stage",
            )


def build_stage(
    parent: Path,
    stage: Stage,
    build: Callable[[Path], tuple[list[dict[str, Any]], dict[str, Any]]],
) -> tuple[Dataset, bool]:
    """Run a build made of `run_tasks` unless its result exists; whether it did is returned too."""
    folder, manifest, skipped = run_stage(
        parent, stage, lambda folder: _prepare(folder, build), resumable=True
    )
    return Dataset(folder, manifest), skipped


def _prepare(
    folder: Path, build: Callable[[Path], tuple[list[dict[str, Any]], dict[str, Any]]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Build, and remove what killed workers left half-written: before in an earlier run, or now."""
    (folder / RECORDS).mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PortolanError(
                f"another process is building {folder}", remedy="wait for it, or end it"
            ) from None
        (folder / MANIFEST).unlink(missing_ok=True)
        _remove_half_written(folder)
        built = build(folder)
        _remove_half_written(folder)
        return built


def _remove_half_written(folder: Path) -> None:
    for half in folder.rglob(f".*{PARTIAL_SUFFIX}"):
        half.unlink(missing_ok=True)


def run_tasks(
    engine: Engine, stage: Stage, folder: Path, step: str, tasks: Sequence[Task]
) -> list[dict[str, Any]]:
    """Records of all tasks in their order; see `iterate_tasks`."""
    records = dict(iterate_tasks(engine, stage, folder, step, tasks))
    return [records[index] for index in range(len(tasks))]


def iterate_tasks(
    engine: Engine, stage: Stage, folder: Path, step: str, tasks: Sequence[Task]
) -> Generator[tuple[int, dict[str, Any]]]:
    """(index, record) of tasks: first those already recorded, then the others as they finish.

    The first failure ends the step once the tasks in flight have ended; it stands in the manifest
    of the unfinished stage.

    Raises:
        PortolanError: of the class that the task raised, or StorageError, or TaskFailed.
    """
    waiting: list[int] = []
    for index, task in enumerate(tasks):
        if (record := _read_record(folder, task)) is None:
            waiting.append(index)
        else:
            yield index, record
    meter = _Meter(engine, stage, step, tasks, waiting)
    items = [_Item(str(folder), tasks[index]) for index in waiting]
    with contextlib.closing(engine.executor.completed(_run, items)) as completed:
        for position, result in completed:
            index = waiting[position]
            if isinstance(result, _Failure):
                _write_failed_manifest(folder, stage, tasks, result)
                raise result.named(stage.label or stage.name, folder)
            meter.finish(tasks[index], result)
            yield index, result


class _Meter:
    """Adds up finished tasks and reports them; the time left follows from the bytes left."""

    def __init__(
        self, engine: Engine, stage: Stage, step: str, tasks: Sequence[Task], waiting: Sequence[int]
    ) -> None:
        self.engine, self.stage, self.step = engine, stage.label or stage.name, step
        self.num_tasks, self.finished = len(tasks), len(tasks) - len(waiting)
        self.bytes_left = sum(tasks[index].bytes for index in waiting)
        self.documents = self.bytes = 0
        self.begin = time.monotonic()

    def finish(self, task: Task, record: dict[str, Any]) -> None:
        self.finished += 1
        self.documents += record.get("documents", task.documents)
        self.bytes += task.bytes
        self.bytes_left -= task.bytes
        if self.engine.report is None:
            return
        seconds = max(time.monotonic() - self.begin, 1e-9)
        self.engine.report(
            StageProgress(
                self.stage,
                self.step,
                self.finished,
                self.num_tasks,
                self.documents,
                self.bytes,
                seconds,
                self.documents / seconds,
                seconds * self.bytes_left / self.bytes if self.bytes else 0.0,
            )
        )


def _write_failed_manifest(
    folder: Path, stage: Stage, tasks: Sequence[Task], failure: _Failure
) -> None:
    """Say in the unfinished stage which shard failed and which are whole."""
    records = (_read_record(folder, task) for task in tasks)
    shards = [file for record in records if record for file in record.get("files", ())]
    failed = {
        "name": failure.task,
        "status": FAILED,
        "error": f"{failure.kind}: {failure.message}",
    }
    manifest = {**stage_fields(stage), "status": FAILED, "shards": [*shards, failed]}
    # When the disk is full, the error that is about to be raised says so.
    with contextlib.suppress(StorageError):
        write_json_atomic(folder / MANIFEST, manifest)
