"""The model that the comparison trains: GraphSAGE over DGL's blocks. Called by epoch.py."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import gids.dgl  # noqa: F401  # isort: skip  # before dgl: makes it importable beside a current torch
import dgl


class SageLayer(nn.Module):
    """GraphSAGE with the mean: W x + V mean(neighbors' x). Unlike SAGEConv it does not copy x."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.own = nn.Linear(in_dim, out_dim)
        self.neighbors = nn.Linear(in_dim, out_dim, bias=False)

    def forward(self, block: Any, x: Tensor) -> Tensor:
        with block.local_scope():
            block.srcdata["h"] = self.neighbors(x)
            block.update_all(dgl.function.copy_u("h", "m"), dgl.function.mean("m", "h"))
            result: Tensor = self.own(x[: block.num_dst_nodes()]) + block.dstdata["h"]
            return result


class GraphSage(nn.Module):
    """One layer per fanout."""

    def __init__(self, in_dim: int, hidden: int, classes: int, layer_count: int) -> None:
        super().__init__()
        dims = [in_dim] + [hidden] * (layer_count - 1) + [classes]
        self.layers = nn.ModuleList(SageLayer(a, b) for a, b in pairwise(dims))

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        assert len(blocks) == len(self.layers)
        for depth, block in enumerate(blocks):
            x = self.layer(depth, block, x)
        return x

    def layer(self, depth: int, block: Any, x: Tensor) -> Tensor:
        """Apply one layer to the output of the previous layer."""
        result: Tensor = self.layers[depth](block, x if depth == 0 else torch.relu(x))
        return result
