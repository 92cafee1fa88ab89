"""A dataset of every kind of table and array, and what its parts hold, the obvious way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import CITES, WRITES, same_bits

from gids.heat import write_heat
from gids.store import FeatureStore
from gids.store.part import part_paths
from gids.write import DatasetWriter, edge_list
from gids.write.partition import partition

PAPERS, AUTHORS, CITED, WRITTEN = 700, 130, 4000, 1500
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool")


def write_rich_dataset(path: Path, *, heterogeneous: bool = True, seed: int = 0) -> Path:
    """Tables of every dtype, of nodes and edges, both scales, an order, times, labels, splits and heat."""
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)

    def values(count: int, dim: int, dtype: str) -> torch.Tensor:
        found = torch.randint(-100, 100, (count, dim), generator=generator)
        if dtype == "uint8":
            found = found.abs()
        return (found % 2 == 0) if dtype == "bool" else found.to(getattr(torch, dtype))

    with DatasetWriter(path, page_bytes=512) as writer:
        for index, dtype in enumerate(DTYPES):
            writer.write_table("node", "paper", dtype, values(PAPERS, 3 + 11 * index, dtype))
        floats = torch.randn(PAPERS, 37, generator=generator)
        writer.write_table("node", "paper", "by_row", floats, dtype=torch.int8, scale="row")
        writer.write_table("node", "paper", "by_column", floats, dtype=torch.int8, scale="column")
        writer.write_table("node", "paper", "ordered", floats, order=rng.permutation(PAPERS))
        writer.write_table("node", "paper", "long", torch.randn(PAPERS, 200, generator=generator))
        writer.write_times("paper", torch.randint(1990, 2020, (PAPERS,), generator=generator))
        ends = edge_list(
            *torch.randint(PAPERS, (2, CITED), generator=generator), num_src=PAPERS, num_dst=PAPERS
        )
        times = torch.randint(1 << 40, (CITED,), generator=generator)
        writer.write_edges(CITES, ends, times=times, index_dtype="int32")
        writer.write_table("edge", CITES, "weight", values(CITED, 5, "float32"))
        writer.write_table("edge", CITES, "kind", values(CITED, 2, "int8"))
        if heterogeneous:
            writer.write_table("node", "author", "feat", values(AUTHORS, 40, "bfloat16"))
            pairs = (torch.randint(n, (WRITTEN,), generator=generator) for n in (AUTHORS, PAPERS))
            writer.write_edges(WRITES, edge_list(*pairs, num_src=AUTHORS, num_dst=PAPERS))
            writer.write_table("edge", WRITES, "place", values(WRITTEN, 1, "uint8"))
            back = torch.randint(AUTHORS, (300,), generator=generator).sort().values
            indptr = np.searchsorted(back.numpy(), np.arange(AUTHORS + 1))
            sources = torch.randint(PAPERS, (300,), generator=generator)
            writer.write_graph(("paper", "by", "author"), torch.from_numpy(indptr), sources, num_src=PAPERS)
            writer.write_table("edge", ("paper", "by", "author"), "w", values(300, 1, "float64"))
            writer.write_split("author", "val", torch.arange(0, AUTHORS, 7))
        writer.write_labels("paper", torch.randint(9, (PAPERS,), generator=generator))
        writer.write_split("paper", "train", torch.randperm(PAPERS, generator=generator)[:200])
        writer.write_split("paper", "test", torch.arange(600, 650))
    write_heat(path, "sampled", {"paper": rng.random(PAPERS)})
    return path


class Datasets:
    """A dataset, and its parts by their number."""

    def __init__(self, folder: Path, *, heterogeneous: bool = False) -> None:
        self.whole = write_rich_dataset(folder / "whole.gids", heterogeneous=heterogeneous)
        self._folder = folder

    def parts(self, count: int) -> Path:
        out = self._folder / f"parts-{count}"
        if not out.exists():
            partition(self.whole, out, count)
        return out

    def tables(self, kind: str | None = None) -> list[str]:
        return [t.name for t in FeatureStore(self.whole).tables.values() if kind in (None, t.kind)]


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
