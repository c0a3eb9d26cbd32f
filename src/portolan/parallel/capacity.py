"""Row limits of the expert exchange, from exact fractions (parallel.md 5.1)."""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from portolan.errors import UsageError

Gate = Literal["none", "cell", "receiver", "waterfill"]
Order = Literal["source_major", "round_robin"]
INT32_LIMIT = 2**31
MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 8, 128
BLOCKS_PER_EXPERT = 4
"""Blocks that the mean load should fill."""
# Codes l + 1 of local experts travel as activation values: the largest integer exact in each type.
EXACT_INTEGERS = {"bfloat16": 256, "float16": 2048, "float32": 2**24}


def parse_capacity_factor(text: str | int | Fraction) -> Fraction:
    """An exact capacity factor from its decimal string: floats would give ceil(1.1 x 50) = 56.

    Raises:
        UsageError: it is no positive decimal number.
    """
    try:
        factor = Fraction(text)
    except (ValueError, ZeroDivisionError):
        factor = Fraction(0)
    if factor <= 0 or isinstance(text, float):
        raise UsageError(
            f"capacity factor {text!r} is not a positive decimal",
            remedy='write it as a string such as "1.15"',
        )
    return factor


def choose_block_rows(num_rows: int, num_experts: int) -> int:
    """Rows of a block in grouped products: the largest power of two of at most N / (4 E), between
    8 and 128, so that padding is about an eighth (parallel.md 6.1)."""
    wanted = max(num_rows // (BLOCKS_PER_EXPERT * num_experts), 1)
    return min(max(2 ** (wanted.bit_length() - 1), MIN_BLOCK_ROWS), MAX_BLOCK_ROWS)


def ceil_div(value: int, divisor: int) -> int:
    """Ceiling of value / divisor."""
    return -(-value // divisor)


@dataclass(frozen=True)
class ExchangeShape:
    """Static sizes of one expert group: S shards, E experts, A assignments a shard."""

    num_shards: int
    num_experts: int
    num_assignments: int

    def __post_init__(self) -> None:
        if self.num_shards < 1 or self.num_experts % self.num_shards:
            raise UsageError(
                f"{self.num_experts} experts do not divide over an expert axis of "
                f"{self.num_shards}",
                remedy="set parallel.mesh.expert to a size that divides the number of experts",
            )
        if self.num_assignments < 1 or self.total_assignments >= INT32_LIMIT:
            raise UsageError(
                f"{self.num_shards} x {self.num_assignments} assignments do not fit 32-bit offsets",
                remedy="use fewer tokens a device, or more replicas",
            )

    @property
    def local_experts(self) -> int:
        """El, experts that a shard owns."""
        return self.num_experts // self.num_shards

    @property
    def total_assignments(self) -> int:
        """S x A."""
        return self.num_shards * self.num_assignments


@dataclass(frozen=True)
class RoutingRule:
    """How overflow is decided: gate, capacity factor, chunks Q, group G of `waterfill`, order."""

    gate: Gate = "waterfill"
    capacity_factor: Fraction = Fraction(23, 20)
    num_chunks: int = 1
    group_size: int = 1
    order: Order = "source_major"


@dataclass(frozen=True)
class Limit:
    """A physical size in rows, and the rule that shrinks it to the rows that are valid."""

    physical: int
    factor: Fraction
    divisor: int
    minimum: int

    def __post_init__(self) -> None:
        if self.factor.denominator * self.divisor * self.factor.numerator >= INT32_LIMIT:
            raise UsageError(
                f"capacity factor {self.factor} over {self.divisor} classes overflows 32 bits",
                remedy="write parallel.capacity_factor with fewer decimals",
            )

    def logical(self, valid: Any, xp: Any) -> Any:
        """Rows allowed for `valid` assignments: ceil(valid x factor / divisor), clipped.

        Every product stays below 2**31, so int32 arrays give the exact rational result.
        """
        numerator, modulus = self.factor.numerator, self.factor.denominator * self.divisor
        whole, rest = valid // modulus, valid % modulus
        rows = whole * numerator + (rest * numerator + modulus - 1) // modulus
        return xp.clip(rows, self.minimum, self.physical)


@dataclass(frozen=True)
class Capacities:
    """Row limits of a rule at a shape."""

    shape: ExchangeShape
    rule: RoutingRule

    def __post_init__(self) -> None:
        local, rule = self.shape.local_experts, self.rule
        if rule.num_chunks < 1 or local % rule.num_chunks:
            raise UsageError(
                f"{rule.num_chunks} chunks do not divide {local} local experts",
                remedy="set parallel.num_chunks to a divisor of them",
            )
        if rule.gate == "waterfill" and self.chunk_experts % rule.group_size:
            raise UsageError(
                f"waterfill groups of {rule.group_size} do not divide the {self.chunk_experts} "
                "local experts of a chunk",
                remedy="set parallel.group_size to a divisor of them",
            )
        # A limit that overflows is refused now, not while a program is traced.
        getattr(self, rule.gate, None)

    @property
    def chunk_experts(self) -> int:
        """Local experts of a chunk."""
        return self.shape.local_experts // self.rule.num_chunks

    @cached_property
    def cell(self) -> Limit:
        """Rows of one (sender, expert)."""
        factor, shape = self.rule.capacity_factor, self.shape
        rows = max(1, _ceil(factor * shape.num_assignments / shape.num_experts))
        return Limit(rows, factor, shape.num_experts, 1)

    @cached_property
    def receiver(self) -> Limit:
        """Rows of one owner over all its chunks."""
        factor, shape = self.rule.capacity_factor, self.shape
        rows = max(shape.local_experts, _ceil(factor * shape.num_assignments))
        return Limit(rows, factor, shape.num_shards, shape.local_experts)

    @property
    def receiver_chunk(self) -> int:
        """Rows of one (owner, chunk)."""
        return max(self.chunk_experts, ceil_div(self.receiver.physical, self.rule.num_chunks))

    @cached_property
    def waterfill(self) -> Limit:
        """Rows of one expert before its group lends or borrows."""
        factor, shape = self.rule.capacity_factor, self.shape
        total = shape.total_assignments
        rows = min(max(1, _ceil(factor * total / shape.num_experts)), total)
        return Limit(rows, factor, shape.num_experts, 1)

    @property
    def chunk_buffer(self) -> int:
        """Rows that the owner of a chunk must be able to receive."""
        if self.rule.gate == "none":
            return self.shape.total_assignments
        if self.rule.gate == "cell":
            return self.chunk_experts * self.shape.num_shards * self.cell.physical
        if self.rule.gate == "receiver":
            return self.receiver_chunk
        return self.chunk_experts * self.waterfill.physical


@dataclass(frozen=True)
class PooledCapacities:
    """Row limits of the pooled-wave transport (parallel.md 6.4)."""

    shape: ExchangeShape
    send_factor: Fraction
    receive_factor: Fraction
    num_waves: int

    def __post_init__(self) -> None:
        if self.num_waves < 1 or self.shape.local_experts % self.num_waves:
            raise UsageError(
                f"{self.num_waves} waves do not divide {self.shape.local_experts} local experts",
                remedy="set parallel.num_waves to a divisor of them",
            )
        _ = self.send, self.receive

    @cached_property
    def send(self) -> Limit:
        """P, rows of one (sender, owner, wave)."""
        divisor = self.shape.num_shards * self.num_waves
        rows = max(1, _ceil(self.send_factor * self.shape.num_assignments / divisor))
        return Limit(rows, self.send_factor, divisor, 1)

    @cached_property
    def receive(self) -> Limit:
        """R, rows of one (expert, wave)."""
        divisor = self.shape.num_experts * self.num_waves
        rows = max(1, _ceil(self.receive_factor * self.shape.total_assignments / divisor))
        return Limit(rows, self.receive_factor, divisor, 1)

    def header_rows(self, width: int) -> int:
        """M, rows of `width` values that hold the P codes of a payload."""
        return ceil_div(self.send.physical, width)

    def check_codes(self, dtype: str) -> None:
        """Refuse a type in which the codes 1..El are not exact."""
        if self.shape.local_experts > EXACT_INTEGERS[dtype]:
            raise UsageError(
                f"{self.shape.local_experts} local experts have no exact codes in {dtype}",
                remedy=f"use at most {EXACT_INTEGERS[dtype]} experts a shard, or another "
                "parallel.transport",
            )


def _ceil(value: Fraction) -> int:
    return ceil_div(value.numerator, value.denominator)
