"""The page of runs that others trained: lineage, moments on the curve, evidence."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.report.test_browser import DESKTOP, PHONE, Visit

from portolan.pipeline.importing import Placement, import_run
from portolan.record.journal import Journal
from portolan.record.schema import StepPoint
from portolan.record.types import Cause, Change, Changed, Event, Expected
from portolan.report import build_site
from portolan.report.gather import read_project
from portolan.report.observed import (
    evidence_table,
    lineage_figures,
    moment_table,
    series_figures,
)
from portolan.track.imports.store import Clock
from portolan.track.imports.tables import CsvFile

SWITCH = 600
HOSTILE = "</script><script>window.hacked=1</script>\u202e"


def losses(start: int, end: int, shift: float) -> list[tuple[int, float]]:
    return [(row, 2.0 + 40 / (row + 20) + shift) for row in range(start, end)]


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of a lineage, a trial that never counts, a hang and a change with its effect."""
    base = tmp_path_factory.mktemp("observed")
    root = base / "audit"
    parts = {
        "first": (Placement("first", "theirs"), losses(0, 700, 0.0)),
        "second": (Placement("second", "theirs", "production", "first", SWITCH),
                   losses(SWITCH, 1200, -0.1)),
        "try": (Placement("try", "theirs", "trial", "first", 500), losses(500, 550, 9.0)),
    }  # fmt: skip
    for name, (placement, rows) in parts.items():
        path = base / f"{name}.csv"
        path.write_text("step,train/loss\n" + "".join(f"{r},{v}\n" for r, v in rows))
        import_run(root, CsvFile(path), Clock("step", "row"), placement)
    journal = Journal.open(root / "record")
    cause = Cause(text="not known", status="unknown")
    hang = Event(text=HOSTILE, kind="hang", step=StepPoint(clock="completed", n=300), run="first",
                 cause=cause)  # fmt: skip
    journal.append("event", hang)
    change = Change(
        text="Fewer drops.",
        planned=True,
        what=Changed(code="transport"),
        from_step=StepPoint(clock="row", n=SWITCH - 1),
        expected=Expected(metric="loss", direction="down", size="0.1", tolerance="0.02"),
        not_exercised=("evaluation",),
        gate="paired steps",
        control_window="600 to 700",
        verdict="accepted",
    )
    journal.append("change", change)
    return root


def test_the_lineage_counts_each_update_once(audit: Path) -> None:
    (figure,) = lineage_figures(read_project(audit))
    assert figure.table is not None
    assert [row[4] for row in figure.table.rows] == ["0 to 600", "600 to 1\u202f200", "none"]
    assert figure.table.note.startswith("1\u202f200 updates count once")


def test_moments_stand_at_completed_updates_with_the_loss_around_them(audit: Path) -> None:
    project = read_project(audit)
    assert [(m.completed, m.what) for m in project.observed.moments] == [
        (300, "hang"),
        (SWITCH, "change"),
    ]
    table = moment_table(project)
    assert table is not None
    before, after = (float(text) for text in table.rows[1][-1].split(" → "))
    reach = 0.02 * 1200
    values = dict(losses(0, SWITCH, 0.0) + losses(SWITCH, 1200, -0.1))
    assert before == pytest.approx(
        np.mean([v for row, v in values.items() if SWITCH - reach <= row < SWITCH]), abs=0.01
    )
    assert after == pytest.approx(
        np.mean([v for row, v in values.items() if SWITCH <= row < SWITCH + reach]), abs=0.01
    )
    assert before - after == pytest.approx(0.1, abs=0.01)


def test_the_trial_is_in_no_curve_and_evidence_is_listed(audit: Path) -> None:
    project = read_project(audit)
    (figure,) = series_figures(project)
    values = [row["value"] for row in figure.chart.to_dict()["layer"][1]["data"]["values"]]
    assert max(values) < 5 and len({key.name for key in figure.legend}) == 2
    table = evidence_table(project)
    assert table is not None and len(table.rows) == 6
    assert {row[4] for row in table.rows} == {"full"}


def test_a_contradiction_is_said_and_the_page_still_made(audit: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("step,loss\n5000,1\n")
    root = tmp_path / "p"
    import_run(root, CsvFile(path), Clock("step", "row"), Placement("x", "l"))
    later = Placement("y", "l", "production", "x", 9000)
    import_run(root, CsvFile(path), Clock("step", "row"), later)
    assert "contradict each other" in build_site(root).read_text()


@pytest.mark.browser
def test_the_page_draws_and_runs_nothing_from_the_record(audit: Path, browser: Any) -> None:
    assert build_site(audit).stat().st_size < 3_000_000
    with Visit(browser, audit) as visit:
        visit.drawn()
        assert visit.page.locator("#lineage .chart svg").count() == 2
        assert visit.page.evaluate("window.hacked") is None
        for size in (DESKTOP, PHONE):
            visit.page.set_viewport_size(size)
            assert visit.overflow() <= 0
        assert not visit.faults
