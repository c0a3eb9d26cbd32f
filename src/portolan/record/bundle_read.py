"""Opening a bundle from a stranger: everything is checked before a byte of it is written."""

import os
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from portolan.record.bundle_names import check_names, refusal
from portolan.record.visible import visible

MAX_FILES = 65_534
MAX_DIRECTORY_BYTES = 32 << 20
MAX_EXTRA_BYTES = 256
MAX_TOTAL_BYTES = 16 << 30
MAX_RATIO = 200
FREE_OF_RATIO_BYTES = 1 << 20

_END = struct.Struct("<4s4H2LH")
_END_MARK = b"PK\x05\x06"
_LOCAL_MARK = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30
_ENCRYPTED = 0x1
_UTF8 = 0x800
_CHUNK_BYTES = 1 << 20


def unpack_bundle(path: Path, target: Path) -> list[str]:
    """Check the archive, then write its files below the empty folder `target`; returns the names.

    BundleRefused, with nothing written, for: an end that is not a plain ZIP's, too many files or
    too large a directory, links and devices, encryption, overlapping entries, more than
    `MAX_RATIO` times the packed size, more bytes than allowed or than the disk has, and names that
    `check_names` refuses. Folders are made as needed and never followed.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        _check_end(file, size)
        try:
            with zipfile.ZipFile(file) as archive:
                entries = _check_entries(archive.infolist(), size)
            _check_room(entries, target)
            for entry in entries:
                _write(file, entry, target)
        except (zipfile.BadZipFile, zlib.error, NotImplementedError, ValueError) as error:
            raise refusal(f"it is not a whole ZIP archive ({visible(str(error))})") from error
    return [entry.filename for entry in entries]


def _check_end(file: BinaryIO, size: int) -> None:
    """The last 22 bytes state how many entries there are: read before anything is allocated."""
    if size < _END.size:
        raise refusal("it is too short for a ZIP archive")
    file.seek(size - _END.size)
    mark, disk, first_disk, here, total, length, start, comment = _END.unpack(file.read(_END.size))
    file.seek(0)
    if mark != _END_MARK or comment:
        raise refusal("it is not a plain ZIP archive, or has bytes after its end")
    if disk or first_disk or here != total or total == 0xFFFF or 0xFFFFFFFF in (length, start):
        raise refusal("it is split or of the 64-bit form, which bundles are not")
    if total > MAX_FILES or length > MAX_DIRECTORY_BYTES:
        raise refusal(f"its directory has {total} entries in {length} bytes")
    if start + length != size - _END.size:
        raise refusal("it has bytes before its start or between its parts")


def _check_entries(entries: Sequence[zipfile.ZipInfo], size: int) -> list[zipfile.ZipInfo]:
    """The files of an archive; entries of folders are skipped, everything odd is refused."""
    files = []
    for entry in entries:
        name = entry.filename
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if name.endswith("/") and entry.file_size == 0 and kind in (0, stat.S_IFDIR):
            check_names([name[:-1]])
            continue
        if kind not in (0, stat.S_IFREG):
            raise refusal(f"{name!r} is a link, a folder with content or a device")
        if entry.flag_bits & _ENCRYPTED:
            raise refusal(f"{name!r} is encrypted")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise refusal(f"{name!r} is packed by a method that bundles do not use")
        if len(entry.extra) > MAX_EXTRA_BYTES or entry.comment:
            raise refusal(f"{name!r} has a large header or a comment")
        if entry.orig_filename != name:
            raise refusal("a name holds a zero byte")
        _check_ratio(f"{name!r}", entry.file_size, entry.compress_size)
        files.append(entry)
    check_names(entry.filename for entry in files)
    _check_overlap(files, size)
    total = sum(entry.file_size for entry in files)
    if total > MAX_TOTAL_BYTES:
        raise refusal(f"it unpacks to {total} bytes, more than {MAX_TOTAL_BYTES}")
    _check_ratio("it", total, size)
    return files


def _check_ratio(what: str, unpacked: int, packed: int) -> None:
    if unpacked > FREE_OF_RATIO_BYTES and unpacked > MAX_RATIO * max(packed, 1):
        raise refusal(f"{what} unpacks to {unpacked} bytes from {packed}: a zip bomb")


def _check_overlap(files: Sequence[zipfile.ZipInfo], size: int) -> None:
    ordered = sorted(files, key=lambda entry: entry.header_offset)
    ends = [entry.header_offset for entry in ordered[1:]] + [size]
    for entry, end in zip(ordered, ends, strict=True):
        name_bytes = len(entry.orig_filename.encode("utf-8", "surrogateescape"))
        least = entry.header_offset + _LOCAL_HEADER_BYTES + name_bytes + entry.compress_size
        if least > end:
            raise refusal(f"{entry.filename!r} shares its bytes with another entry")


def _check_room(entries: Sequence[zipfile.ZipInfo], target: Path) -> None:
    total = sum(entry.file_size for entry in entries)
    free = shutil.disk_usage(target).free
    if total > free:
        raise refusal(f"it unpacks to {total} bytes, the disk has {free}")


def _write(file: BinaryIO, entry: zipfile.ZipInfo, target: Path) -> None:
    place = target.joinpath(*entry.filename.split("/"))
    place.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    written = 0
    with os.fdopen(os.open(place, flags, 0o600), "wb") as output:
        for chunk in _content(file, entry):
            written += len(chunk)
            if written > entry.file_size:
                break
            output.write(chunk)
    if written != entry.file_size:
        raise refusal(f"{entry.filename!r} has another length than its header says")


def _content(file: BinaryIO, entry: zipfile.ZipInfo) -> Iterator[bytes]:
    """Bytes of an entry in pieces, unpacked where needed.

    The CRC is not looked at: a changed byte is to be found, and named, by the digests inside.
    """
    file.seek(entry.header_offset)
    header = file.read(_LOCAL_HEADER_BYTES)
    if header[:4] != _LOCAL_MARK or len(header) != _LOCAL_HEADER_BYTES:
        raise refusal(f"{entry.filename!r} has no header")
    name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
    encoding = "utf-8" if entry.flag_bits & _UTF8 else "cp437"
    if file.read(name_bytes) != entry.orig_filename.encode(encoding, "surrogateescape"):
        raise refusal(f"{entry.filename!r} has another name in its own header")
    if extra_bytes > MAX_EXTRA_BYTES:
        raise refusal(f"{entry.filename!r} has a large header")
    file.seek(extra_bytes, os.SEEK_CUR)
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS) if entry.compress_type else None
    left = entry.compress_size
    while left > 0 and (packed := file.read(min(left, _CHUNK_BYTES))):
        left -= len(packed)
        while unpacker is not None and packed:
            yield unpacker.decompress(packed, _CHUNK_BYTES)
            packed = unpacker.unconsumed_tail
        if packed:
            yield packed
