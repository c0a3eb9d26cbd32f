"""Verbs of the forecaster and of the run beside its forecast."""

from pathlib import Path
from typing import Annotated

import typer

from portolan.cli.app import SetOption, app, open_project_of

forecast = typer.Typer(
    help="Forecast the target from the finished rungs. Example: portolan -C my-run forecast",
    invoke_without_command=True,
)
app.add_typer(forecast, name="forecast")


@forecast.callback()
def fit(context: typer.Context, overrides: SetOption = None) -> None:
    """Forecast the target from the finished rungs. Example: portolan -C my-run forecast"""
    if context.invoked_subcommand is not None:
        return
    from portolan.pipeline import stages

    stages.forecast(open_project_of(context, overrides))


@forecast.command()
def backtest(
    tasks: Annotated[Path, typer.Argument(help="JSON list of ladders with a larger run each.")],
    output: Annotated[Path, typer.Option(help="Where to write the predictions, JSON.")],
    exclude_family: Annotated[
        list[str] | None,
        typer.Option(help="Learn nothing from this suite or family; may be repeated."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Also write a page of the scores here.")
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(help="Parquet table of runs: noise from repeats, pools for N,D fits."),
    ] = None,
    curves: Annotated[
        Path | None,
        typer.Option(help="Parquet table of loss curves: TASKS is a CSV of tasks within runs."),
    ] = None,
) -> None:
    """Forecast tasks with known or unknown outcomes.

    Example: portolan forecast backtest tasks.json --output predictions.json
    """
    from portolan.pipeline import backtesting

    if curves is not None:
        backtesting.predict_curves(tasks, curves, output, report=report)
    else:
        backtesting.predict_tasks(
            tasks, output, exclude=tuple(exclude_family or ()), runs=runs, report=report
        )


@forecast.command()
def amend(
    context: typer.Context,
    change: Annotated[str, typer.Option(help="Id of the change, or a part; default: newest.")] = "",
    shift: Annotated[
        list[str] | None,
        typer.Option(metavar="MEAN,SD", help="Expected effect in nats; may be repeated."),
    ] = None,
    multiplier: Annotated[
        list[str] | None,
        typer.Option(metavar="RATIO,SD", help="Expected effect as compute; may be repeated."),
    ] = None,
    reason: Annotated[str, typer.Option(help="Why the forecast changes.")] = "",
    overrides: SetOption = None,
) -> None:
    """Register a new forecast after a recorded change; the earlier one stays and stays scored.

    Example: portolan -C my-run forecast amend --shift -0.009,0.010
    """
    from portolan.pipeline import amending

    amending.amend(
        open_project_of(context, overrides),
        change_id=change,
        shifts=shift or (),
        multipliers=multiplier or (),
        reason=reason,
    )


@forecast.command("ledger")
def show_ledger(
    context: typer.Context,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    overrides: SetOption = None,
) -> None:
    """Every forecast of the target, its status and its score. Example: portolan forecast ledger"""
    from portolan.pipeline import amending

    amending.show_ledger(open_project_of(context, overrides), as_json=json_)


@app.command()
def delay(
    context: typer.Context,
    horizon: Annotated[float, typer.Option(help="Share of the planned updates to keep.")],
    from_step: Annotated[int, typer.Option(min=0, help="Completed updates at the cut.")],
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    overrides: SetOption = None,
) -> None:
    """What a shortened run would change and cost; changes nothing.

    Example: portolan -C my-run delay --horizon 0.8 --from-step 300
    """
    from portolan.pipeline import amending

    amending.show_delay(open_project_of(context, overrides), horizon, from_step, as_json=json_)


@app.command()
def watch(
    context: typer.Context,
    follow: Annotated[
        bool, typer.Option("--follow", help="Look again and again until the run ends.")
    ] = False,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks.")] = 5.0,
    trace: Annotated[
        Path | None, typer.Option(help="Replay recorded signals instead, and print the alarms.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    overrides: SetOption = None,
) -> None:
    """The target against its forecast, its rungs and the health rules.

    The exit code is the verdict: 0 clear, 10 watch, 11 off course, 12 no verdict yet.
    Example: portolan -C my-run watch
    """
    from portolan.pipeline import watching

    project = open_project_of(context, overrides)
    if trace is not None:
        raise typer.Exit(watching.replay(project, trace, as_json=json_))
    raise typer.Exit(watching.watch(project, follow=follow, as_json=json_, every=every))
