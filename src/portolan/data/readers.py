"""Readers: files of text, JSON lines or Parquet in, raw documents or reasons for a drop out.

Reading streams. No reader holds more of a document or line than the limit, whatever the file says.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from portolan.data.licenses import classify_license, join_expressions, license_from_metadata
from portolan.errors import UsageError

CHUNK_BYTES = 1 << 20
PARQUET_BATCH_ROWS = 64
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
EXTENSIONS = {
    "jsonl": (".jsonl", ".json"),
    "parquet": (".parquet",),
    "huggingface": (".parquet", ".jsonl", ".json"),
    "text": (),
}

BINARY, INVALID_UTF8, INVALID_UNICODE = "binary", "invalid_utf8", "invalid_unicode"
TOO_LONG, NOT_JSON, MISSING_TEXT = "too_long", "not_json", "missing_text"
EMPTY, UNPARSABLE, LICENSE_REFUSED = "empty", "unparsable", "license_refused"


@dataclass(frozen=True)
class InputFile:
    """One file of a source: its address, and the relative path that stands for it in the record."""

    url: str
    path: str
    size: int
    modified_ns: int | None = None
    license: str | None = None


@dataclass(frozen=True)
class ReadOptions:
    """How the files of a source are read. `kind` is a reader's name.

    A row of a licence class that `license_classes` does not name is dropped; without any classes,
    every row is taken.
    """

    kind: str
    max_document_bytes: int
    text_field: str = "text"
    id_field: str = ""
    content_key: tuple[str, ...] = ()
    license_field: str = ""
    license_classes: tuple[str, ...] = ()

    @property
    def one_document_a_file(self) -> bool:
        """True if a file's path alone locates its document."""
        return self.kind in ("text", "docstrings", "description")


@dataclass(frozen=True)
class RawDocument:
    """Text as found, before normalising."""

    text: str
    path: str
    row: int
    source_id: str | None = None
    license: str | None = None
    extra: str | None = None
    content_key: str | None = None


@dataclass(frozen=True)
class Drop:
    """A document that cannot be used, with the reason and the place."""

    reason: str
    path: str
    row: int


def open_file_system(url: str) -> tuple[Any, str]:
    """File system of a local path or any fsspec URL, and the path in it.

    Raises:
        UsageError: the kind of URL is unknown, or its package is not installed.
    """
    import fsspec
    from fsspec.registry import known_implementations

    protocol = url.split("://")[0] if "://" in url else "file"
    options = {"endpoint": os.environ.get("HF_ENDPOINT")} if protocol == "hf" else {}
    try:
        return fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        package = known_implementations[protocol]["class"].split(".")[0]
        package = f"fsspec[{protocol.removesuffix('s')}]" if package == "fsspec" else package
        raise UsageError(
            f"cannot open {url}: {error}",
            remedy=f"install what reads {protocol}:// URLs: pip install {package}",
        ) from error
    except ValueError as error:
        raise UsageError(
            f"cannot open {url}: {error}", remedy="use a path or a kind of URL that fsspec knows"
        ) from error


def open_input(url: str) -> Any:
    """Open a local path or any fsspec URL for reading bytes; errors name the file."""
    try:
        if "://" not in url:
            return Path(url).open("rb")
        system, path = open_file_system(url)
        return system.open(path, "rb")
    except (OSError, ValueError) as error:
        raise unreadable(url, error) from error


def unreadable(url: str, error: BaseException) -> UsageError:
    """Error for a file that cannot be opened, decompressed or parsed."""
    return UsageError(
        f"cannot read {url}: {error}",
        remedy="fetch the file again, or take it out of the source's folder",
    )


@contextlib.contextmanager
def opened(file: InputFile) -> Iterator[Any]:
    """Decompressed byte stream of a file; damage in the middle of it becomes a UsageError."""
    compression = COMPRESSIONS.get(PurePosixPath(file.path).suffix.lower())
    with open_input(file.url) as raw:
        try:
            if compression is None:
                yield raw
            else:
                with pa.CompressedInputStream(pa.PythonFile(raw, "r"), compression) as stream:
                    yield stream
        except (OSError, EOFError, UnicodeDecodeError, pa.ArrowException) as error:
            raise unreadable(file.url, error) from error


def decode(content: bytes) -> tuple[str, str | None]:
    """Text of UTF-8 bytes and None, or an empty text and the reason for a drop."""
    if b"\0" in content:
        return "", BINARY
    try:
        return content.decode(), None
    except UnicodeDecodeError:
        return "", INVALID_UTF8


def read_whole(file: InputFile, limit_bytes: int) -> tuple[str, str | None]:
    """Text of a whole file, or the reason for a drop; reads at most one byte over the limit."""
    with opened(file) as stream:
        pieces, size = [], 0
        while size <= limit_bytes and (piece := stream.read(min(CHUNK_BYTES, limit_bytes + 1))):
            pieces.append(piece)
            size += len(piece)
    content = b"".join(pieces)
    if size > limit_bytes and b"\0" not in content:
        return "", TOO_LONG
    return decode(content)


def iterate_lines(stream: Any, limit_bytes: int) -> Iterator[bytes | None]:
    """Lines without their ends; None for a line over the limit, of which no more is held."""
    pending, skipping = bytearray(), False
    while chunk := stream.read(min(CHUNK_BYTES, limit_bytes + 1)):
        begin = 0
        while (end := chunk.find(b"\n", begin)) >= 0:
            if skipping or len(pending) + end - begin > limit_bytes:
                yield None
            else:
                yield bytes(pending) + chunk[begin:end]
            pending.clear()
            skipping, begin = False, end + 1
        if not skipping:
            pending += chunk[begin:]
            if len(pending) > limit_bytes:
                pending.clear()
                skipping = True
    if skipping:
        yield None
    elif pending:
        yield bytes(pending)


def content_key_of(record: dict[str, Any], columns: Sequence[str]) -> str | None:
    """XXH3-128 of the values of the content-key columns; None when a column is absent or null."""
    values = [record.get(column) for column in columns]
    if not columns or any(value is None for value in values):
        return None
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True, default=_plain).encode())


def _from_record(
    record: dict[str, Any], text: Any, file: InputFile, row: int, options: ReadOptions
) -> RawDocument | Drop:
    """Document of one row; every field but text and id is kept as JSON in `extra`."""
    if text is None:
        return Drop(EMPTY if options.text_field in record else MISSING_TEXT, file.path, row)
    if not isinstance(text, str):
        return Drop(MISSING_TEXT, file.path, row)
    if "\0" in text:
        return Drop(BINARY, file.path, row)
    license_spdx = license_of(record, file, options)
    classes = options.license_classes
    if classes and _class_of(license_spdx or "") not in classes:
        return Drop(LICENSE_REFUSED, file.path, row)
    identifier = record.get(options.id_field) if options.id_field else None
    others = {
        name: value
        for name, value in record.items()
        if name not in (options.text_field, options.id_field) and value is not None
    }
    return RawDocument(
        text=text,
        path=file.path,
        row=row,
        source_id=None if identifier is None else _valid_unicode(str(identifier)),
        license=license_spdx,
        extra=json.dumps(others, sort_keys=True, default=_plain) if others else None,
        content_key=content_key_of({"path": file.path, **record}, options.content_key),
    )


def license_of(record: dict[str, Any], file: InputFile, options: ReadOptions) -> str | None:
    """SPDX expression of a row; several names all hold, none means the source's own."""
    stated = record.get(options.license_field) if options.license_field else None
    names = [stated] if isinstance(stated, str) else stated
    if not isinstance(names, list) or not names:
        return file.license
    return join_expressions(_spdx_of(str(name)) for name in names)


@lru_cache(maxsize=4096)
def _spdx_of(name: str) -> str:
    return license_from_metadata(None, name, ())[0]


@lru_cache(maxsize=4096)
def _class_of(expression: str) -> str:
    return classify_license(expression).license_class


def _valid_unicode(name: str) -> str:
    return name.encode(errors="backslashreplace").decode()


def _plain(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def read_text(file: InputFile, options: ReadOptions) -> Iterator[RawDocument | Drop]:
    """One document a file."""
    text, reason = read_whole(file, options.max_document_bytes)
    if reason:
        yield Drop(reason, file.path, 0)
        return
    yield RawDocument(
        text=text,
        path=file.path,
        row=0,
        source_id=file.path,
        license=file.license,
        content_key=content_key_of(
            {"path": file.path, "name": PurePosixPath(file.path).name}, options.content_key
        ),
    )


def read_jsonl(file: InputFile, options: ReadOptions) -> Iterator[RawDocument | Drop]:
    """One JSON object a line; blank lines are passed over. `row` is the line number from 0."""
    with opened(file) as stream:
        for row, line in enumerate(iterate_lines(stream, options.max_document_bytes)):
            if line is None:
                yield Drop(TOO_LONG, file.path, row)
                continue
            text, reason = decode(line)
            if reason:
                yield Drop(reason, file.path, row)
            elif text.strip():
                try:
                    record = json.loads(text)
                except (ValueError, RecursionError):
                    record = None
                if isinstance(record, dict):
                    yield _from_record(record, record.get(options.text_field), file, row, options)
                else:
                    yield Drop(NOT_JSON, file.path, row)


def _seekable(stream: Any, compressed: bool, scratch: IO[bytes]) -> Any:
    """Parquet needs to seek: unpack a compressed stream into a temporary file."""
    if not compressed:
        return stream
    while chunk := stream.read(CHUNK_BYTES):
        scratch.write(chunk)
    scratch.seek(0)
    return scratch


def _check_columns(schema: pa.Schema, file: InputFile, options: ReadOptions) -> None:
    named = [options.text_field, options.id_field, options.license_field, *options.content_key]
    missing = [name for name in named if name not in (*schema.names, "path", "")]
    if missing:
        raise UsageError(
            f"{file.url} has no column {missing[0]!r}; its columns are {', '.join(schema.names)}",
            remedy="name columns that exist in text_field, id_field, license_field, content_key",
        )
    kind = schema.field(options.text_field).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind)):
        raise UsageError(
            f"column {options.text_field!r} of {file.url} has type {kind}, not text",
            remedy="name the column that holds the text in text_field of this source",
        )


def read_parquet(file: InputFile, options: ReadOptions) -> Iterator[RawDocument | Drop]:
    """One document a row. `row` counts over the row groups of the file."""
    compressed = PurePosixPath(file.path).suffix.lower() in COMPRESSIONS
    with opened(file) as stream, tempfile.TemporaryFile() as scratch:
        try:
            table = pq.ParquetFile(_seekable(stream, compressed, scratch))
        except pa.ArrowException as error:
            raise unreadable(file.url, error) from error
        _check_columns(table.schema_arrow, file, options)
        row = -1
        for batch in table.iter_batches(batch_size=PARQUET_BATCH_ROWS):
            position = batch.schema.get_field_index(options.text_field)
            texts = batch.column(position)
            if pa.types.is_dictionary(texts.type):
                texts = texts.cast(texts.type.value_type)
            contents = texts.cast(pa.large_binary()).to_pylist()
            records = batch.drop_columns([options.text_field]).to_pylist()
            for content, record in zip(contents, records, strict=True):
                row += 1
                record[options.text_field] = content
                if content is not None and len(content) > options.max_document_bytes:
                    yield Drop(TOO_LONG, file.path, row)
                    continue
                text, reason = (None, None) if content is None else decode(content)
                if reason:
                    yield Drop(reason, file.path, row)
                else:
                    yield _from_record(record, text, file, row, options)


def read_records(file: InputFile, options: ReadOptions) -> Iterator[RawDocument | Drop]:
    """Parquet or JSON lines, by the name of the file."""
    is_parquet = ".parquet" in PurePosixPath(file.path).suffixes
    return (read_parquet if is_parquet else read_jsonl)(file, options)


def list_files(root: str, extensions: Sequence[str]) -> list[InputFile]:
    """Files below a folder or URL (or that one file), in byte order of their relative paths.

    Names that begin with `.` and links to folders are passed over. With `extensions`, a name must
    end with one of them, alone or followed by `.gz` or `.zst`. On the web a folder ends with `/`.

    Raises:
        UsageError: nothing exists there.
    """
    system, top = open_file_system(root)
    try:
        facts = {} if root.endswith("/") else system.info(top)
        if facts.get("type") == "file":
            modified = None if "://" in root else Path(root).stat().st_mtime_ns
            return [InputFile(root, PurePosixPath(root).name, facts["size"] or 0, modified)]
        found = _walk(system, top)
    except Exception as error:  # file systems raise whatever their library raises
        raise UsageError(
            f"cannot list {root}: {error or type(error).__name__}",
            remedy="set `path` of the source to a folder, a file or an fsspec URL that exists",
        ) from error
    allowed = tuple(
        extension + ending for extension in extensions for ending in ("", *COMPRESSIONS)
    )
    for path, _, _ in found:
        if _valid_unicode(path) != path:
            raise UsageError(
                f"the file name {path!r} below {root} is not valid Unicode",
                remedy="rename the file; its path identifies its document",
            )
    files = [
        InputFile(f"{root.rstrip('/')}/{path}", path, size, modified)
        for path, size, modified in found
        if not allowed or path.lower().endswith(allowed)
    ]
    return sorted(files, key=lambda file: file.path.encode())


def _walk(system: Any, top: str) -> list[tuple[str, int, int | None]]:
    """Relative path, size and modification time (local files only) of every visible file."""
    from fsspec.implementations.local import LocalFileSystem

    is_local, found, folders = isinstance(system, LocalFileSystem), [], [top.rstrip("/")]
    while folders:
        folder = folders.pop()
        for entry in system.ls(folder if is_local else f"{folder}/", detail=True):
            name = entry["name"].rstrip("/")
            base = name.rsplit("/", 1)[-1]
            # A listing on the web also links to other places, and to itself in another order.
            if base.startswith((".", "?")) or not name.startswith(f"{folder}/"):
                continue
            if entry["type"] == "directory":
                folders.append(name)
            elif entry["type"] == "file":
                modified = os.stat(name).st_mtime_ns if is_local else None  # noqa: PTH116
                found.append((name[len(top.rstrip("/")) + 1 :], entry["size"] or 0, modified))
    return found
