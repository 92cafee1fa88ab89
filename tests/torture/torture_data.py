"""Two small datasets with tables of every kind. Minibatches must have rows by id, and edges that exist."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import CITES, WRITES, in_edges, int8_with_a_scale, same_bits, write_ids

import gids
from gids.sampler import Minibatch
from gids.write import DatasetWriter
from gids.write.partition import partition

PAPERS, AUTHORS, TIMES = 600, 150, 29
WRITTEN = ("paper", "written by", "author")
NODES = {"paper": PAPERS, "author": AUTHORS}
KEYS = ["feat", "tiny", "half", "brain", "long", "ordered", "by_row", "by_column", "flag"]
"""Tables of each node type: float32, int, float16, bfloat16, rows longer than a page, rows in another order,
int8 with a scale for each row or column, bool. Each relation has a table "w"."""


class TortureData:
    """A dataset with one relation; typed: two node types and three relations. rows: of each table, by id."""

    def __init__(self, folder: Path, *, typed: bool) -> None:
        self.typed = typed
        self.path = folder / f"{'typed' if typed else 'one'}.gids"
        self.rows: dict[str, torch.Tensor] = {}
        self.written: dict[str, torch.Tensor] = {}
        """What became rows with a scale, by table."""
        self.labels: dict[str, torch.Tensor] = {}
        self.edges: dict[Any, torch.Tensor] = {}
        """int64[2, edges], by relation: the ends of the edges in the order of their ids."""
        self.edge_ids: dict[Any, np.ndarray] = {}
        """By relation and position."""
        rng, generator = np.random.default_rng(typed), torch.Generator().manual_seed(int(typed))
        with DatasetWriter(self.path, stripe=2, page_bytes=4096 if typed else 512) as writer:
            for ntype in ("paper", "author") if typed else ("paper",):
                self._write_tables(writer, ntype, generator, rng)
                shape = (NODES[ntype], *{"paper": (1,) if typed else (), "author": (3,)}[ntype])
                self.labels[ntype] = torch.randint(0, 9, shape, generator=generator)
                writer.write_labels(ntype, self.labels[ntype])
            writer.write_times("paper", torch.arange(PAPERS) % TIMES)
            for relation in (CITES, WRITES, WRITTEN) if typed else (CITES,):
                self._write_graph(writer, relation, rng)
        self.parts = self.path.with_suffix(".parts")
        """The dataset in two parts."""
        partition(self.path, self.parts, 2)
        self.apart = [self.path.with_suffix(f".{name}.gids") for name in ("graph", "nodes", "edges")]
        """The same in three datasets, of which the second one has its nodes in another order."""
        self._write_apart(rng)

    def _write_apart(self, rng: np.random.Generator) -> None:
        whole = gids.FeatureStore(self.path)
        with contextlib.ExitStack() as stack:
            graph, nodes, edges = (stack.enter_context(DatasetWriter(path)) for path in self.apart)
            for ntype, labels in self.labels.items():
                ids = rng.permutation(len(labels)) * 5 - 99
                moved = rng.permutation(len(ids))
                graph.write_labels(ntype, labels)
                write_ids(graph, ntype, ids if ntype == "paper" else ids.astype(str))
                for table in (t for t in whole.tables.values() if t.type == ntype):
                    form = {"dtype": table.stored_dtype, "scale": table.scale}
                    order = rng.permutation(len(ids)) if table.key in ("feat", "ordered") else None
                    rows = self.written.get(table.name, self.rows[table.name])
                    nodes.write_table("node", ntype, table.key, rows[moved], order=order, **form)
                write_ids(nodes, ntype, ids[moved] if ntype == "paper" else ids[moved].astype(str))
            graph.write_times("paper", torch.arange(PAPERS) % TIMES)
            for relation in whole.relations:
                arrays = whole.graph(relation)
                for writer in (graph, edges):
                    ids = torch.from_numpy(self.edge_ids[relation])
                    writer.add_nodes(relation[2], arrays.num_dst)
                    writer.write_graph(
                        relation, arrays.indptr, arrays.indices, edge_ids=ids, num_src=arrays.num_src
                    )
                edges.write_table("edge", relation, "w", self.rows[f"{'.'.join(relation)}.w"])

    def _write_tables(self, writer: Any, ntype: str, generator: Any, rng: np.random.Generator) -> None:
        count = NODES[ntype]
        floats = torch.randn(count, 37, generator=generator)
        for key, values in (
            ("feat", torch.randn(count, 24, generator=generator)),
            ("tiny", (torch.arange(count).view(-1, 1) * 7).to(torch.int16 if self.typed else torch.int64)),
            ("half", torch.randn(count, 60, generator=generator).half()),
            ("brain", torch.randn(count, 5, generator=generator).bfloat16()),
            ("long", torch.randn(count, 300, generator=generator)),
            ("flag", torch.rand(count, 9, generator=generator) < 0.5),
        ):
            writer.write_table("node", ntype, key, values)
            self.rows[f"{ntype}.{key}"] = values
        writer.write_table("node", ntype, "ordered", floats, order=rng.permutation(count))
        self.rows[f"{ntype}.ordered"] = floats
        for scale in ("row", "column"):
            writer.write_table("node", ntype, f"by_{scale}", floats, dtype=torch.int8, scale=scale)
            self.written[f"{ntype}.by_{scale}"] = floats
            steps, scales = int8_with_a_scale(floats.numpy(), scale)
            self.rows[f"{ntype}.by_{scale}"] = torch.from_numpy(steps.astype(np.float32) * scales)

    def _write_graph(self, writer: Any, relation: Any, rng: np.random.Generator) -> None:
        num_src, num_dst = NODES[relation[0]], NODES[relation[2]]
        indptr, indices = in_edges(rng.integers(0, 8, num_dst), num_src, rng)
        destinations = np.repeat(np.arange(num_dst), np.diff(indptr))
        indices = indices[np.lexsort((indices % TIMES, destinations))]  # as temporal samplers need them
        self.edge_ids[relation] = ids = rng.permutation(len(indices))
        writer.write_graph(relation, indptr, indices, edge_ids=ids, num_src=num_src)
        edges = np.stack([indices, destinations])
        self.edges[relation] = torch.from_numpy(edges[:, np.argsort(ids)])
        values = torch.arange(len(indices) * 3.0).reshape(-1, 3)
        writer.write_table("edge", relation, "w", values)
        self.rows[f"{'.'.join(relation)}.w"] = values

    @functools.cached_property
    def stores(self) -> list[gids.FeatureStore]:
        return [gids.FeatureStore(self.path)]

    @functools.cached_property
    def stores_apart(self) -> list[gids.FeatureStore]:
        return [gids.FeatureStore(path) for path in self.apart]

    def type_of(self, table: str) -> Any:
        *owner, _ = table.split(".")
        return owner[0] if len(owner) == 1 else tuple(owner)

    def graphbolt_name(self, table: str) -> tuple[str, Any, str]:
        """(domain, type, name) of a table. The type is None where there is one."""
        type_, key = self.type_of(table), table.rpartition(".")[2]
        domain, name = ("node", type_) if isinstance(type_, str) else ("edge", ":".join(type_))
        return domain, name if self.typed else None, key

    def check_rows(
        self, table: str, ids: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype | None
    ) -> None:
        expected = self.rows[table][ids.cpu().long()]
        if dtype is not None and expected.is_floating_point():
            expected = expected.to(dtype)
        if not same_bits(rows, expected):
            wrong = (rows.cpu() != expected).flatten(1).any(1) if rows.shape == expected.shape else "shape"
            raise WrongRowsError(f"{table}: {rows.dtype}{list(rows.shape)}, wrong: {wrong}")

    def check_labels(self, ntype: str, ids: torch.Tensor, labels: torch.Tensor) -> None:
        if not same_bits(labels, self.labels[ntype][ids.cpu()]):
            raise WrongRowsError(f"labels of {ntype}")

    def check_edges(self, relation: Any, src: torch.Tensor, dst: torch.Tensor, ids: torch.Tensor) -> None:
        if not torch.equal(self.edges[relation][:, ids.cpu().long()], torch.stack([src, dst]).cpu().long()):
            raise WrongRowsError(f"edges of {relation}")

    def check(self, minibatch: Minibatch, dtype: torch.dtype | None, *, edges: bool) -> None:
        """A minibatch of gids.NodeLoader or gids.EdgeLoader. edges: the blocks have edges of the graph."""
        nodes = self.by_type(minibatch.input_nodes)
        layers = [b if isinstance(b, dict) else {b.relation: b} for b in minibatch.blocks]
        for name, rows in minibatch.features.items():
            type_ = self.type_of(name)
            if isinstance(type_, str):
                self.check_rows(name, nodes[type_], rows, dtype)
            else:
                ids = torch.cat([layer[type_].edge_ids.cpu() for layer in layers])
                self.check_rows(name, ids, rows, dtype)
        for layer in layers if edges else ():
            for relation, block in layer.items():
                src, dst = block.coo()
                self.check_edges(relation, nodes[relation[0]][src], nodes[relation[2]][dst], block.edge_ids)

    def by_type(self, values: Any) -> dict[str, torch.Tensor]:
        return values if isinstance(values, Mapping) else {"paper": values}


class WrongRowsError(AssertionError):
    """A minibatch does not have the rows, labels or edges of its ids."""


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of dtypes, shapes and bits."""
    state = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        state.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        flattened = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
        state.update(flattened.view(torch.uint8).numpy())
    return state.hexdigest()


def flat(item: Any) -> Iterable[torch.Tensor]:
    """All tensors in lists and dictionaries, these in the order of keys."""
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, Mapping):
        for key in sorted(item, key=str):
            yield from flat(item[key])
    elif isinstance(item, list | tuple):
        for value in item:
            yield from flat(value)
