"""The command line: one verb, one short function.

Exit codes: 0 done; 1 failed or a check failed; 2 wrong usage, recipe or input; 3 saved state
exists but cannot be trusted; 4 the record is unsigned; 5 the record has a torn tail; 6 the disk is
full, read-only or refuses writes; 7 training diverged; 130 interrupted.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from portolan import __version__
from portolan.console import errors, say
from portolan.errors import PortolanError, StorageError
from portolan.files import STORAGE_REMEDIES

INTERRUPTED = 130

app = typer.Typer(
    name="portolan",
    help="Train mixture-of-experts language models in the open: curate, rehearse, forecast, "
    "register, train, verify.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog=(
        "Exit codes: 0 done, 1 failed or a check failed, 2 wrong usage, recipe or input, 3 saved "
        "state cannot be trusted, 4 record unsigned, 5 record has a torn tail, 6 storage full or "
        "read-only, 7 training diverged, 130 interrupted."
    ),
)


@dataclass(frozen=True)
class Options:
    """Options before the verb."""

    root: Path
    debug: bool


SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key, e.g. seed=1."),
]


@app.callback()
def options(
    context: typer.Context,
    project: Annotated[
        Path, typer.Option("-C", "--project", metavar="DIR", help="Project folder.")
    ] = Path(),
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Act on the project in the current folder, or in -C DIR."""
    context.obj = Options(root=project, debug=debug)


@app.command()
def version() -> None:
    """Print the version. Example: portolan version"""
    say(__version__)


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

    stages.run_all(_project(context, overrides), dry_run=dry_run)


@app.command()
def curate(context: typer.Context, overrides: SetOption = None) -> None:
    """Documents into a token store. Example: portolan -C my-run curate"""
    from portolan.pipeline import stages

    stages.curate(_project(context, overrides))


@app.command()
def ladder(context: typer.Context, overrides: SetOption = None) -> None:
    """Train the rungs that are not finished. Example: portolan -C my-run ladder"""
    from portolan.pipeline import stages

    stages.train_rungs(_project(context, overrides))


@app.command()
def forecast(context: typer.Context, overrides: SetOption = None) -> None:
    """Forecast the target from the finished rungs. Example: portolan -C my-run forecast"""
    from portolan.pipeline import stages

    stages.forecast(_project(context, overrides))


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

    stages.register(_project(context, overrides), retrospective=retrospective)


@app.command()
def train(context: typer.Context, overrides: SetOption = None) -> None:
    """Train the target, resuming where it stopped. Example: portolan -C my-run train"""
    from portolan.pipeline import stages

    stages.train_target(_project(context, overrides))


@app.command()
def score(context: typer.Context, overrides: SetOption = None) -> None:
    """Score the forecast against the target. Example: portolan -C my-run score"""
    from portolan.pipeline import stages

    stages.score(_project(context, overrides))


@app.command()
def evaluate(
    context: typer.Context,
    run_id: Annotated[str, typer.Option("--run", help="Run id; default: the target.")] = "",
    overrides: SetOption = None,
) -> None:
    """Evaluate a run's newest checkpoint. Example: portolan -C my-run evaluate"""
    from portolan.pipeline import inspect

    inspect.evaluate(_project(context, overrides), run_id)


@app.command()
def sample(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")] = "def ",
    run_id: Annotated[str, typer.Option("--run", help="Run id; default: the target.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.95,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    overrides: SetOption = None,
) -> None:
    """Write text from a checkpoint. Example: portolan -C my-run sample "def main" """
    from portolan.pipeline import inspect

    inspect.sample(
        _project(context, overrides),
        run_id,
        prompt,
        num_tokens=tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )


@app.command("show-batch")
def show_batch(
    context: typer.Context,
    step: Annotated[int, typer.Argument(min=0, help="Zero-based step.")],
    run_id: Annotated[str, typer.Option("--run", help="Run id; default: the target.")] = "",
    overrides: SetOption = None,
) -> None:
    """Print the documents behind a step. Example: portolan -C my-run show-batch 0"""
    from portolan.pipeline import inspect

    inspect.show_batch(_project(context, overrides), run_id, step)


@app.command()
def verify(
    context: typer.Context,
    head: Annotated[
        Path | None, typer.Option(help="A head you held before: detects truncation.")
    ] = None,
    limits: Annotated[
        bool, typer.Option("--limits", help="Print what hashes do not prove.")
    ] = False,
) -> None:
    """Check the record offline. Example: portolan -C my-run verify"""
    from portolan.pipeline import inspect

    raise typer.Exit(inspect.verify(context.obj.root, head, limits=limits))


@app.command()
def report(context: typer.Context, overrides: SetOption = None) -> None:
    """Build the page site/index.html. Example: portolan -C my-run report"""
    from portolan.pipeline import stages

    stages.report(_project(context, overrides))


@app.command()
def doctor(context: typer.Context) -> None:
    """Say what this machine can do. Example: portolan doctor"""
    from portolan.pipeline.doctor import print_report

    print_report(context.obj.root)


def _project(context: typer.Context, overrides: list[str] | None):
    from portolan.project import open_project

    return open_project(context.obj.root, tuple(overrides or ()))


def main() -> None:
    """Entry point: errors become one message and a documented exit code."""
    debug = "--debug" in sys.argv
    try:
        app(standalone_mode=True)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            _explain("interrupted", "run the same command again to go on")
        raise
    except PortolanError as error:
        if debug:
            raise
        errors.print(f"portolan: {error}", markup=False)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _explain("interrupted", "run the same command again to go on")
        sys.exit(INTERRUPTED)
    except Exception as error:
        if debug:
            raise
        sys.exit(_explain_unexpected(error))


def _explain_unexpected(error: Exception) -> int:
    """Print an error that no stage translated; returns the exit code."""
    if isinstance(error, OSError) and error.errno in STORAGE_REMEDIES:
        place = error.filename or "a file"
        _explain(f"cannot write {place}: {error.strerror}", STORAGE_REMEDIES[error.errno])
        return StorageError.exit_code
    _explain(
        f"{type(error).__name__}: {error}",
        "this is a defect of Portolan: please report it with what --debug shows",
    )
    return PortolanError.exit_code


def _explain(message: str, remedy: str) -> None:
    errors.print(f"portolan: {message}\n  remedy: {remedy}", markup=False)


if __name__ == "__main__":
    main()
