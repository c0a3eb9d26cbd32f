"""What a label means: the rubric that every labeller follows, and the row that it gives."""

from typing import Literal, get_args

import pyarrow as pa
import pydantic

from portolan.canonical import digest
from portolan.settings import Settings

ContentType = Literal["prose", "code", "math", "multilingual", "structured", "agentic", "other"]
CONTENT_TYPES: tuple[ContentType, ...] = get_args(ContentType)
LEVELS = (1, 2, 3, 4, 5)

RUBRIC = """\
You judge one document as training text for a language model. You see its text and nothing else.

Answer with one JSON object and nothing around it:
{"content_type": "...", "valid": true, "level": 3}

content_type is what the document mostly is, one of:
  prose         running text in English
  code          source code or configuration, with its comments
  math          mathematics: derivations, proofs, exercises with solutions
  multilingual  running text in another language, or in several
  structured    tables, lists, logs, records, markup with little running text
  agentic       a record of steps: tool calls, terminal sessions, conversations with actions
  other         none of these

valid is false for text that is corrupt, cut off so that it makes no sense, boilerplate, or spam.

level says how good the document is as an example of its own type:
  5  excellent: correct, complete, clear; an expert would show it to a student
  4  good: useful and well made, with small flaws
  3  fair: sound, but thin, dated or uneven
  2  poor: little content, careless, or mostly noise
  1  worthless; always the level of a document that is not valid

Judge every type by its own measure. English prose gets no bonus; code, mathematics, other
languages and synthetic text get no penalty. Length alone is neither a merit nor a fault.
"""
RUBRIC_DIGEST = digest({"rubric": RUBRIC})

LABEL_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("content_type", pa.string()),
        pa.field("valid", pa.bool_()),
        pa.field("level", pa.int8()),
        pa.field("labeller", pa.string(), nullable=False),
        pa.field("rubric", pa.string(), nullable=False),
        pa.field("windows", pa.int32(), nullable=False),
        pa.field("failure", pa.string(), nullable=False),
    ]
)
"""A label: `windows` is how many parts of the document the labeller saw, 0 for all of it. Where a
labeller gave no valid answer, `failure` says why and type, valid and level are null."""


class Judgement(Settings):
    """What a labeller says about one document; one that is not valid has level 1."""

    content_type: ContentType
    valid: bool
    level: Literal[1, 2, 3, 4, 5]

    @pydantic.model_validator(mode="before")
    @classmethod
    def _worthless_if_invalid(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("valid") is False and "level" in value:
            return {**value, "level": 1}
        return value
