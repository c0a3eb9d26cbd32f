"""The curation engine: map, exchange, reduce and join over Parquet shards, here or on Ray.

A step reads datasets (finished stage folders) and writes one. Its stage key decides whether
anything is done; the executor decides only where. Finished tasks of an unfinished stage survive.
"""

from portolan.data.engine.core import Engine, StageProgress
from portolan.data.engine.dataset import Dataset, Shard
from portolan.data.engine.exchange import exchange
from portolan.data.engine.executors import LocalExecutor
from portolan.data.engine.ray_executor import RayExecutor
from portolan.data.engine.steps import join_sorted, map_shards, reduce_groups
from portolan.data.engine.streams import align

__all__ = [
    "Dataset",
    "Engine",
    "LocalExecutor",
    "RayExecutor",
    "Shard",
    "StageProgress",
    "align",
    "exchange",
    "join_sorted",
    "map_shards",
    "reduce_groups",
]
