"""The page in headless Chromium: drawn, silent, offline, inert to hostile text, usable by keys."""

from pathlib import Path
from typing import Any

import pytest

from portolan.report.palette import DARK, LIGHT

pytestmark = pytest.mark.browser

DRAWN = "html[data-charts=drawn], html:not(:has(#charts))"
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
STAGES = ("empty", "corpus", "ladder", "registered", "running", "finished")
CHART_REPORT = """
() => [...document.querySelectorAll('.chart')].map((box) => {
  const svg = box.querySelector('svg');
  const marks = svg ? svg.querySelectorAll(
    '[role=graphics-symbol], .mark-line path, .mark-area path, .mark-symbol path, .mark-rect path,'
    + '.mark-rule line').length : 0;
  const frame = svg ? svg.getBoundingClientRect() : {width: 0, height: 0};
  const room = box.getBoundingClientRect();
  const clipped = svg ? [...svg.querySelectorAll('text')].filter((text) => {
    const r = text.getBoundingClientRect();
    return r.width && (r.left < room.left - 1 || r.right > room.right + 1);
  }).map((text) => text.textContent) : [];
  return {id: box.id, marks, width: frame.width, height: frame.height, clipped};
})
"""


class Visit:
    """An open page and everything that it should not have done."""

    def __init__(self, browser: Any, project: Path, **options: Any) -> None:
        self.context = browser.new_context(viewport=DESKTOP, **options)
        self.page = self.context.new_page()
        self.faults: list[str] = []
        self.page.on("console", lambda message: self.faults.append(f"console: {message.text}"))
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("request", self._request)
        self.page.on("dialog", lambda dialog: self.faults.append("dialog"))
        self.page.goto((project / "site" / "index.html").as_uri())

    def _request(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:")) or request.url.count("file:") > 1:
            self.faults.append(f"request: {request.url}")

    def drawn(self) -> "Visit":
        self.page.locator(DRAWN).wait_for(state="attached", timeout=60_000)
        return self

    def overflow(self) -> float:
        return self.page.evaluate("document.documentElement.scrollWidth - innerWidth")

    def __enter__(self) -> "Visit":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


@pytest.mark.parametrize("stage", STAGES)
def test_page_is_drawn_silent_and_fits(browser, project_at, stage):
    with Visit(browser, project_at(stage)) as visit:
        page = visit.drawn().page
        for viewport in (DESKTOP, PHONE):
            page.set_viewport_size(viewport)
            page.wait_for_timeout(250)
            assert visit.overflow() <= 0
            for chart in page.evaluate(CHART_REPORT):
                assert chart["marks"] > 0 and chart["height"] > 40, chart
                assert 0.6 * viewport["width"] / 2 < chart["width"] <= viewport["width"], chart
                assert chart["clipped"] == [], chart
        assert visit.faults == []


@pytest.mark.parametrize(("scheme", "colours"), [("light", LIGHT), ("dark", DARK)])
def test_colours_follow_the_scheme(browser, project_at, scheme, colours):
    with Visit(browser, project_at("finished"), color_scheme=scheme) as visit:
        page = visit.drawn().page
        read = "(e) => getComputedStyle(e).{}"
        paper = page.eval_on_selector("body", read.format("backgroundColor"))
        assert paper == rgb(colours["paper"])
        line = "#chart-residuals .mark-line path"
        assert page.eval_on_selector(line, read.format("stroke")) == rgb(colours["measured"])
        text = "#chart-residuals .role-axis-label text"
        assert page.eval_on_selector(text, read.format("fill")) == rgb(colours["ink-soft"])
        page.emulate_media(media="print")
        assert page.eval_on_selector("body", read.format("backgroundColor")) == rgb(LIGHT["paper"])
        assert page.eval_on_selector(line, read.format("stroke")) == rgb(LIGHT["measured"])
        assert visit.faults == []


def rgb(colour: str) -> str:
    red, green, blue = bytes.fromhex(colour[1:])
    return f"rgb({red}, {green}, {blue})"


def test_hostile_text_is_inert(browser, hostile_project):
    with Visit(browser, hostile_project) as visit:
        page = visit.drawn().page
        assert page.evaluate("window.hacked === undefined")
        assert page.query_selector("img") is None
        assert page.text_content("h1") == "</script><script>window.hacked=1</script>"
        assert "><img src=x" in page.text_content("#chart-domains-loss")
        assert all(chart["marks"] > 0 for chart in page.evaluate(CHART_REPORT))
        page.set_viewport_size(PHONE)
        page.wait_for_timeout(250)
        assert visit.overflow() <= 0
        assert visit.faults == []


def test_contents_work_by_keyboard(browser, project_at):
    with Visit(browser, project_at("finished"), reduced_motion="reduce") as visit:
        page = visit.drawn().page
        focused = "document.activeElement.getAttribute('href')"
        page.keyboard.press("Tab")
        assert page.evaluate(focused) == "#main"
        links = []
        for _ in range(4):
            page.keyboard.press("Tab")
            links.append(page.evaluate(focused))
        assert links == ["#summary", "#forecast", "#ladder", "#domains"]
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(outline) == "solid"
        page.keyboard.press("Enter")
        page.wait_for_timeout(100)
        nav = page.eval_on_selector("nav", "(e) => e.getBoundingClientRect().bottom")
        top = page.eval_on_selector("#domains", "(e) => e.getBoundingClientRect().top")
        assert nav - 5 <= top < 200


def test_a_point_can_be_read(browser, project_at):
    with Visit(browser, project_at("finished")) as visit:
        page = visit.drawn().page
        point = page.locator("#chart-residuals .mark-symbol path").nth(10)
        point.scroll_into_view_if_needed()
        point.hover(force=True)
        tooltip = page.wait_for_selector("#vg-tooltip-element.visible", timeout=5_000)
        assert tooltip is not None
        assert "share of the run" in (tooltip.text_content() or "")
        page.mouse.move(0, 0)
        page.locator("#chart-train-loss .mark-symbol path").nth(60).hover(force=True)
        page.wait_for_selector("#vg-tooltip-element.visible", timeout=5_000)
        text = page.text_content("#vg-tooltip-element") or ""
        assert (
            text.startswith("seriesd32") and "share of the run" in text and "undefined" not in text
        )
        assert visit.faults == []


def test_without_scripts_the_tables_remain(browser, project_at):
    with Visit(browser, project_at("finished"), java_script_enabled=False) as visit:
        assert visit.page.is_visible("noscript p")
        visit.page.click("#forecast-band summary")
        assert visit.page.locator("#forecast-band tbody tr").count() == 20
