"""Datasets: the shards of a finished stage folder, read as streams of tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from portolan.data.documents import EMPTY, FAILED, MANIFEST, read_tables
from portolan.errors import PortolanError
from portolan.files import read_json


@dataclass(frozen=True)
class Shard:
    """One Parquet file of a dataset, as its manifest describes it.

    `status` is complete, empty (a file with a schema and no rows) or failed (no file).
    """

    folder: Path
    name: str
    rows: int
    bytes: int
    digest: str
    status: str
    error: str = ""

    @property
    def path(self) -> Path:
        """Where the file lies."""
        return self.folder / self.name

    def read(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Row groups, one after the other; memory is one of them.

        Raises:
            PortolanError: the shard failed, or its file is missing, damaged or lacks a column.
        """
        if self.status == FAILED:
            raise self._unusable(f"failed: {self.error}", "remove the cause and run again")
        rebuild = f"delete {self.folder} and run again: it will be built anew"
        if columns is not None and (absent := sorted(set(columns) - set(self.schema.names))):
            raise self._unusable(f"has no column {absent[0]!r}", rebuild)
        rows = 0
        try:
            for table in read_tables(self.path, columns):
                rows += table.num_rows
                yield table
        except FileNotFoundError:
            raise self._unusable("is missing", rebuild) from None
        except (pa.ArrowException, OSError) as error:
            raise self._unusable(f"is damaged: {error}", rebuild) from error
        if rows != self.rows:
            raise self._unusable(f"holds {rows} rows, not {self.rows}", rebuild)

    @cached_property
    def schema(self) -> pa.Schema:
        """Schema of the file."""
        rebuild = f"delete {self.folder} and run again: it will be built anew"
        try:
            return pq.read_schema(self.path)
        except FileNotFoundError:
            raise self._unusable("is missing", rebuild) from None
        except (pa.ArrowException, OSError) as error:
            raise self._unusable(f"is damaged: {error}", rebuild) from error

    def _unusable(self, what: str, remedy: str) -> PortolanError:
        return PortolanError(f"shard {self.path} {what}", remedy=remedy)


@dataclass(frozen=True)
class Dataset:
    """The shards directly in `folder/prefix` of a stage, in the order of their names.

    A stage that holds several sets of shards, one a source for example, is several datasets:
    `dataset.within(folder)`.
    """

    folder: Path
    manifest: Mapping[str, Any]
    prefix: str = ""

    @classmethod
    def open(cls, folder: Path, prefix: str = "") -> "Dataset":
        """Open a finished stage folder.

        Raises:
            PortolanError: the folder has no readable manifest.
        """
        try:
            manifest = read_json(folder / MANIFEST)
        except (OSError, ValueError) as error:
            raise PortolanError(
                f"{folder} holds no finished step: {error}", remedy="run the step again"
            ) from error
        return cls(folder, manifest, prefix)

    def within(self, prefix: str) -> "Dataset":
        """The shards in a folder of this dataset."""
        return Dataset(self.folder, self.manifest, f"{self.prefix}{prefix}/")

    @property
    def key(self) -> str:
        """Key of the stage."""
        return self.manifest["key"]

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """Shards in the order of their names; their folder is absolute, for workers elsewhere."""
        found, folder = [], (self.folder / self.prefix).absolute()
        for entry in self.manifest["shards"]:
            name = entry["name"].removeprefix(self.prefix)
            if entry["name"].startswith(self.prefix) and "/" not in name:
                found.append(
                    Shard(
                        folder,
                        name,
                        entry.get("rows", 0),
                        entry.get("bytes", 0),
                        entry.get("digest", ""),
                        entry["status"],
                        entry.get("error", ""),
                    )
                )
        return tuple(sorted(found, key=lambda shard: shard.name))

    @property
    def names(self) -> list[str]:
        """Names of the shards."""
        return [shard.name for shard in self.shards]

    @property
    def paths(self) -> list[Path]:
        """Paths of the shards."""
        return [shard.path for shard in self.shards]

    @property
    def num_rows(self) -> int:
        """Rows in all shards."""
        return sum(shard.rows for shard in self.shards)

    @property
    def is_empty(self) -> bool:
        """True if the manifest says so of every shard."""
        return all(shard.status == EMPTY for shard in self.shards)

    @cached_property
    def schema(self) -> pa.Schema:
        """Schema of the first shard; every shard of a step has the same."""
        if not self.shards:
            raise PortolanError(f"dataset {self.folder / self.prefix} has no shard")
        return self.shards[0].schema

    def shard(self, name: str) -> Shard:
        """The shard of that name.

        Raises:
            PortolanError: the manifest does not know it.
        """
        try:
            return self._by_name[name]
        except KeyError:
            raise PortolanError(
                f"dataset {self.folder / self.prefix} has no shard {name!r}"
            ) from None

    @cached_property
    def _by_name(self) -> dict[str, Shard]:
        return {shard.name: shard for shard in self.shards}

    def read(self, name: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Row groups of a shard."""
        return self.shard(name).read(columns)
