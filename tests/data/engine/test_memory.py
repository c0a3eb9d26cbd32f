"""Peak memory of a process that moves, reduces and joins rows of which nine in ten share a key."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
MIB = 1 << 20


def measure(root: Path, num_rows: int, share: float) -> dict:
    """1 kB a row; a budget of 8 MiB, beside which a row group of the output holds 8 MB."""
    command = [sys.executable, "-m", "tests.data.engine.skew", root, num_rows, share, 8 * MIB]
    done = subprocess.run(
        list(map(str, command)), cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_key_with_nine_tenths_of_the_rows_needs_no_more_memory(tmp_path):
    small, large = (measure(tmp_path / str(n), n, 0.9) for n in (60_000, 120_000))
    assert large["rows"] > 1.9 * small["rows"] > 100_000
    assert large["arrow"] < 64 * MIB
    assert large["arrow"] < small["arrow"] + 8 * MIB
    assert large["peak"] < 128 * MIB
    assert large["peak"] < small["peak"] + 24 * MIB
