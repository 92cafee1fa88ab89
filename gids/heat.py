"""Compute and store the heat of nodes: how often training is expected to read them.

Called by `gids heat` and bench/; hottest_nodes by users, for gids.sampler.LocalityBias. sampled_counts
samples minibatches. reverse_pagerank and expected_visits propagate visits from seeds along in-edges: each
pass streams over the mapped in-edges, with four numbers per node and a block of destinations in memory.

write_heat adds the heat to an existing dataset, in one step: new array files are written beside the old ones;
then a manifest that names them replaces the old manifest. Nothing else of a dataset ever changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.cache import page_heat
from gids.errors import FormatError, StorageError
from gids.sampler import Neighbor, Topology
from gids.store import FeatureStore, Graph, graphs_of
from gids.store.files import read_manifest
from gids.store.manifest import MANIFEST, ArrayEntry, Manifest, NodesEntry, dump_manifest, heat_dtype
from gids.store.names import HEAT_ROLES, SPLITS, describe_type, encode_path
from gids.store.part import refuse_part
from gids.write.files import lock, replace_file, sync_directory, write_array

__all__ = [
    "choose_seeds",
    "expected_visits",
    "hottest_nodes",
    "reverse_pagerank",
    "sampled_counts",
]

Ids = npt.NDArray[np.int64]
Seeds = Mapping[str, Ids]
Visits = npt.NDArray[np.float64]

_BLOCK_NODES = 1 << 18
_MISSING = 0.01
_CURE = "compute the heat of the whole dataset, then partition it"


def sampled_counts(
    store: FeatureStore,
    seeds: Seeds,
    fanouts: Sequence[int],
    *,
    batch_size: int = 1024,
    seed: int = 0,
    on_total: Callable[[int], None] = lambda _: None,
    on_batch: Callable[[int], None] = lambda _: None,
) -> dict[str, npt.NDArray[np.float32]]:
    """The number of minibatches of one epoch of gids.sampler.Neighbor that contain each node.

    seeds: node type -> int64[n], drawn in random order, batch_size of all types together. fanouts: for every
    relation; as in DGL, the last one applies to the seeds; -1: all neighbors. seed: seed of the random draws.

    Returns node type -> float32[num_nodes], for every type. Raises FormatError for a dataset without topology
    or with ids out of range, IndexError and ValueError for invalid arguments.
    """
    check_fanouts(fanouts)
    check_seeds(store, seeds)
    refuse_part(store, "gids.heat", _CURE)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}; it must be 1 or more")
    topology, sampler = Topology(graphs_of(store)), Neighbor(fanouts)
    counts = {ntype: np.zeros(store.num_nodes(ntype), np.float32) for ntype in store.node_types}
    ends = np.cumsum([0, *map(len, seeds.values())])
    order = np.random.default_rng(seed).permutation(ends[-1])  # over all types
    on_total(-(-len(order) // batch_size))
    for step, first in enumerate(range(0, len(order), batch_size)):
        chosen = order[first : first + batch_size]
        ids = {
            ntype: np.unique(ids[chosen[(begin <= chosen) & (chosen < end)] - begin])
            for (ntype, ids), begin, end in zip(seeds.items(), ends, ends[1:], strict=False)
        }
        known = {ntype: torch.from_numpy(ids[ntype]) for ntype in ids if ntype in topology.node_types}
        drawn = sampler.sample(topology, known, seed=seed, step=step).input_nodes
        assert isinstance(drawn, dict)
        for ntype, nodes in (ids | {t: n.numpy() for t, n in drawn.items()}).items():
            counts[ntype][nodes] += 1  # nodes are unique
        on_batch(1)
    return counts


def choose_seeds(store: FeatureStore, which: str) -> dict[str, Ids]:
    """The ids of a split ("train", "val" or "test") or of "all" nodes: node type -> int64[n].

    Raises ValueError if no node type has this split.
    """
    if which == "all":
        return {ntype: np.arange(store.num_nodes(ntype)) for ntype in store.node_types}
    if which not in SPLITS:
        raise ValueError(f"seeds={which!r}; it must be one of {', '.join(SPLITS)}, all")
    seeds = {ntype: split[which].numpy() for ntype, split in store.splits.items() if which in split}
    if not any(map(len, seeds.values())):
        raise ValueError(f"no node of {store.name} is in a {which} split: give seeds='all' (--seeds all)")
    return seeds


def check_seeds(store: FeatureStore, seeds: Seeds) -> None:
    """Raise IndexError if a seed is out of range, ValueError if there are no seeds."""
    for ntype, ids in seeds.items():
        count = store.num_nodes(ntype)
        if len(ids) and not (ids.min() >= 0 and ids.max() < count):
            raise IndexError(
                f"seeds of {ntype!r} run from {ids.min()} to {ids.max()}; there are {count} nodes"
            )
    if not any(map(len, seeds.values())):
        raise ValueError("there are no seeds; give at least one")


def check_fanouts(fanouts: Sequence[int]) -> None:
    """Raise ValueError unless every fanout is 1 or more, or -1 for all neighbors."""
    if not fanouts or any(f < 1 and f != -1 for f in fanouts):
        raise ValueError(f"fanouts={list(fanouts)}; give one per layer: 1 or more, or -1 for all neighbors")


def reverse_pagerank(
    store: FeatureStore,
    seeds: Seeds,
    *,
    damping: float = 0.85,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> dict[str, Visits]:
    """Expected visits of random walks against the edges, one from each seed (Data Tiering, Min et al., 2022).

    seeds: node type -> int64[n]. With probability `damping` a walk continues: it chooses one of the relations
    in which its node has in-edges, then the source of one of these in-edges, all with equal probability. A
    walk ends at a node without in-edges. Stops when at most 1 % of the visits is missing.

    Returns node type -> float64[num_nodes], for every type. on_bytes(n): progress, in bytes of in-edges.
    Raises FormatError for a dataset without topology, IndexError and ValueError for invalid arguments.
    """
    if not 0 < damping < 1:
        raise ValueError(f"damping={damping}; it must be between 0 and 1")
    graphs = graphs_of(store)
    continuing = _continuing(store, graphs, damping)
    moving = _seeded(store, seeds)
    visits = {ntype: values.copy() for ntype, values in moving.items()}
    while True:
        for ntype, values in moving.items():
            values *= continuing[ntype]
        moving = _carry(store, graphs, moving, 1, on_bytes)
        for ntype, values in moving.items():
            visits[ntype] += values
        missing = _total(moving) * damping / (1 - damping)  # the number of walks only decreases
        if missing <= _MISSING * _total(visits):
            return visits


def expected_visits(
    store: FeatureStore,
    seeds: Seeds,
    fanouts: Sequence[int],
    *,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> dict[str, Visits]:
    """How often neighbor sampling is expected to read each node in one epoch of the seeds.

    fanouts: as in DGL, the last one applies to the seeds; -1: all neighbors. In each layer every node found
    so far draws min(fanout, in-degree) of its in-edges per relation, and remains. A node that several nodes
    of a minibatch draw counts several times, which makes the computation linear.

    Returns and raises as `reverse_pagerank`.
    """
    check_fanouts(fanouts)
    graphs = graphs_of(store)
    visits = _seeded(store, seeds)
    for fanout in reversed(fanouts):
        for ntype, values in _carry(store, graphs, visits, fanout, on_bytes).items():
            visits[ntype] += values
    return visits


def _seeded(store: FeatureStore, seeds: Seeds) -> dict[str, Visits]:
    check_seeds(store, seeds)
    refuse_part(store, "gids.heat", _CURE)
    visits = {ntype: np.zeros(store.num_nodes(ntype)) for ntype in store.node_types}
    for ntype, ids in seeds.items():
        np.add.at(visits[ntype], ids, 1.0)
    return visits


def _continuing(store: FeatureStore, graphs: Sequence[Graph], damping: float) -> dict[str, Visits]:
    """The probability that a walk continues from a node along each relation in which it has in-edges."""
    relations = {ntype: np.zeros(store.num_nodes(ntype)) for ntype in store.node_types}
    for graph in graphs:
        relations[graph.relation[2]] += graph.indptr[1:] > graph.indptr[:-1]
    return {ntype: damping / np.maximum(count, 1) for ntype, count in relations.items()}


def _carry(
    store: FeatureStore,
    graphs: Sequence[Graph],
    visits: dict[str, Visits],
    fanout: int,
    on_bytes: Callable[[int], None],
) -> dict[str, Visits]:
    """The visits that one layer of sampling adds to the sources of nodes with these visits."""
    reached = {ntype: np.zeros(store.num_nodes(ntype)) for ntype in store.node_types}
    for graph in graphs:
        source, _, destination = graph.relation
        topology = f"topology of {describe_type(graph.relation)}"
        for first in range(0, graph.num_dst, _BLOCK_NODES):
            indptr = np.asarray(graph.indptr[first : first + _BLOCK_NODES + 1])
            # Each in-edge is drawn with probability min(fanout, degree) / degree.
            shares = visits[destination][first : first + _BLOCK_NODES].copy()
            if fanout != -1:
                shares *= np.minimum(fanout / np.maximum(np.diff(indptr), 1), 1.0)
            try:
                bad = _core.carry_to_sources(indptr, graph.indices, shares, reached[source])
            except ValueError as error:
                raise FormatError(f"{topology}: {error}; `gids verify` lists all faults") from None
            if bad is not None:
                must = f"it must be from 0 to {graph.num_src - 1}"
                raise FormatError(f"{topology}: indices[{bad}] is {graph.indices[bad]}; {must}")
            on_bytes(int(indptr[-1] - indptr[0]) * graph.indices.itemsize)
    return reached


def _total(visits: dict[str, Visits]) -> float:
    return float(sum(values.sum() for values in visits.values()))


def hottest_nodes(store: FeatureStore, table: str, cache_bytes: int, *, method: str = "auto") -> torch.Tensor:
    """The nodes with rows on the hottest pages of a table that fit in cache_bytes.

    A cache of this size with policy="static" converges to these pages, if it has no other table. table: a
    table of nodes, such as "paper.feat". method: the heat to use; "auto": the best that is stored, as in
    gids.FeatureLoader. Returns bool[num_nodes] on the CPU. The result depends only on the dataset, so
    minibatches that depend on it are reproducible.

    Raises MissingError for an unknown table or heat, ValueError for a table of edges or a negative size.
    """
    refuse_part(store, "gids.heat.hottest_nodes")
    stored = store.table(table)
    if not isinstance(stored.type, str):
        raise ValueError(f"{table} is a table of edges, which have no heat: give a table of nodes")
    if cache_bytes < 0:
        raise ValueError(f"cache_bytes={cache_bytes}; it must be 0 or more")
    methods = store.heat_methods(stored.type)
    heat = page_heat(
        store.heat(methods[0] if method == "auto" and methods else method, stored.type),
        stored.rows_per_page,
        stored.order,
    )
    fit = cache_bytes // (stored.page_bytes + _core.LINE_METADATA_BYTES)
    held = np.zeros(len(heat), np.bool_)
    held[np.argsort(255 - heat, kind="stable")[:fit]] = True
    return torch.from_numpy(stored.rows_of_pages(held))


def write_heat(path: str | os.PathLike[str], method: str, heat: Mapping[str, np.ndarray]) -> None:
    """Store the heat of some node types, and replace what this method stored for them before.

    method: a key of HEAT_ROLES. heat: node type -> number[num_nodes], finite and 0 or more; stored as float32
    (uint32 for "out-degree").

    Even if this process is killed, a reader sees all of the new heat or none; the next call removes what was
    left. Blocks while another process stores heat in the dataset. Raises FormatError for heat that does not
    match the dataset, StorageError if it cannot be written.
    """
    root = Path(os.path.abspath(path))
    role = HEAT_ROLES[method]
    with _locked(root) as manifest:
        _check(heat, {n.type: n.count for n in manifest.nodes}, root.name)
        replaced = [n.arrays[role].path for n in manifest.nodes if n.type in heat and role in n.arrays]
        nodes = tuple(
            replace(n, arrays={**n.arrays, role: _write_array(root, n, role, heat[n.type])})
            if n.type in heat
            else n
            for n in manifest.nodes
        )
        sync_directory(root / "nodes")
        replace_file(root / MANIFEST, dump_manifest(replace(manifest, nodes=nodes)))
        for old in replaced:
            with suppress(OSError):  # the new manifest is on disk, and names others
                (root / old).unlink()


@contextmanager
def _locked(root: Path) -> Iterator[Manifest]:
    """Lock the dataset against others that store heat, and yield its manifest. An OSError becomes a
    StorageError."""
    read_manifest(root)  # its errors are clearer than open()'s
    try:
        fd = lock(root, lambda: os.open(root, os.O_RDONLY | os.O_DIRECTORY))
        try:
            yield read_manifest(root)
        finally:
            os.close(fd)
    except StorageError:
        raise
    except OSError as error:
        message = f"storing heat failed ({error.strerror}); the dataset is unchanged"
        raise StorageError(error.errno or 0, message, root) from error


def _check(heat: Mapping[str, np.ndarray], counts: Mapping[str, int], name: str) -> None:
    for ntype, values in heat.items():
        if ntype not in counts:
            raise FormatError(f"no node type {ntype!r} in {name} (has {', '.join(map(repr, counts))})")
        if values.shape != (counts[ntype],):
            raise FormatError(
                f"heat of {ntype!r} is {list(values.shape)}, but {name} has {counts[ntype]} nodes"
            )
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise FormatError(f"heat of {ntype!r} has values that are negative or not finite")


def _write_array(root: Path, nodes: NodesEntry, role: str, values: np.ndarray) -> ArrayEntry:
    # There are two names; take the one that the manifest does not use, so that the old file stays until the
    # rename. A file that a killed process left is removed, not overwritten: a reader may have mapped it.
    stem = f"nodes/{encode_path(nodes.type)}.{role}"
    used = nodes.arrays[role].path if role in nodes.arrays else ""
    name = f"{stem}.1.npy" if used == f"{stem}.npy" else f"{stem}.npy"
    (root / name).unlink(missing_ok=True)
    return write_array(root, name, heat_dtype(role), values.shape, [values])
