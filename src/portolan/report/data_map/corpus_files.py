"""Reading a curated corpus for its pages: stages by name, and documents by id."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from portolan.data.documents import MANIFEST, source_folder_name
from portolan.errors import UsageError
from portolan.files import read_json
from portolan.record.visible import visible

SUMMARY = "summary.json"
NORMALISE = "normalise"
EVIDENCE = "evidence"
DOCUMENTS = "part-"


@dataclass(frozen=True)
class StageFolder:
    """A finished stage: its folder and its manifest."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the step."""
        return self.manifest["name"]

    @property
    def key(self) -> str:
        """Key of the step."""
        return self.manifest["key"]

    def shards(self, folder: str = "") -> list[Path]:
        """Paths of the shards directly in a folder of the stage, in order of their names."""
        names = sorted(shard["name"] for shard in self.manifest["shards"])
        return [self.folder / name for name in names if name.rpartition("/")[0] == folder]


@dataclass(frozen=True)
class CorpusFiles:
    """A curated corpus on disk: its summary and the stages that the summary names."""

    root: Path
    summary: Mapping[str, Any]
    stages: tuple[StageFolder, ...]

    @property
    def folder(self) -> Path:
        """Folder of the corpus."""
        return self.root / "corpus"

    def named(self, name: str) -> StageFolder | None:
        """The stage of a name, or None where curation did not run it."""
        return next((stage for stage in self.stages if stage.name == name), None)

    def sources(self) -> dict[str, StageFolder]:
        """Normalised documents of each source."""
        return {stage.manifest["label"]: stage for stage in self.stages if stage.name == NORMALISE}

    def attribute_of(self, name: str, source: str) -> list[Path]:
        """Shards of an attribute of a source, which has a stage for each source or one for all."""
        for stage in self.stages:
            if stage.name == name and stage.manifest["label"] in (name, f"{name}/{source}"):
                is_own = stage.manifest["label"] != name
                return stage.shards("" if is_own else source_folder_name(source))
        return []

    def evidence_of(self, stage: StageFolder) -> list[Path]:
        """Shards of the evidence that a stage left beside its attribute, source after source."""
        folders = (f"{source_folder_name(source)}/{EVIDENCE}" for source in self.sources())
        return [path for folder in folders for path in stage.shards(folder)]


def open_corpus(root: Path) -> CorpusFiles:
    """The corpus of a project folder.

    Raises:
        UsageError: nothing is curated there.
    """
    path = root / "corpus" / SUMMARY
    if not path.is_file():
        raise UsageError(f"{root} has no curated corpus", remedy="run `portolan curate` first")
    summary = read_json(path)
    manifests = [root / name for name in summary["manifests"] if name.endswith(MANIFEST)]
    manifests.append(root / summary["store"]["path"] / MANIFEST)
    found = dict.fromkeys(manifests)
    stages = (StageFolder(path.parent, read_json(path)) for path in found if path.is_file())
    return CorpusFiles(root, summary, tuple(stages))


def read_texts(
    corpus: CorpusFiles, wanted: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], str]:
    """Texts by (source, id); ids that a source lacks are left out.

    Row groups that hold none of the ids are skipped by their statistics, so memory is that of one
    row group and of the texts found.
    """
    by_source: dict[str, set[str]] = {}
    for source, document in wanted:
        by_source.setdefault(source, set()).add(document)
    found = {}
    sources = corpus.sources()
    for source, ids in by_source.items():
        paths = sources[source].shards() if source in sources else []
        for path in (path for path in paths if path.name.startswith(DOCUMENTS)):
            for document, text in _texts_in(path, sorted(ids)):
                found[source, document] = text
    return found


def _texts_in(path: Path, ids: Sequence[str]) -> Iterable[tuple[str, str]]:
    import pyarrow as pa

    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            column = file.metadata.row_group(group).column(0)
            bounds = column.statistics if column.path_in_schema == "id" else None
            if bounds is not None and not any(bounds.min <= name <= bounds.max for name in ids):
                continue
            here = pc.is_in(file.read_row_group(group, ["id"])["id"], pa.array(ids))  # pyright: ignore
            if not pc.any(here).as_py():  # pyright: ignore
                continue
            rows = file.read_row_group(group, ["id", "text"]).filter(here)
            yield from zip(rows["id"].to_pylist(), rows["text"].to_pylist(), strict=True)


def readable(text: str) -> str:
    """Text of a document with hidden characters shown; line breaks and tabs stay."""
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join("\t".join(map(visible, line.split("\t"))) for line in lines)
