"""What every transport is given and gives back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from portolan.model.drops import Drops
from portolan.parallel.transports.expert_function import ExpertFunction


class Routed(NamedTuple):
    """Tokens of one shard: x [T, R], combine weights [T, K], expert of each assignment int32[A].

    The expert of a padding token is E: it uses no capacity and travels nowhere.
    """

    x_TR: jax.Array
    weights_TK: jax.Array
    ids: jax.Array


class Experts(NamedTuple):
    """The experts of this shard, a tree with leading El, and the function that they compute."""

    tree: Any
    function: ExpertFunction

    def slice(self, start: int, size: int) -> Any:
        """The tree of `size` local experts from `start` on."""
        return jax.tree.map(lambda leaf: leaf[start : start + size], self.tree)


def local_drops(sender: Any = 0, receiver: Any = 0) -> Drops:
    """Drops of this shard; padding is counted for all transports alike."""
    zero = jnp.zeros((), jnp.int32)
    return Drops(jnp.asarray(sender, jnp.int32), jnp.asarray(receiver, jnp.int32), zero)
