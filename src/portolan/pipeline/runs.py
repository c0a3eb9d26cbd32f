"""Which runs a recipe has, and how one of them is trained."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from portolan.canonical import digest, stringify_floats
from portolan.console import RunReporter, say
from portolan.files import read_json, write_json_atomic
from portolan.pipeline.corpus import Corpus
from portolan.pipeline.plan import plan_width
from portolan.pipeline.recorder import ProjectRecord, RunRecorder
from portolan.project import Project
from portolan.scaling.ladder import Rung

RUN_KEY_DIGITS = 8
MIXTURE_FILE = "mixture.json"
MAX_PERMANENT_CHECKPOINTS = 64


@dataclass(frozen=True)
class PlannedRun:
    """A run of the recipe: its id holds the digest of everything that changes its bytes."""

    run_id: str
    role: str
    seed: int
    rung: Rung
    config_digest: str

    @property
    def is_target(self) -> bool:
        """Whether this is the run that the ladder rehearses."""
        return self.role == "target"


def planned_runs(project: Project, corpus: Corpus) -> list[PlannedRun]:
    """All rungs by width and seed, then the target."""
    recipe = project.recipe
    runs = [
        _planned(project, corpus, width, "rung", recipe.seed + offset)
        for width in recipe.ladder.widths
        for offset in range(recipe.ladder.seeds.get(str(width), 1))
    ]
    return [*runs, _planned(project, corpus, recipe.model.width, "target", recipe.seed)]


def _planned(project: Project, corpus: Corpus, width: int, role: str, seed: int) -> PlannedRun:
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
    key = digest(stringify_floats(identity))
    run_id = f"{role}-d{width}-s{seed}-{key[:RUN_KEY_DIGITS]}"
    return PlannedRun(run_id, role, seed, rung, key)


def reference_tokens(project: Project) -> int:
    """Tokens that mixture weights and simulated epochs refer to: the target's, unless stated."""
    stated = project.recipe.budget.reference_tokens
    return stated or plan_width(project.recipe, project.recipe.model.width).tokens


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
    """Content of `run.json`."""
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
            },
        }
    )


def train(project: Project, corpus: Corpus, record: ProjectRecord, run: PlannedRun) -> bool:
    """Train a run to its end; False when it was finished before."""
    folder = project.runs / run.run_id
    if is_finished(project, run):
        record_finished(project, record, run)
        return False
    from portolan.evals.perplexity import HeldOutEvaluator
    from portolan.train.loop import TrainingLoop
    from portolan.train.state import resolve_compute_dtype

    settings = run_settings(project, run)
    write_json_atomic(folder / "run.json", describe(project, corpus, run))
    corpus.mixture(run.rung).save(folder / MIXTURE_FILE)
    role = "production" if run.is_target else "trial"
    record.run(
        run.run_id,
        role,
        f"{run.role} of width {run.rung.width}, seed {run.seed}: {run.rung.steps} updates of "
        f"{run.rung.tokens_per_step} tokens",
    )
    loader = corpus.loader(run.rung, run.seed, reference_tokens(project))
    evaluator = HeldOutEvaluator(
        corpus.evaluation_set,
        run.rung.config,
        batch_sequences=project.recipe.evaluation.batch_sequences,
        compute_dtype=resolve_compute_dtype(settings.compute_dtype),
    )
    reporter = RunReporter(run.run_id, settings.steps)
    with reporter.open() as report:
        loop = TrainingLoop(
            settings,
            folder,
            loader,
            evaluator,
            RunRecorder(record, run.config_digest, corpus.store_digest),
            report,
            {"config_digest": run.config_digest, "data_digest": corpus.store_digest},
        )
        outcome = loop()
    record_finished(project, record, run)
    macro = outcome.evaluation["eval_dropless/heldout/macro_loss"]
    say(
        f"{run.run_id}: macro loss {macro:.4f} nats per token after {outcome.completed} updates, "
        f"{run.rung.tokens / outcome.train_seconds:,.0f} tokens/s"
    )
    return True


def record_finished(project: Project, record: ProjectRecord, run: PlannedRun) -> None:
    """Record metrics and success mark once; a process killed before it did this is made good."""
    name = f"{run.run_id} metrics"
    if record.find("artifact", kind="metrics", name=name):
        return
    folder = project.runs / run.run_id
    names = ("run.json", MIXTURE_FILE, "finished.json")
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


def run_settings(project: Project, run: PlannedRun) -> Any:
    """What the training loop is told."""
    from portolan.optim.schedule import PeakRates
    from portolan.optim.settings import OptimizerSettings
    from portolan.train.state import RunSettings, resolve_compute_dtype

    recipe, rung = project.recipe, run.rung
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
        hyperball_radius=recipe.optimizer.hyperball_radius,
        momentum=recipe.optimizer.momentum,
        nesterov=recipe.optimizer.nesterov,
        ns_dtype=dtype,  # type: ignore[arg-type]
        gate_router_decay=recipe.optimizer.gate_router_decay,
        decay_start=recipe.optimizer.decay_start,
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
        norm_interval_steps=recipe.train.norm_interval_steps,
        temporary_checkpoint_seconds=recipe.train.temporary_checkpoint_seconds,
        permanent_checkpoint_steps=recipe.train.permanent_checkpoint_steps
        or (-(-rung.steps // MAX_PERMANENT_CHECKPOINTS) if run.is_target else rung.steps),
    )
