"""The mixture file: how many sequences of each cell a mixture block holds, phase by phase.

Weights are integer counts on a lattice, so that no float rounding can change what is read. The
default lattice of 49,152 = 2^15 + 2^14 and its phases follow the public run of marin #9126, #9162.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from portolan.data.mixture_design import MixtureError, round_to_lattice, sort_names
from portolan.files import read_json, write_json_atomic

FORMAT = "portolan-mixture"
FORMAT_VERSION = 1
DEFAULT_LATTICE = 49_152
DEFAULT_BLOCK_SEQUENCES = 49_152
DEFAULT_CAP_EPOCHS = 8.0
CAP_TOLERANCE = 1e-8
FLOAT_TOLERANCE = 1e-9
MINIMUM_BLOCK_SEQUENCES = 64
BLOCKS_PER_RUN = 40


@dataclass(frozen=True)
class Phase:
    """Counts of the lattice per cell from `start_step` on; `budget_tokens` is what it will use."""

    name: str
    start_step: int
    budget_tokens: int
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Mixture:
    """A mixture of the cells of one store; `cells` gives the tokens it was fitted for.

    `block_sequences` (Z) is the number of sequences over which the counts hold exactly.
    """

    name: str
    tokenizer_digest: str
    store_digest: str
    cells: Mapping[str, int]
    phases: tuple[Phase, ...]
    sequence_length: int
    block_sequences: int = DEFAULT_BLOCK_SEQUENCES
    lattice: int = DEFAULT_LATTICE
    cap_epochs: float = DEFAULT_CAP_EPOCHS
    dropped_cells: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cell_names(self) -> list[str]:
        """Cells in byte order of their names."""
        return sort_names(self.cells)

    def to_json(self) -> dict[str, Any]:
        """The mixture file."""
        return {
            "block_sequences": self.block_sequences,
            "cap_epochs": self.cap_epochs,
            "cells": dict(self.cells),
            "dropped_cells": list(self.dropped_cells),
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "lattice": self.lattice,
            "name": self.name,
            "phases": [
                {
                    "budget_tokens": phase.budget_tokens,
                    "counts": dict(phase.counts),
                    "name": phase.name,
                    "start_step": phase.start_step,
                }
                for phase in self.phases
            ],
            "provenance": dict(self.provenance),
            "sequence_length": self.sequence_length,
            "store_digest": self.store_digest,
            "tokenizer_digest": self.tokenizer_digest,
        }

    @property
    def digest(self) -> str:
        """SHA-256 of the file's content with keys sorted and no white space."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def weights(self, phase: int) -> dict[str, float]:
        """Weight of each cell in a phase; they sum to 1."""
        counts = self.phases[phase].counts
        return {name: counts[name] / self.lattice for name in self.cell_names}

    def block_counts(self, phase: int) -> NDArray[np.int64]:
        """Sequences of each cell in one mixture block, int64[num_cells], sum `block_sequences`."""
        counts = [self.phases[phase].counts[name] for name in self.cell_names]
        return block_counts(counts, self.block_sequences, self.lattice)

    def unread_cells(self) -> list[str]:
        """Cells that some phase gives a positive weight and a block no sequence of."""
        unread = set()
        for index, phase in enumerate(self.phases):
            for name, count in zip(self.cell_names, self.block_counts(index), strict=True):
                if phase.counts[name] and not count:
                    unread.add(name)
        return sort_names(unread)

    def epochs(self) -> dict[str, float]:
        """Times each cell is read over all phases: sum of budget * weight / tokens."""
        return {name: self._epochs_of(name) for name in self.cell_names}

    def _epochs_of(self, name: str) -> float:
        used = sum(phase.budget_tokens * phase.counts[name] for phase in self.phases)
        if not used:
            return 0.0
        tokens = self.cells[name]
        return used / (self.lattice * tokens) if tokens else math.inf

    def save(self, path: Path) -> None:
        """Write the mixture file."""
        write_json_atomic(path, self.to_json())


def block_counts(counts: Sequence[int], block_sequences: int, lattice: int) -> NDArray[np.int64]:
    """floor(count * Z / lattice) a cell; the remainder goes to the first largest count."""
    result = np.array([count * block_sequences // lattice for count in counts], np.int64)
    result[int(np.argmax(np.array(counts, np.int64)))] += block_sequences - int(result.sum())
    return result


def load_mixture(path: Path) -> Mixture:
    """Read a mixture file and check that it is consistent in itself.

    A phase may give `weights` (floats that sum to 1 within 1e-9) in place of `counts`; they are
    put on the lattice by largest remainder.
    """
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise MixtureError(f"{path} is not a mixture file: {error}") from error
    known = set(Mixture.__dataclass_fields__) | {"format", "format_version"}
    unknown = sorted(set(content) - known)
    missing = sorted({"name", "tokenizer_digest", "store_digest", "cells", "phases"} - set(content))
    if unknown or missing or content.get("format", FORMAT) != FORMAT:
        raise MixtureError(
            f"{path} is not a mixture file: unknown keys {unknown}, missing keys {missing}"
        )
    if content.pop("format_version", FORMAT_VERSION) != FORMAT_VERSION:
        raise MixtureError(f"{path}: unknown format_version", remedy="use a newer Portolan")
    content.pop("format", None)
    lattice = content.get("lattice", DEFAULT_LATTICE)
    content["phases"] = tuple(_read_phase(path, phase, lattice) for phase in content["phases"])
    content["dropped_cells"] = tuple(content.get("dropped_cells", ()))
    try:
        mixture = Mixture(**content)
    except TypeError as error:
        raise MixtureError(f"{path}: {error}") from error
    _raise_if(structure_problems(mixture), str(path))
    return mixture


def _read_phase(path: Path, content: Mapping[str, Any], lattice: int) -> Phase:
    content = dict(content)
    weights = content.pop("weights", None)
    if weights is not None:
        total = math.fsum(weights.values())
        if abs(total - 1) > FLOAT_TOLERANCE or min(weights.values(), default=0) < 0:
            raise MixtureError(
                f"{path}: weights of phase {content.get('name')!r} sum to {total!r}",
                remedy="give weights >= 0 that sum to 1, or integer counts",
            )
        content["counts"] = round_to_lattice(weights, lattice)
    try:
        return Phase(**content)
    except TypeError as error:
        raise MixtureError(f"{path}: phase {content.get('name')!r}: {error}") from error


def _raise_if(problems: Sequence[str], place: str) -> None:
    if problems:
        raise MixtureError(
            f"{place}: " + "; ".join(problems),
            remedy="make the mixture again for this store, tokenizer and run",
        )


def structure_problems(mixture: Mixture) -> list[str]:
    """What is wrong with a mixture by itself: counts, cells, phases, cap."""
    problems: list[str] = []
    names = set(mixture.cells)
    if min(mixture.lattice, mixture.block_sequences, mixture.sequence_length) < 1:
        problems.append("lattice, block_sequences and sequence_length must be positive")
    starts = [phase.start_step for phase in mixture.phases]
    if not starts or starts[0] != 0 or any(b <= a for a, b in itertools.pairwise(starts)):
        problems.append(f"phases start at steps {starts}: need 0 first, then increasing")
    if set(mixture.dropped_cells) - names:
        problems.append(f"dropped_cells name unknown cells {set(mixture.dropped_cells) - names}")
    for phase in mixture.phases:
        difference = sort_names(names.symmetric_difference(phase.counts))
        if difference:
            problems.append(f"phase {phase.name!r} and cells differ in {difference}")
        counts = list(phase.counts.values())
        if any(type(count) is not int or count < 0 for count in counts):
            problems.append(f"phase {phase.name!r} has counts that are not integers >= 0")
        elif sum(counts) != mixture.lattice:
            problems.append(
                f"counts of phase {phase.name!r} sum to {sum(counts)}, lattice {mixture.lattice}"
            )
    if problems:
        return problems
    over = {n: e for n, e in mixture.epochs().items() if e > mixture.cap_epochs + CAP_TOLERANCE}
    for name, epochs in over.items():
        problems.append(f"cell {name} is read {epochs:.6g} times, cap {mixture.cap_epochs:g}")
    unread = sort_names(set(mixture.unread_cells()) - set(mixture.dropped_cells))
    if unread:
        problems.append(
            f"cells {unread} have a weight but no sequence in a block of "
            f"{mixture.block_sequences}: raise block_sequences or list them in dropped_cells"
        )
    return problems


def check_mixture(
    mixture: Mixture,
    *,
    tokenizer_digest: str,
    store_digest: str,
    store_tokens: Mapping[str, int],
    sequence_length: int | None = None,
    phases: Sequence[tuple[str, int, int]] | None = None,
    cap_epochs: float | None = None,
) -> None:
    """Refuse a mixture that was not made for this tokenizer, store and run.

    Args:
        phases: (name, first step, budget in tokens) that the run expects.
        cap_epochs: the run's, which the mixture's must not exceed.
    """
    problems = []
    for what, found, expected in (
        ("tokenizer digest", mixture.tokenizer_digest, tokenizer_digest),
        ("store digest", mixture.store_digest, store_digest),
        ("sequence length", mixture.sequence_length, sequence_length or mixture.sequence_length),
    ):
        if found != expected:
            problems.append(f"{what} is {found}, this run has {expected}")
    difference = sort_names(set(mixture.cells).symmetric_difference(store_tokens))
    if difference:
        problems.append(f"mixture and store differ in cells {difference}")
    for name in sort_names(set(mixture.cells) & set(store_tokens)):
        if mixture.cells[name] != store_tokens[name]:
            problems.append(
                f"cell {name} was fitted with {mixture.cells[name]} tokens, "
                f"the store holds {store_tokens[name]}"
            )
    found = [(phase.name, phase.start_step, phase.budget_tokens) for phase in mixture.phases]
    if phases is not None and found != list(phases):
        problems.append(
            f"phases (name, first step, budget) are {found}, the run expects {list(phases)}"
        )
    if cap_epochs is not None and mixture.cap_epochs > cap_epochs:
        problems.append(f"its cap is {mixture.cap_epochs:g} epochs, this run's is {cap_epochs:g}")
    _raise_if(problems + structure_problems(mixture), f"mixture {mixture.name!r}")


def check_continuation(
    recorded: Mixture, changed: Mixture, *, completed_steps: int, batch_sequences: int | None = None
) -> None:
    """Refuse a changed mixture that would alter a completed step or an offset built on one.

    Phases that began before `completed_steps` must stay as recorded (marin #9162); others must
    start at or after it, at a block boundary of `batch_sequences` where the batch is one number.
    """
    problems = []
    for name in ("store_digest", "tokenizer_digest", "lattice", "block_sequences", "cells"):
        if getattr(recorded, name) != getattr(changed, name):
            problems.append(f"{name} changed")
    begun = [phase for phase in recorded.phases if phase.start_step < completed_steps]
    for index, phase in enumerate(begun):
        other = changed.phases[index] if index < len(changed.phases) else None
        if other is None or (other.start_step, other.counts) != (phase.start_step, phase.counts):
            problems.append(f"phase {phase.name!r} has been used and must stay as recorded")
    unit = step_unit(batch_sequences, changed.block_sequences) if batch_sequences else 1
    for phase in changed.phases[len(begun) :]:
        if phase.start_step < completed_steps or phase.start_step % unit:
            earliest = -(-completed_steps // unit) * unit
            problems.append(
                f"phase {phase.name!r} starts at step {phase.start_step}: the earliest start is "
                f"{earliest}, in steps of {unit}"
            )
    _raise_if(problems, f"mixture {changed.name!r} after {completed_steps} steps")


def step_unit(batch_sequences: int, block_sequences: int) -> int:
    """Smallest number of steps that is a whole number of mixture blocks."""
    return block_sequences // math.gcd(block_sequences, batch_sequences)


def fit_block(steps: int, batch_sequences: int, block_sequences: int) -> int:
    """Halve a mixture block until a run has at least ten places where a phase may start."""
    while (unit := step_unit(batch_sequences, block_sequences)) > 1 and 10 * unit > steps:
        if block_sequences % 2:
            raise MixtureError(
                f"a mixture block of {block_sequences} sequences spans {unit} of {steps} steps",
                remedy="use a block_sequences that is a power of two times a divisor of the batch",
            )
        block_sequences //= 2
    return block_sequences


def snap_start(
    steps: int, batch_sequences: int, block_sequences: int, fraction: tuple[int, int]
) -> int:
    """First step of a phase planned at `fraction` = (p, q) of a run, snapped down to a block."""
    unit = step_unit(batch_sequences, block_sequences)
    return fraction[0] * steps // fraction[1] // unit * unit


def snap_recorded_start(start_step: int, batch_sequences: int, block_sequences: int) -> int:
    """A recorded start under a new batch size, snapped up to a block."""
    unit = step_unit(batch_sequences, block_sequences)
    return -(-start_step // unit) * unit


def micro_block(steps: int, batch_sequences: int) -> int:
    """Block for runs of a few thousand sequences: max(64, largest power of two <= U*B/40)."""
    fortieth = steps * batch_sequences // BLOCKS_PER_RUN
    return max(MINIMUM_BLOCK_SEQUENCES, 1 << max(0, fortieth.bit_length() - 1))


def plan_mixture(
    name: str,
    *,
    tokens: Mapping[str, int],
    tokenizer_digest: str,
    store_digest: str,
    steps: int,
    batch_sequences: int,
    sequence_length: int,
    phases: Sequence[tuple[str, tuple[int, int], Mapping[str, int]]],
    block_sequences: int = DEFAULT_BLOCK_SEQUENCES,
    lattice: int = DEFAULT_LATTICE,
    **fields: Any,
) -> Mixture:
    """Mixture of a run from (phase name, start as a fraction p/q of the steps, counts).

    The block is halved where needed, starts are snapped down to it, budgets are the tokens
    between starts. `fields` are further fields of Mixture.
    """
    block_sequences = fit_block(steps, batch_sequences, block_sequences)
    starts = [snap_start(steps, batch_sequences, block_sequences, p) for _, p, _ in phases]
    mixture = Mixture(
        name=name,
        tokenizer_digest=tokenizer_digest,
        store_digest=store_digest,
        cells=dict(tokens),
        phases=budget_phases(
            [
                (label, start, counts)
                for (label, _, counts), start in zip(phases, starts, strict=True)
            ],
            steps=steps,
            tokens_per_step=batch_sequences * sequence_length,
        ),
        sequence_length=sequence_length,
        block_sequences=block_sequences,
        lattice=lattice,
        **fields,
    )
    require_consistent(mixture)
    return mixture


def budget_phases(
    phases: Sequence[tuple[str, int, Mapping[str, int]]], *, steps: int, tokens_per_step: int
) -> tuple[Phase, ...]:
    """Phases from (name, first step, counts); the budget of each is the tokens until the next."""
    ends = [*(start for _, start, _ in phases[1:]), steps]
    return tuple(
        Phase(label, start, (end - start) * tokens_per_step, dict(counts))
        for (label, start, counts), end in zip(phases, ends, strict=True)
    )


def require_consistent(mixture: Mixture) -> None:
    """Raise MixtureError for what is wrong with a mixture by itself."""
    _raise_if(structure_problems(mixture), f"mixture {mixture.name!r}")


def simulated_prefixes(
    num_sequences: Mapping[str, int],
    *,
    experiment_tokens: int,
    target_tokens: int,
    weighted: Collection[str] | None = None,
    min_one: bool = False,
) -> dict[str, int]:
    """Sequences of each cell that a small run may read: floor(N * E / T), in integers.

    The run then repeats its data as often as the target run of T tokens would. `weighted` are the
    cells with a positive weight (default: all); they must keep a sequence, which `min_one` grants.

    Raises:
        MixtureError: E > T, or a weighted cell keeps nothing.
    """
    if not 0 < experiment_tokens <= target_tokens:
        raise MixtureError(
            f"a run of {experiment_tokens} tokens cannot imitate one of {target_tokens}",
            remedy="simulated epoching needs a target of at least the run's tokens",
        )
    prefixes = {n: c * experiment_tokens // target_tokens for n, c in num_sequences.items()}
    required = sort_names(num_sequences if weighted is None else weighted)
    empty = [name for name in required if not prefixes[name]]
    if min_one:
        lifted = {name: 1 for name in empty if num_sequences[name]}
        prefixes |= lifted
        empty = [name for name in empty if name not in lifted]
    if empty:
        raise MixtureError(
            f"simulated epoching leaves no sequence of cells {empty}",
            remedy="give these cells weight 0, use shorter rows or a longer run, or allow min_one",
        )
    return prefixes


def prefix_deviations(
    prefixes: Mapping[str, int],
    num_sequences: Mapping[str, int],
    *,
    experiment_tokens: int,
    target_tokens: int,
) -> dict[str, float]:
    """Relative deviation N' / (N * E / T) - 1 that rounding causes, for non-empty cells."""
    return {
        name: prefix * target_tokens / (num_sequences[name] * experiment_tokens) - 1
        for name, prefix in prefixes.items()
        if num_sequences[name]
    }
