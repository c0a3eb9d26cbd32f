"""The staging folder beside the checkpoint roots: one writer, hard links, stale files."""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

from portolan.errors import UsageError
from portolan.files import fsync_directory
from portolan.train.manifest import Marker

LOCK = "lock"
COMMIT = "COMMIT"
SYNC_THREADS = 16
NO_HARD_LINKS = {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP}

_held: dict[tuple[Path, int], int] = {}


def acquire_writer_lock(staging: Path) -> bool:
    """Become the only process that saves beside `staging`; True if it was not so already.

    The lock belongs to the process and ends with it, however it ends.

    Raises:
        UsageError: another live process holds it.
    """
    key = (staging.absolute(), os.getpid())
    if key in _held:
        return False
    staging.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(staging / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        raise UsageError(
            f"process {holder} is already saving checkpoints of {staging.parent.parent}",
            remedy="stop that process, or wait for it to end",
        ) from error
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    _held[key] = descriptor
    return True


def release_writer_lock(staging: Path) -> None:
    """Let another process save; nothing happens if this one does not hold the lock."""
    descriptor = _held.pop((staging.absolute(), os.getpid()), None)
    if descriptor is not None:
        os.close(descriptor)


def remove_stale(staging: Path) -> list[str]:
    """Delete what dead attempts left in `staging`; names of the folders that are gone.

    Only the holder of the writer lock may call this: then nothing here belongs to a living save.
    """
    removed = []
    for entry in sorted(staging.iterdir()):
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
            if not entry.exists():
                removed.append(entry.name)
    return removed


def write_synced(path: Path, content: bytes) -> None:
    """Create `path` with `content` and make it durable; an existing file is an error."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_paths(paths: Iterable[Path]) -> None:
    """Make files and folders durable, several at once: one journal commit then serves many."""

    def sync(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(SYNC_THREADS) as pool:
        list(pool.map(sync, paths))


def link_or_copy(source: Path, target: Path) -> None:
    """Give `source` a second name, or copy it where the file system has no hard links.

    Raises:
        FileExistsError: the target exists; it keeps its content.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        write_synced(target, source.read_bytes())


def create_attempt(step_folder: Path, attempt: int) -> Path:
    """Create `attempt-<k>` with the first free k >= `attempt`."""
    step_folder.mkdir(parents=True, exist_ok=True)
    for ordinal in count(attempt):
        folder = step_folder / f"attempt-{ordinal}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError


def link_tree(source: Path, target: Path) -> None:
    """Create below `target` every file of `source`, by creating names only, then sync them."""
    folders = [target, target.parent, target.parent.parent, target.parent.parent.parent]
    for parent, _, names in os.walk(source):
        folder = target / Path(parent).relative_to(source)
        if folder != target:
            folder.mkdir()
            folders.append(folder)
        for name in names:
            link_or_copy(Path(parent, name), folder / name)
    sync_paths(folders)


def publish_marker(staging: Path, step_folder: Path, marker: Marker) -> Path:
    """Create the step's COMMIT, whole or not at all; COMMIT.1, .2, … when one exists already."""
    staged = staging / COMMIT
    write_synced(staged, marker.encode())
    for number in count():
        path = step_folder / (f"{COMMIT}.{number}" if number else COMMIT)
        with contextlib.suppress(FileExistsError):
            link_or_copy(staged, path)
            fsync_directory(step_folder)
            return path
    raise AssertionError
