"""The registry of metric bases: what a number counts, and who can vouch for it.

Adding a basis or changing a definition raises REGISTRY_VERSION, and the next append to a journal
that was written under another version first records that as a `change`.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from portolan.canonical import digest

REGISTRY_VERSION = 2
"""1: the bases of the first journals. 2: `ckpt.bytes`, `flops.per_token`, `count@`, `share.count()`
and `forecast.macro.nats` are new, and each basis names the layers that can vouch for it."""

NOT_STATED = "not_stated"
"""Basis of a claim that does not say what it counts; no other record may use it."""

Layer = Literal["claimed", "registered", "configured", "launched", "observed", "derived"]
LAYERS: tuple[Layer, ...] = get_args(Layer)
"""From prose to arithmetic; a later one weighs more where two figures of one basis differ."""

Qualifier = Literal["", "time", "basis"]


@dataclass(frozen=True)
class Basis:
    """One entry: its definition, what a differing qualifier means, which layers document it.

    A figure of a layer in `documented_by` needs no arithmetic to count as supported.
    """

    definition: str
    qualifier: Qualifier = ""
    documented_by: tuple[Layer, ...] = ("registered", "configured", "launched", "observed")


_MEASURED: tuple[Layer, ...] = ("observed",)
_FORECAST: tuple[Layer, ...] = ("registered", "observed")
_PROSE_TOO: tuple[Layer, ...] = ("claimed", "registered", "configured", "launched", "observed")
_ARITHMETIC: tuple[Layer, ...] = ()

BASES: Mapping[str, Basis] = MappingProxyType(
    {
        "step.completed": Basis("optimizer updates finished, N; checkpoint step-N"),
        "step.row": Basis("zero-based training row, N - 1, written by update N"),
        "step.tracker": Basis("counter of a tracker; looked up, never computed", "", _MEASURED),
        "steps.planned": Basis("optimizer steps in the plan or launch"),
        "tokens.planned": Basis("tokens of the plan"),
        "tokens.nominal": Basis("updates x sequences per batch x tokens per sequence"),
        "tokens.nonpad": Basis("tokens without padding"),
        "tokens.unique": Basis("distinct corpus tokens seen"),
        "tokens.mixture_reference": Basis("budget that only scales mixture weights and exposure"),
        "data.pool.tokens@": Basis("tokens in the corpus build named after @", "basis", _PROSE_TOO),
        "params.total": Basis("all parameters"),
        "params.active": Basis("parameters used by one token, embeddings excluded"),
        "flops.6nd": Basis("6 x active parameters x tokens"),
        "flops.model.fwd_bwd": Basis("analytic forward and backward operations, with attention"),
        "flops.hardware": Basis("operations executed, with recomputation and padding"),
        "flops.per_token": Basis("analytic forward and backward operations of one token"),
        "devices.mesh": Basis("product of the mesh axes"),
        "devices.installed": Basis("devices in the racks"),
        "devices.allocated": Basis("devices leased"),
        "peak.flops@": Basis("peak operations a second of the dtype and device after @", "basis"),
        "mfu.segment@": Basis(
            "model operations over peak x devices x seconds, in one window", "time"
        ),
        "mfu.run": Basis("sum of operations over peak x devices x sum of seconds (time-weighted)"),
        "time.step@": Basis("seconds a step in one window", "time"),
        "time.wall": Basis("elapsed time"),
        "time.effective": Basis("seconds of valid steps over elapsed seconds"),
        "batch.sequences": Basis("sequences a step"),
        "seq.tokens": Basis("tokens a sequence"),
        "racks": Basis("racks used"),
        "tasks": Basis("processes of the job"),
        "tokens_per_active_param": Basis("tokens over active parameters"),
        "schedule.lr": Basis("learning rate of the schedule"),
        "clusters.fine": Basis("clusters of the first k-means"),
        "clusters.final": Basis("domains after merging"),
        "rungs.finished": Basis("ladder rungs trained to their planned end"),
        "loss.train.total": Basis("training loss with all its terms", "", _MEASURED),
        "ce.train.nats": Basis("training cross-entropy alone, nats a token", "", _MEASURED),
        "paloma.macro.dropless": Basis(
            "equal-weight mean over domains, token drops disabled", "", _FORECAST
        ),
        "paloma.macro.as_trained@": Basis(
            "the same with drops at the batch named after @", "basis", _FORECAST
        ),
        "eval.macro.nats": Basis(
            "equal-weight mean over the domains of the project's held-out set", "", _FORECAST
        ),
        "eval.micro.nats": Basis(
            "token-weighted mean over the project's held-out set", "", _FORECAST
        ),
        "eval.macro.bpb": Basis("equal-weight mean over domains, bits per byte", "", _FORECAST),
        "eval.micro.bpb": Basis("byte-weighted mean, bits per UTF-8 byte", "", _FORECAST),
        "forecast.macro.nats": Basis(
            "median of a registered forecast of eval.macro.nats at the end", "", ("registered",)
        ),
        "drop.assignment@": Basis("dropped routed assignments over all, in one window", "time"),
        "norm.params.pre_update": Basis("parameter norm before the update of the same row"),
        "progress.tokens()": Basis(
            "share of tokens; the denominator is in the parentheses", "basis", _ARITHMETIC
        ),
        "progress.steps()": Basis("share of steps; the denominator is in the parentheses", "basis"),
        "policy.guidance": Basis("written practice", "", _PROSE_TOO),
        "policy.run": Basis("a run's own registered setting", "", ("registered",)),
        "retries.task": Basis("retries left to one process"),
        "retries.job": Basis("retries left to the job"),
        "retries.coordinator": Basis("retries left to the coordinator"),
        "ckpt.bytes": Basis("bytes of one checkpoint"),
        "ckpt.bytes_per_param": Basis("checkpoint bytes over all parameters"),
        "duration.compute": Basis("steps x seconds a step"),
        "duration.calendar": Basis("days by the calendar"),
        "count@": Basis("number of the things named after @", "basis", _PROSE_TOO),
        "share.count()": Basis(
            "one count over another; the denominator is in the parentheses", "basis", _ARITHMETIC
        ),
        "status.scheduler": Basis("the scheduler's opinion, never a terminal status"),
        "status.exit": Basis("the exit code's opinion, never a terminal status"),
        "status.log": Basis("the log's opinion, never a terminal status"),
    }
)


def parse_basis(basis: str) -> tuple[str, str]:
    """Split a basis into its registered id and its qualifier (empty if it has none).

    `mfu.segment@rows 0-99` gives (`mfu.segment@`, `rows 0-99`); unknown ids raise ValueError.
    """
    name, mark, qualifier = basis.partition("@")
    name += mark
    if not mark and basis.endswith(")") and "(" in basis:
        name, _, qualifier = basis[:-1].partition("(")
        name += "()"
    if name not in BASES:
        raise ValueError(f"the basis {basis!r} is not in the registry")
    if name.endswith(("@", ")")) and not qualifier.strip():
        raise ValueError(f"the basis {basis!r} lacks its qualifier")
    return name, qualifier


def same_basis(first: str, second: str) -> bool:
    """Whether two bases are one: windows differ in time only, and `status.*` is one group."""
    name_first, qualifier_first = parse_basis(first)
    name_second, qualifier_second = parse_basis(second)
    if name_first.startswith("status.") and name_second.startswith("status."):
        return True
    if name_first != name_second:
        return False
    return BASES[name_first].qualifier == "time" or qualifier_first == qualifier_second


@functools.cache
def registry_digest() -> str:
    """SHA-256 of the registry: version, ids, definitions, qualifiers and layers."""
    entries = {
        name: [basis.definition, basis.qualifier, list(basis.documented_by)]
        for name, basis in BASES.items()
    }
    return digest({"bases": entries, "version": REGISTRY_VERSION})


def registry_change(known: str) -> dict[str, Any]:
    """Body of the `change` record that moves a journal from the registry `known` to this one."""
    here = registry_digest()
    return {
        "text": f"definitions of the metric bases: registry version {REGISTRY_VERSION}",
        "planned": True,
        "what": {"code": f"metric-basis registry from {known} to {here}"},
        "from_step": {"clock": "completed", "n": 0},
        "expected": {
            "metric": "meaning of quantities recorded from here on",
            "direction": "none",
            "size": "no measured value changes",
            "tolerance": "none",
        },
        "not_exercised": [],
        "gate": "the definitions are part of the package's source",
        "control_window": "not_stated",
        "verdict": "accepted",
        "basis_registry": here,
    }
