"""The application, its options and what every verb shares."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from portolan.project import Project

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
        "read-only, 7 training diverged, 8 pending, 9 unsupported (of `reconcile`), 10 watch, "
        "11 off course, 12 no verdict (of `watch`), 130 interrupted."
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

WorkersOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Runs at once on a CPU, one thread each; as many as cores and memory allow if not "
        "given. It changes no bit of a run.",
    ),
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


def open_project_of(context: typer.Context, overrides: list[str] | None) -> "Project":
    """The project that the verb acts on, with its overrides applied."""
    from portolan.project import open_project

    return open_project(context.obj.root, tuple(overrides or ()))
