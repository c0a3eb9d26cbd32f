"""Settings of one source of documents, and the classes of licences that a recipe may accept."""

from typing import Annotated, Literal, get_args

import pydantic
from pydantic import Field

from portolan.settings import PositiveInt, Settings

INSTALLED_SOURCES = (
    "stdlib-sources",
    "stdlib-tests",
    "stdlib-docstrings",
    "manual-topics",
    "package-sources",
    "package-docstrings",
    "package-readmes",
    "package-licences",
)
LicenseClass = Literal[
    "public-domain",
    "permissive",
    "share-alike",
    "model-output-terms",
    "no-derivatives",
    "non-commercial",
    "custom-terms",
    "unknown",
]
LICENSE_CLASSES: tuple[LicenseClass, ...] = get_args(LicenseClass)
"""From the most open to the most closed."""


class SourceSettings(Settings):
    """One source of documents.

    `installed` takes its text from this machine's Python (key is one of INSTALLED_SOURCES).
    `text`, `jsonl` and `parquet` read a folder, a file or any fsspec URL in `path`; `huggingface`
    reads the Parquet and JSON-lines files of a dataset: `path` is its name on the hub
    (`owner/name`) or a copy in a folder (`./folder`); `subset` and `split` choose files as its card
    says. What lies elsewhere needs a `revision`: on the hub the commit, else the name of a version,
    or `sha256:` and the content digest that provenance.csv shows. Licences that differ by document
    stand in the column `license_field`; a document of a class that is not accepted is left out.
    """

    key: str
    kind: Literal["installed", "text", "jsonl", "parquet", "huggingface"]
    path: str = ""
    category: str = "web"
    upstream: str = ""
    subset: str = ""
    split: str = ""
    revision: str = ""
    text_field: str = "text"
    id_field: str = ""
    license_field: str = ""
    content_key: tuple[str, ...] = ()
    extensions: tuple[str, ...] = ()
    max_bytes: PositiveInt | None = None
    license_spdx: str = "NOASSERTION"
    license_raw: str = ""
    evidence_url: str = ""
    retrieved_on: Annotated[str, Field(pattern=r"^(\d{4}-\d{2}-\d{2})?$")] = ""
    evidence_digest: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    accept: str = ""
    synthetic: bool = False
    machine_translated: bool = False
    pdf: bool = False
    generator: str = ""
    transform: str = ""

    @pydantic.model_validator(mode="after")
    def _complete(self) -> "SourceSettings":
        if self.kind == "installed" and self.key not in INSTALLED_SOURCES:
            raise ValueError(
                f"installed source {self.key!r} is unknown; use one of "
                f"{', '.join(INSTALLED_SOURCES)}"
            )
        if self.kind != "installed" and not self.path:
            raise ValueError(f"source {self.key!r} of kind {self.kind!r} needs a path")
        return self
