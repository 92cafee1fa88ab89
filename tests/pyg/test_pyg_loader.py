"""gids.pyg.NeighborLoader: PyG's minibatches, attribute by attribute, from a dataset on disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import has_open
from open_options import take_options, tuned
from pyg_model import (
    AUTHORS,
    CITES,
    PAPERS,
    WRITES,
    WRITTEN,
    assert_all_same,
    sample_all,
    stores,
    write,
)
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NodeLoader as PygNodeLoader
from torch_geometric.sampler import NumNeighbors

import gids
import gids.pyg
from gids.loader import pack_switch, sampled_ahead
from gids.loader.epoch_loader import EpochLoader
from gids.write import DatasetWriter, edge_list


def open_loader(path: Any, num_neighbors: Any, nodes: Any = None, **options: Any) -> gids.pyg.NeighborLoader:
    given = {"batch_size": 32, "memory": 64 << 20, "cache": 60_000, **options}
    taken = take_options(given)
    source = gids.open(path, **tuned(taken)) if isinstance(path, str | Path | gids.FeatureStore) else path
    return gids.pyg.NeighborLoader(source, num_neighbors, nodes, **given)


@pytest.mark.parametrize("shuffle", [False, True])
def test_minibatches_are_those_of_pygs_own_node_loader(one: Data, one_path: Path, shuffle: bool) -> None:
    """All neighbors are taken, so that nothing is drawn; PyG's loader puts its Data together from memory."""
    with open_loader(one_path, [-1, -1], shuffle=shuffle, seed=3) as loader:
        ours = list(loader)
        order = torch.cat([batch.input_id for batch in ours])
        assert len(loader) == len(ours) == -(-PAPERS // 32)
    sampler = gids.pyg.NeighborSampler(one, [-1, -1])
    theirs = PygNodeLoader(one, sampler, input_nodes=order, batch_size=32, input_id=order)
    assert_all_same(ours, theirs)
    assert (order.tolist() == list(range(PAPERS))) != shuffle
    assert sorted(order.tolist()) == list(range(PAPERS))


def test_the_memory_of_the_sampler_counts(one_path: Path) -> None:
    with open_loader(one_path, [5, 5]) as loader:
        epoch = iter(loader)
        next(epoch)
        plan = loader.feature_loader._placement.plan  # type: ignore[union-attr]
        assert plan.purposes["sampler"] >= loader.stats()["memory"]["sampler"] > 0
        list(epoch)
        assert loader.stats()["memory"]["sampler"] == 0  # freed once all is sampled


def test_typed_minibatches_are_those_of_pygs_own_node_loader(several: HeteroData, several_path: Path) -> None:
    counts = {CITES: [-1, 0], WRITES: [-1, -1], WRITTEN: [0, -1]}
    nodes = torch.arange(3, AUTHORS, 2)
    with open_loader(several_path, counts, ("author", nodes)) as loader:
        ours = list(loader)
    sampler = gids.pyg.NeighborSampler(several, counts)
    theirs = PygNodeLoader(several, sampler, input_nodes=("author", nodes), batch_size=32)
    assert_all_same(ours, theirs)
    assert [len(b["author"].input_id) for b in ours] == [b["author"].batch_size for b in ours]


def test_nodes_and_edges_stand_in_pyg_libs_order(one_path: Path) -> None:
    store = gids.FeatureStore(one_path)
    seeds = torch.tensor([5, 599, 17, 5, 0])
    with open_loader(store, [-1] * 3, seeds, batch_size=5) as loader:
        (batch,) = loader
    nodes, edges, node_counts, edge_counts = sample_all([store.graph()], {"paper": seeds.tolist()}, 3)
    assert batch.n_id.tolist() == nodes["paper"]
    assert list(zip(*batch.edge_index.tolist(), batch.e_id.tolist(), strict=True)) == edges[CITES]
    assert batch.num_sampled_nodes == node_counts["paper"]
    assert batch.num_sampled_edges == edge_counts[CITES]
    assert batch.batch_size == 5


def test_types_stand_in_pyg_libs_order(several_path: Path) -> None:
    store = gids.FeatureStore(several_path)
    seeds = torch.tensor([5, 599, 17, 0])
    with open_loader(store, [-1, -1], ("paper", seeds), batch_size=4) as loader:
        (batch,) = loader
    graphs = [store.graph(r) for r in store.relations]
    nodes, edges, node_counts, edge_counts = sample_all(graphs, {"paper": seeds.tolist()}, 2)
    for ntype in ("paper", "author"):
        assert batch[ntype].n_id.tolist() == nodes[ntype]
        assert batch[ntype].num_sampled_nodes == node_counts[ntype]
    for relation in (CITES, WRITES, WRITTEN):
        found = zip(*batch[relation].edge_index.tolist(), batch[relation].e_id.tolist(), strict=True)
        assert list(found) == edges[relation]
        assert batch[relation].num_sampled_edges == edge_counts[relation]


def test_every_node_draws_once_and_in_its_hop(one: Data, one_path: Path) -> None:
    in_degree = torch.bincount(one.edge_index[1], minlength=PAPERS)
    with open_loader(one_path, [4, 3, 2], shuffle=True) as loader:
        for batch in loader:
            row, col = batch.edge_index
            source, destination = one.edge_index[:, batch.e_id]
            assert torch.equal(batch.n_id[row], source)
            assert torch.equal(batch.n_id[col], destination)
            assert len(batch.e_id.unique()) == len(batch.e_id)
            assert torch.equal(batch.x, one.x[batch.n_id])
            assert torch.equal(batch.y, one.y[batch.n_id])
            assert torch.equal(batch.edge_attr, one.edge_attr[batch.e_id])
            assert torch.equal(batch.n_id[: batch.batch_size], batch.input_id)
            hop_of = torch.arange(4).repeat_interleave(torch.tensor(batch.num_sampled_nodes))
            fanout = torch.tensor([4, 3, 2, 0])[hop_of]
            drawn = torch.bincount(col, minlength=len(batch.n_id))
            assert torch.equal(drawn, torch.minimum(in_degree[batch.n_id], fanout))
            ends = torch.cumsum(torch.tensor(batch.num_sampled_edges), 0)
            assert torch.equal(hop_of[col], torch.searchsorted(ends, torch.arange(len(col)), right=True))


def test_input_nodes(one_path: Path, several_path: Path) -> None:
    mask = torch.zeros(PAPERS, dtype=torch.bool)
    mask[[7, 30, 200]] = True
    for nodes, ids, input_ids in (
        (None, list(range(PAPERS)), list(range(PAPERS))),
        ([9, 4], [9, 4], [0, 1]),
        (torch.tensor([9, 4], dtype=torch.int32), [9, 4], [0, 1]),
        (np.array([9, 4]), [9, 4], [0, 1]),
        (mask, [7, 30, 200], [7, 30, 200]),
    ):
        with open_loader(one_path, [1], nodes, batch_size=PAPERS) as loader:
            (batch,) = loader
            assert batch.n_id[: batch.batch_size].tolist() == ids
            assert batch.input_id.tolist() == input_ids
        with open_loader(several_path, [1], ("paper", nodes), batch_size=PAPERS) as loader:
            (typed,) = loader
            assert typed["paper"].n_id[: typed["paper"].batch_size].tolist() == ids
            assert typed["paper"].input_id.tolist() == input_ids
    with open_loader(one_path, [1], []) as loader:
        assert list(loader) == []
    with open_loader(several_path, [1], "author", batch_size=AUTHORS) as loader:
        assert next(iter(loader))["author"].batch_size == AUTHORS


def test_an_epochs_order_is_made_once(one_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = []

    def order(self: EpochLoader, epoch: int) -> torch.Tensor:
        epochs.append(epoch)
        return original(self, epoch)

    original = EpochLoader.order
    monkeypatch.setattr(EpochLoader, "order", order)
    mask = torch.arange(PAPERS) % 3 == 0
    with open_loader(one_path, [1], mask, shuffle=True, drop_last=True) as loader:
        for _ in range(2):
            seen = []
            for batch in loader:
                assert torch.equal(batch.input_id, batch.n_id[: batch.batch_size])  # of a mask: the nodes
                seen.append(batch.input_id)
            assert len(torch.cat(seen).unique()) == 32 * len(seen) == PAPERS // 3 // 32 * 32
    assert epochs == [0, 1]


def test_what_data_and_num_neighbors_may_be(one_path: Path, several_path: Path) -> None:
    store = gids.FeatureStore(several_path)
    pair = gids.pyg.FeatureStore(store), gids.pyg.GraphStore(several_path)
    counts: dict[Any, list[int]] = {CITES: [2, 1], WRITES: [2, 2], WRITTEN: [2, 2]}
    by_name = NumNeighbors({"paper__cites__paper": [2, 1]}, default=[2, 2])
    with open_loader(str(several_path), counts, "paper") as loader:
        expected = list(loader)
    for data, given in ((store, counts), (pair, counts), (several_path, by_name)):
        with open_loader(data, given, "paper") as loader:
            assert_all_same(loader, expected)
    with open_loader(one_path, NumNeighbors([3, 2])) as loader, open_loader(one_path, (3, 2)) as other:
        assert_all_same(loader, other)
    with open_loader(one_path, [2], ("paper", None)) as loader:
        assert isinstance(next(iter(loader)), HeteroData)


def test_tables_of_several_datasets(several_path: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    source = {"text": torch.randn(PAPERS, 5, generator=generator), "image": torch.randn(PAPERS, 3).half()}
    tables = {}
    for name, rows in source.items():
        with DatasetWriter(tmp_path / f"{name}.gids") as writer:
            writer.write_table("node", "paper", "feat", rows)
        tables[name] = gids.FeatureStore(tmp_path / f"{name}.gids").table("feat")
    with open_loader(several_path, [3], "paper", tables={"x": "paper.feat", **tables}) as loader:
        expected = {"x": gids.FeatureStore(several_path).read_rows(range(PAPERS), "paper.feat"), **source}
        for batch in loader:
            for name, rows in expected.items():
                assert batch["paper"][name].dtype == rows.dtype
                assert torch.equal(batch["paper"][name], rows[batch["paper"].n_id])
    with pytest.raises(ValueError, match=r"two tables are called 'paper.feat'"):
        open_loader(several_path, [3], "paper", tables=["paper.feat", tables["text"]])


def test_a_call_converts_the_tables_that_an_epoch_converts(one_path: Path, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "numbers.gids") as writer:
        writer.write_table("node", "paper", "number", torch.arange(PAPERS) + (1 << 40))
    tables = {"x": "paper.feat", "number": gids.FeatureStore(tmp_path / "numbers.gids").table("number")}
    with open_loader(one_path, [-1], tables=tables, dtype=torch.float16) as loader:
        called, iterated = loader(range(32)), next(iter(loader))
        assert called.number.tolist() == (called.n_id + (1 << 40)).tolist()
        assert called.x.dtype == torch.float16
        assert torch.equal(called.x, iterated.x)


def test_a_table_gets_no_name_that_minibatches_have_already(one_path: Path, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "x.gids") as writer:
        writer.write_table("node", "paper", "x", torch.ones(PAPERS, 2))
    x = gids.FeatureStore(tmp_path / "x.gids").table("x")
    with pytest.raises(ValueError, match="two tables would have the name 'x' of 'paper': give names"):
        open_loader(one_path, [3], tables=["paper.feat", x])
    for name in ("edge_index", "n_id", "batch_size", "y"):
        with pytest.raises(ValueError, match=f"have the name '{name}' of 'paper', which minibatches have"):
            open_loader(one_path, [3], tables={name: "paper.feat"})
    with open_loader(one_path, [3], tables={"y": "paper.feat"}, labels=False) as loader:
        batch = next(iter(loader))
        assert torch.equal(batch.y, gids.FeatureStore(one_path).read_rows(batch.n_id, "paper.feat"))


def test_an_unknown_option_is_refused(one_path: Path) -> None:
    for name, said in (("memory", "an option of gids.open()"), ("trasform", "did you mean 'transform'")):
        with pytest.raises(TypeError) as caught:
            gids.pyg.NeighborLoader(one_path, [3], **{name: 1})
        assert f"gids.pyg.NeighborLoader has no argument {name!r}" in str(caught.value)
        assert said in str(caught.value)


def test_bools_select_as_they_do_in_memory(one: Data, tmp_path: Path) -> None:
    flag, known = torch.rand(PAPERS) < 0.5, torch.rand(one.num_edges, 2) < 0.5
    path = write(tmp_path / "one.gids", one)
    more = tmp_path / "more.gids"
    with DatasetWriter(more) as writer:
        writer.write_table("node", "paper", "flag", flag)
        writer.write_table("edge", ("paper", "cites", "paper"), "known", known)
    tables = ["paper.flag", "paper.cites.paper.known"]
    with open_loader(gids.open([path, more], memory="64MB"), [3, 3], tables=tables) as loader:
        for batch in loader:
            assert torch.equal(batch.n_id[~batch.flag], batch.n_id[~flag[batch.n_id]])
            assert torch.equal(batch.known, known[batch.e_id])
    features = gids.pyg.FeatureStore(more)
    assert torch.equal(features.get_tensor("paper", "flag", index=None), flag)


@pytest.mark.parametrize("error", [None, ValueError, StopIteration, KeyboardInterrupt])
def test_a_minibatch_counts_once_the_transform_is_done(one_path: Path, error: Any) -> None:
    """Where a signal handler may save the state."""

    def transform(data: Any) -> Any:
        steps.append(loader.state_dict()["step"])
        if len(steps) == 2 and error is not None:
            raise error
        return data

    steps: list[int] = []
    with open_loader(one_path, [2], transform=transform) as loader:
        epoch = iter(loader)
        next(epoch)
        if error is not None:
            with pytest.raises(RuntimeError if error is StopIteration else error):
                next(epoch)
        if error is KeyboardInterrupt:  # which ends the epoch
            assert next(epoch, None) is None
            assert loader.state_dict()["step"] == 1
        else:
            assert sum(1 for _ in epoch) == len(loader) - (1 if error is None else 2)
            assert steps == list(range(len(loader)))


def test_only_the_tables_asked_for_and_a_transform(one_path: Path, several_path: Path) -> None:
    with open_loader(one_path, [2], tables=[], labels=False, transform=lambda d: d.keys()) as loader:
        assert "x" not in next(iter(loader))
        assert "y" not in next(iter(loader))
    with open_loader(several_path, [2], "paper", tables=["author.feat"]) as loader:
        batch = next(iter(loader))
        assert "x" in batch["author"]
        assert "x" not in batch["paper"]
        assert "edge_attr" not in batch[WRITES]


def test_minibatches_depend_on_seed_and_epoch_alone(one_path: Path) -> None:
    def run(**options: Any) -> list[list[int]]:
        with open_loader(one_path, [3, 3], shuffle=True, **options) as loader:
            return [b.n_id.tolist() + b.e_id.tolist() for _ in range(2) for b in loader]

    expected = run()
    without_effect: dict[str, Any] = {"num_workers": 3, "timeout": 3, "is_sorted": True}
    for options in ({"window": 0}, {"threads": 1}, {"threads": 4, **without_effect}, {"tables": []}):
        assert run(**options) == expected, options
    assert run(seed=1) != expected
    assert expected[: len(expected) // 2] != expected[len(expected) // 2 :]


def test_wrong_arguments_of_a_loader_are_refused(one: Data, one_path: Path, several_path: Path) -> None:
    for error, message, path, counts, nodes, options in (
        (TypeError, "data is int: give gids.open", 5, [2], None, {}),
        (ValueError, "num_neighbors", one_path, [-2], None, {}),
        (TypeError, "give a list", one_path, {CITES: [2]}, None, {}),
        (ValueError, "edge type", several_path, {CITES: [2]}, "paper", {}),
        (ValueError, "hops", several_path, {CITES: [2], WRITES: [2, 2], WRITTEN: [2]}, "paper", {}),
        (ValueError, "must be a node type", several_path, [2], None, {}),
        (KeyError, "no node type 'venue'", several_path, [2], "venue", {}),
        (ValueError, "a mask is", one_path, [2], torch.ones(3, dtype=torch.bool), {}),
        (TypeError, "give int64", one_path, [2], torch.ones(3), {}),
        (IndexError, "ids run from 0 to 599", one_path, [2], [600], {}),
        (KeyError, "time_attr='t': neither nodes nor edges", one_path, [2], None, {"time_attr": "t"}),
        (ValueError, "input_time= needs time_attr=", one_path, [2], None, {"input_time": torch.zeros(600)}),
        (ValueError, "strategy='last' needs time_attr", one_path, [2], None, {"temporal_strategy": "last"}),
        (ValueError, "for each of the 600 seeds", one_path, [2], None, {"input_id": torch.arange(6)}),
        (ValueError, "collate_fn= is not supported", one_path, [2], None, {"collate_fn": list}),
        (ValueError, "dataset= is not supported", one_path, [2], None, {"dataset": [1]}),
        (ValueError, "batch_size=None needs sampler=", one_path, [2], None, {"batch_size": None}),
        (ValueError, "give sampler= or shuffle=", one_path, [2], None, {"sampler": [1], "shuffle": True}),
        (TypeError, "sampler= needs a length", one_path, [2], None, {"sampler": iter([1])}),
        (ValueError, "seed= or generator=", one_path, [2], None, {"seed": 1, "generator": torch.Generator()}),
        (KeyError, "weight_attr='w': one.gids has no edges", one_path, [2], None, {"weight_attr": "w"}),
        (ValueError, "subgraph_type='both' must be", one_path, [2], None, {"subgraph_type": "both"}),
        (KeyError, "no table 'z'", one_path, [2], None, {"tables": ["z"]}),
    ):
        with pytest.raises(error, match=message):
            open_loader(path, counts, nodes, **options)


def test_a_closed_loader_holds_no_dataset(one_path: Path, tmp_path: Path) -> None:
    path = shutil.copytree(one_path, tmp_path / "one.gids")
    loader = gids.pyg.NeighborLoader(path, [2])
    assert has_open(path)
    loader.close()
    assert not has_open(path)


@pytest.mark.parametrize("kind", ["nodes", "typed nodes", "edges"])
def test_packs_yield_the_same_minibatches(
    one: Data, one_path: Path, several_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_switch, "EARLY", 2)
    monkeypatch.setattr(sampled_ahead, "MOST_MINIBATCHES", 3)
    path = several_path if kind == "typed nodes" else one_path
    options: dict[str, Any] = {"batch_size": 16, "shuffle": True, "seed": 3}
    epochs = []
    for reads in ("random", "pack"):
        with gids.open(path, memory=64 << 20, reads=reads) as source:  # type: ignore[arg-type]
            if kind == "edges":
                options |= {"neg_sampling": "binary", "batch_size": 100}
                loader = gids.pyg.LinkNeighborLoader(source, [3, 2], one.edge_index, **options)
            elif kind == "nodes":
                loader = gids.pyg.NeighborLoader(source, [4, 3], replace=True, **options)
            else:
                counts: Any = {CITES: [3, 0], WRITES: [3, 2], WRITTEN: [2, 2]}
                loader = gids.pyg.NeighborLoader(source, counts, "author", **options)
            with loader:
                epochs.append([*loader, *loader])
                by_packs = loader.stats()["packs"]["minibatches"]
                assert by_packs == (0 if reads == "random" else 2 * len(loader))
    assert_all_same(*epochs)


def test_an_explicit_number_of_nodes_stays_in_minibatches(several: HeteroData, tmp_path: Path) -> None:
    """Of a type without features, as of Data with num_nodes= in memory."""
    edges = several[CITES].edge_index
    one = Data(edge_index=edges, num_nodes=PAPERS)
    typed = HeteroData({"paper": {"x": several["paper"].x}, "author": {"num_nodes": AUTHORS}})
    for relation in (CITES, WRITES, WRITTEN):
        typed[relation].edge_index = several[relation].edge_index
    counts = {"paper": PAPERS, "author": AUTHORS}
    for name, data, relations in (("one", one, [CITES]), ("typed", typed, [CITES, WRITES, WRITTEN])):
        path = tmp_path / f"{name}.gids"
        with DatasetWriter(path) as writer:
            if data is typed:
                writer.write_table("node", "paper", "feat", several["paper"].x)
            for relation in relations:
                src, _, dst = relation
                row, col = several[relation].edge_index
                writer.write_edges(relation, edge_list(row, col, num_src=counts[src], num_dst=counts[dst]))
        options: dict[str, Any] = {"batch_size": 100}
        seeds = None if data is one else "author"
        theirs = gids.pyg.NeighborLoader(data, [-1], seeds, **options)
        with gids.pyg.NeighborLoader(path, [-1], seeds, **options) as loader:
            assert_all_same(loader, theirs)
            called = loader([3, 1])
            assert stores(called)[seeds].num_nodes == len(stores(called)[seeds].n_id)
