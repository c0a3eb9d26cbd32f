"""Compiled programs are kept between processes, so that a restart does not compile again.

They lie in a folder of the user, not of the project: a program is machine code that JAX runs as it
is, and a project folder is handed to strangers. A second project with the same shapes finds them.
"""

import atexit
import contextlib
import hashlib
import itertools
import os
import tempfile
import warnings
from pathlib import Path

import jax
import zstandard

from portolan.files import sha256_file
from portolan.processes import num_threads

MAX_KEPT_BYTES = 512 * 1024 * 1024
"""The oldest programs go first; those of one training shape take 2 to 4 MB."""
MIN_COMPILE_SECONDS = 0.3
ENTRY_SUFFIX = "-cache"
SEAL_SUFFIX = "-sha256"
_kept: set[Path] = set()


def default_folder() -> Path:
    """`portolan/programs` below $XDG_CACHE_HOME or ~/.cache, by the number of threads.

    A program for the CPU is cut into as many pieces as there are threads when it is compiled.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(cache) / "portolan" / "programs" / f"{num_threads()}-cores"


def keep_programs(folder: Path | None = None) -> None:
    """Let JAX look for compiled programs in `folder` (None: the user's) and leave new ones there.

    Where JAX was told of a folder (JAX_COMPILATION_CACHE_DIR), that one stays. A folder that cannot
    be written, a full disk or a damaged program never fail: the program is compiled.
    """
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
    if getattr(jax.config, "jax_compilation_cache_dir"):  # noqa: B009
        return
    try:
        folder = folder or default_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            _discard_unsealed(folder)
            _discard_oldest(folder)
    except (OSError, RuntimeError):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    _kept.add(folder)
    atexit.register(seal_programs)


def seal_programs() -> None:
    """Write the digest of every new program beside it, unless it was cut short.

    JAX takes a program as it finds it, and neither writes by renaming nor replaces a damaged file.
    """
    for entry in itertools.chain(*(folder.glob(f"*{ENTRY_SUFFIX}") for folder in _kept)):
        seal = _seal_of(entry)
        with contextlib.suppress(OSError, zstandard.ZstdError):
            if not seal.exists():
                content = entry.read_bytes()
                zstandard.ZstdDecompressor().decompress(content)
                seal.write_text(hashlib.sha256(content).hexdigest())


def _seal_of(entry: Path) -> Path:
    return entry.with_name(entry.name.removesuffix(ENTRY_SUFFIX) + SEAL_SUFFIX)


def _discard_unsealed(folder: Path) -> None:
    """Remove programs whose bytes are not those of their seal."""
    for entry in folder.glob(f"*{ENTRY_SUFFIX}"):
        seal = _seal_of(entry)
        if not seal.exists() or seal.read_text() != sha256_file(entry):
            entry.unlink(missing_ok=True)
            seal.unlink(missing_ok=True)


def _discard_oldest(folder: Path) -> None:
    """Remove programs, oldest first, until the rest fits."""
    entries = [(entry.stat(), entry) for entry in folder.glob(f"*{ENTRY_SUFFIX}")]
    total = 0
    for status, entry in sorted(entries, key=lambda pair: pair[0].st_mtime, reverse=True):
        total += status.st_size
        if total > MAX_KEPT_BYTES:
            entry.unlink(missing_ok=True)
            _seal_of(entry).unlink(missing_ok=True)
