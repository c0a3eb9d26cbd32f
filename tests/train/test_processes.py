"""Two processes over loopback: they train what one does, and outlive neither of them alone."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from portolan.errors import PeerLost
from portolan.track.tracker import read_metrics

pytestmark = pytest.mark.slow

CHILD = Path(__file__).with_name("process_child.py")
MESH = "expert=4"
SAVED = 4
"""Update after which the process that dies had last saved with the other one."""
ABORTED = -6
"""Exit status when the runtime itself ends a process whose peer is gone."""
SECONDS_TO_NOTICE = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Gang:
    """Processes that train in one folder."""

    def __init__(self, folder: Path, cache: Path, size: int, stop_at: dict[int, int]) -> None:
        self.folder = folder
        port, devices = str(free_port()), 4 // size
        flags = f"--xla_force_host_platform_device_count={devices}"
        env = os.environ | {
            "XLA_FLAGS": flags,
            "JAX_PLATFORMS": "cpu",
            "XDG_CACHE_HOME": str(cache),
        }
        folder.mkdir(exist_ok=True)
        self.outputs = [folder / f"output-{index}.txt" for index in range(size)]
        self.processes = []
        for index, path in enumerate(self.outputs):
            command = [sys.executable, CHILD, folder, MESH, port, size, index]
            command += [stop_at[index]] if index in stop_at else []
            with path.open("w") as output:
                self.processes.append(
                    subprocess.Popen(
                        list(map(str, command)), env=env, stdout=output, stderr=subprocess.STDOUT
                    )
                )

    def wait(self, seconds: float = 900) -> list[int]:
        """Exit codes."""
        end = time.monotonic() + seconds
        try:
            return [p.wait(max(1, end - time.monotonic())) for p in self.processes]
        finally:
            for process in self.processes:
                process.kill()

    def said(self) -> str:
        return "\n".join(path.read_text() for path in self.outputs)


def train(folder: Path, cache: Path, size: int) -> dict[str, Any]:
    gang = Gang(folder, cache, size, {})
    assert gang.wait() == [0] * size, gang.said()
    return json.loads((folder / "told-0.json").read_text())


def losses(folder: Path) -> list[float]:
    table = read_metrics(folder, keys=["train/loss"])
    return table.sort("completed")["value"].to_list()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, cache):
    """One process with all four devices."""
    folder = tmp_path_factory.mktemp("alone")
    train(folder, cache, 1)
    return folder


@pytest.fixture(scope="module")
def broken(tmp_path_factory, cache):
    """Two processes, of which the second one was killed in the fifth update."""
    folder = tmp_path_factory.mktemp("broken")
    gang = Gang(folder, cache, 2, {1: SAVED})
    first, second = gang.processes
    second.wait(900)
    begin = time.monotonic()
    code = first.wait(SECONDS_TO_NOTICE)
    gang.wait()
    assert code in (PeerLost.exit_code, ABORTED), gang.said()
    assert time.monotonic() - begin < SECONDS_TO_NOTICE
    if code == PeerLost.exit_code:
        assert "lost another one" in gang.said()
        assert "lost another one" in json.loads((folder / "attempt-1.json").read_text())["reason"]
    return folder


def copy(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "copy"))


def test_both_write_shards(broken):
    arrays = broken / "checkpoints/permanent" / f"step-{SAVED}" / "attempt-1/arrays"
    experts = sorted(path.name for path in (arrays / "blocks.moe.experts.gate").glob("[0-9]*"))
    assert experts == [f"0.{index}.0.0" for index in range(4)]
    manifest = json.loads((arrays.parent / "manifest.json").read_text())
    assert manifest["writers"] == ["process-0", "process-1"]


def test_a_restart_ends_as_an_undisturbed_run(alone, broken, cache, tmp_path):
    folder = copy(broken, tmp_path)
    told = train(folder, cache, 2)
    start = next(note for note in told["notes"] if note[0] == "start")
    assert start[:3] == ["start", 2, SAVED]
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-5)


def test_one_process_goes_on_where_two_stopped(alone, broken, cache, tmp_path):
    folder = copy(broken, tmp_path)
    train(folder, cache, 1)
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-5)


def test_a_damaged_shard_of_one_process_is_found(alone, broken, cache, tmp_path):
    folder = copy(broken, tmp_path)
    step = folder / "checkpoints/permanent" / f"step-{SAVED}"
    shard = step / "attempt-1/arrays/blocks.moe.experts.up/0.3.0.0"
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)
    told = train(folder, cache, 2)
    start = next(note for note in told["notes"] if note[0] == "start")
    assert start[2] == SAVED - 2
    incidents = [note[2] for note in told["notes"] if note[0] == "incident"]
    assert any("blocks/moe/experts/up" in text for text in incidents), told
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-5)
