"""Building blocks of the record's schemas: text that is never blank, hashes, ids, steps."""

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from portolan.canonical import stringify_floats
from portolan.errors import PortolanError
from portolan.record.times import check_time

ID_PATTERN = r"[a-z_]+:[0-9a-f]{64}"


class SchemaError(PortolanError, ValueError):
    """A body does not have the form of its record type."""


def _check_relative(path: str) -> str:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\\" in path or str(pure) != path:
        raise ValueError(f"the path {path!r} is not a plain path relative to the project")
    return path


def _decimal_text(value: Any) -> Any:
    """A number as decimal text; text unchanged."""
    return value if isinstance(value, str) else str(stringify_floats(value))


Text = Annotated[str, StringConstraints(min_length=1)]
Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
HashOrUnknown = Hash | Literal["unknown", "not_stated", "withheld"]
RecordId = Annotated[str, StringConstraints(pattern=f"^{ID_PATTERN}$")]
Time = Annotated[str, AfterValidator(check_time)]
RelativePath = Annotated[str, AfterValidator(_check_relative)]
Count = Annotated[int, Field(ge=0, strict=True)]
NonEmptyMap = Annotated[dict[str, Any], Field(min_length=1), BeforeValidator(stringify_floats)]
DecimalText = Annotated[str, BeforeValidator(_decimal_text)]
Mark = Literal["unknown", "not_stated", "withheld"]


class Part(BaseModel):
    """Base of every body and of its parts: frozen, no extra field, no blank text, no null."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="after")
    def _no_blanks(self) -> "Part":
        for name, value in self:
            _refuse_blanks(value, name)
        return self


class Body(Part):
    """What a journal line says: its fields, a text in plain English and ids it refers to."""

    record_type: ClassVar[str] = ""

    text: Text
    refs: tuple[RecordId, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON value without absent fields; floats inside free mappings are decimal strings."""
        return stringify_floats(self.model_dump(mode="json", exclude_none=True))


class StepPoint(Part):
    """A step on a named clock; a bare number is never accepted."""

    clock: Literal["completed", "row", "tracker"]
    n: Annotated[int, Field(ge=-1, strict=True)]


def _refuse_blanks(value: Any, place: str) -> None:
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{place} is blank; write unknown, not_stated or withheld")
    elif isinstance(value, Mapping):
        for name, item in value.items():
            _refuse_blanks(name, place)
            if item is None:
                raise ValueError(f"{place}.{name} is null; write unknown, not_stated or withheld")
            _refuse_blanks(item, f"{place}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _refuse_blanks(item, f"{place}[{index}]")
