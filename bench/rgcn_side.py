"""One side of `bench/epoch.py --hetero`, in its own process: trains R-GCN on the features of all node types.

The first table is that of the node type that is classified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from epoch_side import with_stages
from torch import Tensor, nn

from gids.bench.dgl_side import DglSide
from gids.bench.sides import EpochConfig

import dgl  # isort: skip  # after gids.dgl
from gids.store.names import Relation


def run(values: Mapping[str, Any]) -> dict[str, Any]:
    """Train as an EpochConfig says; the fields of its EpochResult. Called by run_fresh."""
    return with_stages(lambda: asdict(TypedSide(EpochConfig(**values)).train()))


class TypedSide(DglSide):
    def make_model(self, classes: int) -> nn.Module:
        dims = {str(table.type): table.shape[0] for table in self.tables}
        widths = [*[self.config.hidden] * (len(self.config.fanouts) - 1), classes]
        return Rgcn(dims, widths, self.graph.canonical_etypes, self.target)

    def seeds(self, ids: Tensor) -> Any:
        return {self.target: ids}

    def make_sampler(self, **prefetched: Any) -> Any:
        if prefetched:
            prefetched["prefetch_node_feats"] = {str(table.type): [table.key] for table in self.tables}
        labels = {self.target: ["label"]}
        fanouts = list(self.config.fanouts)
        return dgl.dataloading.NeighborSampler(fanouts, prefetch_labels=labels, **prefetched)

    def logits(self, model: nn.Module, minibatch: Any, x: list[Tensor]) -> Tensor:
        logits: Tensor = model(minibatch[2], x)
        return logits

    def features(self, minibatch: Any) -> list[Tensor]:
        return [minibatch[2][0].srcnodes[table.type].data[table.key] for table in self.tables]

    def input_nodes(self, minibatch: Any) -> list[Tensor]:
        return [minibatch[2][0].srcnodes[table.type].data[dgl.NID] for table in self.tables]


class Layer(nn.Module):
    """For each node type, W x + the sum over relations of V mean(neighbors' x).

    in_dims: by node type; relations from other types are left out. out_types: the types of the result.
    """

    def __init__(self, in_dims: Mapping[str, int], out_dim: int, relations: Sequence[Relation]) -> None:
        super().__init__()
        self._relations = [relation for relation in relations if relation[0] in in_dims]
        self._in_types = list(in_dims)
        self.own = nn.ModuleList(nn.Linear(dim, out_dim) for dim in in_dims.values())
        self.neighbors = nn.ModuleList(
            nn.Linear(in_dims[source], out_dim, bias=False) for source, _, _ in self._relations
        )
        self.out_types = list(dict.fromkeys([*in_dims, *(relation[2] for relation in self._relations)]))

    def forward(self, block: Any, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        result = {
            ntype: own(x[ntype][: block.num_dst_nodes(ntype)])
            for ntype, own in zip(self._in_types, self.own, strict=True)
        }
        for (source, name, target), neighbors in zip(self._relations, self.neighbors, strict=True):
            mean = dgl.ops.copy_u_mean(block[source, name, target], neighbors(x[source]))
            result[target] = result[target] + mean if target in result else mean
        return result


class Rgcn(nn.Module):
    """in_dims: by node type. widths: of each layer's result. target: the type that is classified."""

    def __init__(
        self, in_dims: Mapping[str, int], widths: Sequence[int], relations: Sequence[Relation], target: str
    ) -> None:
        super().__init__()
        self._types, self._target = list(in_dims), target
        self.layers = nn.ModuleList()
        for depth, width in enumerate(widths):
            used = [r for r in relations if depth < len(widths) - 1 or r[2] == target]
            layer = Layer(in_dims, width, used)
            self.layers.append(layer)
            in_dims = dict.fromkeys(layer.out_types, width)

    def forward(self, blocks: list[Any], x: Sequence[Tensor]) -> Tensor:
        """Logits of the seeds. x: the rows of the input nodes, by table."""
        rows = dict(zip(self._types, x, strict=True))
        for depth, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            rows = layer(block, {ntype: torch.relu(r) for ntype, r in rows.items()} if depth else rows)
        return rows[self._target]
