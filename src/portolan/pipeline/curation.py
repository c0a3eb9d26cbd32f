"""Building the corpus of a project: curation, tokenizer, token stores, and their summary."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portolan.canonical import digest, stringify_floats
from portolan.console import say
from portolan.data.mixture_design import MixtureError
from portolan.errors import UsageError
from portolan.files import read_json, sha256_file, write_bytes_atomic, write_json_atomic
from portolan.pipeline.corpus import SUMMARY, Corpus, load_tokenizer
from portolan.pipeline.corpus_summary import summarize, tokens_by_source
from portolan.pipeline.plan import plan_width
from portolan.processes import usable_cores
from portolan.project import CURATION_LOG, Project
from portolan.recipe import DataSettings, Recipe

if TYPE_CHECKING:
    from portolan.data.curation_steps import CurationProgress
    from portolan.data.engine import Engine


@dataclass(frozen=True)
class Place:
    """Where curation runs: `local` in processes of this machine, or on a `ray` cluster.

    `workers` is the number of local processes, by default one a core; `address` is that of a
    running cluster, by default one is started here. Neither changes a byte.
    """

    executor: str = "local"
    address: str = ""
    workers: int | None = None


@contextlib.contextmanager
def open_engine(place: Place) -> Iterator["Engine"]:
    """The engine at a place, with a report of long stages.

    Raises:
        UsageError: the executor is unknown, Ray is not installed, or no cluster answers.
    """
    from portolan.data.engine import Engine, LocalExecutor, RayExecutor
    from portolan.data.engine.report import StageReporter

    if place.executor not in ("local", "ray"):
        raise UsageError(f"executor {place.executor!r} is unknown", remedy="use local or ray")
    if place.address and place.executor != "ray":
        raise UsageError(
            f"--address {place.address} means nothing for the executor 'local'",
            remedy="add --executor ray, or leave the address out",
        )
    workers = place.workers or usable_cores()
    if place.executor == "ray":
        executor = RayExecutor(place.address or None, workers)
    else:
        executor = LocalExecutor(workers)
    with StageReporter().open() as report, Engine(executor, report=report) as engine:
        yield engine


class _StepLog:
    """Says what a step did, and keeps its numbers outside the corpus, whose files hold no times."""

    def __init__(self, path: Path) -> None:
        self.path = path
        known = read_json(path) if path.is_file() else []
        self.rows: dict[str, Any] = {row["step"]: row for row in known}

    def __call__(self, step: "CurationProgress") -> None:
        _say_step(step)
        if not step.skipped:
            name = f"{step.step} {step.source}".strip()
            self.rows[name] = {
                "step": name,
                "documents": step.documents,
                "seconds": str(round(step.seconds, 3)),
                "text_bytes": step.text_bytes,
            }
            self.path.parent.mkdir(exist_ok=True)
            write_json_atomic(self.path, list(self.rows.values()))


def _say_step(step: "CurationProgress") -> None:
    seconds = max(step.seconds, 1e-9)
    state = (
        "kept"
        if step.skipped
        else f"{step.seconds:.1f} s, {step.documents / seconds:,.0f} documents/s, "
        f"{step.text_bytes / seconds / 1e6:.1f} MB/s"
    )
    say(
        f"{' '.join(filter(None, [step.step, step.source]))}: {step.documents:,} documents, {state}"
    )


def build_corpus(project: Project, place: Place | None = None, *, refit: bool = False) -> Corpus:
    """Curate the sources, train the tokenizer, tokenise, and write the summary last."""
    with open_engine(place or Place()) as engine:
        return _build(project, engine, refit)


def _build(project: Project, engine: "Engine", refit: bool) -> Corpus:
    from portolan.data.curate import curate_documents
    from portolan.data.provenance import with_tokens, write_provenance
    from portolan.data.removed_tokens import count_removed_tokens
    from portolan.data.store_writing import cells_of_sources, write_store

    curated = curate_documents(
        project.recipe.data,
        project.root,
        engine=engine,
        progress=_StepLog(project.root / CURATION_LOG),
        refit=refit,
    )
    for warning in curated.warnings:
        say(f"warning: {warning}")
    train = [(source.key, source.train_shards) for source in curated.domains]
    heldout = [(s.key, s.heldout_shards) for s in curated.domains if s.heldout_documents]
    with _timed("tokenizer"):
        path = _tokenizer_file(project, curated.key, train)
        tokenizer = load_tokenizer(path, project.recipe)
        _check_vocabulary(tokenizer, path, project.recipe)
    with _timed("tokenise"):
        store = write_store(
            project.corpus / "tokens",
            curated.cells,
            tokenizer,
            inputs=[curated.key],
            choices=choices_of(project.recipe.data),
        )
        held = write_store(
            project.corpus / "heldout-tokens",
            cells_of_sources(heldout),
            tokenizer,
            inputs=[curated.heldout_key],
        )
    with _timed("count removed tokens"):
        removed = count_removed_tokens(engine, curated, tokenizer, path)
    rows = with_tokens(curated.provenance, tokens_by_source(store))
    write_provenance(project.corpus, rows)
    summary = summarize(project, curated, rows, tokenizer, path, store, held, removed)
    add_epochs(project, summary)
    write_json_atomic(project.corpus / SUMMARY, summary)
    return Corpus(project, summary)


def choices_of(settings: DataSettings) -> dict[str, Any]:
    """What a person decided about the corpus, for the store's parameters."""
    return {
        "accepted_license_classes": list(settings.accepted_license_classes),
        "accepted_sources": {s.key: s.accept for s in settings.sources if s.accept},
        "exempt_sources": list(settings.fuzzy.exempt_sources),
        "reviewed_losses": [
            stringify_floats(loss.model_dump(mode="json"))
            for loss in settings.fuzzy.reviewed_losses
        ],
        "excluded_sets": {s.name: s.excluded for s in settings.decontamination.sets if s.excluded},
    }


def add_epochs(project: Project, summary: dict[str, Any]) -> None:
    """Epochs of each cell in the target's run, and of each source as the mean over its tokens."""
    target = plan_width(project.recipe, project.recipe.model.width)
    try:
        epochs = Corpus(project, summary).mixture(target).epochs()
    except MixtureError as error:  # the recipe names a mixture file of another store
        say(f"warning: {error.message}; {error.remedy}")
        epochs = {}
    read: dict[str, float] = {}
    for cell in summary["cells"]:
        value = float(epochs.get(cell["name"], 0.0))
        cell["epochs"] = str(value)
        for key, (_, tokens) in cell["sources"].items():
            read[key] = read.get(key, 0.0) + value * tokens
    for source in summary["sources"]:
        source["epochs"] = str(read.get(source["key"], 0.0) / max(1, source["tokens"]))


class _timed:
    """Say how long a step took."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.begin = time.monotonic()

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            say(f"{self.name}: {time.monotonic() - self.begin:.1f} s")


def _tokenizer_file(
    project: Project, key: str, train: Sequence[tuple[str, Sequence[Path]]]
) -> Path:
    """The recipe's tokenizer, copied into the project, or one trained on the corpus."""
    from portolan.data.tokenizer import train_tokenizer_file

    settings = project.recipe.tokenizer
    if settings.file:
        source = project.root / settings.file
        if not source.is_file():
            raise UsageError(
                f"tokenizer.file = {settings.file!r} does not exist in {project.root}",
                remedy="copy a tokenizer.json there, or leave the key out to train one",
            )
        target = project.corpus / "tokenizer" / f"{sha256_file(source)[:16]}.json"
        write_bytes_atomic(target, source.read_bytes())
        return target
    identity = {
        "input": key,
        "vocab_size": settings.vocab_size,
        "sample_bytes": settings.sample_bytes,
        "seed": project.recipe.data.seed,
    }
    target = project.corpus / "tokenizer" / f"{digest(identity)[:16]}.json"
    if not target.is_file():
        train_tokenizer_file(
            target,
            train,
            vocab_size=settings.vocab_size,
            seed=project.recipe.data.seed,
            sample_bytes=settings.sample_bytes,
        )
    return target


def _check_vocabulary(tokenizer: Any, path: Path, recipe: Recipe) -> None:

    if tokenizer.vocab_size > recipe.tokenizer.vocab_size:
        raise UsageError(
            f"{path} has {tokenizer.vocab_size} tokens, tokenizer.vocab_size is "
            f"{recipe.tokenizer.vocab_size}",
            remedy="raise tokenizer.vocab_size to at least the tokenizer's size",
        )
