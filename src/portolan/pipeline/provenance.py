"""Facts about the code and the machine that a run's numbers depend on."""

import hashlib
import platform
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

from portolan.canonical import digest
from portolan.processes import THREADS_VARIABLE
from portolan.record.types import Attempt

RECORDED_ENVIRONMENT = (
    "JAX_PLATFORMS",
    "XLA_FLAGS",
    "OMP_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
    THREADS_VARIABLE,
)


@cache
def code_digest() -> str:
    """SHA-256 over the package's own source files, by relative path and content."""
    import portolan

    root = Path(portolan.__file__).parent
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".toml"))
    return digest(
        [
            [path.relative_to(root).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()]
            for path in files
        ]
    )


@cache
def installed_digest() -> str:
    """SHA-256 over name and version of every installed distribution."""
    found = {
        (d.metadata["Name"] or "").lower(): d.version
        for d in metadata.distributions()
        if d.metadata["Name"]
    }
    return digest(sorted(f"{name}=={version}" for name, version in found.items()))


def _git(*arguments: str) -> str | None:
    import portolan

    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(portolan.__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


@cache
def code_commit() -> str:
    """Commit of the checkout that the package runs from, or its version when it has none."""
    commit = _git("rev-parse", "HEAD")
    inside = _git("ls-files", "--error-unmatch", "__init__.py") is not None
    if commit is None or not inside:
        from portolan import __version__

        return f"version {__version__}"
    return commit.strip()


@cache
def tree_state() -> tuple[str, str | None]:
    """`clean`, `dirty` with the digest of the code, or `not_stated` outside a checkout."""
    if code_commit().startswith("version"):
        return "not_stated", None
    status = _git("status", "--porcelain", "--", ".")
    if status is None:
        return "unknown", None
    return ("dirty", code_digest()) if status.strip() else ("clean", None)


def build_attempt(
    run_id: str,
    ordinal: int,
    *,
    start: str,
    restored_from: str,
    config_digest: str,
    data_digest: str,
    text: str,
    from_completed: int,
    to_completed: int | None = None,
    end: str | None = None,
    evidence: tuple[str, ...] = (),
) -> Attempt:
    """The record body of an attempt of this process; steps count completed updates."""
    import os

    state, patch = tree_state()
    return Attempt(
        text=text,
        run=run_id,
        ordinal=ordinal,
        start=start,
        end=end,
        restored_from=restored_from,
        from_completed=from_completed,
        to_completed=to_completed,
        container_digest="not_stated",
        lock_digest=installed_digest(),
        code_commit=code_commit(),
        tree_state=state,  # type: ignore[arg-type]
        patch_digest=patch,
        config_digest=config_digest,
        data_manifest_digest=data_digest,
        argv=tuple(_argument(argument) for argument in sys.argv),
        env={name: os.environ[name] for name in RECORDED_ENVIRONMENT if os.environ.get(name)},
        hosts_digest=digest([platform.node() or "unknown"]),
        exit_evidence=evidence,
    )


def _argument(argument: str) -> str:
    """An argument without the folder of a path, which says where, not what; never blank."""
    return Path(argument).name if argument.startswith("/") else argument or "''"
