"""Totals over all tokens of a batch, of which a device may hold a part."""

import jax


class Totals:
    """Every token is here: nothing is missing from a sum. A mesh overrides all of it."""

    def sum(self, x: jax.Array) -> jax.Array:
        """Sum over the devices that hold different tokens."""
        return x

    def least(self, x: jax.Array) -> jax.Array:
        """Smallest over those devices."""
        return x

    def largest(self, x: jax.Array) -> jax.Array:
        """Largest over those devices."""
        return x

    def gather(self, x_T: jax.Array) -> jax.Array:
        """The rows of all tokens, [all T, ...]."""
        return x_T

    @property
    def is_spread(self) -> bool:
        """Whether other devices hold other tokens."""
        return False

    @property
    def is_partial(self) -> bool:
        """Whether other micro-batches of the same update follow."""
        return False


ALL_TOKENS = Totals()
