"""Collectives of a compiled program, read from the text that XLA prints. Text only, no JAX.

An instruction inside a `while` body is executed as often as the loop turns, which XLA states for
the loops of `scan` (`known_trip_count`); a loop without that figure counts once.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from portolan.parallel.layout import MESH_AXES
from portolan.parallel.planner.mesh import MeshSizes

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
BITS = {"pred": 8, "bf16": 16, "f16": 16}
"""Of element types whose name does not end in their width."""
UNKNOWN_TRIPS = 0
"""Of a loop whose number of turns XLA does not state."""
_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$")
_ASSIGNMENT = re.compile(r"^\s+(?:ROOT )?%?(\S+) = ")
_ARRAY = re.compile(r"([a-z]+[0-9]*(?:e[0-9]+m[0-9]+\w*)?)\[([0-9,]*)\]")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([^\s,)}]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_IOTA = re.compile(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]+)\]"
    r"(?:, device_ids=\(\[([0-9,]+)\](?:T\(([0-9,]+)\))?\))? \{([^}]*)\}"
)
_AXIS = re.compile(r"'([^']+)'(?:=(\d+)|:\((\d+)\)(\d+))?")
_LISTED = re.compile(r"replica_groups=\{(\{[0-9,]*\}(?:,\{[0-9,]*\})*)?\}")
_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")


@dataclass(frozen=True)
class Collective:
    """One collective instruction.

    `num_bytes` is its result on one device; `group` the first set of devices that take part, with
    `group_size` of them in each set; `times` how often an execution of the program runs it.
    """

    kind: str
    element_type: str
    num_bytes: int
    group: tuple[int, ...]
    group_size: int
    times: int
    in_loop: bool

    @property
    def moved_bytes(self) -> int:
        """Bytes that leave a device each time, in rings; of a ragged exchange the most it may."""
        others = self.group_size - 1
        if self.kind == "reduce-scatter":
            return self.num_bytes * others
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.num_bytes
        share = 2 if self.kind == "all-reduce" else 1
        return share * self.num_bytes * others // self.group_size


@dataclass
class _Computation:
    """Collectives of one computation, and (name, trips) of what it calls."""

    collectives: list[Collective] = field(default_factory=list)
    calls: list[tuple[str, int]] = field(default_factory=list)


def parse_collectives(text: str) -> tuple[Collective, ...]:
    """Every collective that an execution of the entry computation reaches, in order of text."""
    computations, entry, num_devices = _read(text)
    times: dict[str, int] = {}
    looped: set[str] = set()
    _count(entry, 1, False, computations, times, looped)
    return tuple(
        Collective(
            found.kind,
            found.element_type,
            found.num_bytes,
            found.group or tuple(range(num_devices)),
            found.group_size or num_devices,
            times[name],
            name in looped,
        )
        for name, computation in computations.items()
        if name in times
        for found in computation.collectives
    )


def _count(
    name: str,
    turns: int,
    in_loop: bool,
    computations: dict[str, _Computation],
    times: dict[str, int],
    looped: set[str],
) -> None:
    """Add `turns` executions of a computation and of all that it calls."""
    times[name] = times.get(name, 0) + turns
    if in_loop:
        looped.add(name)
    for called, trips in computations[name].calls:
        if called in computations:
            inside = in_loop or trips != 1
            _count(called, turns * max(1, trips), inside, computations, times, looped)


def _read(text: str) -> tuple[dict[str, _Computation], str, int]:
    """Computations by name, the name of the entry, and the number of devices."""
    computations: dict[str, _Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header.group(2), _Computation())
            entry = header.group(2) if header.group(1) else entry
        elif current is not None and (assignment := _ASSIGNMENT.match(line)):
            _read_instruction(line[assignment.end() :], current)
    partitions = re.search(r"num_partitions=(\d+)", text)
    replicas = re.search(r"replica_count=(\d+)", text)
    devices = math.prod(int(found.group(1)) for found in (partitions, replicas) if found)
    return computations, entry, devices


def _read_instruction(body: str, computation: _Computation) -> None:
    shape, rest = _split_shape(body)
    opcode = rest.split("(", 1)[0].strip()
    kind = opcode.removesuffix("-start")
    if kind in KINDS:
        computation.collectives.append(_collective(kind, opcode, shape, rest))
    trips = 1
    if opcode == "while":
        stated = _TRIPS.search(rest)
        trips = int(stated.group(1)) if stated else UNKNOWN_TRIPS
    called = _CALLED.findall(rest)
    if branches := _BRANCHES.search(rest):
        called += [name.strip().lstrip("%") for name in branches.group(1).split(",")]
    # A reduction's `to_apply` adds two scalars and holds no collective; counting it is harmless.
    computation.calls += [(name, trips) for name in called]


def _split_shape(body: str) -> tuple[str, str]:
    """The result type, which may be a tuple, and what follows it."""
    if not body.startswith("("):
        shape, _, rest = body.partition(" ")
        return shape, rest
    depth = 0
    for index, character in enumerate(body):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return body[: index + 1], body[index + 1 :].lstrip()
    return body, ""


def _collective(kind: str, opcode: str, shape: str, rest: str) -> Collective:
    arrays = _ARRAY.findall(shape)
    if opcode.endswith("-start") and kind != "all-reduce" and len(arrays) > 1:
        # The result of an asynchronous start holds its operands first.
        arrays = arrays[len(arrays) // 2 :]
    size = sum(_array_bytes(element, dimensions) for element, dimensions in arrays)
    group, group_size = _first_group(rest)
    return Collective(kind, arrays[0][0] if arrays else "", size, group, group_size, 1, False)


def _array_bytes(element: str, dimensions: str) -> int:
    digits = re.match(r"[a-z]+(\d+)", element)
    bits = BITS.get(element) or (int(digits.group(1)) if digits else 0)
    return bits * math.prod(int(d) for d in dimensions.split(",") if d) // 8


def _first_group(rest: str) -> tuple[tuple[int, ...], int]:
    """The first set of devices and the size of every set; () and 0 for all devices."""
    if iota := _IOTA.search(rest):
        shape, dimensions, permutation = iota.groups()
        size = int(shape.split(",")[-1])
        return tuple(itertools.islice(_iota(dimensions, permutation), size)), size
    if mesh := _MESH.search(rest):
        return _mesh_group(*mesh.groups())
    if listed := _LISTED.search(rest):
        if not listed.group(1):
            return (), 0
        first = listed.group(1).split("}", 1)[0].lstrip("{")
        group = tuple(int(number) for number in first.split(",") if number)
        return group, len(group)
    if pair := _PAIRS.search(rest):
        return (int(pair.group(1)), int(pair.group(2))), 2
    return (), 0


def _iota(dimensions: str, permutation: str | None) -> Iterator[int]:
    """iota(dimensions), transposed, in order."""
    sizes = [int(size) for size in dimensions.split(",")]
    order = [int(axis) for axis in permutation.split(",")] if permutation else range(len(sizes))
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    ranges = (range(0, sizes[axis] * strides[axis], strides[axis]) for axis in order)
    return (sum(offsets) for offsets in itertools.product(*ranges))


def _mesh_group(
    axes: str, dimensions: str | None, permutation: str | None, grouped: str
) -> tuple[tuple[int, ...], int]:
    """First group of a mesh of named axes, whose groups differ along some of them, or along a part
    of an axis: `'a':(2)4` is the middle of a split into 2, 4 and the rest."""
    lengths = {name: int(size) for name, size, _, _ in _AXIS.findall(axes)}
    parts = {name: (before, size) for name, _, before, size in _AXIS.findall(grouped)}
    splits: list[tuple[int, bool]] = []
    for name, length in lengths.items():
        if name not in parts:
            splits.append((length, False))
            continue
        before, size = (int(part or 1) for part in parts[name])
        size = size if parts[name][1] else length
        splits += [(before, False), (size, True), (length // (before * size), False)]
    strides = [math.prod(size for size, _ in splits[index + 1 :]) for index in range(len(splits))]
    ranges = (
        range(0, size * stride, stride)
        for (size, varies), stride in zip(splits, strides, strict=True)
        if varies
    )
    places = [sum(offsets) for offsets in itertools.product(*ranges)]
    total = math.prod(lengths.values())
    devices = list(_iota(dimensions, permutation)) if dimensions else list(range(total))
    return tuple(devices[place] for place in places), len(places)


def mesh_axes(group: Iterable[int], mesh: MeshSizes) -> tuple[str, ...]:
    """Axes along which the devices of a group differ, in a mesh laid out row by row."""
    lengths = [mesh.size(axis) for axis in MESH_AXES]
    strides = [math.prod(lengths[index + 1 :]) for index in range(len(lengths))]
    coordinates = [
        tuple(device // stride % length for stride, length in zip(strides, lengths, strict=True))
        for device in group
    ]
    return tuple(
        axis
        for index, axis in enumerate(MESH_AXES)
        if len({coordinate[index] for coordinate in coordinates}) > 1
    )


@dataclass(frozen=True)
class CollectiveSum:
    """Collectives of one kind over the same axes: instructions, executions, bytes sent."""

    kind: str
    axes: tuple[str, ...]
    element_type: str
    in_loop: bool
    instructions: int
    executions: int
    moved_bytes: int


def summarise(collectives: Iterable[Collective], mesh: MeshSizes) -> Iterator[CollectiveSum]:
    """Sums by kind, axes, element type and place, the largest traffic first; groups of a single
    device move nothing and are left out."""
    groups: dict[tuple, list[Collective]] = {}
    for one in collectives:
        if one.group_size == 1:
            continue
        key = (one.kind, mesh_axes(one.group, mesh), one.element_type, one.in_loop)
        groups.setdefault(key, []).append(one)
    sums = [
        CollectiveSum(
            *key,
            instructions=len(found),
            executions=sum(one.times for one in found),
            moved_bytes=sum(one.times * one.moved_bytes for one in found),
        )
        for key, found in groups.items()
    ]
    yield from sorted(sums, key=lambda one: -one.moved_bytes)
