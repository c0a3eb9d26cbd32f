"""The verbs that ask what a component is worth, and those that change a run while it goes on."""

from pathlib import Path
from typing import Annotated

import typer

from portolan.cli.app import SetOption, WorkersOption, app, open_project_of
from portolan.errors import UsageError


@app.command()
def ablate(
    context: typer.Context,
    arms: Annotated[
        str, typer.Option(help="Names of arms, separated by commas; default: all.")
    ] = "",
    widths: Annotated[
        str,
        typer.Option(help="Widths, separated by commas; default: the two smallest of the ladder."),
    ] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of every arm.")] = 3,
    tokens_per_param: Annotated[
        float | None, typer.Option(help="Tokens per active parameter; default: the recipe's.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it costs; train nothing.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
    workers: WorkersOption = None,
    overrides: SetOption = None,
) -> None:
    """What each component is worth: variants of the recipe, trained with several seeds at equal
    tokens and at equal FLOPs. Resumes where it stopped. Example: portolan -C my-run ablate
    --widths 32 --seeds 3
    """
    from portolan.pipeline.ablation import ablate

    ablate(
        open_project_of(context, overrides),
        arms=_names(arms),
        widths=_widths(widths),
        num_seeds=seeds,
        tokens_per_active_param=tokens_per_param,
        dry_run=dry_run,
        as_json=json_,
        num_workers=workers,
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _widths(text: str) -> list[int]:
    """Whole numbers separated by commas, ascending and without repetition.

    Raises:
        UsageError: a part is not a whole number.
    """
    try:
        return sorted({int(part) for part in _names(text)})
    except ValueError:
        raise UsageError(
            f"--widths {text!r} is not a list of whole numbers", remedy="write e.g. --widths 32,48"
        ) from None


change = typer.Typer(
    help="Change a run while it goes on: recorded first, then training follows. A change before a "
    "completed update is refused. Example: portolan -C my-run change horizon --fraction 0.8 "
    '--reason "the machine is needed elsewhere"',
    no_args_is_help=True,
)
app.add_typer(change, name="change")
ReasonOption = Annotated[str, typer.Option("--reason", help="Why; it enters the record.")]
FromStepOption = Annotated[
    int | None,
    typer.Option(
        "--from-step",
        min=1,
        help="Completed updates before the change; rows and weights wait for the next mixture "
        "block. Default: as soon as possible.",
    ),
]
RunOption = Annotated[str, typer.Option("--run", help="Run id; default: the target.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show what would change; record nothing.")
]


@change.command("context")
def change_context(
    context: typer.Context,
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens of a row from then on.")],
    reason: ReasonOption,
    qk_multiplier: Annotated[
        float | None,
        typer.Option(min=0.0, help="On queries; default: 1 + 0.1 ln(S / S0) times the first."),
    ] = None,
    from_step: FromStepOption = None,
    run_id: RunOption = "",
    dry_run: DryRunOption = False,
    overrides: SetOption = None,
) -> None:
    """Longer rows at the same tokens an update. Example: portolan -C my-run change context
    --sequence-length 1024 --reason "longer documents"
    """
    from portolan.pipeline import changes

    changes.change_context(
        open_project_of(context, overrides),
        run_id,
        sequence_length=sequence_length,
        qk_multiplier=qk_multiplier,
        from_step=from_step,
        reason=reason,
        dry_run=dry_run,
    )


@change.command("mixture")
def change_mixture(
    context: typer.Context,
    reason: ReasonOption,
    weight: Annotated[
        list[str] | None,
        typer.Option(metavar="CELL=WEIGHT", help="Repeat; default: proportional to tokens."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Mixture file with the weights, instead of --weight.")
    ] = None,
    phase: Annotated[str, typer.Option(help="Phase of that file; default: its last.")] = "",
    name: Annotated[str, typer.Option(help="Name of the phase.")] = "",
    from_step: FromStepOption = None,
    run_id: RunOption = "",
    dry_run: DryRunOption = False,
    overrides: SetOption = None,
) -> None:
    """Other weights of the cells. Example: portolan -C my-run change mixture
    --weight stdlib-sources=0.7 --weight manual-topics=0.3 --reason "more code at the end"
    """
    from portolan.pipeline import changes

    changes.change_mixture(
        open_project_of(context, overrides),
        run_id,
        weights=changes.parse_weights(weight or []),
        file=file,
        phase=phase,
        name=name,
        from_step=from_step,
        reason=reason,
        dry_run=dry_run,
    )


@change.command("horizon")
def change_horizon(
    context: typer.Context,
    fraction: Annotated[float, typer.Option(min=0.0, help="Share of the planned updates.")],
    reason: ReasonOption,
    from_step: FromStepOption = None,
    run_id: RunOption = "",
    dry_run: DryRunOption = False,
    overrides: SetOption = None,
) -> None:
    """Another end, with rates re-timed towards it. Example: portolan -C my-run change horizon
    --fraction 0.8 --reason "the machine is needed elsewhere"
    """
    from portolan.pipeline import changes

    changes.change_horizon(
        open_project_of(context, overrides),
        run_id,
        fraction=fraction,
        from_step=from_step,
        reason=reason,
        dry_run=dry_run,
    )
