"""What a stage prints: lines in a pipe, a bar on a terminal."""

import io
import re

from rich.console import Console

from portolan.data.engine import StageProgress, report


def progress(tasks, stage="normalise/web"):
    return StageProgress(stage, "read", tasks, 10, 100 * tasks, 10**6 * tasks, 2.0, 50 * tasks, 8.0)


def test_a_pipe_gets_a_line_every_ten_seconds(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    with report.StageReporter().open() as say:
        for tasks in range(1, 9):
            now[0] += 4.0
            say(progress(tasks))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert dict(pair.split("=") for pair in lines[0].split()) == {
        "stage": "normalise/web",
        "step": "read",
        "tasks": "3/10",
        "documents": "300",
        "documents_per_second": "150",
        "bytes": "3000000",
        "eta_seconds": "8",
    }


def test_a_terminal_gets_a_bar(monkeypatch):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    monkeypatch.setattr(report, "console", console)
    with report.StageReporter().open() as show:
        show(progress(3))
        show(progress(5, "dup_doc"))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "dup_doc read" in text
    assert "500 documents 250/s 5 MB" in text
