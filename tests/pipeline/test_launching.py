"""Processes that are watched from outside: what is said of each end, and when all are ended."""

import signal
import subprocess
import sys
import time

import pytest

from portolan.errors import PeerLost, PortolanError
from portolan.pipeline import launching
from portolan.pipeline.launching import End, watch_gang


def start(*programs: str) -> list[subprocess.Popen]:
    return [subprocess.Popen([sys.executable, "-c", program]) for program in programs]


def test_all_done():
    end = watch_gang(start("", ""))
    assert (end.statuses, end.first, end.status) == ((0, 0), None, 0)


def test_a_killed_process_and_the_one_that_lost_it():
    end = watch_gang(
        start(
            f"import time; time.sleep(0.6); raise SystemExit({PeerLost.exit_code})",
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        )
    )
    assert end.first == 1
    assert end.may_restart
    assert end.describe() == "process 0: peer lost; process 1: killed by SIGKILL"


def test_a_process_that_notices_nothing_is_ended():
    begin = time.monotonic()
    end = watch_gang(start("import time; time.sleep(60)", "raise SystemExit(2)"), 0.3)
    assert time.monotonic() - begin < 30
    assert (end.first, end.status, end.may_restart) == (1, 2, False)
    assert end.statuses[0] == -signal.SIGTERM


def test_the_runtime_may_end_the_survivor():
    end = End((-signal.SIGABRT, -signal.SIGKILL), 1)
    assert end.describe() == "process 0: peer lost; process 1: killed by SIGKILL"


@pytest.mark.parametrize(("status", "starts"), [(-signal.SIGKILL, 3), (2, 1), (13, 3)])
def test_restarts_only_after_a_loss(monkeypatch, tmp_path, capsys, status, starts):
    started = []

    def begin(*arguments):
        started.append(arguments)
        kill = f"import os; os.kill(os.getpid(), {-status})" if status < 0 else ""
        return start(kill or f"raise SystemExit({status})", "")

    monkeypatch.setattr(launching, "_start", begin)
    with pytest.raises(PortolanError, match="ended badly") as caught:
        launching.launch(tmp_path, ["train"], num_processes=2, devices=None, retries=2)
    assert len(started) == starts
    assert caught.value.exit_code == (status if status > 0 else PeerLost.exit_code)
    assert f"attempt {starts}: process 0: " in capsys.readouterr().out
