"""Merkle tree of RFC 6962: one digest that covers all lines and blobs of a record."""

import hashlib
from collections.abc import Iterable


def leaf_hash(data: bytes) -> bytes:
    """SHA256(0x00 || data)."""
    return hashlib.sha256(b"\x00" + data).digest()


class MerkleTree:
    """A tree that grows leaf by leaf.

    Folding equal-sized subtrees as they complete yields the RFC 6962 split at the largest power
    of two below n, in memory of order log n.
    """

    def __init__(self) -> None:
        self._stack: list[tuple[int, bytes]] = []

    def add(self, data: bytes) -> None:
        """Append a leaf."""
        stack = self._stack
        size, node = 1, leaf_hash(data)
        while stack and stack[-1][0] == size:
            left_size, left = stack.pop()
            size, node = size + left_size, _node_hash(left, node)
        stack.append((size, node))

    def root(self) -> str:
        """Root over the leaves so far as 64 hex digits; no leaves give SHA256 of nothing."""
        if not self._stack:
            return hashlib.sha256(b"").hexdigest()
        *rest, (_, node) = self._stack
        for _, left in reversed(rest):
            node = _node_hash(left, node)
        return node.hex()


def merkle_root(leaves: Iterable[bytes]) -> str:
    """Root over the leaves in order as 64 hex digits; no leaves give SHA256 of nothing."""
    tree = MerkleTree()
    for leaf in leaves:
        tree.add(leaf)
    return tree.root()


def _node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()
