"""The verbs that bring in other people's runs and take series out."""

from pathlib import Path
from typing import Annotated

import typer

from portolan.cli.app import app
from portolan.console import say


@app.command("import")
def import_(
    context: typer.Context,
    kind: Annotated[str, typer.Argument(help="wandb, tensorboard, trackio, csv or json.")],
    source: Annotated[
        str, typer.Argument(help="entity/project/run, a folder of event files, or a file.")
    ],
    run_id: Annotated[str, typer.Option(help="Id of the run here; default: its name.")] = "",
    lineage: Annotated[str, typer.Option(help="Lineage that the run belongs to.")] = "imported",
    role: Annotated[
        str, typer.Option(help="production, trial, control, rolled_back or ablation.")
    ] = "production",
    parent: Annotated[str, typer.Option(help="Run id that this run continues.")] = "",
    fork_completed: Annotated[
        int, typer.Option(min=0, help="Updates completed at the checkpoint of the hand-over.")
    ] = 0,
    fork_tracker_step: Annotated[
        int | None, typer.Option(help="The same place on the tracker's own counter, if known.")
    ] = None,
    step_key: Annotated[
        str, typer.Option(help="Field that counts steps; default: step, for wandb _step.")
    ] = "",
    clock: Annotated[
        str,
        typer.Option(
            help="What it counts: row (zero-based training rows), completed (updates done) or "
            "tracker (the tracker's own counter); default: tracker for wandb and trackio, else row."
        ),
    ] = "",
    name: Annotated[str, typer.Option(help="Name of the run, where a file holds several.")] = "",
    samples: Annotated[
        int | None, typer.Option(min=1, help="wandb: the sampled history of this size.")
    ] = None,
    base_url: Annotated[str, typer.Option(help="wandb: address of another server.")] = "",
    basis: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=BASIS", help="Meaning of a series, for reconcile."),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Import the run anew.")] = False,
) -> None:
    """Bring in a run of another tracker. Example: portolan -C audit import csv their-run.csv"""
    from portolan.pipeline.importing import (
        Placement,
        import_run,
        open_source,
        parse_bases,
        parse_clock,
    )

    history = open_source(kind, source, name=name, samples=samples, base_url=base_url)
    placement = Placement(
        run_id=run_id or history.default_id,
        lineage=lineage,
        role=role,  # type: ignore[arg-type]
        parent=parent,
        fork_completed=fork_completed,
        fork_tracker_step=fork_tracker_step,
    )
    import_run(
        context.obj.root,
        history,
        parse_clock(kind, step_key, clock),
        placement,
        bases=parse_bases(basis or []),
        replace=replace,
    )


@app.command()
def series(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A run, or a lineage: its canonical curve.")],
    output: Annotated[Path, typer.Argument(help="File to write: .parquet, .csv or .json.")],
    key: Annotated[
        list[str] | None, typer.Option(help="Only this series; may be repeated.")
    ] = None,
    replays: Annotated[
        bool, typer.Option("--replays", help="With the rows that a later attempt repeated.")
    ] = False,
) -> None:
    """Write series as one table. Example: portolan -C audit series their-run curve.csv"""
    from portolan.pipeline.series import export_series

    rows = export_series(context.obj.root, name, output, key or (), replays=replays)
    say(f"{output}: {rows:,} values")
