"""The curated corpus of a project: tokenizer, token store, held-out set, and their summary."""

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from portolan.canonical import digest, stringify_floats
from portolan.console import say
from portolan.errors import UsageError
from portolan.files import read_json, sha256_file, write_json_atomic
from portolan.pipeline.course import Course, plan_course
from portolan.pipeline.plan import plan_width
from portolan.project import Project
from portolan.recipe import Recipe
from portolan.scaling.ladder import Rung

SUMMARY = "summary.json"
VERSION = 1


def corpus_key(recipe: Recipe) -> str:
    """Digest of the settings that change the corpus."""
    settings = {
        "data": recipe.data.model_dump(mode="json"),
        "tokenizer": recipe.tokenizer.model_dump(mode="json"),
        "rows": recipe.evaluation.max_sequences_per_domain,
        "sequence_length": recipe.shape(recipe.model.width).sequence_length,
        "version": VERSION,
    }
    return digest(stringify_floats(settings))


@dataclass(frozen=True)
class Corpus:
    """What the training stages need of the corpus; files are opened when they are asked for."""

    project: Project
    summary: dict[str, Any]

    @property
    def store_digest(self) -> str:
        """Digest of all training tokens."""
        return self.summary["store"]["digest"]

    @property
    def tokenizer_digest(self) -> str:
        """SHA-256 of the tokenizer file."""
        return self.summary["tokenizer"]["digest"]

    @property
    def evaluation_digest(self) -> str:
        """Digest of the held-out rows that every evaluation sees."""
        return self.summary["heldout"]["digest"]

    @property
    def domains(self) -> list[str]:
        """Names of the held-out domains."""
        return list(self.summary["heldout"]["domains"])

    def path(self, part: str) -> Path:
        """Path of a part: `tokenizer`, `store` or `heldout`."""
        return self.project.root / self.summary[part]["path"]

    def tokenizer(self) -> Any:
        """The tokenizer with its boundary policy."""
        return load_tokenizer(self.path("tokenizer"), self.project.recipe)

    @cached_property
    def store(self) -> Any:
        """The memory-mapped token store."""
        from portolan.data.store import TokenStore

        return TokenStore(self.path("store"))

    @cached_property
    def evaluation_set(self) -> Any:
        """Held-out rows of the length that the models train on."""
        return open_evaluation_set(self.path("heldout"), self.tokenizer(), self.project.recipe)

    def evaluation_rows(self, length: int) -> Any:
        """The same held-out text, as much of it, in rows of another length."""
        tokenizer, recipe = self.tokenizer(), self.project.recipe
        return open_evaluation_set(self.path("heldout"), tokenizer, recipe, length)

    def loader(
        self,
        rung: Rung,
        seed: int,
        reference_tokens: int,
        *,
        course: Course | None = None,
        simulate_epochs: bool = True,
    ) -> Any:
        """Batches of a run: the mixture on this store, with the epochs of the target.

        The target has its own epochs: it passes `simulate_epochs` = False.
        """
        from portolan.data.loader import Loader
        from portolan.data.mixture import simulated_prefixes

        course = course or plan_course(self.project.recipe, rung)
        mixture = self.mixture(rung, course)
        length = rung.config.sequence_length
        prefixes = None
        if simulate_epochs:
            prefixes = simulated_prefixes(
                {name: tokens // length for name, tokens in self.store.tokens_by_cell.items()},
                experiment_tokens=rung.tokens,
                target_tokens=max(reference_tokens, rung.tokens),
                weighted=[n for n in mixture.cells if any(p.counts[n] for p in mixture.phases)],
            )
        return Loader(self.store, mixture, geometry=course.geometry, seed=seed, prefixes=prefixes)

    def mixture(self, rung: Rung, course: Course | None = None) -> Any:
        """Counts per cell of every phase of the run.

        The lattice is the smallest mixture block of the recipe's runs, so that every run reads
        the cells in exactly the same proportions.
        """
        from portolan.data.mixture import Mixture, budget_phases, require_consistent

        recipe = self.project.recipe
        course = course or plan_course(recipe, rung)
        tokens = self.store.tokens_by_cell
        widths = (*recipe.ladder.widths, recipe.model.width)
        lattice = min(plan_width(recipe, width).mixture_block for width in widths)
        mixture = Mixture(
            name=recipe.name,
            cells=dict(tokens),
            tokenizer_digest=self.tokenizer_digest,
            store_digest=self.store_digest,
            phases=budget_phases(
                [
                    (phase.name, phase.start_step, _counts(phase.weights, tokens, lattice))
                    for phase in course.phases
                ],
                steps=course.num_updates,
                tokens_per_step=course.tokens_per_step,
            ),
            sequence_length=rung.config.sequence_length,
            block_sequences=course.block_sequences,
            lattice=lattice,
            cap_epochs=recipe.mixture.max_epochs,
        )
        require_consistent(mixture)
        return mixture

    def artifacts(self) -> Iterator[tuple[str, str, list[Path], str]]:
        """(kind, name, files, text) of everything that the record must name."""
        summary, store = self.summary, self.summary["store"]
        key = summary["key"][:16]
        files = [path for path in self.path("store").rglob("*") if path.is_file()]
        text = f"training tokens: {store['tokens']} in {store['documents']} documents"
        yield "dataset", f"token store {key}", files, text
        files = [path for path in self.path("heldout").rglob("*") if path.is_file()]
        yield "dataset", f"held-out tokens {key}", files, "documents that no model is trained on"
        text = f"byte-level BPE of {summary['tokenizer']['vocab_size']} tokens"
        yield "tokenizer", f"tokenizer {key}", [self.path("tokenizer")], text
        files = [self.project.root / path for path in summary["manifests"]]
        text = "what each step of curation read and wrote"
        yield "dataset", f"curation manifests {key}", files, text
        files = [self.project.corpus / SUMMARY]
        yield "dataset", f"corpus summary {key}", files, "what the corpus is, in numbers"

    def describe(self) -> list[str]:
        """Lines for a person."""
        lines = []
        for s in self.summary["sources"]:
            text = (
                f"{s['key']}: {s['documents']:,} documents, {s['bytes'] / 1e6:.1f} MB, "
                f"{s['tokens']:,} tokens, {s['heldout_documents']} held out, {s['license_class']}"
            )
            dropped = sorted(s["dropped"].items())
            reasons = [f"{number:,} {why}" for why, number in dropped if why != "heldout"]
            lines.append("; left out: ".join(filter(None, [text, ", ".join(reasons)])))
        store = self.summary["store"]
        return [*lines, f"token store: {store['tokens']:,} tokens, digest {store['digest'][:16]}"]


def _counts(weights: Mapping[str, float], tokens: Mapping[str, int], lattice: int) -> dict:
    """Weights by domain, or without any the tokens, as counts on the lattice."""
    from portolan.data.mixture_design import proportional_counts, round_to_lattice

    if not weights:
        return proportional_counts(tokens, lattice, at_least_one=True)
    if unknown := sorted(set(weights) - set(tokens)):
        raise UsageError(
            f"mixture weights name {unknown[0]!r}, which is not a domain",
            remedy=f"use {', '.join(tokens)}",
        )
    return round_to_lattice({name: weights.get(name, 0.0) for name in tokens}, lattice)


def load_tokenizer(path: Path, recipe: Recipe) -> Any:
    """A tokenizer file with the recipe's boundary policy."""
    from portolan.data.tokenizer import BoundaryPolicy, DocumentTokenizer

    policy = BoundaryPolicy(bos=recipe.tokenizer.bos, eos=recipe.tokenizer.eos)
    return DocumentTokenizer.from_file(path, policy)


def open_evaluation_set(
    folder: Path, tokenizer: Any, recipe: Recipe, length: int | None = None
) -> Any:
    """The held-out store as rows of the first length or another, capped as the recipe says."""
    from portolan.data.evaluation_set import EvaluationSet
    from portolan.data.store import TokenStore
    from portolan.data.tokenizer import token_bytes

    first = recipe.shape(recipe.model.width).sequence_length
    max_rows = recipe.evaluation.max_sequences_per_domain
    return EvaluationSet(
        TokenStore(folder),
        length or first,
        token_bytes(tokenizer),
        max_rows=max(1, max_rows * first // (length or first)),
    )


def find_corpus(project: Project) -> Corpus | None:
    """The corpus of this recipe, if its stage is complete."""
    path = project.corpus / SUMMARY
    if not path.is_file():
        return None
    summary = read_json(path)
    return Corpus(project, summary) if summary["key"] == corpus_key(project.recipe) else None


def build_corpus(project: Project) -> Corpus:
    """Curate the sources, train the tokenizer, tokenise, and write the summary last."""
    from portolan.data.curate import CurationProgress, curate_documents
    from portolan.data.provenance import with_tokens, write_provenance
    from portolan.data.store import cells_of_sources, write_store

    def report(step: CurationProgress) -> None:
        rate = step.text_bytes / max(step.seconds, 1e-9) / 1e6
        state = "kept" if step.skipped else f"{step.seconds:.1f} s, {rate:.1f} MB/s"
        say(f"{step.step} {step.source}: {step.documents:,} documents, {state}")

    curated = curate_documents(
        project.recipe.data, project.root, workers=usable_cores(), progress=report
    )
    for warning in curated.warnings:
        say(f"warning: {warning}")
    train = [(source.key, source.train_shards) for source in curated.domains]
    heldout = [(s.key, s.heldout_shards) for s in curated.domains if s.heldout_documents]
    with _timed("tokenizer"):
        path = _tokenizer_file(project, curated.key, train)
        tokenizer = load_tokenizer(path, project.recipe)
        _check_vocabulary(tokenizer, path, project.recipe)
    tokens = project.corpus / "tokens"
    with _timed("tokenise"):
        store = write_store(tokens, cells_of_sources(train), tokenizer, inputs=[curated.key])
        held = write_store(
            project.corpus / "heldout-tokens",
            cells_of_sources(heldout),
            tokenizer,
            inputs=[curated.heldout_key],
        )
    write_provenance(project.corpus, with_tokens(curated.provenance, store.tokens_by_cell))
    summary = _summarize(project, curated, tokenizer, path, store, held)
    target = plan_width(project.recipe, project.recipe.model.width)
    epochs = stringify_floats(Corpus(project, summary).mixture(target).epochs())
    for source in summary["sources"]:
        source["epochs"] = epochs.get(source["key"], "0.0")
    write_json_atomic(project.corpus / SUMMARY, summary)
    return Corpus(project, summary)


def usable_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _timed:
    """Say how long a step took."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.begin = time.monotonic()

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            say(f"{self.name}: {time.monotonic() - self.begin:.1f} s")


def _tokenizer_file(project: Project, key: str, train: list) -> Path:
    """The recipe's tokenizer, copied into the project, or one trained on the corpus."""
    from portolan.data.tokenizer import train_tokenizer_file
    from portolan.files import write_bytes_atomic

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


def _summarize(
    project: Project, curated: Any, tokenizer: Any, path: Path, store: Any, held: Any
) -> dict[str, Any]:
    recipe = project.recipe
    evaluation = open_evaluation_set(held.folder, tokenizer, recipe)
    train_counts = sum(cell.count_tokens(store.vocab_size) for cell in store.cells.values())
    unigram = _unigram(train_counts, evaluation, store.vocab_size)
    provenance = {row["key"]: row for row in curated.provenance}
    tokens = store.tokens_by_cell
    sources = [
        {
            "key": source.key,
            "category": source.category,
            "license_spdx": provenance[source.key]["license_spdx"],
            "license_class": source.license_class,
            "read": source.read,
            "documents": source.train_documents,
            "bytes": source.train_text_bytes,
            "tokens": tokens.get(source.key, 0),
            "heldout_documents": source.heldout_documents,
            "heldout_tokens": held.tokens_by_cell.get(source.key, 0),
            "dropped": source.dropped,
            "provenance": provenance[source.key]["row_hash"],
        }
        for source in curated.sources
    ]
    summary = {
        "key": corpus_key(recipe),
        "documents_key": curated.key,
        "sources": sources,
        "tokenizer": {
            "path": project.relative(path),
            "vocab_size": tokenizer.vocab_size,
            "digest": tokenizer.digest,
            "bos": recipe.tokenizer.bos,
            "eos": recipe.tokenizer.eos,
            "bytes_per_token": sum(s["bytes"] for s in sources) / max(1, sum(tokens.values())),
        },
        "store": {
            "path": project.relative(store.folder),
            "digest": store.digest,
            "tokens": sum(tokens.values()),
            "documents": sum(s["documents"] for s in sources),
        },
        "heldout": {
            "path": project.relative(held.folder),
            "digest": evaluation.digest,
            "domains": evaluation.domains,
            "rows": {name: len(rows.tokens) for name, rows in evaluation.rows.items()},
            "truncated": evaluation.truncated,
        },
        "manifests": [
            project.relative(path)
            for path in (*curated.manifests, *project.corpus.glob("provenance.*"))
        ],
        "unigram_cross_entropy": unigram,
        "warnings": list(curated.warnings),
    }
    return stringify_floats(summary)


def _unigram(train_counts: Any, evaluation: Any, vocab_size: int) -> dict[str, float]:
    """Nats per held-out token under training frequencies: mean over domains, and over tokens."""
    import numpy as np

    from portolan.data.loss_metrics import unigram_cross_entropy

    per_domain = []
    for rows in evaluation.rows.values():
        targets = rows.tokens[:, 1:][rows.weights[:, :-1] > 0]
        counts = np.bincount(targets, minlength=vocab_size)
        per_domain.append(unigram_cross_entropy(train_counts, counts))
    return {
        "macro": float(np.mean(per_domain)),
        "micro": unigram_cross_entropy(train_counts, evaluation.target_counts(vocab_size)),
    }
