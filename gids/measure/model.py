"""The model that the comparison trains: GraphSAGE over DGL's blocks. Called by epoch.py.

With several relations this is R-GCN with the mean: each relation has weights of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gids.dgl  # noqa: F401  # isort: skip  # before dgl: makes it importable beside a current torch
import dgl

from gids.store.names import Relation


class SageLayer(nn.Module):
    """For each node type, W x + the sum over relations of V mean(neighbors' x). Unlike SAGEConv it does not
    copy x.

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


class GraphSage(nn.Module):
    """One layer per fanout. in_dims: of the types with features. target: the type that is classified.

    Raises ValueError if no features reach the target.
    """

    def __init__(
        self,
        in_dims: Mapping[str, int],
        hidden: int,
        classes: int,
        layer_count: int,
        relations: Sequence[Relation],
        target: str,
    ) -> None:
        super().__init__()
        self._target = target
        self.layers = nn.ModuleList()
        for depth in range(layer_count):
            is_last = depth == layer_count - 1
            used = [relation for relation in relations if not is_last or relation[2] == target]
            layer = SageLayer(in_dims, classes if is_last else hidden, used)
            self.layers.append(layer)
            in_dims = dict.fromkeys(layer.out_types, hidden)
        if target not in in_dims:
            raise ValueError(f"no features reach {target!r} nodes in {layer_count} layers")

    def forward(self, blocks: list[Any], x: Mapping[str, Tensor]) -> Tensor:
        """Logits of the seeds. x: the rows of the input nodes, by node type."""
        assert len(blocks) == len(self.layers)
        for depth, block in enumerate(blocks):
            x = self.layer(depth, block, x)
        return x[self._target]

    def layer(self, depth: int, block: Any, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Apply one layer to the output of the previous layer."""
        if depth:
            x = {ntype: torch.relu(values) for ntype, values in x.items()}
        result: dict[str, Tensor] = self.layers[depth](block, x)
        return result
