"""The pages of a made-up corpus of 200 cells, written once for all tests."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from portolan.report.data_map import write_map


def load(name: str) -> ModuleType:
    """A module that lies beside the tests."""
    path = Path(__file__).parent / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"portolan_data_map_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def sample_map() -> ModuleType:
    """The module that makes up a corpus."""
    return load("sample_map")


@pytest.fixture(scope="session")
def cells_csv(shared_data: Path) -> Path:
    """Tokens of the public grid."""
    return shared_data / "marin" / "cells_40x5.csv"


@pytest.fixture(scope="session")
def data_map(sample_map: ModuleType, cells_csv: Path) -> Any:
    """Facts of the made-up corpus."""
    return sample_map.make_map(cells_csv)


@pytest.fixture(scope="session")
def map_folder(data_map: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of its pages; only to be read."""
    folder = tmp_path_factory.mktemp("site") / "map"
    folder.mkdir()
    (folder.parent / "index.html").write_text("<!doctype html><title>project</title>")
    write_map(folder, data_map)
    return folder
