"""The features of a comparison as stock DGL maps them: the only shard of a table.

Called by epoch.py, gids.bench.epoch and the scripts in bench/.
"""

from __future__ import annotations

import mmap
import warnings

import numpy as np
import torch
from torch import Tensor

from gids.store import Table


def why_no_array(table: Table) -> str:
    """Why the rows of a table cannot be mapped as one array; "" if they can."""
    if table.scale is not None:
        return "its rows are int8 with a scale"
    if table.dtype == torch.bfloat16:
        return "NumPy has no bfloat16"
    if len(table.shard_paths) > 1:
        return f"its pages are spread over {len(table.shard_paths)} shards"
    if table.order is not None:
        return "its rows are not stored in the order of their ids"
    if table.rows_per_page * table.row_bytes != table.page_bytes:
        return f"rows of {table.row_bytes} B leave a part of each page of {table.page_bytes} B empty"
    return ""


def map_array(table: Table, *, random_access: bool) -> Tensor:
    """Map the rows of a table without a reason of why_no_array: [row_count, *shape].

    random_access: without read-ahead.
    """
    [shard] = table.shard_paths
    dtype = np.dtype(str(table.dtype).removeprefix("torch."))
    # Not "c": the kernel refuses a private map of more than the machine's memory.
    features = np.memmap(shard, dtype, "r", shape=(table.row_count, *table.shape))
    if random_access:
        features._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(features)
