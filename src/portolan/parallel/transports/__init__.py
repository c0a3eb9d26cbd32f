"""The exchanges of routed rows, each a function of one shard inside `jax.shard_map`.

Shapes: S shards of the expert axis, T tokens of a shard, K experts per token, A = T*K assignments
of a shard, E experts, El = E/S of them on a shard, R latent width, F expert width, N rows of a
buffer. Row maps are int32; -1 means none. Every map is one-to-one on the rows that are kept, so
every adjoint is a gather (parallel.md 3): scattered sums would depend on their order.
"""

EXPERT_AXIS = "expert"
"""The mesh axis over which rows are exchanged."""
MODEL_AXIS = "model"
"""The mesh axis that splits the inner width of every expert."""
