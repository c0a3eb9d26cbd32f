"""The verbs `mixture show`, `check` and `diff`: mixture files as a person reads them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from portolan.console import console, say
from portolan.data.mixture import Mixture, load_mixture
from portolan.data.mixture_design import sort_names
from portolan.pipeline.mixing import check_target, describe_epochs
from portolan.pipeline.plan import plan_width
from portolan.pipeline.stages import require_corpus
from portolan.project import Project

MOST_CELLS_SHOWN = 60
GRID_CELL = re.compile(r"(c\d\d)(q\d)")


def current_mixture(project: Project) -> Mixture:
    """The mixture of the target under the recipe."""
    corpus = require_corpus(project)
    return corpus.mixture(plan_width(project.recipe, project.recipe.model.width))


def show(project: Project, path: Path | None) -> None:
    """Print a mixture file, or the mixture that the target has."""
    print_mixture(current_mixture(project) if path is None else load_mixture(path))


def check(project: Project, path: Path) -> None:
    """Check a mixture file against this project's tokenizer, store and target.

    Raises:
        MixtureError: everything that is wrong with it.
    """
    mixture = load_mixture(path)
    check_target(require_corpus(project), mixture)
    say(f"{path} fits this project: {describe_epochs(mixture)}")


def print_mixture(mixture: Mixture) -> None:
    """Weights by cell and phase with tokens and epochs; by domain and bucket where cells are."""
    say(f"{mixture.name}, digest {mixture.digest[:16]}, store {mixture.store_digest[:16]}")
    say(
        f"lattice {mixture.lattice:,}, block of {mixture.block_sequences:,} sequences of "
        f"{mixture.sequence_length:,} tokens"
    )
    for phase in mixture.phases:
        say(f"phase {phase.name} from update {phase.start_step}: {phase.budget_tokens:,} tokens")
    if mixture.provenance:
        facts = (
            (k, f"{v:.4g}" if isinstance(v, float) else v) for k, v in mixture.provenance.items()
        )
        say("made by: " + ", ".join(f"{key} {value}" for key, value in facts if value))
    names = mixture.cell_names
    grouped = [GRID_CELL.fullmatch(name) for name in names]
    if all(grouped):
        for title, group in (("domain", 1), ("bucket", 2)):
            members: dict[str, list[str]] = {}
            for match in grouped:
                assert match is not None
                members.setdefault(match.group(group), []).append(match.group())
            _print_table(mixture, title, dict(sorted(members.items())))
    if len(names) <= MOST_CELLS_SHOWN:
        _print_table(mixture, "cell", {name: [name] for name in names})
    say(describe_epochs(mixture))


def _print_table(mixture: Mixture, title: str, groups: Mapping[str, Sequence[str]]) -> None:
    table = Table(title=f"By {title}", title_justify="left")
    table.add_column(title)
    for heading in ("tokens", *(phase.name for phase in mixture.phases), "epochs"):
        table.add_column(heading, justify="right")
    epochs = mixture.epochs()
    for name, cells in groups.items():
        tokens = sum(mixture.cells[cell] for cell in cells)
        weights = [
            sum(phase.counts[cell] for cell in cells) / mixture.lattice for phase in mixture.phases
        ]
        read = sum(epochs[cell] * mixture.cells[cell] for cell in cells if epochs[cell])
        table.add_row(
            name,
            f"{tokens:,}",
            *(f"{weight:.4f}" for weight in weights),
            f"{read / tokens if tokens else 0.0:.2f}",
        )
    console.print(table)


def diff(first_path: Path, second_path: Path) -> None:
    """Print how two mixture files differ: weights by phase, epochs, total variation."""
    first, second = load_mixture(first_path), load_mixture(second_path)
    for what in ("store_digest", "tokenizer_digest", "lattice", "block_sequences", "cap_epochs"):
        before, after = getattr(first, what), getattr(second, what)
        if before != after:
            say(f"{what}: {before} -> {after}")
    names = sort_names({*first.cells, *second.cells})
    phases = list(dict.fromkeys(phase.name for m in (first, second) for phase in m.phases))
    weights = [{phase: _weights(m, phase) for phase in phases} for m in (first, second)]
    table = Table(title=f"{first.name} -> {second.name}", title_justify="left")
    table.add_column("cell")
    for heading in (*phases, "epochs"):
        table.add_column(heading, justify="right")
    epochs = first.epochs(), second.epochs()
    same = 0
    for name in names:
        pairs = [tuple(w[phase].get(name, 0.0) for w in weights) for phase in phases]
        if all(before == after for before, after in pairs):
            same += 1
            continue
        cells = [f"{before:.4f} -> {after:.4f}" for before, after in pairs]
        reads = [e.get(name, 0.0) for e in epochs]
        table.add_row(name, *cells, f"{reads[0]:.2f} -> {reads[1]:.2f}")
    console.print(table)
    say(f"{same} of {len(names)} cells have the same weights")
    for phase in phases:
        before, after = (w[phase] for w in weights)
        total = 0.5 * sum(abs(before.get(n, 0.0) - after.get(n, 0.0)) for n in names)
        say(f"total variation of {phase}: {total:.4f}")


def _weights(mixture: Mixture, phase_name: str) -> dict[str, float]:
    for index, phase in enumerate(mixture.phases):
        if phase.name == phase_name:
            return mixture.weights(index)
    return {}
