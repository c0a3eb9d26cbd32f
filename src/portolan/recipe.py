"""What a run is: frozen, validated settings, read from TOML, with a digest.

A recipe says everything that changes a byte of the result. Where it runs (folder, number of
processes) is not part of it.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from portolan.architecture import KEYS, ModelSettings
from portolan.canonical import digest, stringify_floats
from portolan.curation_settings import (
    DecontaminationSettings,
    DomainSettings,
    EmbeddingSettings,
    FuzzySettings,
    QualitySettings,
)
from portolan.errors import UsageError
from portolan.parallel_settings import ParallelSettings
from portolan.settings import Fraction, PositiveInt, Settings
from portolan.shapes import ModelConfig, Remat, ShapeError, derive_shape
from portolan.source_settings import LICENSE_CLASSES, LicenseClass, SourceSettings
from portolan.timetable import ContextSettings, MixtureSettings


class BudgetSettings(Settings):
    """How long a model of a given size trains.

    `per_rack` batches take 1,024 sequences a rack from `racks` (width -> racks); `fixed` takes
    `batch_sequences`; `token_power` the largest power of two below (tokens)^0.6 / length.
    """

    tokens_per_active_param: Annotated[float, Field(gt=0)]
    batch_policy: Literal["token_power", "per_rack", "fixed"] = "token_power"
    batch_sequences: PositiveInt | None = None
    racks: dict[str, int] = Field(default={})
    reference_tokens: PositiveInt | None = None

    @pydantic.model_validator(mode="after")
    def _complete(self) -> "BudgetSettings":
        if self.batch_policy == "fixed" and self.batch_sequences is None:
            raise ValueError("batch_policy 'fixed' needs batch_sequences")
        if self.batch_policy == "per_rack" and not self.racks:
            raise ValueError("batch_policy 'per_rack' needs the table racks: width -> racks")
        return self


class LadderSettings(Settings):
    """Widths of the rungs, and how many seeds a width trains (default 1)."""

    widths: tuple[PositiveInt, ...]
    seeds: dict[str, PositiveInt] = Field(default={})

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> "LadderSettings":
        if list(self.widths) != sorted(set(self.widths)):
            raise ValueError(f"widths {list(self.widths)} must rise without repetition")
        if unknown := sorted(set(self.seeds) - {str(w) for w in self.widths}):
            raise ValueError(f"seeds names width {unknown[0]}, which is not one of the widths")
        return self


class OptimizerSettings(Settings):
    """Optimizer of every run; the peak rates come from the law unless a multiplier changes them.

    `hyperball_scope` has no default: one norm per expert matrix (`per_expert`) or one per layer
    over all experts (`joint`, as in the public run by accident of stacking, marin #8621).
    `matrix` is the rule of hidden matrices: `muonh`, `adamh` (Adam's direction, norm kept) or
    `adamw` (Adam's rate, decoupled decay 0.1, gradients clipped to norm 1), which takes the head
    with it. `gated_norm = "muonh"` leaves the gates of the norms with them; `adam` and `adamh`
    move only those. `clip` bounds the global gradient norm.
    """

    matrix: Literal["muonh", "adamh", "adamw"] = "muonh"
    gated_norm: Literal["muonh", "adam", "adamh"] = "muonh"
    hyperball_scope: Literal["per_expert", "joint"]
    hyperball_radius: Literal["current", "initial"] = "current"
    momentum: Fraction = 0.95
    nesterov: bool = True
    newton_schulz_dtype: Literal["float32", "bfloat16", "compute"] = "compute"
    beta1: Fraction = 0.90
    beta2_guard: bool = False
    rate_multiplier: Annotated[float, Field(gt=0)] = 1.0
    warmup_steps: PositiveInt | None = None
    min_ratio: Fraction = 0.05
    gate_router_decay: Annotated[float, Field(ge=0)] = 0.02
    decay_start: Annotated[int, Field(ge=0)] = 0
    clip: Annotated[float, Field(gt=0)] | None = None


class TrainSettings(Settings):
    """How a run is executed and saved.

    `remat` is what the backward pass computes again to save memory: with `none` only what costs
    little, with `experts` the products of the routed experts too, with `layer` whole layers, of
    which `offload_carries` keeps what each of them read in the host's memory.
    """

    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    z_weight: Annotated[float, Field(ge=0)] = 1e-4
    remat: Remat = "none"
    offload_carries: bool = False
    norm_interval_steps: PositiveInt = 10
    temporary_checkpoint_seconds: Annotated[float, Field(gt=0)] = 900.0
    permanent_checkpoint_steps: PositiveInt | None = None


class EvaluationSettings(Settings):
    """Held-out evaluation at every 5 % of a run; sequences are capped per domain."""

    max_sequences_per_domain: PositiveInt = 64
    batch_sequences: PositiveInt = 64


class ForecastSettings(Settings):
    """Method (`F1` takes each mark by itself) and asymptote: `relative` to the best rung, or
    `public`, around 1.5 nats."""

    method: Literal["F1", "F2"] = "F2"
    asymptote: Literal["relative", "public"] = "relative"


class HealthSettings(Settings):
    """How `portolan watch` judges this run; an absolute limit that is not set here is off.

    `time_scale` multiplies every limit that is a time, such as 15 minutes without a step.
    """

    time_scale: Annotated[float, Field(gt=0)] = 1.0
    gradient_norm_max: Annotated[float, Field(gt=0)] | None = None
    router_bias_max: Annotated[float, Field(gt=0)] | None = None
    tokens_per_second_min: Annotated[float, Field(gt=0)] | None = None
    mfu_min: Annotated[float, Field(gt=0, le=1)] | None = None


class TokenizerSettings(Settings):
    """A byte-level BPE trained on the corpus, or the file of any `tokenizer.json`."""

    vocab_size: Annotated[int, Field(ge=259)] = 512
    file: str = ""
    sample_bytes: PositiveInt = 4_000_000
    bos: Literal["none", "document"] = "document"
    eos: Literal["none", "document"] = "document"


class DataSettings(Settings):
    """Sources and what is taken out of them before training."""

    sources: tuple[SourceSettings, ...]
    accepted_license_classes: tuple[LicenseClass, ...] = LICENSE_CLASSES[:3]
    max_document_bytes: PositiveInt = 16 * 1024 * 1024
    heldout_bytes_per_domain: PositiveInt = 100_000
    heldout_documents_per_domain: PositiveInt = 200
    heldout_fraction_max: Fraction = 0.1
    seed: Annotated[int, Field(ge=0)] = 0
    fuzzy: FuzzySettings = FuzzySettings()
    decontamination: DecontaminationSettings = DecontaminationSettings()
    embedding: EmbeddingSettings = EmbeddingSettings()
    domains: DomainSettings = DomainSettings()
    quality: QualitySettings = QualitySettings()

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> "DataSettings":
        if not self.sources:
            raise ValueError("sources is empty: name at least one source")
        keys = [source.key for source in self.sources]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"source key {key!r} is used twice")
        return self

    def contradictions(self) -> Iterator[tuple[str, str, str]]:
        """(key, what is wrong with it, remedy) of every key that can have no effect."""
        no_domains = "data.domains.count is not set", "set it, or leave this key out"
        idle: list[tuple[str, Settings, set[str], tuple[str, str]]] = []
        if self.domains.count is None:
            idle += [
                ("embedding", self.embedding, set(), no_domains),
                ("domains", self.domains, set(), no_domains),
            ]
            if self.quality.labeller is not None:
                yield "quality.labeller", *no_domains
        if self.quality.labeller is None:
            why = "data.quality.labeller is not set", "set it, or leave this key out"
            idle.append(("quality", self.quality, set(), why))
        for name, table in (("fuzzy", self.fuzzy), ("decontamination", self.decontamination)):
            if not table.enabled:
                why = f"data.{name}.enabled is false", "leave this key out"
                idle.append((name, table, {"enabled"}, why))
        for name, table, switches, why in idle:
            for key in table.changed() - switches:
                yield f"{name}.{key}", *why


class Recipe(Settings):
    """Everything that a run is."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    seed: Annotated[int, Field(ge=0)] = 0
    data: DataSettings
    tokenizer: TokenizerSettings = TokenizerSettings()
    mixture: MixtureSettings = MixtureSettings()
    context: ContextSettings = ContextSettings()
    model: ModelSettings
    budget: BudgetSettings
    ladder: LadderSettings
    optimizer: OptimizerSettings
    train: TrainSettings = TrainSettings()
    parallel: ParallelSettings = ParallelSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    forecast: ForecastSettings = ForecastSettings()
    health: HealthSettings = HealthSettings()

    def shape_overrides(self, width: int) -> dict[str, Any]:
        """What `derive_shape` is told about a width: its dimensions set by hand, and the switches.

        A rung must see the target's rows and routing, so it shares their dimensions; the others
        follow its own width. Every width has the target's switches.
        """
        target = width == self.model.width
        dimensions = {
            name: value
            for name, value in self.model.overrides.items()
            if target or name in SHARED_OVERRIDES
        }
        return dimensions | self.model.switches()

    def shape(self, width: int) -> ModelConfig:
        """Shape of the target or of a rung; the vocabulary is the tokenizer's."""
        fields = self.shape_overrides(width)
        fields.setdefault("vocab_size", self.tokenizer.vocab_size)
        return derive_shape(self.model.family, width, **fields)

    def contradictions(self) -> Iterator[tuple[str, str, str]]:
        """(key, what is wrong with it, remedy) of every key that can have no effect."""
        for key, problem, remedy in self.model.contradictions():
            yield f"model.{key}", problem, remedy
        for key, problem, remedy in self.data.contradictions():
            yield f"data.{key}", problem, remedy
        if self.train.offload_carries and self.train.remat != "layer":
            problem = f"train.remat = {self.train.remat!r} keeps more than what layers read"
            yield "train.offload_carries", problem, 'set train.remat = "layer", or leave it out'
        if self.optimizer.gated_norm != "muonh" and not self.model.norm.gated:
            problem = "model.norm.gated = false leaves no such matrix"
            yield "optimizer.gated_norm", problem, "leave it out"

    def canonical(self) -> dict[str, Any]:
        """JSON object of all settings, floats as decimal strings."""
        return stringify_floats(self.model_dump(mode="json"))

    def digest(self) -> str:
        """SHA-256 of the canonical JSON."""
        return digest(self.canonical())


SHARED_OVERRIDES = frozenset(
    {
        "sequence_length",
        "window",
        "head_dim",
        "num_experts",
        "experts_per_token",
        "num_shared_experts",
        "conv_taps",
        "global_every",
        "qb_bins",
        "qk_multiplier",
    }
)
"""Shape fields that the rungs share with the target; the others follow each rung's own width."""


def find_recipe(name_or_path: str) -> Path:
    """Path of a recipe file: a `.toml` path, or the name of a recipe of this package."""
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
        if not path.is_file():
            raise UsageError(f"recipe {path} does not exist", remedy="check the path")
        return path
    folder = Path(str(resources.files("portolan"))) / "recipes"
    names = sorted(file.stem for file in folder.glob("*.toml"))
    if name_or_path not in names:
        raise UsageError(
            f"recipe {name_or_path!r} is unknown",
            remedy=f"use one of {', '.join(names)}, or the path of a .toml file",
        )
    return folder / f"{name_or_path}.toml"


def load_recipe(path: Path, overrides: tuple[str, ...] = ()) -> Recipe:
    """Read a recipe and apply `a.b=value` overrides.

    Raises:
        UsageError: names the key, the file, the line and the remedy.
    """
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot read recipe {path}: {error.strerror}",
            remedy="run `portolan init DIR` first, or name the project with -C DIR",
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text: byte {error.start}", remedy="write the recipe as TOML text"
        ) from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}", remedy="fix that line") from error
    lines = _key_lines(text)
    places = {key: f"{path}, line {line}" for key, line in lines.items()}
    for override in overrides:
        key = _apply_override(values, override)
        places[key] = f"--set {override}"
    recipe = _validate(values, path, places)
    if not recipe.mixture.file:
        return recipe
    return recipe.model_copy(update={"mixture": recipe.mixture.with_file(path.parent)})


def _validate(values: dict, path: Path, places: dict[str, str]) -> Recipe:
    try:
        recipe = Recipe.model_validate_json(json.dumps(values, default=str))
    except pydantic.ValidationError as error:
        raise UsageError(*_explain(error, path, places)) from None
    for key, problem, remedy in recipe.contradictions():
        place = _place(tuple(key.split(".")), path, places)
        raise UsageError(f"{place}: {key}: {problem}", remedy=remedy)
    try:
        recipe.shape(recipe.model.width)
        for width in recipe.ladder.widths:
            recipe.shape(width)
    except ShapeError as error:
        place = _place_of_shape(error, recipe, path, places)
        raise ShapeError(
            f"{place}: {error.message}", remedy=error.remedy or "change the width or the override"
        ) from None
    return recipe


def _place_of_shape(error: ShapeError, recipe: Recipe, path: Path, places: dict[str, str]) -> str:
    text = f"{error.message} {error.remedy}"
    for name in recipe.model.overrides:
        if name in text:
            return _place(("model", "overrides", name), path, places)
    for name in recipe.model.switches():
        if re.search(rf"\b{name}\b", text):
            return _place(("model", *KEYS[name].split(".")), path, places)
    try:
        recipe.shape(recipe.model.width)
    except ShapeError:
        return _place(("model", "width"), path, places)
    return _place(("ladder", "widths"), path, places)


def _explain(
    error: pydantic.ValidationError, path: Path, places: dict[str, str]
) -> tuple[str, ...]:
    """Message of every error of a validation, each with its place and remedy."""
    parts = []
    for item in error.errors(include_url=False):
        location = item["loc"]
        key = ".".join(str(part) for part in location) or "recipe"
        place = _place(location, path, places)
        if item["type"] == "extra_forbidden":
            parts.append(f"{place}: unknown key {key!r}; {_suggest(location)}")
        elif item["type"] == "missing":
            parts.append(f"{place}: required key {key!r} is missing; add it")
        else:
            value = item["input"]
            shown = "" if isinstance(value, dict | list | tuple) else f" = {value!r}"
            message = item["msg"].removeprefix("Value error, ")
            parts.append(f"{place}: {key}{shown}: {message}")
    return ("\n  ".join(parts),)


def _place(location: tuple, path: Path, places: dict[str, str]) -> str:
    """The most exact known place of a key: its own line, else that of an enclosing table."""
    parts = [str(part) for part in location]
    for end in range(len(parts), 0, -1):
        if place := places.get(".".join(parts[:end])):
            return place
    return str(path)


def _suggest(location: tuple) -> str:
    model: Any = Recipe
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        arguments = getattr(annotation, "__args__", ())
        model = arguments[0] if arguments else annotation
    names = sorted(model.model_fields)
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known keys here: {', '.join(names)}"


def _apply_override(values: dict, override: str) -> str:
    key, separator, raw = override.partition("=")
    key = key.strip()
    if not separator or not key:
        raise UsageError(
            f"--set {override!r} has no value", remedy="write it as --set section.key=value"
        )
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    *parents, last = key.split(".")
    table = values
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise UsageError(f"--set {override}: {parent!r} is not a table of the recipe")
    table[last] = value
    return key


def _key_lines(text: str) -> dict[str, int]:
    """Line number of every dotted key of a TOML text; arrays of tables count from 0."""
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    prefix = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if match := re.match(r"\s*\[\[\s*([^\]]+?)\s*\]\]", line):
            name = match.group(1).replace('"', "")
            index = counts.get(name, 0)
            counts[name] = index + 1
            prefix = f"{name}.{index}."
            lines.setdefault(name, number)
            lines[prefix[:-1]] = number
        elif match := re.match(r"\s*\[\s*([^\]]+?)\s*\]\s*(#.*)?$", line):
            name = match.group(1).replace('"', "")
            prefix = f"{name}."
            lines[name] = number
        elif match := re.match(r"""\s*([A-Za-z0-9_."'-]+)\s*=""", line):
            lines[prefix + match.group(1).replace('"', "").replace("'", "")] = number
    return lines
