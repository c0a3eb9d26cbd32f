"""A Ray in processes of this machine, and the toy pipeline's result in this process."""

import os
import tempfile
from pathlib import Path

import pytest
from tests.data.engine import toy

from portolan.data.engine import Engine

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def ray_cluster():
    """Ray with 2 CPUs and a small object store, stopped when the test ends."""
    import ray

    with (
        tempfile.TemporaryDirectory(prefix="ray-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "src")]))
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 << 20,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=folder,
        )
        yield ray
        ray.shutdown()


@pytest.fixture(scope="session")
def expected(tmp_path_factory):
    """The toy pipeline in this process, with memory for everything: its folder and digests."""
    root = tmp_path_factory.mktemp("expected")
    toy.run_toy(Engine(), root)
    return root, toy.tree(root)
