"""Orders of rows to try on a trace, without writing a dataset. Called by trace_source.py."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gids.errors import FormatError
from gids.write.row_order import co_read_order, community_order, degree_order

if TYPE_CHECKING:
    from gids.store import FeatureStore, Table

STORED = "stored"
"""The order in the dataset."""

_MEMORY_BYTES = 256 << 20


def check_row_order(name: str) -> str:
    """Return name if positions_in knows it. Raises ValueError."""
    kind, _, file = name.partition(":")
    if kind not in (STORED, "original", "degree", "community", "trace") or bool(file) != (kind == "trace"):
        known = f"{STORED}, original, degree, community, trace:FILE"
        raise ValueError(f"--order must be one of {known} (got {name!r})")
    return name


def positions_in(name: str, store: FeatureStore, table: Table) -> npt.NDArray[Any] | None:
    """The position of each row of a table of nodes: int32 or int64[row_count]; None: in the order of the ids.

    Raises FormatError if the dataset or the trace lacks what the order needs.
    """
    kind, _, file = name.partition(":")
    if kind == STORED:
        return table.order
    if kind == "original":
        return None
    if kind == "trace":
        return _traced(file, table)
    ntype = str(table.type)
    degrees = store.out_degrees(ntype)
    if degrees is None:
        raise FormatError(f"{store.name} has no edges from {ntype!r} nodes, which order {kind!r} needs")
    graphs = []
    for relation in store.relations if kind == "community" else []:
        if relation[0] == relation[2] == ntype:
            graph = store.graph(relation)
            graphs.append((graph.indptr, graph.indices))
    return community_order(graphs, degrees) if graphs else degree_order(degrees)


def _traced(file: str, table: Table) -> npt.NDArray[np.integer[Any]]:
    from gids.trace.trace_file import RowTrace

    minibatches = RowTrace(file).minibatches(table.name, table.row_count)
    if minibatches is None:
        raise FormatError(f"{file} has no rows of table {table.name!r}")
    with tempfile.TemporaryDirectory(prefix="gids-bench-") as scratch:
        return co_read_order(minibatches, table.row_count, Path(scratch), _MEMORY_BYTES)
