"""The page of a reconciliation: complete, offline, inert to hostile text, usable on a phone."""

import re
from pathlib import Path
from typing import Any

import pytest

from portolan.record.audit.reconciliation import Reconciliation, reconcile_folder
from portolan.record.verdicts import MEANINGS, VERDICTS
from portolan.report.audit import RULES, TONES, render_audit

EXAMPLE = Path(__file__).parents[2] / "examples" / "marin-535b-audit"
HOSTILE = "<script>window.hacked=1</script> 2.1\u202e4.1"
HEADER = "id,quantity,value,unit,basis,layer,stated_by,date,public_source,url\n"


@pytest.fixture(scope="module")
def audit() -> Reconciliation:
    return reconcile_folder(EXAMPLE)


@pytest.fixture(scope="module")
def page(audit: Reconciliation) -> str:
    return render_audit(audit, home="index.html")


def test_every_question_figure_and_calculation_is_there(audit, page):
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page)).replace("&#39;", "'")
    for case in audit.cases:
        assert f'id="case-{case.id}"' in page and case.title in text
        for figure in case.figures:
            assert f'<th scope="row">{figure.id}</th>' in page
        for line in case.arithmetic:
            assert line in text
        for note in case.notes:
            assert note.text in text
    assert page.count("https://github.com/marin-community/marin") > 30
    assert len(page) < 300_000


def test_it_loads_nothing_and_runs_nothing(page):
    assert "<script" not in page and "default-src 'none'" in page
    assert not re.search(r'(src|href)="(?!#|https?://|data:|index\.html)', page)
    links = re.findall(r'<a href="https?://[^"]*"([^>]*)>', page)
    assert links and all("noopener" in rest for rest in links)
    assert set(TONES) == set(MEANINGS) == set(VERDICTS) and len(RULES) == 16


def test_the_same_audit_gives_the_same_bytes(audit, page):
    assert render_audit(audit, home="index.html") == page


def test_hostile_text_is_shown_not_run(tmp_path):
    cells = f'A-1,"{HOSTILE}",1,u,racks,claimed,"{HOSTILE}",d,s,javascript:alert(1)\n'
    (tmp_path / "claims.csv").write_text(HEADER + cells)
    page = render_audit(reconcile_folder(tmp_path))
    assert "<script>" not in page and "javascript:" not in page
    assert "\u202e" not in page and "2.1\\u202e4.1" in page
    assert "Cross-checks" not in page, "too few figures for any formula"


@pytest.fixture(scope="module")
def opened(page: str, browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("audit") / "audit.html"
    path.write_text(page)
    tab = browser.new_context(viewport={"width": 390, "height": 844}).new_page()
    tab.faults = []
    tab.on("console", lambda message: tab.faults.append(message.text))
    tab.goto(path.as_uri())
    yield tab
    tab.context.close()


@pytest.mark.browser
def test_filters_work_without_scripts_and_phones_do_not_scroll_sideways(opened, audit):
    visible = "[...document.querySelectorAll('{}')].filter(e => e.offsetParent).length"
    width = "document.documentElement.scrollWidth - innerWidth"
    assert opened.evaluate(visible.format(".case")) == len(audit.cases)
    for verdict, number in audit.counts.items():
        opened.check(f"#show-{verdict}")
        shown = opened.evaluate(visible.format(".case > .findings > .finding"))
        assert shown == number, verdict
        assert opened.evaluate(visible.format(f".finding:not(.is-{verdict})")) == 0
        assert opened.evaluate(width) <= 0
    opened.check("#show-all")
    opened.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert opened.evaluate(width) <= 0 and opened.faults == []
