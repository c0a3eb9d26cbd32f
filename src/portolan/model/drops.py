"""What became of the assignments of a layer. No JAX here."""

from typing import Any, NamedTuple


class Drops(NamedTuple):
    """Assignments of one layer, over all tokens of the batch; int32 on devices.

    `sender` and `receiver` cut them off at a limit of rows, `skipped` belong to padding tokens.
    """

    sender: Any
    receiver: Any
    skipped: Any
