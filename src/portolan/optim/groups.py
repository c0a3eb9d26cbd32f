"""Which rule updates which leaf: a table resolved by exact path segments. No JAX here.

A substring or the number of dimensions is never a criterion: "attn_gate" is a substring of
"attn_gated_norm", stacked gains have two dimensions and stacked taps three; such a match once put
a gated norm into the wrong group unnoticed (marin #5639, #5644, #5750).
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass

from portolan.optim.settings import OptimizerError, OptimizerSettings
from portolan.shapes import CONV_SITES, ModelConfig

INDEX = "#"
"""Segment of a pattern that stands for a list index."""

DEFAULT_COMPONENTS = frozenset(
    {
        "base",
        "gated_norm",
        "head_gate",
        "conv_k",
        "conv_attn",
        "conv_mlp",
        "routed",
        "latent",
        "latent_norm",
        "shared",
    }
)
"""Those of the reference model; ablations also have `conv_v` and `dense`."""

BYTES_PER_SCALAR = 4
_CONSTRAINED = ("muonh", "adamh")


@dataclass(frozen=True)
class Rule:
    """One path pattern: its group, the dimensions of its leaves, and the component it belongs to.

    `num_stacked` counts leading dimensions (layers, experts) before the matrix, gain or taps.
    """

    pattern: str
    group: str
    num_stacked: int
    num_own: int
    component: str
    decay: bool = False
    gated_norm: bool = False

    def matches(self, path: str) -> bool:
        """Whether every segment is equal, an index standing for any decimal number."""
        mine, theirs = self.pattern.split("/"), path.split("/")
        return len(mine) == len(theirs) and all(
            b.isdecimal() if a == INDEX else a == b for a, b in zip(mine, theirs, strict=True)
        )


def _gains() -> Iterable[Rule]:
    for pattern, num_stacked, component in (
        ("embed_norm/gain", 0, "base"),
        ("blocks/attn_norm/gain", 1, "base"),
        ("blocks/mlp_norm/gain", 1, "base"),
        ("blocks/moe/latent_norm/gain", 1, "latent_norm"),
        ("final_norm/gain", 0, "base"),
    ):
        yield Rule(pattern, "adam", num_stacked, 1, component)


def _gated_norms() -> Iterable[Rule]:
    for site, num_stacked in (
        ("embed_gnorm", 0),
        ("blocks/attn_gnorm", 1),
        ("blocks/mlp_gnorm", 1),
        ("final_gnorm", 0),
    ):
        for name in ("down", "up"):
            yield Rule(f"{site}/{name}", "muonh", num_stacked, 2, "gated_norm", gated_norm=True)


def _matrices() -> Iterable[Rule]:
    for name in ("wq", "wk", "wv", "wo"):
        yield Rule(f"blocks/attn/{name}", "muonh", 1, 2, "base")
    for name in ("latent_down", "latent_up"):
        yield Rule(f"blocks/moe/{name}", "muonh", 1, 2, "latent")
    for name in ("gate", "up", "down"):
        yield Rule(f"blocks/moe/experts/{name}", "muonh", 2, 2, "routed")
        yield Rule(f"blocks/shared/{INDEX}/{name}", "muonh", 1, 2, "shared")
        yield Rule(f"blocks/mlp/{name}", "muonh", 1, 2, "dense")


RULES: tuple[Rule, ...] = (
    Rule("embed/table", "adam", 0, 2, "base"),
    Rule("blocks/moe/router", "adam", 1, 2, "routed", decay=True),
    Rule("blocks/attn/head_gate", "adam", 1, 2, "head_gate", decay=True),
    *_gains(),
    Rule("blocks/attn/k_conv/taps", "adam", 1, 2, "conv_k"),
    Rule("blocks/attn/v_conv/taps", "adam", 1, 2, "conv_v"),
    Rule("blocks/attn_conv/taps", "adam", 1, 2, "conv_attn"),
    Rule("blocks/mlp_conv/taps", "adam", 1, 2, "conv_mlp"),
    Rule("head/proj", "adamh", 0, 2, "base"),
    *_gated_norms(),
    *_matrices(),
)


@dataclass(frozen=True)
class GroupRow:
    """One leaf: `norm_scope` is matrix, per_layer, joint, per_expert, or None (unconstrained).

    `norm_axes` are the axes that one norm sums over; the other leading axes index norm groups.
    """

    path: str
    shape: tuple[int, ...]
    group: str
    norm_scope: str | None
    decay: bool

    @property
    def num_parameters(self) -> int:
        """Entries of the leaf."""
        return math.prod(self.shape)

    @property
    def norm_axes(self) -> tuple[int, ...]:
        """Axes reduced by one Frobenius norm."""
        num_axes = len(self.shape)
        if self.norm_scope in ("joint", "matrix"):
            return tuple(range(1 if self.norm_scope == "joint" else 0, num_axes))
        return (num_axes - 2, num_axes - 1)

    @property
    def constrained(self) -> bool:
        """Whether the leaf keeps its norm."""
        return self.norm_scope is not None


@dataclass(frozen=True)
class GroupTable:
    """The resolved table of a parameter tree, in the order of its leaves."""

    rows: tuple[GroupRow, ...]

    def __getitem__(self, path: str) -> GroupRow:
        """The row of a path."""
        return self.by_path[path]

    @property
    def by_path(self) -> dict[str, GroupRow]:
        """Rows by path."""
        return {row.path: row for row in self.rows}

    def in_group(self, group: str) -> tuple[GroupRow, ...]:
        """Rows of one group."""
        return tuple(row for row in self.rows if row.group == group)

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups that have a leaf, in order of first appearance."""
        return tuple(dict.fromkeys(row.group for row in self.rows))

    def num_parameters(self, group: str) -> int:
        """Entries of one group."""
        return sum(row.num_parameters for row in self.in_group(group))

    @property
    def state_bytes(self) -> int:
        """Float32 state: one tensor per muonh leaf, two per other leaf; without the count."""
        return BYTES_PER_SCALAR * sum(
            row.num_parameters * (1 if row.group == "muonh" else 2) for row in self.rows
        )

    @property
    def parameter_bytes(self) -> int:
        """Float32 bytes of the parameters themselves, router biases excluded."""
        return BYTES_PER_SCALAR * sum(row.num_parameters for row in self.rows)

    def to_json(self) -> list[dict]:
        """Rows for the run record: path, shape, group, norm scope, decay."""
        return [asdict(row) | {"shape": list(row.shape)} for row in self.rows]

    def check_equal(self, stored: list[dict], *, recorded: Collection[str] = ()) -> None:
        """Refuse to restore under another table.

        Args:
            stored: rows as written by `to_json`.
            recorded: fields whose change is recorded and therefore allowed; only `norm_scope`
                and `decay` can be.

        Raises:
            OptimizerError: a leaf, or a field that is not in `recorded`, differs.
        """
        if unknown := set(recorded) - {"norm_scope", "decay"}:
            raise OptimizerError(f"a change of {sorted(unknown)} can never be restored")
        mine = {row["path"]: row for row in json.loads(json.dumps(self.to_json()))}
        theirs = {row["path"]: row for row in stored}
        if different := sorted(set(mine) ^ set(theirs)):
            raise OptimizerError(f"the checkpoint and the model differ in leaf {different[0]}")
        for path, row in mine.items():
            for field, value in row.items():
                if theirs[path][field] != value and field not in recorded:
                    raise OptimizerError(
                        f"{path}: {field} is {theirs[path][field]} in the checkpoint, {value} here",
                        remedy="restore with the recipe of the run, or record the change",
                    )


def components_of(config: ModelConfig) -> frozenset[str]:
    """The components that a shape has; each must have its leaves, and no other leaf may exist."""
    routed = config.mlp == "moe"
    present = {
        "base": True,
        "gated_norm": config.gated_norm,
        "head_gate": config.head_gate,
        **{f"conv_{site}": site in config.conv_sites for site in CONV_SITES},
        "routed": routed,
        "latent": config.latent,
        "latent_norm": config.latent_norm,
        "shared": config.num_shared_experts > 0,
        "dense": not routed,
    }
    return frozenset(name for name, is_present in present.items() if is_present)


def resolve_groups(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    scope: str | None,
    settings: OptimizerSettings | None = None,
    components: Collection[str] = DEFAULT_COMPONENTS,
) -> GroupTable:
    """Assign every leaf to exactly one rule.

    Args:
        shapes: shape by path, in tree order.
        scope: `joint` or `per_expert`; None is refused where an expert stack exists.
        settings: for the ablations of `matrix` and `gnorm`; default muonh.
        components: what the shape has (`components_of`).

    Raises:
        OptimizerError: a leaf without a rule, a rule without its leaf, a leaf with the wrong
            number of dimensions, or no scope.
    """
    settings = settings or OptimizerSettings(hyperball_scope=None)
    enabled = [rule for rule in RULES if rule.component in components]
    unused = {rule.pattern: rule for rule in enabled}
    rows = []
    for path, shape in shapes.items():
        rule = next((rule for rule in enabled if rule.matches(path)), None)
        if rule is None:
            raise OptimizerError(
                f"parameter {path} {tuple(shape)} has no optimizer rule",
                remedy="name it as an enabled component does, or add a rule in optim/groups.py",
            )
        unused.pop(rule.pattern, None)
        rows.append(_row(path, tuple(shape), rule, scope, settings))
    if unused:
        rule = next(iter(unused.values()))
        raise OptimizerError(
            f"component {rule.component} is on, but no parameter matches {rule.pattern}",
            remedy="the tree was renamed, or the component must be left out of `components`",
        )
    return GroupTable(tuple(rows))


def _row(
    path: str, shape: tuple[int, ...], rule: Rule, scope: str | None, settings: OptimizerSettings
) -> GroupRow:
    if len(shape) != rule.num_stacked + rule.num_own:
        raise OptimizerError(
            f"parameter {path} has shape {shape}; {rule.num_stacked} stacked and {rule.num_own} "
            f"own dimensions are expected"
        )
    group = rule.group
    if rule.gated_norm:
        group = settings.resolved_gnorm
    elif group == "muonh" or (group == "adamh" and settings.matrix == "adamw"):
        group = settings.matrix
    norm_scope = None
    if group in _CONSTRAINED:
        norm_scope = ("matrix", "per_layer", scope)[rule.num_stacked]
        if norm_scope not in ("matrix", "per_layer", "joint", "per_expert"):
            raise OptimizerError(
                f"optim.hyperball_scope = {scope!r}, but {path} {shape} is a stack of experts",
                remedy="set it to 'joint' (one norm per layer) or 'per_expert'",
            )
    return GroupRow(path, shape, group, norm_scope, rule.decay)
