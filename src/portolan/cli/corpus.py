"""The verbs about the corpus: what is in it, and in which proportions it is read."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from portolan.cli.app import SetOption, WorkersOption, app, open_project_of

mixture = typer.Typer(
    help="Weights of the cells of the corpus: propose them in closed form or from a swarm of small "
    "runs, look at them, check them. Example: portolan -C my-run mixture propose --method unimax",
    no_args_is_help=True,
)
app.add_typer(mixture, name="mixture")
FileArgument = Annotated[Path, typer.Argument(help="A mixture file.")]


@mixture.command("propose")
def mixture_propose(
    context: typer.Context,
    method: Annotated[
        Literal["proportional", "temperature", "unimax", "surrogate"],
        typer.Option(help="Closed form, or a search over the results of a swarm."),
    ] = "proportional",
    exponent: Annotated[
        float, typer.Option(min=0.0, help="temperature: weights are tokens to this power.")
    ] = 0.5,
    max_epochs: Annotated[
        float, typer.Option(min=0.0, help="Closed forms: cap; default: the recipe's.")
    ] = 0.0,
    model: Annotated[
        Literal["process", "log-linear", "exposure"], typer.Option(help="surrogate: its kind.")
    ] = "process",
    acquisition: Annotated[
        Literal["mean", "noisy-ei"],
        typer.Option(help="surrogate: expected value, or noisy expected improvement."),
    ] = "mean",
    target: Annotated[
        list[str] | None,
        typer.Option(help="surrogate: held-out domain to improve; repeat; default: all."),
    ] = None,
    guard: Annotated[
        list[str] | None,
        typer.Option(help="surrogate: held-out domain that must not get worse; repeat."),
    ] = None,
    from_phase: Annotated[
        str,
        typer.Option(help="surrogate: search near the recipe's mixture from this phase on only."),
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="surrogate: of its candidates.")] = 0,
    overrides: SetOption = None,
) -> None:
    """Write a checked mixture file and print its epochs per cell against the cap. Example:
    portolan -C my-run mixture propose --method temperature --exponent 0.5
    """
    from portolan.pipeline.mixtures import SearchOptions, propose

    options = SearchOptions(
        model, acquisition, tuple(target or ()), tuple(guard or ()), from_phase, seed
    )
    propose(
        open_project_of(context, overrides),
        method,
        exponent=exponent,
        cap_epochs=max_epochs,
        options=options,
    )


@mixture.command("swarm")
def mixture_swarm(
    context: typer.Context,
    designs: Annotated[int, typer.Option(min=0, help="Mixtures far from each other.")] = 8,
    seeds: Annotated[
        int, typer.Option(min=2, help="Seeds of the proportional mixture and of candidates.")
    ] = 2,
    candidate: Annotated[
        list[Path] | None,
        typer.Option(help="Mixture file to compare with the present mixture; repeat."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it costs; train nothing.")
    ] = False,
    workers: WorkersOption = None,
    overrides: SetOption = None,
) -> None:
    """Train runs of the smallest rung that differ in their mixture only, and keep what they show.
    Resumes where it stopped. Example: portolan -C my-run mixture swarm --designs 12
    """
    from portolan.pipeline.mixtures import swarm

    swarm(
        open_project_of(context, overrides),
        num_designs=designs,
        num_seeds=seeds,
        candidates=candidate or [],
        dry_run=dry_run,
        num_workers=workers,
    )


@mixture.command("show")
def mixture_show(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(help="A mixture file; default: the target's mixture.")
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Print weights, budgets and epochs of a mixture. Example: portolan -C my-run mixture show"""
    from portolan.pipeline.mixture_view import show

    show(open_project_of(context, overrides), file)


@mixture.command("check")
def mixture_check(context: typer.Context, file: FileArgument, overrides: SetOption = None) -> None:
    """Check a mixture file against tokenizer, store and target; exit code 2 if it does not fit.
    Example: portolan -C my-run mixture check mixtures/unimax-1a2b3c4d.json
    """
    from portolan.pipeline.mixture_view import check

    check(open_project_of(context, overrides), file)


@mixture.command("diff")
def mixture_diff(first: FileArgument, second: FileArgument) -> None:
    """Print how two mixture files differ. Example: portolan mixture diff old.json new.json"""
    from portolan.pipeline.mixture_view import diff

    diff(first, second)


@app.command("map")
def data_map(
    context: typer.Context,
    open_page: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    labels: Annotated[
        Path | None,
        typer.Option(help="Labels exported from the pair browser: print precision instead."),
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Write the pages of the corpus to site/map: domains, duplicates, decontamination, mixture,
    provenance, stages. Example: portolan -C my-run map --open
    """
    from portolan.pipeline import mapping

    project = open_project_of(context, overrides)
    if labels is not None:
        mapping.review(project, labels)
    else:
        mapping.make_map(project, open_page=open_page)
