"""Which runs a recipe has, and how one of them is trained."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from portolan.canonical import digest, stringify_floats
from portolan.console import RunReporter, say
from portolan.files import read_json, write_json_atomic
from portolan.pipeline import mixing
from portolan.pipeline.change_records import (
    CHANGES_FILE,
    completed_updates,
    conclude_changes,
    record_course,
    run_course,
)
from portolan.pipeline.corpus import Corpus
from portolan.pipeline.course import Course, plan_course
from portolan.pipeline.machine import ONE_PROCESS, Machine
from portolan.pipeline.plan import plan_width
from portolan.pipeline.recorder import ProjectRecord, RunRecorder
from portolan.project import Project
from portolan.recipe import Recipe
from portolan.scaling.ladder import Rung

RUN_KEY_DIGITS = 8
MIXTURE_FILE = "mixture.json"
MAX_PERMANENT_CHECKPOINTS = 64
RECORD_ROLES = {
    "target": "production",
    "rung": "trial",
    "ablation": "ablation",
    "swarm": "trial",
}
"""What the record calls the role of a run."""
FINAL_EVALUATIONS = 4
"""Evaluations of a run of an ablation or of a swarm, which is judged by its last one."""


@dataclass(frozen=True)
class PlannedRun:
    """A run of the recipe: its id holds the digest of everything that changes its bytes.

    `order` is the plan whose mixture and epochs set the order of the data: its own, unless two
    runs of different length must read the same.
    """

    run_id: str
    role: str
    seed: int
    rung: Rung
    order: Rung
    config_digest: str

    @property
    def is_target(self) -> bool:
        """Whether this is the run that the ladder rehearses."""
        return self.role == "target"


def planned_runs(project: Project, corpus: Corpus) -> list[PlannedRun]:
    """All rungs by width and seed, then the target."""
    recipe = project.recipe
    runs = [
        plan_run(project, corpus, width, "rung", recipe.seed + offset)
        for width in recipe.ladder.widths
        for offset in range(recipe.ladder.seeds.get(str(width), 1))
    ]
    return [*runs, plan_run(project, corpus, recipe.model.width, "target", recipe.seed)]


def plan_run(
    project: Project,
    corpus: Corpus,
    width: int,
    role: str,
    seed: int,
    *,
    label: str = "",
    order: Rung | None = None,
) -> PlannedRun:
    """One run of a width; its id starts with `label`, which is the role unless given."""
    recipe = project.recipe
    rung = plan_width(recipe, width)
    identity = {
        "plan": rung.plan(),
        "shape": dataclasses.asdict(rung.config),
        "seed": seed,
        "optimizer": recipe.optimizer.model_dump(mode="json"),
        "train": {
            "compute_dtype": recipe.train.compute_dtype,
            "z_weight": recipe.train.z_weight,
        },
        "evaluation": recipe.evaluation.model_dump(mode="json"),
        "mixture": recipe.mixture.model_dump(mode="json"),
        "reference_tokens": reference_tokens(project),
        "store": corpus.store_digest,
        "heldout": corpus.evaluation_digest,
    }
    if limits := recipe.parallel.identity():
        identity["parallel"] = limits
    if order is not None and order.steps != rung.steps:
        identity["order"] = order.plan()
    if role == "target" and recipe.context.stages:
        identity["context"] = recipe.context.model_dump(mode="json")
    key = digest(stringify_floats(identity))
    run_id = f"{label or role}-d{width}-s{seed}-{key[:RUN_KEY_DIGITS]}"
    return PlannedRun(run_id, role, seed, rung, order or rung, key)


def reference_tokens(project: Project) -> int:
    """Tokens that mixture weights and simulated epochs refer to: the target's, unless stated."""
    return mixing.reference_tokens(project.recipe)


def is_finished(project: Project, run: PlannedRun) -> bool:
    """Whether the run left its success mark."""
    return (project.runs / run.run_id / "finished.json").is_file()


def evaluations(project: Project, run_id: str) -> dict[str, dict[int, float]]:
    """{metric: {completed updates: value}} of the canonical curve of a run."""
    from portolan.track.tracker import read_metrics

    table = read_metrics(project.runs / run_id, keys=None)
    curves: dict[str, dict[int, float]] = {}
    for row in table.filter(table["key"].cast(str).str.starts_with("eval_")).iter_rows(named=True):
        curves.setdefault(row["key"], {})[row["completed"]] = row["value"]
    return curves


def describe(project: Project, corpus: Corpus, run: PlannedRun) -> dict[str, Any]:
    """Content of `run.json`.

    `simulated_epochs`: tokens of the run and tokens of the one whose epochs it repeats, or none.
    """
    reference = reference_tokens(project)
    simulated = None if run.is_target else mixing.simulated_epochs(run.order, reference)
    return stringify_floats(
        {
            "id": run.run_id,
            "role": run.role,
            "width": run.rung.width,
            "seed": run.seed,
            "model": dataclasses.asdict(run.rung.config),
            "plan": run.rung.plan(),
            "recipe_digest": project.recipe.digest(),
            "config_digest": run.config_digest,
            "data": {
                "store": corpus.store_digest,
                "tokenizer": corpus.tokenizer_digest,
                "evaluation": corpus.evaluation_digest,
                "simulated_epochs": None if simulated is None else list(simulated),
            },
        }
    )


def train(
    project: Project,
    corpus: Corpus,
    record: ProjectRecord,
    run: PlannedRun,
    machine: Machine = ONE_PROCESS,
    reporter: Any = None,
) -> bool:
    """Train a run to its end; False when it was finished before.

    `reporter` is a `RunReporter`, or stands for the one of another process. Of several processes of
    a run the first one writes to the project; the others train with it.
    """
    if is_finished(project, run):
        record_finished(project, record, run)
        return False
    from portolan.train.crew import Crew
    from portolan.train.programs import keep_programs

    keep_programs()
    crew = Crew.of_jax()
    crew.decide(lambda: _open_run(project, corpus, record, run))
    reporter = reporter or RunReporter()
    outcome = _train_to_the_end(project, corpus, record, run, machine, reporter)
    if not crew.leads:
        return True
    record_finished(project, record, run)
    macro = outcome.evaluation["eval_dropless/heldout/macro_loss"]
    tokens = outcome.completed * run.rung.tokens_per_step
    say(
        f"{run.run_id}: macro loss {macro:.4f} nats per token after {outcome.completed} updates, "
        f"{tokens / outcome.train_seconds:,.0f} tokens/s"
    )
    return True


def _open_run(project: Project, corpus: Corpus, record: ProjectRecord, run: PlannedRun) -> None:
    """What the project knows of a run before it starts: record, description, mixture."""
    folder = project.runs / run.run_id
    record.run(
        run.run_id,
        RECORD_ROLES[run.role],
        f"{run.role} of width {run.rung.width}, seed {run.seed}: {run.rung.steps} updates of "
        f"{run.rung.tokens_per_step} tokens",
    )
    record_course(project, record, run)
    write_json_atomic(folder / "run.json", describe(project, corpus, run))
    mixture = corpus.mixture(run.order, run_course(project, record, run))
    mixing.save_mixture(mixture, folder / MIXTURE_FILE, completed_updates(folder))
    if run.is_target:
        say(f"{run.run_id}: {mixing.describe_epochs(mixture)}")


def _train_to_the_end(
    project: Project,
    corpus: Corpus,
    record: ProjectRecord,
    run: PlannedRun,
    machine: Machine,
    reporter: Any,
) -> Any:
    from portolan.train.loop import TrainingLoop

    course = run_course(project, record, run)
    settings = run_settings(project.recipe, run, course)
    devices = machine.devices(project.recipe.parallel)
    pinned, by_length = build_evaluators(project, corpus, settings, devices)
    with reporter.open() as report:
        loop = TrainingLoop(
            settings,
            project.runs / run.run_id,
            run_loader(project, corpus, run, course),
            pinned,
            RunRecorder(record, changed_digest(run, settings), corpus.store_digest),
            report,
            {"config_digest": run.config_digest, "data_digest": corpus.store_digest},
            by_length,
            devices,
        )
        try:
            return loop()
        finally:
            if loop.crew.leads:
                for change, result in conclude_changes(project, record, run.run_id):
                    say(f"{run.run_id}: change from update {change.from_step} on: {result}")


def run_loader(project: Project, corpus: Corpus, run: PlannedRun, course: Course) -> Any:
    """Batches of a run; all but the target repeat their data as often as the target would."""
    return corpus.loader(
        run.order,
        run.seed,
        reference_tokens(project),
        course=course,
        simulate_epochs=not run.is_target,
    )


def build_evaluators(
    project: Project, corpus: Corpus, settings: Any, devices: Any = None
) -> tuple[Any, dict]:
    """The evaluation in rows of the first length, and where asked for those of later lengths."""
    from portolan.evals.perplexity import METRIC_PREFIX, HeldOutEvaluator
    from portolan.train.state import resolve_compute_dtype

    recipe = project.recipe
    dtype = resolve_compute_dtype(settings.compute_dtype)
    batch = recipe.evaluation.batch_sequences
    pinned = HeldOutEvaluator(
        corpus.evaluation_set,
        settings.config,
        batch_sequences=batch,
        compute_dtype=dtype,
        devices=devices,
    )
    by_length = {}
    for stage in settings.stages if recipe.context.evaluate else ():
        length = stage.config.sequence_length
        by_length[length] = HeldOutEvaluator(
            corpus.evaluation_rows(length),
            stage.config,
            batch_sequences=max(1, batch * settings.config.sequence_length // length),
            compute_dtype=dtype,
            prefix=f"{METRIC_PREFIX}_at_{length}",
            devices=devices,
        )
    return pinned, by_length


def changed_digest(run: PlannedRun, settings: Any) -> str:
    """Digest of what an attempt is told: the run's, unless something was changed since."""
    changes = settings.history(settings.num_updates)
    return digest([run.config_digest, changes]) if changes else run.config_digest


def record_finished(project: Project, record: ProjectRecord, run: PlannedRun) -> None:
    """Record metrics and success mark once; a process killed before it did this is made good."""
    name = f"{run.run_id} metrics"
    if record.find("artifact", kind="metrics", name=name):
        return
    folder = project.runs / run.run_id
    names = ["run.json", MIXTURE_FILE, "finished.json"]
    names += [CHANGES_FILE] if (folder / CHANGES_FILE).is_file() else []
    paths = [*(folder / "metrics").glob("*.parquet"), *(folder / name for name in names)]
    content = read_json(folder / "finished.json")["content_digest"]
    record.artifact(
        "metrics",
        name,
        paths,
        f"all metrics of {run.run_id}",
        digests={"final_state": content},
    )
    record.sign()


def run_settings(recipe: Recipe, run: PlannedRun, course: Course | None = None) -> Any:
    """What the training loop is told; without a course, that of the recipe."""
    from portolan.optim.schedule import PeakRates
    from portolan.optim.settings import OptimizerSettings
    from portolan.train.state import (
        NUM_EVALUATION_MARKS,
        RunSettings,
        Stage,
        resolve_compute_dtype,
    )

    rung = run.rung
    course = course or plan_course(recipe, run.order, extend=run.is_target)
    peak = PeakRates(
        hyperball=rung.hyperball,
        adam=rung.adam,
        beta1=recipe.optimizer.beta1,
        beta2=rung.beta2,
        epsilon=rung.epsilon,
        capped=rung.lr_capped,
    )
    dtype = recipe.optimizer.newton_schulz_dtype
    if dtype == "compute":
        dtype = resolve_compute_dtype(recipe.train.compute_dtype).name
    optimizer = OptimizerSettings(
        hyperball_scope=recipe.optimizer.hyperball_scope,
        matrix=recipe.optimizer.matrix,
        gnorm=None if recipe.optimizer.gated_norm == "muonh" else recipe.optimizer.gated_norm,
        hyperball_radius=recipe.optimizer.hyperball_radius,
        momentum=recipe.optimizer.momentum,
        nesterov=recipe.optimizer.nesterov,
        ns_dtype=dtype,  # type: ignore[arg-type]
        gate_router_decay=recipe.optimizer.gate_router_decay,
        decay_start=recipe.optimizer.decay_start,
        clip=recipe.optimizer.clip,
    ).with_law(peak)
    return RunSettings(
        run_id=run.run_id,
        role=run.role,
        config=rung.config,
        batch_sequences=rung.batch_sequences,
        steps=rung.steps,
        peak=peak,
        warmup_steps=recipe.optimizer.warmup_steps or rung.warmup_steps,
        min_ratio=recipe.optimizer.min_ratio,
        optimizer=optimizer,
        seed=run.seed,
        compute_dtype=recipe.train.compute_dtype,
        z_weight=recipe.train.z_weight,
        remat=recipe.train.remat,
        offload_carries=recipe.train.offload_carries,
        norm_interval_steps=recipe.train.norm_interval_steps,
        temporary_checkpoint_seconds=recipe.train.temporary_checkpoint_seconds,
        permanent_checkpoint_steps=recipe.train.permanent_checkpoint_steps
        or (-(-rung.steps // MAX_PERMANENT_CHECKPOINTS) if run.is_target else rung.steps),
        num_evaluations=FINAL_EVALUATIONS
        if run.role in ("ablation", "swarm")
        else NUM_EVALUATION_MARKS,
        stages=tuple(
            Stage(
                stage.start_step,
                dataclasses.replace(
                    rung.config,
                    sequence_length=stage.sequence_length,
                    qk_multiplier=stage.qk_multiplier,
                ),
                stage.batch_sequences,
            )
            for stage in course.stages[1:]
        ),
        horizon_events=course.horizons,
        data_changes=course.data_changes(),
    )
