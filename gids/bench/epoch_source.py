"""A dataset as the .npy files that gids.measure.epoch trains from. Called by epoch.py.

The files are links where possible. Stock DGL maps the table's shard, if the shard holds nothing but rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gids.store import FeatureStore, Table


@dataclass(frozen=True)
class EpochSource:
    """The input of an epoch. why_no_stock: why stock DGL cannot map the table, or ""."""

    table: Table
    train_count: int
    why_no_stock: str

    @property
    def feature_bytes(self) -> int:
        return self.table.row_count * self.table.row_bytes


def look_at(store: FeatureStore, table: Table) -> EpochSource:
    """Check that the dataset has what an epoch needs. Raises ValueError."""
    if len(store.node_types) != 1 or len(store.relations) != 1:
        raise ValueError(f"{store.name} is heterogeneous; this comparison needs a dataset with one node type")
    (ntype,) = store.node_types
    labels = store.labels.get(ntype)
    if labels is None or labels.dim() != 1 or labels.dtype.is_floating_point or int(labels.min()) < 0:
        raise ValueError(f"{store.name} has no labels that are classes; this comparison needs them")
    train = store.splits.get(ntype, {}).get("train")
    if train is None or not len(train):
        raise ValueError(f"{store.name} has no train split; this comparison needs one")
    if table.kind != "node" or len(table.shape) != 1:
        raise ValueError(
            f"table {table.name!r} has {table.kind} rows of shape {list(table.shape)}; this comparison needs "
            "a vector per node"
        )
    reason = ""
    if table.scale is not None:
        reason = "its rows are int8 with a scale"
    elif table.dtype == torch.bfloat16:
        reason = "NumPy has no bfloat16"
    elif len(table.shard_paths) > 1:
        reason = f"its pages are spread over {len(table.shard_paths)} shards"
    elif table.order is not None:
        reason = "its rows are not stored in the order of their ids"
    elif table.rows_per_page * table.row_bytes != table.page_bytes:
        reason = f"rows of {table.row_bytes} B leave a part of each page of {table.page_bytes} B empty"
    return EpochSource(table, len(train), reason)


def write_links(store: FeatureStore, directory: Path) -> None:
    """Make the .npy files of topology, labels and splits in directory, as links where possible."""
    (ntype,) = store.node_types
    graph = store.graph()
    splits = store.splits[ntype]
    train = splits["train"].numpy()
    arrays = {
        "indptr": graph.indptr,
        "indices": graph.indices,
        "labels": store.labels[ntype].numpy().astype(np.int64, copy=False),
        "train_idx": train,
        "val_idx": splits["val"].numpy() if "val" in splits else train,
    }
    for name, array in arrays.items():
        file = getattr(array, "filename", None)
        if file is not None and array.dtype == np.int64 and Path(file).suffix == ".npy":
            (directory / f"{name}.npy").symlink_to(file)
        else:
            np.save(directory / f"{name}.npy", np.asarray(array, np.int64))  # DGL takes one type for all
