"""A project folder: where everything of one run lives."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portolan.errors import UsageError
from portolan.files import read_json, storage_errors, write_bytes_atomic
from portolan.recipe import Recipe, find_recipe, load_recipe

RECIPE_FILE = "recipe.toml"
CURATION_LOG = Path("logs", "curation.json")
"""What each step of curation took when it last ran."""


@dataclass(frozen=True)
class Project:
    """The folder of a run and its recipe."""

    root: Path
    recipe: Recipe

    @property
    def corpus(self) -> Path:
        """Documents, held-out documents, tokens."""
        return self.root / "corpus"

    @property
    def runs(self) -> Path:
        """One folder a run."""
        return self.root / "runs"

    @property
    def forecasts(self) -> Path:
        """One JSON file a forecast."""
        return self.root / "forecasts"

    @property
    def record(self) -> Path:
        """Journal, heads and blobs."""
        return self.root / "record"

    @property
    def site(self) -> Path:
        """The report page."""
        return self.root / "site"

    def relative(self, path: Path) -> str:
        """Path relative to the project, as the record names it."""
        return path.resolve().relative_to(self.root.resolve()).as_posix()

    def read(self, *parts: str) -> Any:
        """A JSON file of the project, or None when it does not exist."""
        path = self.root.joinpath(*parts)
        return read_json(path) if path.is_file() else None


def create_project(root: Path, recipe_name: str, *, exist_ok: bool) -> Path:
    """Make the folder with its recipe; an existing recipe is never overwritten.

    Raises:
        UsageError: the folder already holds a project or other files.
    """
    target = root / RECIPE_FILE
    if target.exists():
        if exist_ok:
            return target
        raise UsageError(
            f"{root} already holds a project",
            remedy="choose another folder, or pass --exist-ok to keep it as it is",
        )
    if root.exists() and not root.is_dir():
        raise UsageError(f"{root} is a file", remedy="choose a folder")
    if root.is_dir() and any(root.iterdir()):
        raise UsageError(f"{root} is not empty", remedy="choose a new or an empty folder")
    source = find_recipe(recipe_name)
    load_recipe(source)
    with storage_errors(root):
        root.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(target, source.read_bytes())
    return target


def open_project(root: Path, overrides: tuple[str, ...] = ()) -> Project:
    """The project in `root` with its recipe after `overrides`."""
    if not (root / RECIPE_FILE).is_file():
        raise UsageError(
            f"{root} is not a project: it has no {RECIPE_FILE}",
            remedy=f"make one with: portolan init {root} --recipe pocket",
        )
    return Project(root=root, recipe=load_recipe(root / RECIPE_FILE, overrides))
