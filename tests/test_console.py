"""Live bars of several runs on a terminal."""

import io

from rich.console import Console

from portolan import console
from portolan.train.interface import Progress


def progress(run_id: str, completed: int) -> Progress:
    return Progress(run_id, completed, 10, 2.5, 1000.0, 1.0, None)


def test_late_report_of_a_finished_run_whose_bar_made_room(monkeypatch):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
    monkeypatch.setattr(console, "console", terminal)
    with console.RunReporter().open() as report:
        report(progress("first", 10))
        report(progress("second", 1))
        report(progress("first", 10))
        report(progress("second", 10))
    assert "second" in terminal.file.getvalue()
