"""What is logged about norms, and the check that stops a run."""

import jax.numpy as jnp
import numpy as np
import pytest

from portolan.errors import TrainingDiverged
from portolan.optim.groups import GroupRow, GroupTable
from portolan.optim.norms import check_norm_drift, diagnostics, max_norm_drift, norm_drifts

TABLE = GroupTable(
    (
        GroupRow("a", (2, 3, 4), "muonh", "per_layer", False),
        GroupRow("b", (2, 2, 3, 3), "muonh", "joint", False),
        GroupRow("c", (5,), "adam", None, False),
    )
)


@pytest.fixture
def trees() -> tuple[dict, dict, dict]:
    rng = np.random.default_rng(0)
    return tuple(
        {row.path: jnp.asarray(rng.normal(size=row.shape), jnp.float32) for row in TABLE.rows}
        for _ in range(3)
    )


def test_drift_is_the_worst_norm_group(trees) -> None:
    _, old, _ = trees
    assert max_norm_drift(old, old, TABLE) == 0
    new = old | {"a": old["a"].at[1].multiply(1.01), "b": old["b"][:, ::-1], "c": 2 * old["c"]}
    drifts = norm_drifts(old, new, TABLE)
    assert drifts["a"] == pytest.approx(0.01, rel=1e-4)
    assert drifts["b"] < 1e-6, "experts may trade norm under one joint norm"
    assert set(drifts) == {"a", "b"}
    assert max_norm_drift(old, new, TABLE) == drifts["a"]


def test_keys_and_values(trees) -> None:
    grads, old, new = trees
    out = diagnostics(grads, old, new, TABLE)
    assert set(out) == {
        *(f"norm/{kind}/{p}" for kind in ("parameters", "gradient") for p in "abc"),
        *(f"norm/drift/{p}" for p in "ab"),
        "norm/gradient/global",
    }
    assert all(value.shape == () for value in out.values())
    for path in "abc":
        assert out[f"norm/parameters/{path}"] == pytest.approx(np.linalg.norm(new[path].ravel()))
    total = np.sqrt(sum(np.linalg.norm(g.ravel()) ** 2 for g in grads.values()))
    assert out["norm/gradient/global"] == pytest.approx(total)


def test_a_moved_norm_stops_the_run() -> None:
    check_norm_drift({"a": 9e-6, "b": 0.0}, completed=10)
    for drift in (2e-4, float("nan")):
        with pytest.raises(TrainingDiverged, match=r"norm of head/proj moved .* update 10"):
            check_norm_drift({"a": 0.0, "head/proj": drift}, completed=10)
