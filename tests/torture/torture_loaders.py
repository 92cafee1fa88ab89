"""One class for each kind of loader: how it is made from what is drawn, and what its minibatches must have.

look() checks a minibatch against the dataset, and returns its seeds and a digest of all its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import CITES, WRITES
from torch.utils.data import IterDataPipe
from torture_data import AUTHORS, NODES, PAPERS, TIMES, TortureData, digest, flat
from torture_samplers import OTHER_EDGES, OWN, weighted_by_id

import gids

Looked = tuple[list[int], str]
"""The seeds of a minibatch as numbers, in order, and a digest of its tensors."""


class Kind:
    """load: what is loaded. repeatable: the minibatches of an epoch are the same each time. resumes: the
    loader has state_dict(). alone: ranks share nothing."""

    repeatable = True
    resumes = alone = False

    def __init__(self, load: Any, data: TortureData, share: str = "") -> None:
        self.load, self.data, self.share = load, data, share

    def make(self, source: Any, *, device: str = "cpu", workers: int = 0, **place: Any) -> Any:
        """place: arguments that name the rank, or other tables."""
        raise NotImplementedError

    def look(self, batch: Any) -> Looked:
        raise NotImplementedError

    def seeds(self) -> list[int]:
        """Of an epoch, in any order."""
        return [n for t, ids in self.data.by_type(self.seed_nodes()).items() for n in self.number(t, ids)]

    def number(self, ntype: str, ids: torch.Tensor) -> list[int]:
        """Ids of nodes as numbers that differ from those of other types."""
        return (ids.cpu() + (PAPERS if ntype == "author" else 0)).tolist()

    def seed_nodes(self) -> Any:
        nodes = torch.arange(0, PAPERS, self.load.stride)
        if not self.data.typed:
            return nodes
        return {"paper": nodes, "author": torch.arange(0, AUTHORS, self.load.stride)}


class Nodes(Kind):
    resumes = True

    def sampler(self) -> Any:
        load = self.load
        by_id = load.sampler == "weighted" and self.share == "parts"
        return weighted_by_id(self.data) if by_id else OWN[load.sampler](self.data)

    def options(self, place: dict[str, Any]) -> dict[str, Any]:
        return {"tables": self.load.tables, "dtype": self.load.dtype, **self.load.seeds, **place}

    def make(self, source: Any, *, workers: int = 0, **place: Any) -> Any:
        options = {"labels": self.load.labels, **self.options(place)}
        seeds = self.seed_nodes()
        if self.load.sampler == "temporal":
            options["time"] = seeds * 3 % TIMES
        return gids.NodeLoader(source, seeds, self.sampler(), **options)

    def look(self, batch: Any) -> Looked:
        load, data = self.load, self.data
        assert set(batch.features) == set(load.tables)
        cooperative = hasattr(batch, "exchange")
        data.check(batch, load.dtype, edges=load.sampler not in OTHER_EDGES and not cooperative)
        if cooperative:
            self.check_sources(batch)
        labelled = data.by_type(batch.input_nodes if load.labels == "inputs" else batch.seeds)
        if load.labels:
            assert set(data.by_type(batch.labels)) == set(labelled)
            for ntype, labels in data.by_type(batch.labels).items():
                data.check_labels(ntype, labelled[ntype], labels)
        seeds = [n for t, ids in data.by_type(batch.seeds).items() for n in self.number(t, ids)]
        return seeds, digest_of(batch)

    def check_sources(self, batch: Any) -> None:
        """The edges of the first block of a cooperative minibatch, whose sources other ranks have."""
        nodes = self.data.by_type(batch.input_nodes)
        rows = {ntype: ids.double()[:, None] for ntype, ids in nodes.items()}
        came = self.data.by_type(batch.exchange(0, rows if self.data.typed else rows["paper"]))
        layer = batch.blocks[0]
        for relation, block in (layer if isinstance(layer, dict) else {CITES: layer}).items():
            src, dst = block.coo()
            sources = came[relation[0]][:, 0].long()
            self.data.check_edges(relation, sources[src], nodes[relation[2]][dst], block.edge_ids)


def digest_of(batch: Any) -> str:
    """Of everything that does not depend on the number of parts of a dataset, as positions of edges do."""
    of_nodes = [batch.seeds, batch.input_nodes, batch.labels, batch.batch, getattr(batch, "pairs", None)]
    layers = [list(b.values()) if isinstance(b, dict) else [b] for b in batch.blocks]
    blocks = [[b.indptr, b.indices, b.edge_ids, b.weights] for layer in layers for b in layer]
    return digest(flat([of_nodes, blocks, batch.features]))


class Edges(Nodes):
    def relation(self) -> Any:
        return WRITES if self.data.typed else CITES

    def ends(self) -> torch.Tensor:
        return self.data.edges[self.relation()][:, :: 3 * self.load.stride]

    def make(self, source: Any, *, workers: int = 0, **place: Any) -> Any:
        return gids.EdgeLoader(
            source,
            self.ends(),
            self.sampler(),
            relation=self.relation(),
            negatives=self.load.negatives,
            exclude="self" if self.load.labels else None,
            time=False,
            **self.options(place),
        )

    def seeds(self) -> list[int]:
        return self._number(self.ends())

    def _number(self, ends: torch.Tensor) -> list[int]:
        return (ends[0] * PAPERS + ends[1]).tolist()

    def look(self, batch: Any) -> Looked:
        assert set(batch.features) == set(self.load.tables)
        self.data.check(batch, self.load.dtype, edges=True)
        nodes = self.data.by_type(batch.seeds)
        src, _, dst = self.relation()
        pairs = batch.pairs.cpu()
        ends = torch.stack([nodes[src].cpu()[pairs[0]], nodes[dst].cpu()[pairs[1]]])
        sources, positive = ends[0], batch.positive_count
        assert batch.labels.tolist() == [1.0] * positive + [0.0] * (positive * self.load.negatives)
        assert torch.equal(sources[positive:], sources[:positive].repeat_interleave(self.load.negatives))
        seeds = self._number(ends[:, :positive])
        for layer in batch.blocks if self.load.labels else ():  # exclude="self"
            block = layer[self.relation()] if self.data.typed else layer
            drawn = self.data.edges[self.relation()][:, block.edge_ids.cpu().long()]
            assert not set(self._number(drawn)) & set(seeds)
        return seeds, digest_of(batch)


class Pyg(Nodes):
    def arguments(self, place: dict[str, Any]) -> dict[str, Any]:
        name = self.load.sampler
        found = {"num_neighbors": [4, 3], "replace": name == "replace", "disjoint": name == "disjoint"}
        if name == "induced":
            found["subgraph_type"] = "induced"
        return found | self.options(place)

    def make(self, source: Any, *, workers: int = 0, **place: Any) -> Any:
        import gids.pyg

        nodes: Any = self.seed_nodes()
        if self.data.typed:
            nodes = ("paper", nodes["paper"])
        return gids.pyg.NeighborLoader(source, input_nodes=nodes, **self.arguments(place))

    def seeds(self) -> list[int]:
        return self.data.by_type(self.seed_nodes())["paper"].tolist()

    def look(self, batch: Any) -> Looked:
        from torch_geometric.data import Data

        data, load = self.data, self.load
        one = isinstance(batch, Data)
        names = {"feat": "x"}
        for name in load.tables:
            type_, key = data.type_of(name), name.rpartition(".")[2]
            storage = batch if one else batch[type_]
            ids = storage.n_id if isinstance(type_, str) else storage.e_id
            data.check_rows(name, ids, storage[names.get(key, key)], load.dtype)
        for ntype in ("paper",) if one else ("paper", "author"):
            storage = batch if one else batch[ntype]
            data.check_labels(ntype, storage.n_id, storage.y)
        for relation in data.edges:
            storage = batch if one else batch[relation]
            src, dst = (batch if one else batch[relation[i]] for i in (0, 2))
            row, col = storage.edge_index
            data.check_edges(relation, src.n_id[row], dst.n_id[col], storage.e_id)
        return self.seeds_of(batch), digest(flat(batch.to_dict()))

    def seeds_of(self, batch: Any) -> list[int]:
        storage = batch["paper"] if self.data.typed else batch
        seeds: torch.Tensor = storage.n_id[: storage.batch_size].cpu()
        assert torch.equal(self.data.by_type(self.seed_nodes())["paper"][storage.input_id.cpu()], seeds)
        return seeds.tolist()


class PygLinks(Pyg):
    relation, ends = Edges.relation, Edges.ends

    def make(self, source: Any, *, workers: int = 0, **place: Any) -> Any:
        import gids.pyg

        edges: Any = (self.relation(), self.ends()) if self.data.typed else self.ends()
        options = self.arguments(place)
        if self.load.negatives:
            options["neg_sampling"] = "binary"
        return gids.pyg.LinkNeighborLoader(source, edge_label_index=edges, **options)

    def seeds(self) -> list[int]:
        return list(range(self.ends().shape[1]))

    def look(self, batch: Any) -> Looked:
        from torch_geometric.data import Data

        one = isinstance(batch, Data)
        seeds, found = super().look(batch)
        storage = batch if one else batch[self.relation()]
        src, dst = (batch if one else batch[self.relation()[i]] for i in (0, 2))
        row, col = storage.edge_label_index[:, : len(seeds)]
        assert torch.equal(torch.stack([src.n_id[row], dst.n_id[col]]).cpu(), self.ends()[:, seeds])
        return seeds, found

    def seeds_of(self, batch: Any) -> list[int]:
        found: list[int] = (batch[self.relation()] if self.data.typed else batch).input_id.tolist()
        return found


class Given(Kind):
    """FeatureLoader: minibatches are lists of ids that the load draws."""

    alone = True

    def make(self, source: Any, *, device: str = "cpu", workers: int = 0, **place: Any) -> Any:
        load = self.load
        features = gids.FeatureLoader(source, load.tables, dtype=load.dtype, device=device)

        def begin(epoch: int) -> Iterator[Any]:
            more = {"count": load.count} if load.labels else {}
            minibatches = self.batches(epoch)
            stream: Iterator[Any] = features.attach(minibatches, lambda minibatch: minibatch.ids, **more)
            return stream

        return _Epochs(features, load.count, begin)

    def seeds(self) -> list[int]:
        return list(range(self.load.count))

    def batches(self, epoch: int) -> Iterator[Any]:
        load = self.load
        for number in range(load.count):
            rng = np.random.default_rng((load.seeds["seed"], epoch, number))
            ids_of = self.draw_ids(rng)
            if load.sampler != "neighbor":  # a table with ids of its own
                ids_of[load.tables[0]] = torch.from_numpy(rng.integers(0, AUTHORS, rng.integers(0, 99)))
            yield SimpleNamespace(number=number, ids=ids_of)

    def draw_ids(self, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """By table, the same for tables of one type. Small ones are frequent, some come twice."""
        of_types: dict[Any, torch.Tensor] = {}
        for type_ in map(self.data.type_of, self.load.tables):
            count = NODES[type_] if isinstance(type_, str) else self.data.edges[type_].shape[1]
            ids = (count * rng.random(rng.integers(0, 200)) ** 2).astype(np.int64)
            of_types.setdefault(type_, torch.from_numpy(ids))
        return {name: of_types[self.data.type_of(name)] for name in self.load.tables}

    def look(self, batch: Any) -> Looked:
        minibatch, features = batch
        assert set(features) == set(self.load.tables)
        for name, rows in features.items():
            self.data.check_rows(name, minibatch.ids[name], rows, self.load.dtype)
        return [minibatch.number], digest(features[name] for name in sorted(features))


class _Epochs:
    """A loader of numbered epochs, as others are. begin(epoch): its minibatches."""

    def __init__(self, loader: Any, count: int, begin: Callable[[int], Iterator[Any]]) -> None:
        self._count, self._begin, self.epoch = count, begin, 0
        self.stats, self.close = loader.stats, loader.close

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self._begin(epoch)


class Dgl(Kind):
    repeatable = False

    def make(self, source: Any, *, device: str = "cpu", workers: int = 0, **place: Any) -> Any:
        import gids.dgl  # before dgl

        import dgl.dataloading as dgl  # isort: skip

        load = self.load
        name = "" if load.typed and load.sampler == "disjoint" else load.sampler  # ShaDow takes one type
        sampler = {
            "labor": lambda: dgl.LaborSampler([3, 4]),
            "all": lambda: dgl.MultiLayerFullNeighborSampler(1),
            "disjoint": lambda: dgl.ShaDowKHopSampler([2, 2]),
        }.get(name, lambda: dgl.NeighborSampler([3, 4]))()
        loader: Any = gids.dgl.DataLoader(
            gids.dgl.graph(source, formats=["csc", "coo"] if load.sampler == "disjoint" else "csc"),
            self.seed_nodes(),
            sampler,
            gids=source,
            gids_feats=load.tables,
            gids_dtype=load.dtype,
            gids_device=None if device == "cpu" else device,
            batch_size=load.seeds["batch_size"],
            shuffle=load.seeds["shuffle"],
            drop_last=load.seeds["drop_last"],
            num_workers=workers,
            **place,
        )
        loader.epoch = 0
        return loader

    def look(self, batch: Any) -> Looked:
        import dgl

        data, load = self.data, self.load
        inputs, seeds, blocks = batch
        graphs = blocks if isinstance(blocks, list) else [blocks]
        checked = 0
        for graph in graphs:
            for relation in graph.canonical_etypes:
                src, dst = graph.edges(etype=relation)
                from_ids = graph.srcnodes[relation[0]].data[dgl.NID]
                to_ids = graph.dstnodes[relation[2]].data[dgl.NID]
                ids = graph.edges[relation].data[dgl.EID]
                data.check_edges(relation, from_ids[src], to_ids[dst], ids)
                name = f"{'.'.join(relation)}.w"
                if name in load.tables:
                    data.check_rows(name, ids, graph.edges[relation].data["w"], load.dtype)
                    checked += 1
        for ntype in graphs[0].srctypes:
            frame = graphs[0].srcnodes[ntype].data
            for name in load.tables:
                owner, _, key = name.rpartition(".")
                if owner == ntype:
                    data.check_rows(name, frame[dgl.NID], frame[key], load.dtype)
                    checked += 1
        assert checked >= len(load.tables)
        of_types = data.by_type(seeds)
        return [n for t, ids in of_types.items() for n in self.number(t, ids)], digest(flat(inputs))


class GraphBolt(Given):
    """LookaheadFetcher over a pipe of minibatches. Ids are int32 where the load has labels=False."""

    def make(self, source: Any, *, device: str = "cpu", workers: int = 0, **place: Any) -> Any:
        import gids.graphbolt

        load, data = self.load, self.data
        keys: Any = {"node": {}, "edge": {}}
        for name in load.tables:
            domain, typed, key = data.graphbolt_name(name)
            keys[domain].setdefault(typed, []).append(key)
        if not data.typed:
            keys = {domain: next(iter(of.values()), None) for domain, of in keys.items()}
        pipe = _Pipe(self.batches)
        loader = gids.graphbolt.LookaheadFetcher(
            pipe, source, keys["node"] or None, keys["edge"] or None, dtype=load.dtype, device=device
        )

        def begin(epoch: int) -> Iterator[Any]:
            pipe.epoch = epoch
            return iter(loader)

        return _Epochs(loader, load.count, begin)

    def batches(self, epoch: int) -> Iterator[Any]:
        import dgl

        data = self.data
        for number in range(self.load.count):
            ids = self.draw_ids(np.random.default_rng((self.load.seeds["seed"], epoch, number)))
            found: Any = {"node": {}, "edge": {}}
            for name, of_type in ids.items():
                domain, typed, _ = data.graphbolt_name(name)
                found[domain][typed] = of_type.int() if self.load.labels is False else of_type
            if not data.typed:
                found = {domain: next(iter(of.values()), None) for domain, of in found.items()}
            layers = [
                SimpleNamespace(original_edge_ids=_every_second(found["edge"], first))
                for first in range(2 if found["edge"] is not None else 0)
            ]
            yield dgl.graphbolt.MiniBatch(
                seed_nodes=number, input_nodes=found["node"], sampled_subgraphs=layers
            )

    def look(self, batch: Any) -> Looked:
        rows = []
        for name in self.load.tables:
            domain, typed, key = self.data.graphbolt_name(name)
            if domain == "node":
                parts = [(batch.input_nodes, batch.node_features)]
            else:
                layers = [layer.original_edge_ids for layer in batch.sampled_subgraphs]
                parts = list(zip(layers, batch.edge_features, strict=True))
            for ids, features in parts:
                of_type = ids[typed] if self.data.typed else ids
                rows.append(features[(typed, key) if self.data.typed else key])
                self.data.check_rows(name, of_type, rows[-1], self.load.dtype)
        return [batch.seed_nodes], digest(rows)


def _every_second(ids: Any, first: int) -> Any:
    """The ids of one of two layers."""
    if isinstance(ids, dict):
        return {relation: of_relation[first::2] for relation, of_relation in ids.items()}
    return ids[first::2]


class _Pipe(IterDataPipe[Any]):
    def __init__(self, batches: Callable[[int], Iterator[Any]]) -> None:
        self._batches, self.epoch = batches, 0

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self.epoch)


class GraphBoltFeature(Given):
    """Reads of gids.graphbolt.FeatureStore, which nothing announces."""

    def make(self, source: Any, *, device: str = "cpu", workers: int = 0, **place: Any) -> Any:
        import gids.graphbolt

        store = gids.graphbolt.FeatureStore(source, dtype=self.load.dtype, device=device)

        def begin(epoch: int) -> Iterator[Any]:
            for minibatch in self.batches(epoch):
                names = {name: self.data.graphbolt_name(name) for name in minibatch.ids}
                yield minibatch, {n: store.read(*names[n], ids) for n, ids in minibatch.ids.items()}

        return _Epochs(store, self.load.count, begin)


KINDS: dict[str, type[Kind]] = {
    "NodeLoader": Nodes,
    "EdgeLoader": Edges,
    "FeatureLoader": Given,
    "PyG": Pyg,
    "PyG links": PygLinks,
    "DGL": Dgl,
    "GraphBolt": GraphBolt,
    "GraphBolt feature": GraphBoltFeature,
}
