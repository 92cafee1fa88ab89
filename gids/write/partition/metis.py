"""Owners by METIS, through pymetis or DGL. Called by run.py. METIS holds the whole graph in memory."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any

import numpy as np

from gids import dgl_finder
from gids.write.row_order import InEdges


def find_metis() -> str:
    """ "pymetis" or "dgl", whichever can be imported. Raises ImportError."""
    try:
        import pymetis  # noqa: F401

        return "pymetis"
    except ImportError:
        pass
    try:
        dgl_finder.import_dgl()
        return "dgl"
    except ImportError as error:
        raise ImportError(
            "--method metis needs METIS: pip install pymetis, or install DGL "
            f"(pymetis is not installed; {error})"
        ) from None


def metis_owners(
    library: str, graph: InEdges, kinds: np.ndarray, in_edges: np.ndarray, part_count: int
) -> np.ndarray:
    """The part of each node: uint16[node_count].

    graph: all edges in both directions, without loops and repeated edges. kinds: the type of each node, and
    whether it is a training seed, as a small number. in_edges: int64[node_count]. DGL balances the kinds and
    the edges; pymetis balances one weight per node, a mean of its shares of these.
    """
    indptr, indices = graph
    count = len(kinds)
    if part_count == 1 or not count:
        return np.zeros(count, np.uint16)
    owners = _by_pymetis if library == "pymetis" else _by_dgl
    return np.asarray(owners(indptr, indices, kinds, in_edges, part_count)).astype(np.uint16)


def _by_pymetis(
    indptr: np.ndarray, indices: np.ndarray, kinds: np.ndarray, in_edges: np.ndarray, parts: int
) -> Any:
    import pymetis

    # The share of a node in the rows of its kind and in the in-edges, 1000 on average.
    sizes = np.bincount(kinds)
    known = int((sizes > 0).sum())
    share = len(kinds) / (sizes[kinds] * known) + in_edges * (len(kinds) / max(1, int(in_edges.sum())))
    weights = np.maximum(1, share * 500).astype(np.int64)
    _, owners = pymetis.part_graph(
        parts, xadj=indptr.tolist(), adjncy=indices.tolist(), vweights=weights.tolist()
    )
    return owners


def _by_dgl(
    indptr: np.ndarray, indices: np.ndarray, kinds: np.ndarray, in_edges: np.ndarray, parts: int
) -> Any:
    dgl = dgl_finder.import_dgl()
    import torch

    pointers, sources = (torch.from_numpy(np.array(a, np.int64)) for a in (indptr, indices))
    graph = dgl.graph(("csc", (pointers, sources, torch.empty(0, dtype=torch.int64))))
    of_kinds = torch.from_numpy(kinds.astype(np.int64))
    # DGL prints how long each step takes, and leaves a file to the garbage collection.
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        found = dgl.metis_partition_assignment(graph, parts, balance_ntypes=of_kinds, balance_edges=True)
    return found.numpy()
