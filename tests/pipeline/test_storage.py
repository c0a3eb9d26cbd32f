"""A disk that is full or read-only: exit code 6, and a second run with room gets it right."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pipeline.conftest import Finished
from tests.pipeline.tools import COMMAND, Result, read_tree, run_command

from portolan.track.tracker import metrics_digest

NAMESPACE = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "-Urm")
# Runs a command on a small disk, then the same on a larger one, then copies the disk out.
SMALL_DISK = """
set -e
disk=$1 start=$2 size=$3 result=$4; shift 4
mount -t tmpfs -o size=$size tmpfs $disk
cp -a $start/. $disk
code=0; "$@" >$result/small.out 2>$result/small.err || code=$?; echo $code >$result/small.code
find $disk >$result/small.files
mount -o remount,size=200m $disk
code=0; "$@" >$result/large.out 2>$result/large.err || code=$?; echo $code >$result/large.code
cp -a $disk $result/project
"""
READ_ONLY = """
set -e
disk=$1; shift
mount --bind $disk $disk
mount -o remount,bind,ro $disk
exec "$@"
"""


def can_mount() -> bool:
    """Whether a process may have mounts of its own here."""
    if not shutil.which("unshare"):
        return False
    command = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


MOUNTS = can_mount()
PAGE_BYTES = 4096


def on_small_disk(
    folder: Path, start: Path, size: str, environment: dict[str, str], *verb: str
) -> tuple[Result, Result, Path]:
    """Results on the small and on the large disk, and a copy of the project at the end."""
    disk, result = folder / "disk", folder / "result"
    disk.mkdir()
    result.mkdir()
    arguments = [disk, start, size, result, *COMMAND, "-C", disk, *verb]
    subprocess.run(
        [*NAMESPACE, "sh", "-c", SMALL_DISK, "sh", *map(str, arguments)],
        env=os.environ | environment,
        check=True,
    )

    def read(name: str) -> Result:
        code, out, err = (result / f"{name}.{part}" for part in ("code", "out", "err"))
        return Result(int(code.read_text()), out.read_text(), err.read_text())

    return read("small"), read("large"), result / "project"


def make_project(finished: Finished, folder: Path) -> Path:
    assert run_command("init", folder / "start", "--recipe", finished.recipe).code == 0
    return folder / "start"


def pages(path: Path) -> int:
    """Bytes that a file takes on a disk in memory."""
    return -(-path.stat().st_size // PAGE_BYTES) * PAGE_BYTES if path.is_file() else 0


def check_refusal(done: Result, text: str) -> None:
    assert done.code == 6, done.out + done.err
    assert text in done.err
    assert "remedy: " in done.err
    assert "Traceback" not in done.out + done.err


def token_files(project: Path) -> dict[str, str]:
    return {
        name: digest
        for name, digest in read_tree(project / "corpus").items()
        if name.startswith(("tokens/", "heldout-tokens/", "tokenizer/", "documents/"))
    }


LIMITED = """
import os, resource, sys
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
os.execv(sys.executable, sys.argv[2:])
"""


def test_curation_stopped_by_a_limit_on_file_sizes(finished, tmp_path):
    project = make_project(finished, tmp_path)
    command = [*COMMAND, "-C", project, "curate"]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, "150000", *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
    )
    check_refusal(Result(done.returncode, done.stdout, done.stderr), "File too large")
    assert not (project / "corpus" / "summary.json").exists()
    again = run_command("-C", project, "curate")
    assert (again.code, again.err) == (0, "")
    assert not list(project.rglob("*.partial")), "what had been done was taken over"
    assert token_files(project) == token_files(finished.root)


if MOUNTS:

    def test_curation_on_a_full_disk(finished, tmp_path):
        start = make_project(finished, tmp_path)
        environment = finished.environment
        small, large, project = on_small_disk(tmp_path, start, "500k", environment, "curate")
        check_refusal(small, "No space left on device")
        assert "summary.json" not in (tmp_path / "result" / "small.files").read_text()
        assert (large.code, large.err) == (0, "")
        assert token_files(project) == token_files(finished.root)

    def test_training_on_a_full_disk(finished, tmp_path):
        start = tmp_path / "start"
        shutil.copytree(finished.root, start, ignore=shutil.ignore_patterns("runs", "site"))
        shutil.rmtree(start / "record")
        verb = ("ladder", "--set", "ladder.widths=[48]", "--set", "ladder.seeds={48=1}")
        size = str(60_000 + sum(pages(path) for path in start.rglob("*")))
        environment = finished.environment
        small, large, project = on_small_disk(tmp_path, start, size, environment, *verb)
        check_refusal(small, "No space left on device")
        assert "save after 1 updates failed, training goes on: " in small.err
        assert large.code == 0, large.err
        (folder,) = (project / "runs").iterdir()
        whole = finished.root / "runs" / folder.name
        outcomes = [json.loads((run / "finished.json").read_text()) for run in (folder, whole)]
        assert outcomes[0]["content_digest"] == outcomes[1]["content_digest"]
        assert metrics_digest(folder) == metrics_digest(whole)


@pytest.mark.parametrize("verb", ["curate", "register", "report", "run"])
def test_read_only_project(verb, finished, tmp_path):
    project = tmp_path / "project"
    shutil.copytree(finished.root, project, ignore=shutil.ignore_patterns("checkpoints"))
    shutil.rmtree(project / "site")
    if verb == "curate":
        (project / "corpus" / "summary.json").unlink()
    if verb == "register":
        shutil.rmtree(project / "record")
        shutil.rmtree(next((project / "runs").glob("target-*")))
    before = read_tree(project)
    done = run_read_only(project, verb)
    check_refusal(done, str(project))
    assert read_tree(project) == before


def run_read_only(project: Path, verb: str) -> Result:
    """Run a verb where nothing below `project` can be written."""
    command = [*COMMAND, "-C", project, verb]
    if MOUNTS:
        command = [*NAMESPACE, "sh", "-c", READ_ONLY, "sh", project, *command]
    else:
        for path in (project, *project.rglob("*")):
            path.chmod(path.stat().st_mode & ~0o222)
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        check=False,
        user="nobody" if not MOUNTS and os.geteuid() == 0 else None,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def test_read_only_project_can_still_be_verified(project):
    done = run_read_only(project, "verify")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("ok(")
