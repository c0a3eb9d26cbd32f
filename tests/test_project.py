"""A project folder: made once, opened with overrides, named by relative paths."""

from pathlib import Path

import pytest

from portolan.errors import StorageError, UsageError
from portolan.files import write_json_atomic
from portolan.project import create_project, open_project
from portolan.recipe import find_recipe


def test_project_holds_an_exact_copy_of_its_recipe(tmp_path: Path) -> None:
    path = create_project(tmp_path / "a" / "b", "pocket", exist_ok=False)
    assert path == tmp_path / "a" / "b" / "recipe.toml"
    assert path.read_bytes() == find_recipe("pocket").read_bytes()
    assert open_project(path.parent).recipe.name == "pocket"


def test_existing_project_is_kept_and_other_folders_are_refused(tmp_path: Path) -> None:
    path = create_project(tmp_path / "p", "pocket", exist_ok=False)
    changed = path.read_text() + "# mine\n"
    path.write_text(changed)
    with pytest.raises(UsageError, match="already holds a project"):
        create_project(tmp_path / "p", "pocket", exist_ok=False)
    assert create_project(tmp_path / "p", "laptop", exist_ok=True) == path
    assert path.read_text() == changed
    with pytest.raises(UsageError, match="is not empty"):
        create_project(tmp_path, "pocket", exist_ok=True)
    with pytest.raises(UsageError, match="is a file"):
        create_project(path, "pocket", exist_ok=False)


def test_bad_recipe_makes_no_folder(tmp_path: Path) -> None:
    recipe = tmp_path / "bad.toml"
    recipe.write_text("name = 3\n")
    for name in ("nothing", str(recipe), str(tmp_path / "none.toml")):
        with pytest.raises(UsageError):
            create_project(tmp_path / "p", name, exist_ok=False)
    assert not (tmp_path / "p").exists()


def test_folder_below_a_file_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Not a directory"):
        create_project(tmp_path / "file" / "p", "pocket", exist_ok=False)


def test_overrides_change_the_recipe_of_the_command_only(tmp_path: Path) -> None:
    create_project(tmp_path / "p", "pocket", exist_ok=False)
    project = open_project(tmp_path / "p", ("seed=7", 'name="other"'))
    assert (project.recipe.seed, project.recipe.name) == (7, "other")
    assert open_project(tmp_path / "p").recipe.seed != 7


def test_folder_without_a_recipe_is_not_a_project(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a project: it has no recipe\.toml") as error:
        open_project(tmp_path)
    assert "portolan init" in error.value.remedy


def test_paths_are_named_relative_to_the_project(tmp_path, monkeypatch) -> None:
    create_project(tmp_path / "p", "pocket", exist_ok=False)
    project = open_project(tmp_path / "p")
    assert project.relative(project.runs / "r" / "run.json") == "runs/r/run.json"
    monkeypatch.chdir(tmp_path / "p")
    assert open_project(Path()).relative(project.site / "index.html") == "site/index.html"
    assert project.read("runs", "r", "run.json") is None
    write_json_atomic(project.runs / "r" / "run.json", {"id": "r"})
    assert project.read("runs", "r", "run.json") == {"id": "r"}
