"""The verbs that look at what a run left."""

from pathlib import Path
from typing import Annotated

import typer

from portolan import __version__
from portolan.cli.app import SetOption, app, open_project_of
from portolan.console import say


@app.command()
def version() -> None:
    """Print the version. Example: portolan version"""
    say(__version__)


@app.command()
def evaluate(
    context: typer.Context,
    run_id: Annotated[str, typer.Option("--run", help="Run id; default: the target.")] = "",
    overrides: SetOption = None,
) -> None:
    """Evaluate a run's newest checkpoint. Example: portolan -C my-run evaluate"""
    from portolan.pipeline import inspect

    inspect.evaluate(open_project_of(context, overrides), run_id)


@app.command()
def sample(
    context: typer.Context,
    prompts: Annotated[list[str] | None, typer.Argument(help="Texts to continue.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A text to continue on every line of a file.")
    ] = None,
    run_id: Annotated[str, typer.Option("--run", help="Run id; default: the target.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to write for each.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.95,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    overrides: SetOption = None,
) -> None:
    """Continue texts from a checkpoint. Example: portolan -C my-run sample "def " "import " """
    from portolan.pipeline import inspect

    texts = [*(prompts or []), *(inspect.read_prompts(prompt_file) if prompt_file else [])]
    inspect.sample(
        open_project_of(context, overrides),
        run_id,
        texts or ["def "],
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
    """Print the documents behind a step, from what the run left. Example:
    portolan -C my-run show-batch 0
    """
    from portolan.pipeline.batches import show_batch as show

    show(open_project_of(context, overrides), run_id, step)


@app.command()
def verify(
    context: typer.Context,
    bundle: Annotated[
        Path | None,
        typer.Argument(help="A bundle, or a folder it was unpacked to; default: the project."),
    ] = None,
    head: Annotated[
        Path | None, typer.Option(help="A head you held before: detects truncation.")
    ] = None,
    tsa_root: Annotated[
        Path | None, typer.Option(help="Certificates (PEM) of time-stamp authorities you trust.")
    ] = None,
    limits: Annotated[
        bool, typer.Option("--limits", help="Print what hashes do not prove.")
    ] = False,
) -> None:
    """Check the record offline. Example: portolan verify bundle.zip"""
    from portolan.pipeline import verifying

    code = verifying.verify(context.obj.root, bundle, head, tsa_root, limits=limits)
    raise typer.Exit(code)


@app.command()
def doctor(context: typer.Context) -> None:
    """Say what this machine can do. Example: portolan doctor"""
    from portolan.pipeline.doctor import print_report

    print_report(context.obj.root)
