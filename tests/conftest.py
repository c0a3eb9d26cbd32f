"""Fixtures that every room shares."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis
import pytest

NEEDS_GPU = "needs a GPU"
REPOSITORY = Path(__file__).resolve().parent.parent
PROGRAMS = pytest.StashKey[str]()
ONE_WORKER = "tests/pipeline/"

# No property is about time, and a failure in CI must come again on the next try.
hypothesis.settings.register_profile("portolan", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("portolan")


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled programs for the session: many tests and their processes share shapes."""
    message = "ignore:Error (reading|writing) persistent compilation cache entry"
    config.addinivalue_line("filterwarnings", message)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        config.stash[PROGRAMS] = tempfile.mkdtemp(prefix="portolan-programs-")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = config.stash[PROGRAMS]
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove what `pytest_configure` made."""
    if folder := config.stash.get(PROGRAMS, ""):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file on one worker, and so the folder whose tests share a finished project."""
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return ONE_WORKER if path.startswith(ONE_WORKER) else path

    return FileScheduling(config, log)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with the published figures of the public run, laid beside the checkout in CI.

    A plain clone does not have it: there the test is skipped, in CI it fails.
    """
    folder = Path(os.environ.get("PORTOLAN_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        if os.environ.get("CI"):
            pytest.fail(f"the published figures are missing: {folder}")
        pytest.skip("published figures not present; set PORTOLAN_SHARED_DATA")
    return folder


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """With PORTOLAN_FORBID_SKIPS, as in CI, a test skipped for more than an absent GPU fails."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter else []
    skipped = [report for report in reports if NEEDS_GPU not in str(report.longrepr)]
    if os.environ.get("PORTOLAN_FORBID_SKIPS") and skipped and exitstatus == 0:
        for report in skipped:
            print(f"\nskipped where skips are forbidden: {report.nodeid}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
