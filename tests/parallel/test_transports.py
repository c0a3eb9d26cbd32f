"""Every transport and rule against the dense reference, on eight host devices of one child."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.parallel import dense
from tests.parallel.transport_cases import (
    CASES,
    G1_IDS,
    GOLDENS,
    LARGE,
    MEMORY,
    MORE_CASES,
    Case,
    make_inputs,
)

from portolan.model import kernels
from portolan.model.tree import GatedMlp

REPOSITORY = Path(__file__).resolve().parents[2]
FIELDS = ("y", "dx", "dc", "dgate", "dup", "ddown")
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, np.ndarray]:
    names = [*BY_NAME, *(golden.case.name for golden in GOLDENS), MEMORY]
    return run_child(tmp_path_factory.mktemp("transports"), names)


@pytest.fixture(scope="module")
def found_more(tmp_path_factory) -> dict[str, np.ndarray]:
    names = [case.name for case in MORE_CASES]
    return run_child(tmp_path_factory.mktemp("more_transports"), names)


def run_child(folder: Path, names: list[str]) -> dict[str, np.ndarray]:
    """Results of the named cases; a hang ends after ten minutes."""
    out = folder / "found.npz"
    paths = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    flags = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("transport_child.py")), str(out), *names],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    with np.load(out) as arrays:
        return dict(arrays)


def expected(case: Case) -> tuple[dense.Result, np.ndarray]:
    """What the case must give over all expert groups, and the kept mask [T, K]."""
    inputs = make_inputs(case)
    ids = np.where(inputs.valid[:, None], inputs.experts, case.experts)
    groups = ids.reshape(case.num_groups, case.mesh[3], -1)
    kept = [dense.keep(group, case.exchange().capacities) for group in groups]
    masks = np.stack([part.mask for part in kept]).reshape(inputs.c.shape)
    skipped = int((~inputs.valid).sum()) * case.selected
    drops = sum(part.sender for part in kept), sum(part.receiver for part in kept), skipped
    return dense.apply_dense(inputs, masks, drops), masks


def wrong_rows(found: np.ndarray, reference: np.ndarray, tolerance: float, whole=False):
    """Tokens, or experts, whose largest error exceeds tolerance * (1 + largest reference).

    The largest is that of the token or the expert, with `whole` that of all.
    """
    axes = tuple(range(1, found.ndim))
    largest = np.abs(reference).max(axis=None if whole else axes)
    error = np.abs(found - reference).max(axis=axes)
    return np.flatnonzero(~(error <= tolerance * (1 + largest)))


def check(case: Case, found: dict[str, np.ndarray]) -> None:
    """Values, gradients and counts of a case against the dense reference."""
    reference, masks = expected(case)
    rounded = case.dtype == "bfloat16"
    for field in FIELDS:
        value, wanted = found[f"{case.name}/{field}"], getattr(reference, field)
        assert wrong_rows(value, wanted, 2e-2 if rounded else 1e-5, rounded).size == 0, field
    assert tuple(found[f"{case.name}/drops"]) == reference.drops
    assert (found[f"{case.name}/dc"][~masks] == 0).all()
    valid = make_inputs(case).valid
    assert (found[f"{case.name}/y"][~valid] == 0).all()
    assert (found[f"{case.name}/dx"][~valid] == 0).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_dense_reference(found, case):
    check(case, found)


def test_the_large_case_is_one_for_numpy():
    inputs = make_inputs(LARGE)
    mlp = GatedMlp(inputs.gate, inputs.up, inputs.down)
    assert kernels.choose_experts(mlp, LARGE.tokens * LARGE.selected) is kernels.SORTED


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_CASES, ids=lambda case: case.name)
def test_more_equal_the_dense_reference(found_more, case):
    check(case, found_more)


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.case.name)
def test_golden_problem_on_two_devices(found, golden):
    name = golden.case.name
    x = 1 + np.arange(8) % 4
    keep = np.array([int(bit) for bit in golden.keep]).reshape(G1_IDS.shape)
    assert found[f"{name}/y"][:, 0].tolist() == list(golden.y)
    assert found[f"{name}/dx"][:, 0].tolist() == (np.array(golden.y) / x).tolist()
    assert found[f"{name}/dc"].tolist() == (keep * (G1_IDS + 1) * x[:, None]).tolist()
    assert tuple(found[f"{name}/drops"]) == golden.drops


def test_one_broken_expert_is_caught():
    reference, _ = expected(BY_NAME["ragged"])
    sizes = np.abs(reference.ddown).max(axis=(1, 2))
    weakest = int(np.argmin(np.where(sizes == 0, np.inf, sizes)))
    broken = reference.ddown.copy()
    broken[weakest] *= 1.001
    assert wrong_rows(broken, reference.ddown, 1e-5).tolist() == [weakest]
    broken = reference.y.copy()
    broken[5, 0] += 1e-3
    assert wrong_rows(broken, reference.y, 1e-5).tolist() == [5]


def test_drops_happen_where_they_are_compared():
    for case in CASES:
        dropless = (case.gate == "none" and case.transport != "pooled") or case.padding == 1
        dropless |= "dropless" in case.name
        sender, receiver, _ = expected(case)[0].drops
        assert (sender + receiver == 0) == dropless, case.name


@pytest.mark.parametrize(
    ("one", "other", "tolerance"),
    [
        *(
            (*pair, 1e-5)
            for pair in itertools.combinations(
                ("grouped", "ring", "cell dropless", "pooled dropless", "ragged model"), 2
            )
        ),
        ("ring waterfill", "ragged waterfill", 1e-5),
        ("bfloat16 ragged", "bfloat16 cell", 1e-6),
    ],
)
def test_transports_agree(found, one, other, tolerance):
    for field in FIELDS:
        a, b = found[f"{one}/{field}"], found[f"{other}/{field}"]
        assert wrong_rows(a, b, tolerance, tolerance == 1e-6).size == 0, field
    assert found[f"{one}/drops"].tolist() == found[f"{other}/drops"].tolist()


def test_chunks_save_memory(found):
    one, two = found[MEMORY]
    assert two < 0.8 * one
