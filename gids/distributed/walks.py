"""Walks: random walks over a graph whose edges are divided among ranks. They go from owner to owner.

Made by GroupSampling for gids.sampler.RandomWalk. The owner of the node where a walk is draws its next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from gids import _core
from gids.distributed.collective import CollectiveSampling
from gids.distributed.owners import Dealt
from gids.errors import FormatError
from gids.loader.ranks import Tensors
from gids.sampler import Block, RandomWalk, Topology
from gids.sampler.layered import Numbers

Place = Callable[[str], str]


class Walks:
    """The walks of one layer of successive steps. Lists are by step.

    local, counts: as of GroupSampling. numbers: of the first step. place: where this rank is, for Group, from
    what it exchanges.
    """

    def __init__(
        self,
        sampling: CollectiveSampling,
        local: Topology,
        counts: dict[str, int],
        sampler: RandomWalk,
        layer: int,
        numbers: Numbers,
        place: Place,
    ) -> None:
        self._sampling, self._native, self._counts = sampling, local.native, counts
        self._sampler, self._layer = sampler, layer
        self._numbers, self._place = numbers, place

    def blocks(self, nodes: Sequence[_core.FoundNodes]) -> list[Block]:
        """Walk from all nodes that were found so far. Collective."""
        whole, sampler = self._sampling.whole, self._sampler
        path = sampler.path_in(whole)
        ntype = whole.ends[path[0]][1]
        starts = [np.repeat(n.nodes(ntype), sampler.num_walks) for n in nodes]
        visited = self._walk(starts, path)
        fanout = sampler.fanouts_of(whole)[self._layer][0]
        blocks = []
        for step_nodes, flat in zip(nodes, visited, strict=True):
            indptr = np.empty(step_nodes.size(ntype) + 1, np.int64)
            sources, shares = np.empty(len(flat), np.int64), np.empty(len(flat), np.float32)
            each = sampler.num_walks * sampler.walk_length
            count = _core.rank_walks(flat, each, fanout, indptr, sources, shares)
            local = sources[:count].copy()
            step_nodes.relabel(ntype, local)
            arrays = indptr, local, np.full(count, -1), shares[:count].copy()
            blocks.append(Block.of_arrays(*arrays, step_nodes.size(ntype), whole.graphs[path[0]]))
        return blocks

    def _walk(self, starts: list[np.ndarray], path: list[int]) -> list[np.ndarray]:
        """The nodes that were visited from each node, walk after walk; -1: the node itself."""
        sampler, (seed, epoch, first) = self._sampler, self._numbers
        num_walks, length, width = sampler.num_walks, sampler.walk_length, 1 + len(sampler.metapath or [0])
        at = [ids.copy() for ids in starts]
        visited = [np.full((len(ids), length), -1) for ids in starts]
        for step in range(length):
            # Numbers of draws are counted walk after walk.
            draws = [
                np.tile((np.arange(num_walks) * length + step) * width, len(ids) // num_walks)
                for ids in starts
            ]
            for i, of_step in enumerate(draws if step else []):
                back = np.empty(len(of_step), np.bool_)
                numbers = seed, epoch, first + i
                _core.restart_walks(numbers, self._layer, sampler.restart, starts[i], of_step, back)
                at[i][back] = starts[i][back]
            alive = [np.arange(len(of_step)) for of_step in draws]
            for hop in range(width - 1):
                walks = [(starts[i][a], draws[i][a] + 1 + hop, at[i][a]) for i, a in enumerate(alive)]
                for i, moved in enumerate(self._hop(path[hop], hop, walks)):
                    at[i][alive[i]] = moved
                    alive[i] = alive[i][moved >= 0]
            for i, of_step in enumerate(at):
                of_step[of_step < 0] = starts[i][of_step < 0]  # from a dead end a walk goes back
                visited[i][:, step] = np.where(of_step == starts[i], -1, of_step)
        return [of_step.ravel() for of_step in visited]

    def _hop(
        self, relation: int, hop: int, walks: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    ) -> list[np.ndarray]:
        """Where walks go next; -1 in a dead end. walks: (starts, draws, nodes). Collective."""
        sampling, group, count = self._sampling, self._sampling.group, len(walks)
        orders: list[np.ndarray] = []

        def ask() -> Tensors:
            messages: list[list[torch.Tensor]] = []
            owners = sampling.owners[sampling.whole.ends[relation][1]]
            for of_step in walks:
                dealt = Dealt(owners(of_step[2]), group.size)
                orders.append(dealt.order)
                messages += map(dealt.parts, of_step)
                away = len(dealt.order) - int(dealt.counts[group.rank])
                self._counts["nodes asked"] += away
                self._counts["bytes sent"] += 24 * away
            return messages

        def answer() -> Tensors:
            seed, epoch, first = self._numbers
            messages: list[list[torch.Tensor]] = []
            for i in range(count):
                messages.append([])
                for rank, of_rank in enumerate(zip(*asked[3 * i : 3 * i + 3], strict=True)):
                    starts, draws, at = (v.numpy() for v in of_rank)
                    moved, numbers = np.empty(len(at), np.int64), (seed, epoch, first + i)
                    try:
                        _core.hop_walks(
                            self._native, relation, numbers, self._layer, starts, draws, at, moved
                        )
                    except _core.BadTopology as bad:
                        raise FormatError(str(bad)) from None
                    messages[-1].append(torch.from_numpy(moved))
                    if rank != group.rank:
                        self._counts["edges sent"] += len(moved)
                        self._counts["bytes sent"] += moved.nbytes
            return messages

        asked = group.exchange(ask, [torch.int64] * 3 * count, self._place(f"asks for hop {hop}"))
        answers = group.exchange(answer, [torch.int64] * count, self._place(f"draws hop {hop}"))
        moved = []
        for i, order in enumerate(orders):
            came = np.empty(len(order), np.int64)
            came[order] = torch.cat(answers[i]).numpy()
            moved.append(came)
        return moved
