"""The verbs that do the work of a run."""

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from portolan.cli.app import SetOption, WorkersOption, app, open_project_of
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
    devices: Annotated[
        int | None, typer.Option(min=1, help="Devices, for a mesh whose `data` is -1.")
    ] = None,
    micro_batches: Annotated[
        int, typer.Option(min=1, help="Parts of a batch that a device works off in turn.")
    ] = 1,
    machine: Annotated[
        str, typer.Option(help="gb200-nvl72, h100-node, h200-node, tpu-v5p, this-cpu or a .toml.")
    ] = "",
    master: Annotated[
        str, typer.Option(help="Where the state lives: resident, device or host_master.")
    ] = "resident",
    mfu: Annotated[
        float | None, typer.Option(help="Utilisation to reckon days with, such as 0.25.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Plan what does not fit the machine's memory.")
    ] = False,
    compile_: Annotated[
        bool,
        typer.Option("--compile", help="Only compile the step for the mesh, beside the plan."),
    ] = False,
    drops: Annotated[
        bool, typer.Option("--drops", help="Only predict how many routed rows would be dropped.")
    ] = False,
    skew: Annotated[
        float | None,
        typer.Option(help="Spread of log popularity of experts; else of a finished run, or 0.1."),
    ] = None,
    sender_skew: Annotated[
        float | None, typer.Option(help="Spread from device to device; 0.2 if not given.")
    ] = None,
    overrides: SetOption = None,
) -> None:
    """What it will cost, without training. Example: portolan plan --recipe marin-535b"""
    from portolan.pipeline.plan import plan_width, print_plan
    from portolan.pipeline.plan_drops import DropOptions, print_drops
    from portolan.pipeline.plan_mesh import MeshOptions
    from portolan.project import RECIPE_FILE, Project
    from portolan.recipe import find_recipe, load_recipe

    path = find_recipe(recipe) if recipe else context.obj.root / RECIPE_FILE
    chosen = load_recipe(path, tuple(overrides or ()))
    if drops:
        target = plan_width(chosen, chosen.model.width)
        runs = None if recipe else Project(context.obj.root, chosen).runs
        options = DropOptions(skew, sender_skew)
        print_drops(chosen, target, devices, runs, options, as_json=json_)
        return
    if compile_:
        from portolan.pipeline.plan_compile import plan_compiled

        plan_compiled(chosen, devices, micro_batches, as_json=json_)
        return
    options = MeshOptions(devices, micro_batches, machine, cast(Any, master), mfu, force)
    print_plan(chosen, options, as_json=json_)


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


MeshOption = Annotated[
    str,
    typer.Option(help="Devices by axis, expert=4,data=2; without it the recipe's."),
]
CoordinatorOption = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Where process 0 of several can be reached.")
]
ProcessesOption = Annotated[int | None, typer.Option(min=1, help="Processes of this run.")]
ProcessOption = Annotated[int | None, typer.Option(min=0, help="Which of them this one is.")]
MicroBatchesOption = Annotated[
    int, typer.Option(min=1, help="Parts in which a batch is worked off, for fewer devices.")
]
DistributedOption = Annotated[
    bool,
    typer.Option("--distributed", help="Read the processes from Slurm, MPI or Kubernetes."),
]


@app.command()
def ladder(
    context: typer.Context,
    workers: WorkersOption = None,
    mesh: MeshOption = "",
    coordinator: CoordinatorOption = "",
    num_processes: ProcessesOption = None,
    process_id: ProcessOption = None,
    distributed: DistributedOption = False,
    micro_batches: MicroBatchesOption = 1,
    overrides: SetOption = None,
) -> None:
    """Train the rungs that are not finished. Example: portolan -C my-run ladder"""
    from portolan.pipeline import stages
    from portolan.pipeline.machine import Machine

    machine = Machine(mesh, coordinator, num_processes, process_id, distributed, micro_batches)
    stages.train_rungs(open_project_of(context, overrides), machine, workers)


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
def train(
    context: typer.Context,
    mesh: MeshOption = "",
    coordinator: CoordinatorOption = "",
    num_processes: ProcessesOption = None,
    process_id: ProcessOption = None,
    distributed: DistributedOption = False,
    micro_batches: MicroBatchesOption = 1,
    overrides: SetOption = None,
) -> None:
    """Train the target, resuming where it stopped. Example: portolan -C my-run train --mesh data=2

    Several processes train one run when each is started with --coordinator, --num-processes and its
    own --process-id, or with --distributed under a scheduler.
    """
    from portolan.pipeline import stages
    from portolan.pipeline.machine import Machine

    machine = Machine(mesh, coordinator, num_processes, process_id, distributed, micro_batches)
    stages.train_target(open_project_of(context, overrides), machine)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def launch(
    context: typer.Context,
    processes: Annotated[int, typer.Option("-n", "--processes", min=1, help="How many.")],
    devices: Annotated[
        int | None, typer.Option(min=1, help="CPU devices of each; without it, what it sees.")
    ] = None,
    retries: Annotated[
        int, typer.Option(min=0, help="How often to start again after a process was lost.")
    ] = 2,
) -> None:
    """A verb in several processes on this machine. Example: portolan -C my-run launch -n 2 train

    What follows the options is `train` or `ladder` with its own options. When a process ends badly
    the others are ended too; after a loss all are started again and go on from the newest
    checkpoint.
    """
    from portolan.errors import UsageError
    from portolan.pipeline.launching import launch as launch_gang

    if not context.args or context.args[0] not in ("train", "ladder"):
        raise UsageError(
            f"launch {' '.join(context.args)}: no verb to start",
            remedy="write train or ladder, with its options, behind those of launch",
        )
    launch_gang(
        context.obj.root,
        context.args,
        num_processes=processes,
        devices=devices,
        retries=retries,
    )


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
