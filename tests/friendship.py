"""A friendship network as the MATLAB files of Facebook100 have it: communities, and degrees far apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

COMMUNITIES = 30


def friendship(nodes: int, degree: int) -> tuple[Any, npt.NDArray[np.uint16]]:
    """The symmetric adjacency matrix (SciPy CSC, of ones), and local_info: uint16[nodes, 7].

    degree: about the mean. Two thirds of a node's friends are in its community; the popular have most.
    """
    sparse = pytest.importorskip("scipy.sparse")
    rng = np.random.default_rng(0)
    community = rng.integers(COMMUNITIES, size=nodes)
    popularity = rng.pareto(1.5, nodes) + 1
    pairs = []
    for member in range(COMMUNITIES):
        inside = np.flatnonzero(community == member)
        share = popularity[inside] / popularity[inside].sum()
        pairs.append(rng.choice(inside, (2, len(inside) * degree // 3), p=share))
    pairs.append(rng.choice(nodes, (2, nodes * degree // 6), p=popularity / popularity.sum()))
    ends = np.concatenate(pairs, axis=1)
    ends = ends[:, ends[0] != ends[1]]
    both = np.concatenate([ends, ends[::-1]], axis=1)
    matrix = sparse.coo_matrix((np.ones(both.shape[1]), both), (nodes, nodes)).tocsc()
    matrix.data[:] = 1  # of edges that were drawn twice
    values = [3, 3, 20, 70, community.max() + 1, 30, nodes // 8]  # of each column
    info = np.stack([rng.integers(count, size=nodes) for count in values], axis=1)
    info[:, 4] = community
    return matrix, info.astype(np.uint16)
