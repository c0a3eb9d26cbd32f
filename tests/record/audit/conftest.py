"""A small table of claims, written by the tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

HEADER = "id,quantity,value,unit,basis,layer,stated_by,date,public_source,scope,as_of,due\n"


@pytest.fixture
def write_claims(tmp_path: Path) -> Callable[..., Path]:
    """Write rows (lists of the twelve cells) and optional files to a folder and return it."""

    def write(*rows: str, **files: str) -> Path:
        (tmp_path / "claims.csv").write_text(HEADER + "\n".join(rows) + "\n")
        for name, content in files.items():
            (tmp_path / name.replace("_", ".")).write_text(content)
        return tmp_path

    return write
