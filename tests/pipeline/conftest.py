"""One tiny project, run to its end once, and copies of it."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.pipeline.tiny import write_documents, write_recipe
from tests.pipeline.tools import Cli, Result, call_main, run_command

CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"


@dataclass(frozen=True)
class Finished:
    """A project whose every stage is done; only to be read.

    `environment` makes further processes find the compiled programs of the first one.
    """

    root: Path
    recipe: Path
    output: str
    environment: dict[str, str]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("finished")
    write_documents(folder / "documents")
    recipe = folder / "recipe.toml"
    write_recipe(recipe, folder / "documents")
    environment = {
        CACHE_VARIABLE: os.environ.get(CACHE_VARIABLE, str(tmp_path_factory.mktemp("programs"))),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    made = run_command("init", folder / "project", "--recipe", recipe)
    assert (made.code, made.err) == (0, "")
    done = run_command("-C", folder / "project", "run", environment=environment)
    assert (done.code, done.err) == (0, ""), done.out
    return Finished(folder / "project", recipe, done.out, environment)


@pytest.fixture
def project(finished: Finished, tmp_path: Path) -> Path:
    """A copy of the finished project."""
    return Path(shutil.copytree(finished.root, tmp_path / "project"))


@pytest.fixture
def cli(monkeypatch, capsys) -> Cli:
    """Calls the entry point in this process, without worker processes."""
    monkeypatch.setattr("portolan.pipeline.curation.usable_cores", lambda: 1)

    def call(*arguments: object) -> Result:
        return call_main(monkeypatch, capsys, *arguments)

    return call
