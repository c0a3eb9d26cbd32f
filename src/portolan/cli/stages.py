"""The verbs that do the work of a run."""

from pathlib import Path
from typing import Annotated

import typer

from portolan.cli.app import SetOption, app, open_project_of
from portolan.console import say


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(help="Folder to make.")],
    recipe: Annotated[str, typer.Option(help="Name of a recipe, or a .toml file.")] = "pocket",
    exist_ok: Annotated[
        bool, typer.Option("--exist-ok", help="Keep a project that is already there.")
    ] = False,
) -> None:
    """Make a project folder. Example: portolan init my-run --recipe pocket"""
    from portolan.project import create_project

    path = create_project(directory, recipe, exist_ok=exist_ok)
    say(f"recipe: {path}")


@app.command()
def plan(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Option(help="Plan a recipe by name or file instead of the project's.")
    ] = "",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    overrides: SetOption = None,
) -> None:
    """What it will cost, without training. Example: portolan plan --recipe marin-535b"""
    from portolan.pipeline.plan import print_plan
    from portolan.project import RECIPE_FILE
    from portolan.recipe import find_recipe, load_recipe

    path = find_recipe(recipe) if recipe else context.obj.root / RECIPE_FILE
    print_plan(load_recipe(path, tuple(overrides or ())), as_json=json_)


@app.command()
def run(
    context: typer.Context,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say which stages are missing; do nothing.")
    ] = False,
    overrides: SetOption = None,
) -> None:
    """Everything, in order; only what is missing is done. Example: portolan -C my-run run"""
    from portolan.pipeline import stages

    stages.run_all(open_project_of(context, overrides), dry_run=dry_run)


@app.command()
def curate(
    context: typer.Context,
    executor: Annotated[
        str, typer.Option(help="Where tasks run: local processes, or ray. Bytes do not change.")
    ] = "local",
    address: Annotated[
        str, typer.Option(help="Of a running Ray cluster; without it one is started here.")
    ] = "",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Local processes; one a core if not given.")
    ] = None,
    refit: Annotated[
        bool, typer.Option("--refit", help="Fit domains and quality anew, on all sources.")
    ] = False,
    overrides: SetOption = None,
) -> None:
    """Documents into a token store. Example: portolan -C my-run curate --workers 4"""
    from portolan.pipeline import stages
    from portolan.pipeline.curation import Place

    place = Place(executor, address, workers)
    stages.curate(open_project_of(context, overrides), place, refit=refit)


@app.command()
def ladder(context: typer.Context, overrides: SetOption = None) -> None:
    """Train the rungs that are not finished. Example: portolan -C my-run ladder"""
    from portolan.pipeline import stages

    stages.train_rungs(open_project_of(context, overrides))


@app.command()
def register(
    context: typer.Context,
    retrospective: Annotated[
        bool,
        typer.Option(
            "--retrospective", help="Register although the target has already been evaluated."
        ),
    ] = False,
    overrides: SetOption = None,
) -> None:
    """Seal forecast and plan before the target starts. Example: portolan -C my-run register"""
    from portolan.pipeline import stages

    stages.register(open_project_of(context, overrides), retrospective=retrospective)


@app.command()
def train(context: typer.Context, overrides: SetOption = None) -> None:
    """Train the target, resuming where it stopped. Example: portolan -C my-run train"""
    from portolan.pipeline import stages

    stages.train_target(open_project_of(context, overrides))


@app.command()
def score(context: typer.Context, overrides: SetOption = None) -> None:
    """Score the forecast against the target. Example: portolan -C my-run score"""
    from portolan.pipeline import stages

    stages.score(open_project_of(context, overrides))


@app.command()
def report(context: typer.Context, overrides: SetOption = None) -> None:
    """Build the page site/index.html. Example: portolan -C my-run report"""
    from portolan.pipeline import stages

    stages.report(open_project_of(context, overrides))
