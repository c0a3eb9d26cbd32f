"""The launch files of examples/scale-out: their syntax, and that what they start exists."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from portolan.cli import app
from portolan.pipeline.machine import parse_mesh

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "scale-out"
FILES = ("train.sbatch", "jobset.yaml", "skypilot.yaml")


@pytest.mark.parametrize("name", FILES)
def test_launch_files_start_train_with_options_that_exist(name: str) -> None:
    text = (FOLDER / name).read_text()
    command = re.sub(r"\\?\n\s*", " ", text[text.index("portolan -C") :])
    root = typer.main.get_command(app)
    train = root.get_command(typer.Context(root), "train")  # type: ignore[attr-defined]
    known = {option for parameter in train.params for option in parameter.opts}
    used = set(re.findall(r" (--[a-z-]+)", command.split("status=")[0].split(" env: ")[0]))
    assert used <= known
    assert used >= {"--mesh"}
    assert used & {"--distributed", "--coordinator"}
    mesh = parse_mesh(re.search(r"--mesh (\S+)", command).group(1))  # type: ignore[union-attr]
    assert mesh.expert > 1


def test_pods_agree_on_their_number_and_their_first() -> None:
    jobset = yaml.safe_load((FOLDER / "jobset.yaml").read_text())
    name = jobset["metadata"]["name"]
    (group,) = jobset["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert job["completionMode"] == "Indexed"
    assert f"--num-processes {job['parallelism']} " in container["args"][0]
    assert job["completions"] == job["parallelism"]
    (coordinator,) = (one["value"] for one in container["env"] if one["name"] == "COORDINATOR")
    port = container["ports"][0]["containerPort"]
    assert coordinator == f"{name}-{group['name']}-0-0.{name}:{port}"
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_the_slurm_file_is_a_script_for_as_many_processes_as_devices() -> None:
    path = FOLDER / "train.sbatch"
    if shell := shutil.which("bash"):
        subprocess.run([shell, "-n", str(path)], check=True)
    text = path.read_text()
    tasks, devices = (
        int(re.search(rf"--{option}=(\d+)", text).group(1))  # type: ignore[union-attr]
        for option in ("ntasks-per-node", "gpus-per-node")
    )
    assert tasks == devices
    assert text.startswith("#!")


def test_the_guide_links_every_launch_file() -> None:
    guide = (FOLDER.parent.parent / "docs" / "scale-out.md").read_text()
    for name in FILES:
        assert f"(../examples/scale-out/{name})" in guide
