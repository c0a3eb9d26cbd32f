"""Evaluation sets that training text must not hold, each with its digest and row count."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from portolan.canonical import digest
from portolan.curation_settings import DecontaminationSettings, EvaluationSource
from portolan.data.documents import read_tables
from portolan.data.readers import InputFile, opened
from portolan.errors import UsageError
from portolan.files import sha256_file

HELDOUT_SET = "heldout"
SAMPLES_PATTERN = "samples_*.jsonl"


@dataclass(frozen=True)
class Item:
    """One test item: its name in the set, and its passages, which are searched for one by one."""

    name: str
    passages: tuple[str, ...]


@dataclass(frozen=True)
class EvaluationSet:
    """A registered set, found on disk: `files` are searched for, an excluded set has none.

    `sha256` is of the files in order; `owners` names the source of each file of own documents.
    """

    source: EvaluationSource
    files: tuple[Path, ...]
    sha256: tuple[str, ...]
    owners: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the set."""
        return self.source.name

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the items of the set; where the files lie does not."""
        described = self.source.model_dump(
            include={"name", "version", "revision", "split", "fields"}
        )
        described["fields"] = list(self.source.fields)
        return {**described, "sha256": list(self.sha256), "owners": list(self.owners)}

    def items(self) -> Iterator[Item]:
        """Items in the order of the files and their lines.

        Raises:
            UsageError: a file cannot be read, or a record lacks a field.
        """
        if self.owners:
            yield from self._documents()
            return
        row = 0
        for path in self.files:
            for number, record in _read_records(path):
                yield Item(str(row), tuple(self._passages(record, f"{path} line {number}")))
                row += 1

    def _documents(self) -> Iterator[Item]:
        for owner, path in zip(self.owners, self.files, strict=True):
            for table in read_tables(path, ["id", "text"]):
                pairs = zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True)
                for identifier, text in pairs:
                    yield Item(f"{owner}|{identifier}", (text,))

    def _passages(self, record: Mapping[str, Any], place: str) -> Iterator[str]:
        if not self.source.fields:
            # A line of `--log_samples` holds the model's answers too; only the document counts.
            yield from _texts(record["doc"] if "doc" in record and "doc_id" in record else record)
            return
        for field in self.source.fields:
            value: Any = record
            for part in field.split("."):
                if not isinstance(value, Mapping) or part not in value:
                    raise UsageError(
                        f"evaluation set {self.name!r}: {place} has no field {field!r}",
                        remedy="correct `fields` of the set: names separated by dots",
                    )
                value = value[part]
            yield from _texts(value)


@dataclass(frozen=True)
class Registry:
    """All registered sets; `missing` are sets that are not required and not there."""

    sets: tuple[EvaluationSet, ...]
    excluded: Mapping[str, str]
    missing: tuple[str, ...]

    @property
    def identity(self) -> list[dict[str, Any]]:
        """What decides the items of all sets."""
        return [found.identity for found in self.sets]

    @property
    def digest(self) -> str:
        """SHA-256 of the identity."""
        return digest(self.identity)


def open_registry(
    settings: DecontaminationSettings,
    project_folder: Path,
    heldout: Sequence[tuple[str, Path]] = (),
) -> Registry:
    """Find the sets of a recipe, and register the own held-out documents as a required one.

    Args:
        settings: the sets; a relative path is one of the project folder.
        project_folder: folder of the project.
        heldout: (source key, Parquet file) of the own held-out documents.

    Raises:
        UsageError: a required set is missing, two have one name, or a file is not the stated one.
    """
    names = [source.name for source in settings.sets] + [HELDOUT_SET] * bool(heldout)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(
            f"evaluation set {twice[0]!r} is registered twice", remedy="give each set its own name"
        )
    found, missing = [], []
    for source in settings.sets:
        if source.excluded:
            continue
        files = _find_files(project_folder / source.path)
        if not files and source.required:
            raise UsageError(
                f"evaluation set {source.name!r}: nothing at {source.path}",
                remedy="put the file there, or set required = false, or excluded = the reason",
            )
        if not files:
            missing.append(source.name)
            continue
        digests = tuple(sha256_file(path) for path in files)
        if source.sha256 and digests != (source.sha256,):
            raise UsageError(
                f"evaluation set {source.name!r}: SHA-256 of {source.path} is {digests[0]}, the "
                f"recipe says {source.sha256}",
                remedy="fetch the right file, or correct sha256",
            )
        found.append(EvaluationSet(source, files, digests))
    if heldout:
        found.append(_own_documents(heldout))
    excluded = {source.name: source.excluded for source in settings.sets if source.excluded}
    return Registry(tuple(found), excluded, tuple(missing))


def _own_documents(heldout: Sequence[tuple[str, Path]]) -> EvaluationSet:
    ordered = sorted(heldout, key=lambda pair: pair[0].encode())
    files = tuple(path for _, path in ordered)
    owners = tuple(key for key, _ in ordered)
    source = EvaluationSource(name=HELDOUT_SET, path="", fields=("text",))
    return EvaluationSet(source, files, tuple(map(sha256_file, files)), owners)


def with_rows(found: EvaluationSet, rows: int) -> EvaluationSet:
    """The set as it is recorded, with the number of its rows.

    Raises:
        UsageError: the recipe states another number, or a required set is empty.
    """
    stated = found.source.rows
    if (stated is not None and rows != stated) or (not rows and found.source.required):
        expected = "at least one" if stated is None else stated
        raise UsageError(
            f"evaluation set {found.name!r} has {rows} rows, not {expected}",
            remedy="fetch the whole file, or correct `rows` of the set",
        )
    return replace(found, source=found.source.model_copy(update={"rows": rows or None}))


def _find_files(path: Path) -> tuple[Path, ...]:
    """A file, or the sample files of an lm-eval output folder, level by level."""
    if path.is_dir():
        inner = [folder for folder in sorted(path.iterdir()) if folder.is_dir()]
        files = sorted(path.glob(SAMPLES_PATTERN)) or sorted(path.glob("*.jsonl"))
        return tuple(files) or tuple(file for folder in inner for file in _find_files(folder))
    return (path,) if path.is_file() else ()


def _read_records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line number, object) of a JSON-lines file, or of a JSON file that holds a list."""
    file = InputFile(str(path), path.name, path.stat().st_size)
    with opened(file) as stream:
        content = stream.read()
    try:
        is_list = content.lstrip()[:1] == b"["
        lines = json.loads(content) if is_list else content.split(b"\n")
        for number, line in enumerate(lines, 1):
            if is_list or line.strip():
                record = line if is_list else json.loads(line)
                yield number, record if isinstance(record, dict) else {"text": record}
    except ValueError as error:
        raise UsageError(
            f"evaluation file {path}: {error}", remedy="it must hold one JSON object a line"
        ) from error


def _texts(value: Any) -> Iterator[str]:
    """Strings in a JSON value, outermost first."""
    if isinstance(value, str):
        if value.strip():
            yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
