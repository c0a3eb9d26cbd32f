"""The command line: one verb, one short function.

Exit codes: 0 done; 1 failed or a check failed; 2 wrong usage, recipe or input; 3 saved state
exists but cannot be trusted; 4 the record is unsigned; 5 the record has a torn tail; 6 the disk is
full, read-only or refuses writes; 7 training diverged; 8 and 9 are the worst verdicts of
`portolan reconcile` short of a conflict, pending, and unsupported or unreachable; 10, 11, 12 are
the verdicts watch, off course and no verdict of `portolan watch`; 130 interrupted.
"""

import sys

from portolan.cli import (  # noqa: F401  (the verbs join the application)
    corpus,
    forecasts,
    imports,
    inspect,
    records,
    research,
    stages,
)
from portolan.cli.app import app
from portolan.console import errors
from portolan.errors import PortolanError, StorageError
from portolan.files import STORAGE_REMEDIES

INTERRUPTED = 130


def main() -> None:
    """Entry point: errors become one message and a documented exit code."""
    debug = "--debug" in sys.argv
    try:
        app(standalone_mode=True)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            _explain("interrupted", "run the same command again to go on")
        raise
    except PortolanError as error:
        if debug:
            raise
        errors.print(f"portolan: {error}", markup=False)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _explain("interrupted", "run the same command again to go on")
        sys.exit(INTERRUPTED)
    except Exception as error:
        if debug:
            raise
        sys.exit(_explain_unexpected(error))


def _explain_unexpected(error: Exception) -> int:
    """Print an error that no stage translated; returns the exit code."""
    if isinstance(error, OSError) and error.errno in STORAGE_REMEDIES:
        place = error.filename or "a file"
        _explain(f"cannot write {place}: {error.strerror}", STORAGE_REMEDIES[error.errno])
        return StorageError.exit_code
    _explain(
        f"{type(error).__name__}: {error}",
        "this is a defect of Portolan: please report it with what --debug shows",
    )
    return PortolanError.exit_code


def _explain(message: str, remedy: str) -> None:
    errors.print(f"portolan: {message}\n  remedy: {remedy}", markup=False)
