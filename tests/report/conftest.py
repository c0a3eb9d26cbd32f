"""Sample projects and their pages, built once for all tests of the report."""

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from portolan.report import build_site
from portolan.track.tracker import Tracker

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
    "--disable-component-update", "--disable-sync", "--disable-extensions",
]  # fmt: skip
HOSTILE = "</script><script>window.hacked=1</script>"
HOSTILE_ATTRIBUTE = '"><img src=x onerror="window.hacked=2">'


@pytest.fixture(scope="session")
def sample() -> ModuleType:
    """The module that writes sample projects."""
    path = Path(__file__).parent / "sample_project.py"
    spec = importlib.util.spec_from_file_location("portolan_report_sample_project", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def project_at(
    sample: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Project folder at a stage, its page already built; shared, so only to be read."""
    base, built = tmp_path_factory.mktemp("projects"), {}

    def get(stage: str) -> Path:
        if stage not in built:
            built[stage] = sample.build_sample(base / stage, stage)
            build_site(built[stage])
        return built[stage]

    return get


@pytest.fixture(scope="session")
def hostile_project(sample: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished project whose every text tries to become markup."""
    root = tmp_path_factory.mktemp("hostile") / "<b>project<b>"
    sample.build_sample(root, "finished", name=HOSTILE)
    summary_path = root / "corpus" / "summary.json"
    summary = json.loads(summary_path.read_text())
    summary["sources"][0] |= {
        "key": HOSTILE,
        "license_spdx": HOSTILE_ATTRIBUTE,
        "category": HOSTILE,
    }
    summary["sources"][0]["dropped"][HOSTILE_ATTRIBUTE] = 3
    summary["tokenizer"]["bos"] = HOSTILE
    summary_path.write_text(json.dumps(summary))
    folder = root / "runs" / sample.TARGET.id
    last = sample.TARGET.steps - 1
    with Tracker(folder, 1, 0, clock=lambda: sample.MADE_AT) as tracker:
        for text in (HOSTILE, HOSTILE_ATTRIBUTE):
            tracker.log(last, {f"eval_dropless/heldout/{text}/loss": 3.0})
            tracker.log(last, {f"router/entropy/{text}": 3.0})
    facts = json.loads((root / "runs" / sample.RUNGS[0].id / "run.json").read_text())
    facts |= {"id": HOSTILE_ATTRIBUTE, "width": None, "model": {}}
    (root / "runs" / sample.RUNGS[0].id / "run.json").write_text(json.dumps(facts))
    status = {
        "verdict": HOSTILE,
        "state": HOSTILE_ATTRIBUTE,
        "reasons": [{"severity": HOSTILE, "text": HOSTILE, "advice": HOSTILE_ATTRIBUTE}],
        "checklist": [
            {"title": HOSTILE, "verdict": HOSTILE_ATTRIBUTE, "windows": {HOSTILE: "not measured"}}
        ],
        "shapes": [{"signal": HOSTILE_ATTRIBUTE, "nearest_rung": HOSTILE, "fraction": HOSTILE}],
    }
    (folder / "status.json").write_text(json.dumps(status))
    journal = sample.Journal.open(root / "record", schema=False)
    for text in (HOSTILE, HOSTILE_ATTRIBUTE):
        journal.append("event", {"kind": text, "text": text}, time=sample.moment(40))
    build_site(root)
    return root


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    executable = next((path for path in found if path), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield browser
        browser.close()
