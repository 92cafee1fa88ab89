"""One class for each kind of loader: how it is made from a scenario, and what its minibatches must have.

look() checks a minibatch against the dataset, and returns its seeds and a digest of all its tensors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import CITES, WRITES
from torch.utils.data import IterDataPipe
from torture_data import AUTHORS, NODES, PAPERS, TortureData, digest, flat
from torture_samplers import (
    ERRORS,
    FOREIGN,
    OTHER_EDGES,
    OWN,
    Mutable,
    Odd,
    check_odd,
    odd,
    weighted_by_id,
)

import gids

Looked = tuple[list[int], str]
"""The seeds of a minibatch as numbers, in order, and a digest of its tensors."""


class Kind:
    """s: the scenario. plain: as the reference: the same minibatches, without errors and odd objects.

    repeatable: the minibatches of an epoch are the same each time. resumes: the loader has state_dict().
    alone: ranks share nothing.
    """

    repeatable = True
    resumes = alone = one_epoch_at_a_time = False

    def __init__(self, s: Any, data: TortureData) -> None:
        self.s, self.data = s, data
        self.sampler: Any = None

    def make(self, source: Any, *, plain: bool = False, **place: Any) -> Any:
        raise NotImplementedError

    def look(self, batch: Any) -> Looked:
        raise NotImplementedError

    def seeds(self) -> list[int]:
        """Of an epoch, in any order."""
        return [n for t, ids in self.data.by_type(self.seed_nodes()).items() for n in self.number(t, ids)]

    def disturb(self) -> None:
        """Called between two minibatches."""
        if isinstance(self.sampler, Mutable):
            self.sampler.disturb()

    def reset(self, loader: Any, epoch: int) -> None:
        loader.epoch = epoch

    def number(self, ntype: str, ids: torch.Tensor) -> list[int]:
        """Ids of nodes as numbers that differ from those of other types."""
        return (ids.cpu() + (PAPERS if ntype == "author" else 0)).tolist()

    def seed_nodes(self) -> Any:
        nodes = torch.arange(0, PAPERS, self.s.stride)
        if not self.data.typed:
            return nodes
        return {"paper": nodes, "author": torch.arange(0, AUTHORS, self.s.stride)}


class Nodes(Kind):
    resumes = True

    def __init__(self, s: Any, data: TortureData) -> None:
        super().__init__(s, data)
        self.repeatable = s.foreign in (None, "wrapped")

    def sample_by(self, plain: bool) -> Any:
        s = self.s
        by_id = s.sampler == "weighted" and s.share == "parts" and not plain
        own = weighted_by_id(self.data) if by_id else OWN[s.sampler](self.data)
        if s.foreign is not None:
            own = FOREIGN[s.foreign](self.data, own)
        if not plain and (s.odd or s.error):
            own = Odd(own, s)
        self.sampler = own
        return own

    def options(self, plain: bool, place: dict[str, Any]) -> dict[str, Any]:
        """Of the loader. place: arguments that name the rank, or other tables."""
        s = self.s
        found = {"batch_size": s.batch_size, "shuffle": s.shuffle, "drop_last": s.drop_last, "seed": s.seed}
        return {
            "tables": s.tables,
            "dtype": s.dtype,
            "device": "cpu" if plain else s.device,
            **found,
            **place,
        }

    def make(self, source: Any, *, plain: bool = False, **place: Any) -> Any:
        more = {"cooperative": True} if self.s.cooperative and not plain else {}
        options = {"labels": self.s.labels, **self.options(plain, place), **more}
        return gids.NodeLoader(source, self.seed_nodes(), self.sample_by(plain), **options)

    def look(self, batch: Any) -> Looked:
        s, data = self.s, self.data
        cooperative = hasattr(batch, "exchange")
        data.check(batch, s.dtype, edges=s.sampler not in OTHER_EDGES and not cooperative)
        if cooperative:
            self.check_sources(batch)
        assert set(batch.features) == set(s.tables)
        labelled = data.by_type(batch.input_nodes if s.labels == "inputs" else batch.seeds)
        if s.labels:
            for ntype, labels in data.by_type(batch.labels).items():
                data.check_labels(ntype, labelled[ntype], labels)
        if s.odd is not None and hasattr(batch, "extra"):
            check_odd(batch.extra)
        if s.foreign == "derived" and s.odd is None:
            assert hasattr(batch, "is_of_a_subclass"), "sample() of a subclass is not called"
        seeds = [n for t, ids in data.by_type(batch.seeds).items() for n in self.number(t, ids)]
        return seeds, digest_of(batch, s.tables)

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


def digest_of(batch: Any, tables: list[str]) -> str:
    """Of everything that does not depend on the number of parts of a dataset, as positions of edges do."""
    of_nodes = [batch.seeds, batch.input_nodes, batch.labels, batch.batch, getattr(batch, "pairs", None)]
    layers = [list(b.values()) if isinstance(b, dict) else [b] for b in batch.blocks]
    blocks = [[b.indptr, b.indices, b.edge_ids, b.weights] for layer in layers for b in layer]
    return digest(flat([of_nodes, blocks, [batch.features[name] for name in tables]]))


class Edges(Nodes):
    def relation(self) -> Any:
        return WRITES if self.data.typed else CITES

    def ends(self) -> torch.Tensor:
        return self.data.edges[self.relation()][:, :: 5 * self.s.stride]

    def make(self, source: Any, *, plain: bool = False, **place: Any) -> Any:
        return gids.EdgeLoader(
            source,
            self.ends(),
            self.sample_by(plain),
            relation=self.relation(),
            negatives=self.s.negatives,
            exclude="self" if self.s.labels else None,
            time=False,
            **self.options(plain, place),
        )

    def seeds(self) -> list[int]:
        return self._number(self.ends())

    def _number(self, ends: torch.Tensor) -> list[int]:
        return (ends[0] * PAPERS + ends[1]).tolist()

    def look(self, batch: Any) -> Looked:
        self.data.check(batch, self.s.dtype, edges=self.s.sampler not in OTHER_EDGES)
        nodes = self.data.by_type(batch.seeds)
        src, _, dst = self.relation()
        pairs = batch.pairs.cpu()
        ends = torch.stack([nodes[src].cpu()[pairs[0]], nodes[dst].cpu()[pairs[1]]])
        assert len(batch.labels) == batch.positive_count * (1 + self.s.negatives)
        assert int(batch.labels.sum()) == batch.positive_count
        seeds = self._number(ends[:, : batch.positive_count])
        return seeds, digest_of(batch, self.s.tables)


class Pyg(Nodes):
    def __init__(self, s: Any, data: TortureData) -> None:
        super().__init__(s, data)
        self.repeatable = True

    def arguments(self) -> dict[str, Any]:
        s = self.s
        given: dict[str, Any] = {"num_neighbors": [4, 3]}
        given |= {"replace": s.sampler == "replace", "disjoint": s.sampler == "disjoint"}
        if s.sampler == "induced":
            given["subgraph_type"] = "induced"
        return given

    def make(self, source: Any, *, plain: bool = False, **place: Any) -> Any:
        import gids.pyg

        nodes: Any = self.seed_nodes()
        if self.data.typed:
            nodes = ("paper", nodes["paper"])
        options = self.arguments() | self.options(plain, place)
        return gids.pyg.NeighborLoader(source, input_nodes=nodes, **options)

    def seeds(self) -> list[int]:
        return self.data.by_type(self.seed_nodes())["paper"].tolist()

    def look(self, batch: Any) -> Looked:
        from torch_geometric.data import Data

        data, s = self.data, self.s
        one = isinstance(batch, Data)
        names = {"feat": "x"}
        for name in s.tables:
            type_, key = data.type_of(name), name.rpartition(".")[2]
            storage = batch if one else batch[type_]
            ids = storage.n_id if isinstance(type_, str) else storage.e_id
            data.check_rows(name, ids, storage[names.get(key, key)], s.dtype)
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

    def make(self, source: Any, *, plain: bool = False, **place: Any) -> Any:
        import gids.pyg

        edges: Any = (self.relation(), self.ends()) if self.data.typed else self.ends()
        options = self.arguments() | self.options(plain, place)
        if self.s.negatives:
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
    """FeatureLoader: minibatches are lists of ids that the scenario draws."""

    alone = True

    def make(self, source: Any, *, plain: bool = False, tables: Any = None, **place: Any) -> Any:
        s = self.s
        device = "cpu" if plain else s.device
        features = gids.FeatureLoader(source, tables or s.tables, dtype=s.dtype, device=device)

        def begin(epoch: int) -> Iterator[Any]:
            more = {"count": s.count} if s.labels else {}
            minibatches = self.batches(epoch, plain)
            stream: Iterator[Any] = features.attach(minibatches, lambda minibatch: minibatch.ids, **more)
            return stream

        return _Epochs(features, s.count, begin)

    def seeds(self) -> list[int]:
        return list(range(self.s.count))

    def batches(self, epoch: int, plain: bool) -> Iterator[Any]:
        s = self.s
        for number in range(s.count):
            if s.error and (epoch, number) == (0, s.fails) and not plain:
                raise ERRORS[s.error]()
            rng = np.random.default_rng((s.seed, epoch, number))
            of_types = {}
            for name in s.tables:
                type_ = self.data.type_of(name)
                count = NODES[type_] if isinstance(type_, str) else self.data.edges[type_].shape[1]
                ids = (count * rng.random(rng.integers(0, 300)) ** 2).astype(np.int64)
                ids = of_types.setdefault(type_, torch.from_numpy(ids))
            ids_of = {name: of_types[self.data.type_of(name)] for name in s.tables}
            if s.sampler != "neighbor":  # a table with ids of its own
                ids_of[s.tables[0]] = torch.from_numpy(rng.integers(0, AUTHORS, rng.integers(0, 99)))
            yield SimpleNamespace(
                number=number, ids=ids_of, extra=None if plain or not s.odd else odd(s, number)
            )

    def look(self, batch: Any) -> Looked:
        minibatch, features = batch
        for name, rows in features.items():
            self.data.check_rows(name, minibatch.ids[name], rows, self.s.dtype)
        if minibatch.extra is not None:
            check_odd(minibatch.extra)
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
    """foreign: a sampler class of the user's."""

    repeatable = False

    def make(self, source: Any, *, plain: bool = False, tables: Any = None, **place: Any) -> Any:
        import gids.dgl  # before dgl

        import dgl.dataloading as dgl  # isort: skip

        s, chosen = self.s, tables or self.s.tables
        name = "" if s.typed and s.sampler == "disjoint" else s.sampler  # ShaDow takes one type
        inner = {
            "labor": lambda: dgl.LaborSampler([3, 4]),
            "all": lambda: dgl.MultiLayerFullNeighborSampler(1),
            "disjoint": lambda: dgl.ShaDowKHopSampler([2, 2]),
        }.get(name, lambda: dgl.NeighborSampler([3, 4]))()

        class User(dgl.Sampler):  # type: ignore[misc]
            calls = 0

            def sample(self, graph: Any, nodes: Any, *rest: Any) -> Any:
                self.calls += 1
                if s.error and not plain and self.calls == s.fails + 1 and s.fails < len(loader):
                    raise ERRORS[s.error]()
                sampled = inner.sample(graph, nodes)
                if s.foreign == "random" and not s.typed and s.sampler != "disjoint":
                    sampled[2][-1].edata["drawn"] = torch.rand(sampled[2][-1].num_edges())
                return (*sampled, odd(s, self.calls)) if s.odd is not None and not plain else sampled

        user = User() if s.foreign is not None or s.odd or s.error else inner
        distributed = place.pop("use_ddp", False)
        loader: Any = gids.dgl.DataLoader(
            gids.dgl.graph(source, formats=["csc", "coo"] if s.sampler == "disjoint" else "csc"),
            self.seed_nodes(),
            user,
            gids=source,
            gids_feats=chosen,
            gids_dtype=s.dtype,
            batch_size=s.batch_size,
            shuffle=s.shuffle,
            drop_last=s.drop_last,
            num_workers=0 if plain else s.workers,
            use_ddp=distributed,
        )
        loader.epoch = 0
        return loader

    def look(self, batch: Any) -> Looked:
        import dgl

        data, s = self.data, self.s
        inputs, seeds, blocks, *extra = batch
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
                if name in s.tables:
                    data.check_rows(name, ids, graph.edges[relation].data["w"], s.dtype)
                    checked += 1
        for ntype in graphs[0].srctypes:
            frame = graphs[0].srcnodes[ntype].data
            for name in s.tables:
                owner, _, key = name.rpartition(".")
                if owner == ntype:
                    data.check_rows(name, frame[dgl.NID], frame[key], s.dtype)
                    checked += 1
        assert checked >= len(s.tables)
        for found in extra:
            check_odd(found)
        of_types = data.by_type(seeds)
        return [n for t, ids in of_types.items() for n in self.number(t, ids)], digest(flat(inputs))


class GraphBolt(Kind):
    """A pipe of minibatches that are drawn anew in each epoch."""

    alone = one_epoch_at_a_time = True
    repeatable = False

    def make(self, source: Any, *, plain: bool = False, tables: Any = None, **place: Any) -> Any:
        import gids.graphbolt

        s, data = self.s, self.data
        chosen = tables or s.tables
        keys: Any = {"node": {}, "edge": {}}
        for name in chosen:
            type_, key = data.type_of(name), name.rpartition(".")[2]
            domain = "node" if isinstance(type_, str) else "edge"
            keys[domain].setdefault(type_ if domain == "node" else ":".join(type_), []).append(key)
        if not data.typed:
            keys = {domain: next(iter(of.values()), None) for domain, of in keys.items()}
        pipe = _Pipe(lambda: self._batches(plain))
        loader = gids.graphbolt.LookaheadFetcher(
            pipe, source, keys["node"] or None, keys["edge"] or None, dtype=s.dtype
        )
        return _Epochs(loader, s.count, lambda _: iter(loader))

    def seeds(self) -> list[int]:
        return list(range(self.s.count))

    def _batches(self, plain: bool) -> Iterator[Any]:
        import dgl

        s, data, rng = self.s, self.data, np.random.default_rng(random.randrange(1 << 60))

        def ids(count: int) -> torch.Tensor:
            return torch.from_numpy((count * rng.random(rng.integers(0, 300)) ** 2).astype(np.int64))

        self.runs = getattr(self, "runs", 0) + 1
        for number in range(s.count):
            if s.error and not plain and (self.runs, number) == (1, s.fails):
                raise ERRORS[s.error]()
            nodes: Any = {ntype: ids(NODES[ntype]) for ntype in data.labels}
            edges: Any = {":".join(r): ids(e.shape[1]) for r, e in data.edges.items()}
            if not data.typed:
                nodes, edges = nodes["paper"], next(iter(edges.values()))
            batch = dgl.graphbolt.MiniBatch(
                seed_nodes=number,
                input_nodes=nodes,
                sampled_subgraphs=[SimpleNamespace(original_edge_ids=edges)],
            )
            if s.odd and not plain:
                batch.extra = odd(s, number)
            yield batch

    def look(self, batch: Any) -> Looked:
        data, s = self.data, self.s
        (layer,) = batch.sampled_subgraphs
        for name in s.tables:
            type_, key = data.type_of(name), name.rpartition(".")[2]
            of_nodes = isinstance(type_, str)
            ids = batch.input_nodes if of_nodes else layer.original_edge_ids
            features = batch.node_features if of_nodes else batch.edge_features[0]
            if data.typed:
                typed = type_ if of_nodes else ":".join(type_)
                data.check_rows(name, ids[typed], features[typed, key], s.dtype)
            else:
                data.check_rows(name, ids, features[key], s.dtype)
        if s.odd and hasattr(batch, "extra"):
            check_odd(batch.extra)
        return [batch.seed_nodes], ""


class _Pipe(IterDataPipe[Any]):
    def __init__(self, batches: Callable[[], Iterator[Any]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches()


KINDS: dict[str, type[Kind]] = {
    "NodeLoader": Nodes,
    "EdgeLoader": Edges,
    "FeatureLoader": Given,
    "PyG": Pyg,
    "PyG links": PygLinks,
    "DGL": Dgl,
    "GraphBolt": GraphBolt,
}
