"""The parts of a dataset against the whole, the obvious way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from datasets import same_bits

from gids.store import FeatureStore
from gids.store.part import part_paths


def open_parts(out: Path) -> list[FeatureStore]:
    return [FeatureStore(path) for path in part_paths(out)]


def check_union(whole: FeatureStore, parts: list[FeatureStore]) -> None:
    """All parts together have exactly the rows, edges and arrays of the whole dataset, each once."""
    assert [p.part.index for p in parts] == list(range(len(parts)))
    assert {p.part.count for p in parts} == {len(parts)}
    for part in parts:
        assert part.node_types == whole.node_types
        assert part.relations == whole.relations
        assert list(part.tables) == list(whole.tables)
        for ntype in whole.node_types:
            assert part.num_nodes(ntype) == whole.num_nodes(ntype)
            assert part.heat_methods(ntype) == whole.heat_methods(ntype)
            for method in whole.heat_methods(ntype):
                assert np.array_equal(part.heat(method, ntype), whole.heat(method, ntype))
            assert _equal(part.node_times(ntype), whole.node_times(ntype))
            assert _equal(part.owners(ntype), parts[0].owners(ntype))
        for ntype, labels in whole.labels.items():
            assert same_bits(part.labels[ntype], labels)
        for ntype, splits in whole.splits.items():
            assert {s: ids.tolist() for s, ids in part.splits[ntype].items()} == {
                s: ids.tolist() for s, ids in splits.items()
            }
    for relation in whole.relations:
        _check_edges(whole, parts, relation)
    for name, table in whole.tables.items():
        _check_rows(table, [p.tables[name] for p in parts])


def _check_rows(table: Any, of_parts: list[Any]) -> None:
    seen = []
    for mine in of_parts:
        assert (mine.stored_dtype, mine.dtype, mine.shape) == (table.stored_dtype, table.dtype, table.shape)
        assert (mine.scale, mine.page_bytes, mine.order) == (table.scale, table.page_bytes, None)
        assert mine.id_count == table.row_count
        ids = mine.held.ids()
        assert len(ids) == mine.row_count
        assert (np.diff(ids) > 0).all()
        assert np.array_equal(mine.held.rows_of(ids), np.arange(len(ids)))
        shuffled = np.random.default_rng(0).permutation(ids)
        assert same_bits(mine.read_rows(shuffled), table.read_rows(shuffled))
        stored = mine.read_stored(np.arange(mine.row_count))
        assert np.array_equal(stored, table.read_stored(ids)), "rows are copied as they are stored"
        seen.append(ids)
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(table.row_count))


def _check_edges(whole: FeatureStore, parts: list[FeatureStore], relation: Any) -> None:
    graph = whole.graph(relation)
    ids = np.arange(graph.num_edges) if graph.edge_ids is None else graph.edge_ids
    owners = parts[0].owners(relation[2])
    destinations = np.repeat(np.arange(graph.num_dst), np.diff(graph.indptr))
    for index, part in enumerate(parts):
        mine = part.graph(relation)
        assert part.num_edges(relation) == graph.num_edges
        assert mine.sorted_by == graph.sorted_by
        held = owners[destinations] == index
        assert np.array_equal(mine.indices, graph.indices[held])
        assert mine.indices.dtype == graph.indices.dtype
        assert np.array_equal(mine.edge_ids, ids[held])
        assert _equal(mine.edge_times, None if graph.edge_times is None else graph.edge_times[held])
        assert np.array_equal(np.repeat(np.arange(graph.num_dst), np.diff(mine.indptr)), destinations[held])


def _equal(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    return a is b is None or (a is not None and b is not None and a.dtype == b.dtype and np.array_equal(a, b))
