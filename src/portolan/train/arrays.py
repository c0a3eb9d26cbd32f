"""Arrays on disk: Orbax writes one Zarr folder per leaf, TensorStore reads them back."""

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from portolan.train.manifest import CheckpointInvalid, State, leaf_folder

ERROR_CODE = re.compile(r"os_error_code='(\d+)'")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Mute Orbax's log: it reports every save, and each failure from three threads."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def write_arrays(folder: Path, arrays: State) -> None:
    """Write every leaf into its own folder below `folder`, uncompressed, one chunk each.

    Leaves without elements hold no bytes and are known by the manifest alone.

    Raises:
        OSError: the disk refused a write.
    """
    import orbax.checkpoint as ocp

    folder.mkdir()
    tree = {leaf_folder(path): array for path, array in arrays.items() if array.size}
    if not tree:
        return
    handler: Any = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_zarr3=False, use_compression=False
    )
    with _quiet():
        try:
            handler.save(folder.absolute(), args=ocp.args.PyTreeSave(tree))
        except Exception as error:
            # TensorStore reports the system's error number in the text of a ValueError.
            code = ERROR_CODE.search(str(error))
            if code is None:
                raise OSError(f"{type(error).__name__}: {error}") from error
            number = int(code.group(1))
            raise OSError(number, os.strerror(number), str(folder)) from error
        finally:
            handler.close()


def read_arrays(folder: Path, leaves: list[dict[str, Any]]) -> State:
    """Read the leaves of a tree schema from `folder`, all at once.

    Raises:
        CheckpointInvalid: a leaf that cannot be decoded or has another shape or dtype.
    """
    import tensorstore

    def open_leaf(path: str) -> Any:
        store = {"driver": "file", "path": f"{folder.absolute() / leaf_folder(path)}/"}
        return tensorstore.open({"driver": "zarr", "kvstore": store}, open=True, read=True)

    stored = [leaf["path"] for leaf in leaves if 0 not in leaf["shape"]]
    opening = {path: open_leaf(path) for path in stored}
    reading = {path: _await(path, future).read() for path, future in opening.items()}
    arrays: State = {}
    for leaf in leaves:
        path, shape, dtype = leaf["path"], tuple(leaf["shape"]), leaf["dtype"]
        if path not in reading:
            arrays[path] = np.zeros(shape, np.dtype(dtype))
            continue
        array = np.asarray(_await(path, reading[path]))
        if array.shape != shape or array.dtype.name != dtype:
            raise CheckpointInvalid(
                f"leaf {path} decodes as {array.dtype.name}{list(array.shape)}, "
                f"the manifest says {dtype}{list(shape)}",
                file=leaf_folder(path),
                leaf=path,
            )
        arrays[path] = array
    return arrays


def _await(path: str, future: Any) -> Any:
    try:
        return future.result()
    except ValueError as error:
        raise CheckpointInvalid(
            f"leaf {path} cannot be decoded: {error}", file=leaf_folder(path), leaf=path
        ) from error
