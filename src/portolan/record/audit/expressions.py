"""Arithmetic on figures, written as text and evaluated in decimal: `floor({X1-3} / {T})`."""

import ast
import math
import re
from collections.abc import Callable, Mapping
from decimal import ROUND_HALF_EVEN, Context, Decimal, DivisionByZero, InvalidOperation, Overflow

from portolan.errors import UsageError

ARITHMETIC = Context(
    prec=50,
    rounding=ROUND_HALF_EVEN,
    Emax=999_999,
    Emin=-999_999,
    traps=[DivisionByZero, InvalidOperation, Overflow],
)
MAX_LENGTH = 500

_NAME = re.compile(r"\{([^{}]+)\}")
_OPERATORS: dict[type[ast.operator], Callable[[Decimal, Decimal], Decimal]] = {
    ast.Add: ARITHMETIC.add,
    ast.Sub: ARITHMETIC.subtract,
    ast.Mult: ARITHMETIC.multiply,
    ast.Div: ARITHMETIC.divide,
}
_FUNCTIONS: dict[str, Callable[[Decimal], Decimal]] = {
    "floor": lambda value: Decimal(math.floor(value)),
    "ceil": lambda value: Decimal(math.ceil(value)),
    "round": lambda value: Decimal(round(value)),
    "abs": abs,
}


def names_in(expression: str) -> list[str]:
    """Names in braces, in order of their first use."""
    return list(dict.fromkeys(_NAME.findall(expression)))


def evaluate(expression: str, values: Mapping[str, Decimal]) -> Decimal:
    """Value of `+ - * /`, parentheses, floor, ceil, round and abs over numbers and {names}.

    Fifty significant digits. UsageError names an unknown name, a wrong form or a division by zero.
    """
    if len(expression) > MAX_LENGTH:
        raise UsageError(f"the expression {expression[:40]!r}… is longer than {MAX_LENGTH} letters")
    names: dict[str, Decimal] = {}

    def replace(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise UsageError(f"{match[1]!r} in {expression!r} names no figure with a number")
        names[f"v{len(names)}"] = values[match[1]]
        return f" v{len(names) - 1} "

    source = _NAME.sub(replace, expression).strip()
    try:
        return _value(ast.parse(source, mode="eval").body, names, expression)
    except (DivisionByZero, InvalidOperation, Overflow, OverflowError) as error:
        raise UsageError(f"{expression!r} has no finite value") from error
    except (SyntaxError, RecursionError, ValueError) as error:
        raise UsageError(f"{expression!r} is not an expression") from error


def evaluate_rounded(
    expression: str, values: Mapping[str, Decimal], places: Mapping[str, Decimal]
) -> tuple[Decimal, Decimal]:
    """Value of an expression, and the place to which it is known when its inputs are rounded.

    Each input moves by half its place, up and down; the largest moves of all inputs add up.
    """
    value = evaluate(expression, values)
    spread = Decimal(0)
    for name in names_in(expression):
        if half := places.get(name, Decimal(0)) / 2:
            moved = (
                evaluate(expression, {**values, name: values[name] + step})
                for step in (half, -half)
            )
            spread += max(abs(other - value) for other in moved)
    return value, 2 * spread


def substitute(expression: str, texts: Mapping[str, str]) -> str:
    """The expression with its names replaced by what a reader should see."""
    shown = _NAME.sub(lambda match: texts[match[1]], expression)
    return re.sub(r"\s*\*\s*", " × ", shown).replace("-", "−")


def show(value: Decimal, digits: int = 7) -> str:
    """A value for a reader: whole numbers in full up to 10^16, others to `digits` digits."""
    if value == value.to_integral_value() and abs(value) < 10**16:
        return f"{int(value):,}"
    rounded = Context(prec=digits).plus(value).normalize()
    if -4 <= rounded.adjusted() < 9:
        return f"{rounded:,f}"
    mantissa, _, exponent = f"{rounded:e}".lower().partition("e")
    return f"{mantissa}e{int(exponent)}"


def _value(node: ast.expr, names: Mapping[str, Decimal], expression: str) -> Decimal:
    match node:
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Decimal(repr(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names, expression)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            first, second = (_value(side, names, expression) for side in (left, right))
            return _OPERATORS[type(operator)](first, second)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](_value(argument, names, expression))
    raise UsageError(
        f"{expression!r} is not an expression",
        remedy="use numbers, {ids}, + - * /, parentheses, floor, ceil, round and abs",
    )
