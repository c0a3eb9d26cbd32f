"""Documents that the code writes are up to date, and the README names commands that exist."""

import re
import subprocess
import sys
from pathlib import Path

import typer

from portolan.cli import app

ROOT = Path(__file__).resolve().parent.parent


def test_generated_documents_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_readme_and_guides_name_only_commands_that_exist() -> None:
    root = typer.main.get_command(app)
    verbs = set(root.list_commands(typer.Context(root)))  # type: ignore[attr-defined]
    pattern = re.compile(r"^\s*(?:\.venv/bin/)?portolan(?: -C \S+)? ([a-z-]+)", re.MULTILINE)
    named = set()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for block in re.findall(r"```(?:sh|bash)?\n(.*?)```", path.read_text(), re.DOTALL):
            named |= set(pattern.findall(block))
    assert named
    assert named <= verbs


def test_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z-]+)`?", (ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= named <= targets
