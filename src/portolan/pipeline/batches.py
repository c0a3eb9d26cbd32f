"""The documents behind a step, from what the run left: its plan, its mixture, its changes.

Which sequence of which cell is read follows from the folder of the run and the journal alone; the
documents of a sequence follow from the document tables of the token store. The recipe may have
changed since, and the text of the corpus may be gone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from portolan.console import errors, say
from portolan.data.loader import BatchRow, Loader
from portolan.data.mixture import Mixture, load_mixture
from portolan.data.order import Geometry, SequenceOrder
from portolan.data.store import StoreError, TokenStore
from portolan.errors import PortolanError, UsageError
from portolan.files import read_json, sha256_file
from portolan.pipeline.change_records import changes_in_force, run_course
from portolan.pipeline.corpus import find_corpus
from portolan.pipeline.course import ContextChange, HorizonChange, MixtureChange
from portolan.pipeline.mixing import epoch_prefixes
from portolan.pipeline.recorder import ProjectRecord
from portolan.pipeline.runs import MIXTURE_FILE, PlannedRun, planned_runs, run_loader
from portolan.project import Project

RUN_FILE, JOURNAL = "run.json", "journal.jsonl"


@dataclass(frozen=True)
class RecordedOrder:
    """The order of the data of a run that began; `num_updates` is where it ends."""

    run_id: str
    mixture: Mixture
    geometry: tuple[Geometry, ...]
    num_updates: int
    seed: int
    prefixes: dict[str, int] | None

    def sequences(self) -> SequenceOrder:
        """Cell, epoch and sequence of every row."""
        return SequenceOrder(self.mixture, self.geometry, seed=self.seed, prefixes=self.prefixes)


def show_batch(project: Project, run_id: str, step: int) -> None:
    """Print source, id and epoch of the documents in each row of a step.

    Where the token store is missing, cell, epoch and sequence of each row, and what is missing.
    """
    folder = _find_folder(project, run_id)
    if folder is None:
        _show_planned(project, run_id, step)
        return
    order = recorded_order(project, folder)
    _check_step(order.run_id, step, order.num_updates)
    store = _find_store(project, order.mixture.store_digest)
    if isinstance(store, str):
        sequences = order.sequences()
        for row in range(sequences.batch_sequences(step)):
            cell, epoch, sequence = sequences.locate(step, row)
            say(f"row={row} cell={cell} epoch={epoch} sequence={sequence}")
        raise PortolanError(
            f"{store}: the record alone tells cells, epochs and sequences, not the documents",
            remedy="put the token store back, or curate the same sources again",
        )
    loader = Loader(
        store, order.mixture, geometry=order.geometry, seed=order.seed, prefixes=order.prefixes
    )
    _print_rows(loader.show_batch(step))


def _print_rows(rows: list[BatchRow]) -> None:
    for row in rows:
        for document in row.documents:
            say(
                f"row={row.row} tokens={document.start}-{document.stop} "
                f"source={document.source} id={document.document_id} epoch={document.epoch}"
            )


def _check_step(run_id: str, step: int, num_updates: int) -> None:
    if step >= num_updates:
        raise UsageError(f"step {step} is outside {run_id}", remedy=f"use 0 to {num_updates - 1}")


def _find_folder(project: Project, run_id: str) -> Path | None:
    """Folder of a run that began, by the start of its id; of the target when `run_id` is empty.

    None: no such run began.
    """
    pattern = f"{run_id or 'target'}*/{RUN_FILE}"
    found = [path.parent for path in sorted(project.runs.glob(pattern))]
    if found and not run_id and (planned := _planned_target(project)):
        own = [folder for folder in found if folder.name == planned.run_id]
        if not own:
            text = f"the recipe's target {planned.run_id} has not begun: this is {found[-1].name}"
            errors.print(text, markup=False)
        found = own or found[-1:]
    if len(found) > 1:
        names = ", ".join(folder.name for folder in found)
        raise UsageError(
            f"{run_id or 'target'!r} names {len(found)} runs", remedy=f"use --run with {names}"
        )
    return found[0] if found else None


def _planned_target(project: Project) -> PlannedRun | None:
    corpus = find_corpus(project)
    return planned_runs(project, corpus)[-1] if corpus else None


def _show_planned(project: Project, run_id: str, step: int) -> None:
    """The batch that a run of the recipe will read."""
    from portolan.pipeline.inspect import find_run
    from portolan.pipeline.stages import require_corpus

    corpus = require_corpus(project)
    run = find_run(project, corpus, run_id)
    course = run_course(project, ProjectRecord(project), run)
    _check_step(run.run_id, step, course.num_updates)
    errors.print(f"{run.run_id} has not begun: this is what it will read", markup=False)
    _print_rows(run_loader(project, corpus, run, course).show_batch(step))


def recorded_order(project: Project, folder: Path) -> RecordedOrder:
    """The order of a run from its folder and the journal.

    Raises:
        PortolanError: the record lacks something that the order depends on.
    """
    _check_recorded(project, folder)
    run = read_json(folder / RUN_FILE)
    path = folder / MIXTURE_FILE
    if not path.is_file():
        raise PortolanError(f"the record lacks {path}", remedy="restore the folder of the run")
    mixture = load_mixture(path)
    plan = run["plan"]
    length = int(run["model"]["sequence_length"])
    geometry = [Geometry(0, int(plan["batch_sequences"]), length)]
    starts = {phase.start_step for phase in mixture.phases}
    tokens_per_step = geometry[0].batch_sequences * length
    changes = changes_in_force(ProjectRecord(project), folder.name)
    for change in sorted(changes, key=lambda change: change.from_step):
        if isinstance(change, ContextChange):
            batch = tokens_per_step // change.sequence_length
            geometry.append(Geometry(change.from_step, batch, change.sequence_length))
        elif isinstance(change, MixtureChange) and change.from_step not in starts:
            raise PortolanError(
                f"the journal changes the mixture of {folder.name} from update {change.from_step} "
                f"on, {path.name} does not hold it yet",
                remedy="go on with training, which writes the mixture again",
            )
    horizons = [change.horizon for change in changes if isinstance(change, HorizonChange)]
    if "simulated_epochs" not in run["data"]:
        raise PortolanError(
            f"{folder / RUN_FILE} does not say which epochs the run simulates",
            remedy="use the version of Portolan that trained it",
        )
    return RecordedOrder(
        folder.name,
        mixture,
        tuple(geometry),
        [int(plan["steps"]), *horizons][-1],
        int(run["seed"]),
        epoch_prefixes(mixture, run["data"]["simulated_epochs"]),
    )


def _check_recorded(project: Project, folder: Path) -> None:
    """Compare plan and mixture of a finished run with their recorded digests."""
    if not (project.record / JOURNAL).is_file():
        raise PortolanError(
            f"the record lacks its journal, {project.record / JOURNAL}",
            remedy="restore it: it holds the digests and the changes of the run",
        )
    name = f"{folder.name} metrics"
    found = ProjectRecord(project).find("artifact", kind="metrics", name=name)
    if not found:
        errors.print(f"{folder.name} is not finished: its plan is not recorded yet", markup=False)
    recorded = {
        entry["path"]: entry["sha256"] for record in found for entry in record.body["files"]
    }
    for path in (folder / RUN_FILE, folder / MIXTURE_FILE):
        expected = recorded.get(project.relative(path))
        if expected and path.is_file() and sha256_file(path) != expected:
            raise PortolanError(
                f"{path} is not the file that the record names",
                remedy="restore it from a copy: `portolan verify` lists what differs",
            )


def _find_store(project: Project, digest: str) -> TokenStore | str:
    """The token store with a digest, or what is wrong with it."""
    problem = f"the token store {digest[:16]} is not in {project.corpus / 'tokens'}"
    for path in _store_folders(project):
        try:
            if read_json(path / "manifest.json")["store_digest"] != digest:
                continue
            store = TokenStore(path)
            _ = store.cells
            return store
        except (StoreError, OSError, ValueError, KeyError) as error:
            problem = f"the token store {digest[:16]} cannot be read: {error}"
    return problem


def _store_folders(project: Project) -> Iterator[Path]:
    yield from (path.parent for path in sorted((project.corpus / "tokens").glob("*/manifest.json")))
