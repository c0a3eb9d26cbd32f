"""The pages in headless Chromium: offline, silent, inert; search, filters, review."""

import csv
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from portolan.report.data_map import write_map
from portolan.report.data_map.pages import MAX_OVERVIEW_BYTES
from portolan.report.data_map.review import read_labels

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
PAGES = ("index", "domains", "pairs", "decontamination", "mixture", "provenance", "stages")
DRAWN = "html[data-charts=drawn], html:not(:has(#charts))"
OVERFLOW = "document.documentElement.scrollWidth - innerWidth"


class Visit:
    """An open page and everything that it should not have done."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.context = browser.new_context(viewport=DESKTOP, accept_downloads=True, **options)
        self.page = self.context.new_page()
        self.faults: list[str] = []
        self.page.on("console", lambda message: self.faults.append(f"console: {message.text}"))
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("request", self._request)
        self.page.on("dialog", lambda dialog: self.faults.append("dialog"))
        self.page.goto(path.as_uri())
        self.page.locator(DRAWN).wait_for(state="attached", timeout=60_000)

    def _request(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.faults.append(f"request: {request.url}")

    def __enter__(self) -> "Visit":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


def test_sizes_links_and_the_same_bytes_again(data_map, map_folder, tmp_path):
    pages = {path.name: path.read_text() for path in map_folder.glob("*.html")}
    assert sorted(pages) == sorted(f"{name}.html" for name in PAGES)
    assert len(pages["domains.html"].encode()) <= MAX_OVERVIEW_BYTES
    for html in pages.values():
        for link in re.findall(r'(?:href|src)="([^"]+)"', html.partition("<script")[0]):
            assert link.startswith("#") or link in pages or link in (
                "data:,", "../index.html", "https://example.org/licence"
            ), link  # fmt: skip
        assert "window.hacked=1</script>" not in html and "default-src 'none'" in html
    (tmp_path / "old.html").write_text("of a corpus that is no more")
    write_map(tmp_path, data_map)
    assert {path.name: path.read_text() for path in tmp_path.glob("*.html")} == pages


def test_what_curation_did_not_do_has_no_page(data_map, tmp_path):
    one_bucket = dataclasses.replace(
        data_map.overview,
        num_buckets=1,
        cells={(name, 0): count for (name, b), count in data_map.overview.cells.items() if not b},
        by_source={name: row[:1] for name, row in data_map.overview.by_source.items()},
        by_type={},
        cuts={},
    )
    plain = dataclasses.replace(
        data_map,
        overview=one_bucket,
        pairs=None,
        contamination=None,
        mixtures=(),
        problems=("a <b> is odd", "so is c"),
    )
    written = {path.name for path in write_map(tmp_path, plain)}
    assert written == {"index.html", "domains.html", "provenance.html", "stages.html"}
    html = (tmp_path / "domains.html").read_text()
    assert 'href="pairs.html"' not in html and "Buckets of quality" not in html
    for page in (html, (tmp_path / "index.html").read_text()):
        assert "2 warnings of curation" in page and "<li>a &lt;b&gt; is odd</li>" in page


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_silent_inert_and_fits(browser, map_folder, scheme):
    for name in PAGES:
        with Visit(browser, map_folder / f"{name}.html", color_scheme=scheme) as visit:
            for viewport in (DESKTOP, PHONE):
                visit.page.set_viewport_size(viewport)
                visit.page.wait_for_timeout(60)
                assert visit.page.evaluate(OVERFLOW) <= 0, (name, viewport)
            assert visit.page.evaluate("window.hacked === undefined")
            assert visit.page.evaluate(
                "[...document.querySelectorAll('svg')].every(e => e.getBBox().width > 0)"
            )
            assert visit.faults == [], name


def expected_scores(overview: Any, query: str) -> list[tuple[float, int]]:
    """The score of the specification, word by word: (score, domain), best first."""
    places = []
    for domain in overview.domains:
        texts = [e.text for b in range(5) for e in overview.examples[domain.name, b]]
        words = [
            re.findall(r"\w+", " ".join(t).casefold())
            for t in ([domain.label], domain.keywords, texts)
        ]
        places.append(words)

    def hit(word: str, known: list[str]) -> float:
        return 1.0 if word in known else 0.5 if any(k.startswith(word) for k in known) else 0.0

    scores = [0.0] * len(places)
    for word in set(re.findall(r"\w+", query.casefold())):
        hits = [[hit(word, known) for known in place] for place in places]
        df = sum(any(row) for row in hits)
        for i, (label, keyword, example) in enumerate(hits):
            if df:
                scores[i] += math.log(1 + len(places) / df) * (4 * label + 2 * keyword + example)
    tokens = [sum(c.tokens for c in overview.row(d.name)) for d in overview.domains]
    order = sorted(range(len(places)), key=lambda i: (-scores[i], -tokens[i], i))
    return [(scores[i], i) for i in order if scores[i] > 0]


@pytest.mark.browser
def test_search_finds_a_planted_topic_first_with_the_stated_score(browser, map_folder, data_map):
    with Visit(browser, map_folder / "domains.html") as visit:
        page = visit.page
        for query in ("Telescope", "telesc", "software code", "va lo mathematics", "qqq"):
            page.fill("#search", query)
            found = page.evaluate("search(document.getElementById('search').value)")
            expected = expected_scores(data_map.overview, query)
            assert [row["i"] for row in found] == [i for _, i in expected]
            assert [row["score"] for row in found] == pytest.approx([s for s, _ in expected])
        page.fill("#search", "telescope")
        assert page.text_content("#hits li:first-child").startswith("natural sciences")
        assert page.text_content("#detail h3") == "natural sciences"
        assert page.locator("#grid tbody tr:visible").count() == 1
        page.fill("#search", "")
        assert page.locator("#grid tbody tr:visible").count() == 40
        assert visit.faults == []


@pytest.mark.browser
def test_a_cell_shows_its_enrichment_sources_and_examples(browser, map_folder):
    with Visit(browser, map_folder / "domains.html") as visit:
        page = visit.page
        page.check("input[value=enrichment]")
        cell = page.locator("#grid tbody tr").nth(30).locator(".cell button").nth(4)
        assert cell.text_content() == "+1.49"
        cell.click()
        detail = page.text_content("#detail")
        assert "2.82 ×" in detail and "Examples of Q4" in detail and "code/files" in detail
        assert page.locator("#detail .example").count() == 4
        page.locator("#grid tbody tr").nth(0).locator(".cell button").nth(0).click()
        assert "<script>window.hacked=1</script> said the page" in page.text_content("#detail")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert (
            page.get_attribute("#grid tr.chosen .cell:nth-of-type(4) button", "aria-pressed")
            == "true"
        )
        assert visit.faults == []


@pytest.mark.browser
def test_filters_of_the_pair_browser(browser, map_folder, data_map):
    rows = data_map.pairs.rows
    with Visit(browser, map_folder / "pairs.html") as visit:
        page = visit.page
        shown = page.locator("#list li")
        assert shown.count() == len(rows)
        page.select_option("#filter-pair", "forum → papers")
        mine = [row for row in rows if (row.removed_source, row.kept_source) == ("forum", "papers")]
        assert shown.count() == len(mine)
        page.select_option("#filter-containment", "19")
        mine = [row for row in mine if row.containment >= 0.95]
        assert shown.count() == len(mine)
        page.select_option("#filter-size", "500-5000")
        mine = [row for row in mine if 500 <= row.chars_removed < 5000]
        assert 0 < shown.count() == len(mine)
        first = page.locator("#pair del").first
        assert first.text_content() == "<b>X</b>" and page.locator("#pair b").count() == 0
        page.select_option("#filter-label", "wrong")
        assert "No pair passes" in page.text_content("#pair")
        assert visit.faults == []


@pytest.mark.browser
@pytest.mark.parametrize("kind", ["csv", "json"])
def test_labels_are_exported_read_and_imported_again(browser, map_folder, data_map, tmp_path, kind):
    path = tmp_path / f"labels.{kind}"
    with Visit(browser, map_folder / "pairs.html") as visit:
        page = visit.page
        for key in ("c", "n", "w", "n", "u", "n", "c", "c"):
            page.keyboard.press(key)
        assert page.text_content("#progress").startswith("3 of 48 judged")
        page.select_option("#filter-label", "none")
        assert page.locator("#list li").count() == 45
        with page.expect_download() as download:
            page.click(f"#export-{kind}")
        download.value.save_as(path)
        assert visit.faults == []
    labels = read_labels(path)
    assert [label.label for label in labels] == ["correct", "wrong", "unsure"]
    for label, row in zip(labels, data_map.pairs.rows, strict=False):
        assert label.evidence == data_map.pairs.evidence_key
        assert label.stratum == row.stratum
        assert label.containment == pytest.approx(row.containment)
    if kind == "csv":
        assert len(list(csv.DictReader(path.read_text().splitlines()))) == 3
    else:
        assert json.loads(path.read_text())["format"] == "portolan-labels"
    with Visit(browser, map_folder / "pairs.html") as visit:
        page = visit.page
        assert page.text_content("#progress").startswith("0 of 48 judged")
        page.set_input_files("#import-file", path)
        page.locator("#progress").filter(has_text="3 of 48").wait_for()
        assert "3 of 3 rows" in page.text_content("#progress")
        page.reload()
        # Kept in this browser.
        page.locator("#progress").filter(has_text="3 of 48 judged").wait_for()
        (tmp_path / "broken.json").write_text("{")
        page.set_input_files("#import-file", tmp_path / "broken.json")
        page.locator("#progress").filter(has_text="not a file").wait_for()
        assert visit.faults == []


@pytest.mark.browser
def test_mixtures_are_compared_also_with_a_file_from_disk(browser, map_folder, data_map, tmp_path):
    with Visit(browser, map_folder / "mixture.html") as visit:
        page = visit.page
        cell = "#weights-table tbody tr:nth-child(31) td:nth-of-type(6)"
        first, second = data_map.mixtures

        def weight(mixture: Any) -> float:
            phases = mixture["phases"]
            total = sum(phase["budget_tokens"] for phase in phases)
            return sum(p["budget_tokens"] * p["counts"]["c30q4"] for p in phases) / total / 49_152

        assert page.text_content(cell) == f"{100 * weight(first):.2f} %"
        page.select_option("#second", "1")
        difference = 100 * (weight(first) - weight(second))
        assert page.text_content(cell) == f"{difference:+.2f}".replace("-", "−")
        page.select_option("#second", "")
        page.check("input[value=epochs]")
        assert (
            page.text_content("#weights-table tbody tr:nth-child(31) td:nth-of-type(5)") == "0.81"
        )
        other = {**second, "store_digest": "7" * 64}
        (tmp_path / "other.json").write_text(json.dumps(other))
        page.set_input_files("#import-file", tmp_path / "other.json")
        page.locator("#heard").filter(has_text="different stores").wait_for()
        assert "minus tilted (other.json)" in page.text_content("#weights-table caption")
        assert visit.faults == []


@pytest.mark.browser
def test_filters_of_the_other_pages(browser, map_folder):
    with Visit(browser, map_folder / "provenance.html", java_script_enabled=False) as visit:
        rows = visit.page.locator("#sources tbody tr:visible")
        assert rows.count() == 6
        visit.page.check("#class-2")
        assert rows.count() == 2 and "permissive" in rows.first.text_content()
    with Visit(browser, map_folder / "decontamination.html") as visit:
        assert visit.page.locator("#matches article").count() == 3
        visit.page.select_option("#filter-set", "heldout")
        visit.page.select_option("#filter-rule", "paragraph")
        assert visit.page.locator("#matches article").count() == 1
        assert visit.page.text_content("#matches mark") == "the words of the item"
        assert visit.faults == []
