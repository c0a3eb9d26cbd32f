"""What the command line says about devices and processes."""

import pytest

from portolan.errors import UsageError
from portolan.parallel_settings import INFERRED
from portolan.pipeline.machine import Machine, parse_mesh


def test_axes_that_are_not_named_have_length_one():
    mesh = parse_mesh("expert=4, replica=2")
    assert (mesh.replica, mesh.data, mesh.context, mesh.expert, mesh.model) == (2, 1, 1, 4, 1)
    assert parse_mesh("data=-1").data == INFERRED


@pytest.mark.parametrize("text", ["expert", "expert=0", "experts=2", "expert=-1", "data=x", ""])
def test_a_wrong_axis_is_named(text):
    with pytest.raises(UsageError, match="is no axis with its length"):
        parse_mesh(text)


@pytest.mark.parametrize(
    "half",
    [
        {"coordinator": "127.0.0.1:1"},
        {"num_processes": 2},
        {"process_id": 0},
        {"coordinator": "127.0.0.1:1", "num_processes": 2},
    ],
)
def test_half_a_description_is_refused(half):
    with pytest.raises(UsageError, match="belong together"):
        Machine(**half)


def test_either_explicit_or_detected():
    assert Machine(coordinator="127.0.0.1:1", num_processes=2, process_id=0).is_shared
    assert not Machine(mesh="data=2").is_shared
    with pytest.raises(UsageError, match="reads what --coordinator says"):
        Machine(coordinator="127.0.0.1:1", num_processes=2, process_id=0, detect=True)


def test_without_a_scheduler_nothing_is_detected(monkeypatch):
    for name in ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="did not meet"):
        Machine(detect=True).join()
