"""The verbs of the open record: what is claimed, and what supports it."""

from pathlib import Path
from typing import Annotated

import typer

from portolan.cli.app import SetOption, app, open_project_of


@app.command()
def reconcile(
    context: typer.Context,
    folder: Annotated[
        Path | None,
        typer.Argument(help="Folder with a table of claims; without it, the project."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    page: Annotated[
        Path | None, typer.Option(help="Write the page there; a project's goes to site/.")
    ] = None,
) -> None:
    """Do the published figures agree? Exit code: 0 agree or explained, 8 pending, 9 unsupported or
    unreachable, 1 conflict. Example: portolan reconcile examples/marin-535b-audit --page audit.html
    """
    from portolan.pipeline import reconcile as stage

    raise typer.Exit(stage.run(context.obj.root, folder, as_json=as_json, page=page))


@app.command("lint-claims")
def lint_claims(
    context: typer.Context,
    files: Annotated[list[Path], typer.Argument(help="Markdown or HTML files.")],
    claims: Annotated[
        Path | None,
        typer.Option(help="Folder with a table of claims; without it, the project's record."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Does every number in a document resolve to a claim? Exit code 1 if one does not, or if
    something without a licence is called open. Example: portolan -C my-run lint-claims README.md
    """
    from portolan.pipeline import lint

    raise typer.Exit(lint.run(context.obj.root, files, claims, as_json=as_json))


@app.command()
def reach(
    context: typer.Context,
    folder: Annotated[
        Path | None,
        typer.Argument(help="Folder with a table of claims; without it, the project."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    private: Annotated[
        bool, typer.Option("--private", help="Ask hosts on private addresses as well.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=1.0, help="Time for all requests.")] = 900.0,
    max_bytes: Annotated[int, typer.Option(min=1, help="Bytes read of one locator.")] = 256 << 20,
) -> None:
    """Can a stranger fetch what the record cites? Asks anonymously, never with a login. Exit code:
    0 yes, 9 not everything, 1 other bytes than stated. Example: portolan -C my-run reach
    """
    from portolan.pipeline import publish

    code = publish.reach(
        context.obj.root,
        folder,
        as_json=as_json,
        private=private,
        seconds=seconds,
        max_bytes=max_bytes,
    )
    raise typer.Exit(code)


@app.command()
def witness(
    context: typer.Context,
    kind: Annotated[str, typer.Argument(help="rfc3161, git or folder.")],
    place: Annotated[
        str,
        typer.Argument(
            help="URL of the authority, a repository (PATH+sign for a signed tag), or a folder."
        ),
    ],
) -> None:
    """Give the head to somebody outside. Example: portolan -C my-run witness git ../repo"""
    from portolan.pipeline import publish

    publish.witness(context.obj.root, kind, place)


@app.command()
def seal(context: typer.Context, overrides: SetOption = None) -> None:
    """State the end of a project, signed; refused while something is open, missing or unverified.
    Example: portolan -C my-run seal
    """
    from portolan.pipeline import publish

    publish.seal(open_project_of(context, overrides))


@app.command()
def bundle(
    context: typer.Context,
    target: Annotated[
        Path | None, typer.Argument(help="Archive to write; default: bundle.zip of the project.")
    ] = None,
) -> None:
    """Write a sealed project as one archive for strangers. Example: portolan -C my-run bundle"""
    from portolan.pipeline import publish

    publish.bundle(context.obj.root, target)
