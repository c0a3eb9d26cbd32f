"""Bodies about bytes: files, what they are, their licence and how far they were checked."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from portolan.canonical import digest
from portolan.record.schema import Body, Count, Hash, Part, RecordId, RelativePath, Text


class FileEntry(Part):
    """One file of an artifact: path relative to the project, size in bytes and SHA-256."""

    path: RelativePath
    bytes: Count
    sha256: Hash


class Artifact(Body):
    """Bytes that exist: what they are, where they lie, under which licence, how far checked."""

    record_type: ClassVar[str] = "artifact"

    kind: Literal[
        "checkpoint",
        "dataset",
        "mixture",
        "tokenizer",
        "metrics",
        "forecast",
        "container",
        "wheel",
        "report",
        "log_bundle",
        "eval_output",
        "snapshot",
        "release",
    ]
    name: Text = "not_stated"
    files: tuple[FileEntry, ...] = ()
    digests: Annotated[dict[str, Hash], Field(min_length=1)]
    bytes: Count
    manifest_digest: Hash | None = None
    locations: tuple[Text, ...] = ()
    licence_declared: Text
    licence_concluded: Text
    redistribution: Literal["public", "gated", "metadata_only", "withheld"]
    derived_from: tuple[RecordId, ...] = ()
    retain_until: Text
    completeness: Literal[
        "submitted",
        "committed",
        "marked",
        "listed",
        "bytes_verified",
        "restored",
        "replay_matched",
    ]

    @model_validator(mode="after")
    def _files_add_up(self) -> "Artifact":
        if self.files and sum(entry.bytes for entry in self.files) != self.bytes:
            raise ValueError(f"bytes is {self.bytes}, its files hold another number")
        paths = [entry.path for entry in self.files]
        if len(set(paths)) != len(paths):
            raise ValueError("a path occurs twice in files")
        return self


def files_digest(files: tuple[FileEntry, ...]) -> str:
    """Digest of a list of files in path order: equal for equal names and bytes."""
    ordered = sorted(files, key=lambda entry: entry.path)
    return digest([entry.model_dump(mode="json") for entry in ordered])
