"""The licence table of a project: what its sources, code, artifacts and weights may be used for."""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import pydantic

from portolan.data.licenses import NO_ASSERTION, classify_license
from portolan.errors import UsageError
from portolan.pipeline.corpus import Corpus
from portolan.record.chain import Record
from portolan.record.licences import (
    SOURCE_ROW,
    LicenceRow,
    Redistribution,
    Subject,
    check_licences,
)
from portolan.source_settings import LICENSE_CLASSES

FILE = "licences.toml"
CODE = "code"
SUBJECT_OF_KIND: Mapping[str, Subject] = {
    "checkpoint": "weights",
    "release": "weights",
    "dataset": "corpus",
    "mixture": "corpus",
    "tokenizer": "tokenizer",
    "metrics": "measurements",
    "forecast": "measurements",
    "report": "measurements",
    "eval_output": "measurements",
    "container": "code",
    "wheel": "code",
}
_HELD_OUT = "held-out"
_PASSED_ON = LICENSE_CLASSES.index("share-alike")


class StatedLicence(pydantic.BaseModel):
    """What an owner states for one subject in `licences.toml`; absent keys keep the default."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    declared: Annotated[str, pydantic.Field(min_length=1)] | None = None
    concluded: Annotated[str, pydantic.Field(min_length=1)] | None = None
    basis: Annotated[str, pydantic.Field(min_length=1)] | None = None
    obligations: list[str] | None = None
    redistribution: Redistribution | None = None
    legal_basis: Annotated[str, pydantic.Field(min_length=1)] | None = None


class StatedLicences(pydantic.BaseModel):
    """The tables of `licences.toml`: one per subject."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    code: StatedLicence = StatedLicence()
    corpus: StatedLicence = StatedLicence()
    evaluation: StatedLicence = StatedLicence()
    tokenizer: StatedLicence = StatedLicence()
    weights: StatedLicence = StatedLicence()
    measurements: StatedLicence = StatedLicence()
    other: StatedLicence = StatedLicence()


def licence_table(root: Path, records: list[Record], corpus: Corpus | None) -> list[LicenceRow]:
    """Rows for the program, every source and every artifact in force, checked against each other.

    An artifact's row is named by its record. LicenceError if something is broader than its inputs.
    """
    stated = read_stated(root)
    rows = [_with(_code_row(), stated), *_source_rows(corpus)]
    sources = tuple(row.name for row in rows if row.subject == "corpus")
    artifacts = [record for record in records if record.type == "artifact"]
    data = tuple(r.id for r in artifacts if _subject(r) in ("corpus", "tokenizer"))
    for record in artifacts:
        rows.append(_with(_artifact_row(record, sources, data), stated))
    check_licences(rows, lambda expression: classify_license(expression).number)
    return rows


def read_stated(root: Path) -> StatedLicences:
    """The owner's statements in `licences.toml` of the project; none if there is no such file."""
    path = root / FILE
    if not path.is_file():
        return StatedLicences()
    try:
        return StatedLicences.model_validate(tomllib.loads(path.read_text()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, pydantic.ValidationError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}",
            remedy="give tables such as [weights] with declared, concluded, basis, obligations, "
            "redistribution, legal_basis",
        ) from error


def _with(row: LicenceRow, stated: StatedLicences) -> LicenceRow:
    own: StatedLicence = getattr(stated, row.subject)
    values: dict[str, Any] = own.model_dump(exclude_none=True)
    if "obligations" in values:
        values["obligations"] = tuple(values["obligations"])
    return LicenceRow(**{**vars(row), **values})


def _code_row() -> LicenceRow:
    return LicenceRow(
        CODE,
        "code",
        "Apache-2.0",
        "Apache-2.0",
        basis="the LICENSE file of the program",
        obligations=("keep the notice and the licence text",),
        redistribution="public",
    )


def _source_rows(corpus: Corpus | None) -> Iterator[LicenceRow]:
    for source in corpus.summary["sources"] if corpus else ():
        number = classify_license(source["license_spdx"]).number
        yield LicenceRow(
            SOURCE_ROW + source["key"],
            "corpus",
            source["license_spdx"],
            source["license_spdx"],
            basis=f"provenance row {source['provenance']}",
            obligations=(f"terms of the class {source['license_class']}",),
            redistribution="public" if number <= _PASSED_ON else "metadata_only",
        )


def _artifact_row(record: Record, sources: tuple[str, ...], data: tuple[str, ...]) -> LicenceRow:
    body = record.body
    subject = _subject(record)
    inputs = {"corpus": sources, "evaluation": sources, "tokenizer": sources, "weights": data}
    return LicenceRow(
        record.id,
        subject,
        body.get("licence_declared", NO_ASSERTION),
        body.get("licence_concluded", NO_ASSERTION),
        basis="the artifact's record",
        redistribution=body["redistribution"],
        derived_from=inputs.get(subject, ()),
        title=f"{body['kind']} {body.get('name', 'not_stated')}",
    )


def _subject(record: Record) -> Subject:
    if record.body["kind"] == "dataset" and record.body.get("name", "").startswith(_HELD_OUT):
        return "evaluation"
    return SUBJECT_OF_KIND.get(record.body["kind"], "other")
