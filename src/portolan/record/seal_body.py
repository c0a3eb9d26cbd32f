"""The body of a `seal` record: one statement over everything that a project holds at its end."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from portolan.record.schema import Body, Count, Hash, HashOrUnknown, Part, RecordId, Text

BlobReference = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]


class SealedHead(Part):
    """The line that the seal covers, with everything before it."""

    journal: Hash
    seq: Count
    head: Hash


class OrderDigest(Part):
    """Identities of the first and last batches of a segment, hashed with what derives them."""

    first_step: Count
    last_step: Count
    num_batches: Annotated[int, Field(ge=1, strict=True)]
    seed: Count
    digest: Hash


class SealedRun(Part):
    """A run as it ended; digests are those of its last attempt."""

    name: Text
    role: Text
    status: Text
    attempts: Count
    completed: Count | Literal["unknown", "not_stated"]
    config_digest: HashOrUnknown
    data_manifest_digest: HashOrUnknown
    container_digest: HashOrUnknown
    lock_digest: HashOrUnknown
    code_commit: Text
    final_checkpoint: RecordId | Literal["none", "not_stated"]
    orders: tuple[OrderDigest, ...] = ()


class Seal(Body):
    """Merkle root and head of all lines before, and the tables that go with them as blobs.

    `published_conflicts` lists the contradictions that stay open and are stated in public.
    """

    record_type: ClassVar[str] = "seal"

    merkle_root: Hash
    head: SealedHead
    runs: tuple[SealedRun, ...]
    wheel_digest: HashOrUnknown
    recipe_digest: HashOrUnknown
    data_manifest: BlobReference | Literal["not_stated"]
    evaluations: BlobReference | Literal["not_stated"]
    licences: BlobReference
    reconciliation: BlobReference
    final_items: BlobReference
    published_conflicts: tuple[Text, ...] = ()
