"""Real text that every Python carries: its standard library, manual topics, installed packages.

Files are read and parsed, never imported or executed. What is found depends on relative paths and
contents only. Portolan's own files are left out: a model must not be tested on its own tests.
"""

import ast
import csv
import gc
import inspect
import re
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import BytesParser
from functools import cache
from pathlib import Path, PurePosixPath

from portolan.data.licenses import license_from_metadata
from portolan.data.readers import (
    EMPTY,
    UNPARSABLE,
    Drop,
    InputFile,
    RawDocument,
    ReadOptions,
    read_whole,
)

OWN_DISTRIBUTION = "portolan"
STDLIB_LICENSE = "PSF-2.0"
READERS = {
    "stdlib-sources": "text",
    "stdlib-tests": "text",
    "stdlib-docstrings": "docstrings",
    "manual-topics": "topics",
    "package-sources": "text",
    "package-docstrings": "docstrings",
    "package-readmes": "description",
    "package-licences": "text",
}
TRANSFORMS = {
    "docstrings": "docstrings taken out of each module, each under its dotted name",
    "topics": "one document for each topic of the manual",
    "description": "the description of each distribution's metadata",
}
_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}
_TEST_FOLDERS = {"test", "tests", "idle_test"}
_LICENSE_NAME = re.compile(r"(licen[cs]es?|copying|notice)([.-].*)?", re.IGNORECASE)
_NOT_TEXT = {".py", ".pyc", ".pyi", ".so", ".json", ".html"}
_TOPICS = "pydoc_data/topics.py"


@dataclass(frozen=True)
class Distribution:
    """An installed distribution: its licence, and its files by paths relative to site-packages."""

    name: str
    version: str
    root: Path
    license: str
    license_statement: str
    metadata_path: str
    paths: tuple[str, ...]


def is_stdlib_test(path: str) -> bool:
    """True for a path in one of the standard library's test folders."""
    return any(part in _TEST_FOLDERS for part in PurePosixPath(path).parts[:-1])


@cache
def _stdlib_files() -> list[InputFile]:
    """Python files of the standard library; build settings, which hold machine paths, left out."""
    root, found, folders = Path(sysconfig.get_path("stdlib")), [], [""]
    while folders:
        folder = folders.pop()
        for entry in (root / folder).iterdir():
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.name.startswith((".", "_sysconfigdata", "config-")):
                continue
            if entry.is_dir():
                if entry.name not in _EXCLUDED_FOLDERS and not entry.is_symlink():
                    folders.append(path)
            elif entry.suffix == ".py" and entry.is_file():
                found.append(_input_file(root, path, STDLIB_LICENSE))
    return found


def forget_listings() -> None:
    """List this machine's files anew from now on; a listing is otherwise shared by the sources."""
    _stdlib_files.cache_clear()
    list_distributions.cache_clear()


def _input_file(root: Path, path: str, license_spdx: str) -> InputFile:
    status = (root / path).stat()
    return InputFile(str(root / path), path, status.st_size, status.st_mtime_ns, license_spdx)


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _recorded_paths(root: Path, record: Path) -> tuple[str, ...]:
    """Paths of a RECORD file that lie below its root."""
    with record.open(newline="", encoding="utf-8") as file:
        paths = [row[0] for row in csv.reader(file) if row]
    return tuple(sorted(p for p in paths if not p.startswith(("/", "..")) and ".." not in p))


@cache
def list_distributions() -> list[Distribution]:
    """Distributions in this interpreter's site-packages that list their files, by name.

    Path entries of the process (current folder, PYTHONPATH) are ignored on purpose.
    """
    found: dict[str, Distribution] = {}
    for root in sorted({Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}):
        for folder in sorted(root.glob("*.dist-info")):
            metadata, record = folder / "METADATA", folder / "RECORD"
            if not metadata.is_file() or not record.is_file():
                continue
            with metadata.open("rb") as file:
                headers = BytesParser().parse(file, headersonly=True)
            name = _normalized(str(headers["Name"]))
            if name == OWN_DISTRIBUTION or name in found:
                continue
            expression, stated = headers["License-Expression"], headers["License"]
            spdx, statement = license_from_metadata(
                None if expression is None else str(expression),
                None if stated is None else str(stated),
                [str(value) for value in headers.get_all("Classifier", [])],
            )
            found[name] = Distribution(
                name=name,
                version=str(headers["Version"]),
                root=root,
                license=spdx,
                license_statement=statement,
                metadata_path=f"{folder.name}/METADATA",
                paths=_recorded_paths(root, record),
            )
    return [found[name] for name in sorted(found)]


def _is_license(path: str) -> bool:
    name = PurePosixPath(path)
    in_license_folder = ".dist-info/licenses/" in path
    return name.suffix.lower() not in _NOT_TEXT and bool(
        in_license_folder or _LICENSE_NAME.fullmatch(name.name)
    )


def _package_files(key: str) -> list[InputFile]:
    files: dict[str, InputFile] = {}
    for distribution in list_distributions():
        if key == "package-readmes":
            paths = [distribution.metadata_path]
        elif key == "package-licences":
            paths = [path for path in distribution.paths if _is_license(path)]
        else:
            paths = [path for path in distribution.paths if path.endswith(".py")]
        for path in paths:
            hidden = any(part.startswith(".") for part in PurePosixPath(path).parts)
            if not hidden and path not in files and (distribution.root / path).is_file():
                files[path] = _input_file(distribution.root, path, distribution.license)
    return list(files.values())


def list_installed(key: str) -> list[InputFile]:
    """Files of one installed source, in byte order of their relative paths, with their licence."""
    if key.startswith("package-"):
        files = _package_files(key)
    elif key == "manual-topics":
        files = [file for file in _stdlib_files() if file.path == _TOPICS]
    else:
        wants_tests = key == "stdlib-tests"
        files = [
            file
            for file in _stdlib_files()
            if is_stdlib_test(file.path) == wants_tests and file.path != _TOPICS
        ]
    return sorted(files, key=lambda file: file.path.encode())


def _parse_module(text: str) -> ast.Module | None:
    """Syntax tree of a module, or None; warnings about old syntax are not the user's.

    The cycle collector rests meanwhile: it finds nothing in a growing tree and costs a quarter.
    """
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    finally:
        if was_collecting:
            gc.enable()


def module_docstrings(text: str, module: str) -> str | None:
    """Docstrings of a module in the order of its source, each under its dotted name.

    Returns None if the module cannot be parsed, an empty text if it has no docstring.
    """
    tree = _parse_module(text)
    if tree is None:
        return None
    parts: list[str] = []
    stack: list[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]
    stack = [(module, tree)]
    while stack:
        name, node = stack.pop()
        if docstring := ast.get_docstring(node, clean=False):
            parts.append(f"{name}\n\n{inspect.cleandoc(docstring)}\n")
        stack.extend(
            (f"{name}.{child.name}", child)
            for child in reversed(node.body)
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        )
    return "\n".join(parts)


def read_docstrings(file: InputFile, options: ReadOptions) -> Iterator[RawDocument | Drop]:
    """One document a module: its docstrings."""
    text, reason = read_whole(file, options.max_document_bytes)
    if reason:
        yield Drop(reason, file.path, 0)
        return
    module = file.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    docstrings = module_docstrings(text, module)
    if docstrings is None:
        yield Drop(UNPARSABLE, file.path, 0)
    else:
        yield RawDocument(docstrings, file.path, 0, file.path, file.license)


def read_topics(file: InputFile, options: ReadOptions) -> Iterator[RawDocument | Drop]:
    """One document a topic of the manual, from the dictionary literal that holds them."""
    text, reason = read_whole(file, options.max_document_bytes)
    tree = None if reason else _parse_module(text)
    if tree is None:
        yield Drop(reason or UNPARSABLE, file.path, 0)
        return
    topics: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            literal = ast.literal_eval(node.value)
            topics |= {key: value for key, value in literal.items() if isinstance(value, str)}
    if not topics:
        yield Drop(EMPTY, file.path, 0)
    for row, name in enumerate(sorted(topics)):
        yield RawDocument(topics[name], file.path, row, name, file.license)


def read_description(file: InputFile, options: ReadOptions) -> Iterator[RawDocument | Drop]:
    """One document a distribution: the long description of its METADATA."""
    text, reason = read_whole(file, options.max_document_bytes)
    if reason:
        yield Drop(reason, file.path, 0)
        return
    message = BytesParser().parsebytes(text.encode())
    payload = message.get_payload(decode=True)
    described = payload.decode() if isinstance(payload, bytes) else ""
    if not described.strip() and message["Description"]:
        described = re.sub(r"\n {7}[ |]", "\n", str(message["Description"]))
    if not described.strip() or described.strip() == "UNKNOWN":
        yield Drop(EMPTY, file.path, 0)
    else:
        yield RawDocument(described, file.path, 0, file.path, file.license)
