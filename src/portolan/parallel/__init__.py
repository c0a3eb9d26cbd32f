"""Beyond one device: which routed rows are kept, and where they travel.

Letters: S shards of the expert axis, E experts, El = E / S of them local to a shard, K routes per
token, A assignments per shard (tokens x K), Q chunks, W waves, N int[S,E] assignments of shard s to
expert g. An assignment is one (token, route) pair, numbered token by token.
"""
