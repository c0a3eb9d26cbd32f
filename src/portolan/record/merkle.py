"""Merkle tree of RFC 6962: one digest that covers all lines and blobs of a record."""

import hashlib
from collections.abc import Iterable


def leaf_hash(data: bytes) -> bytes:
    """SHA256(0x00 || data)."""
    return hashlib.sha256(b"\x00" + data).digest()


def merkle_root(leaves: Iterable[bytes]) -> str:
    """Root over the leaves in order as 64 hex digits; no leaves give SHA256 of nothing.

    Folding equal-sized subtrees as they complete yields the RFC 6962 split at the largest power
    of two below n, in memory of order log n.
    """
    stack: list[tuple[int, bytes]] = []
    for leaf in leaves:
        size, node = 1, leaf_hash(leaf)
        while stack and stack[-1][0] == size:
            left_size, left = stack.pop()
            size, node = size + left_size, _node_hash(left, node)
        stack.append((size, node))
    if not stack:
        return hashlib.sha256(b"").hexdigest()
    node = stack.pop()[1]
    while stack:
        node = _node_hash(stack.pop()[1], node)
    return node.hex()


def _node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()
