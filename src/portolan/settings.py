"""What every table of a recipe has in common."""

from typing import Annotated

import pydantic
from pydantic import Field

PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Settings(pydantic.BaseModel):
    """Base of every settings table: frozen, no unknown keys, no silent conversion."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    def changed(self) -> set[str]:
        """Names of the keys that differ from their defaults."""
        fields = type(self).model_fields.items()
        return {
            name
            for name, field in fields
            if getattr(self, name) != field.get_default(call_default_factory=True)
        }
