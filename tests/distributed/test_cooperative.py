"""Cooperative minibatches: the ranks' parts make up the minibatch of one process, and train one model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from programs import CITED, Sage, by_type, error_of, write_cited
from rank_pool import RankPool

import gids.distributed
from gids.sampler import Labor, Ladies, LocalityBias, Minibatch, Neighbor, RandomWalk, Sampler

SEEDS = torch.arange(0, 900, 3)
ONE_TYPE = [
    Neighbor([3, 4, 2], replace=True),
    Neighbor([3, 4], batch_dependency=4),
    Labor([3, 4, 2], layer_dependency=True, batch_dependency=3),
    Labor([3, 4], batch_dependency=4, nested=True),
    Labor([3, 4], importance_sampling=2),
    Ladies([40, 30]),
    RandomWalk([3, 4], num_walks=6),
]
SEVERAL_TYPES = [Labor([3, 4]), Ladies([40, 30]), RandomWalk([3, 4], num_walks=6, metapath=CITED[1:])]


def edges_of(
    minibatch: Minibatch, sources: list[dict[str, torch.Tensor]] | None = None
) -> list[Counter[Any]]:
    """By layer: (relation, source, destination, id, weight) of every edge.

    sources: node ids, by layer and type.
    """
    layers = []
    for i, layer in enumerate(minibatch.blocks):
        found: Counter[Any] = Counter()
        nodes = sources[i] if sources is not None else by_type(minibatch.input_nodes)
        for block in layer.values() if isinstance(layer, dict) else [layer]:
            src, dst = block.coo()
            weights = block.weights if block.weights is not None else torch.ones(block.num_edges)
            ends = nodes[block.relation[0]][src], nodes[block.relation[2]][dst]
            columns = (*ends, block.edge_ids, weights)
            found.update((block.relation, *e) for e in zip(*(c.tolist() for c in columns), strict=True))
        layers.append(found)
    return layers


def cooperate(dataset: Path, samplers: list[Sampler], seeds: Any, batch_size: int) -> None:
    """Compare the parts of cooperative minibatches, put together, with the minibatches of one process."""
    size = dist.get_world_size()
    options: dict[str, Any] = {"shuffle": True, "seed": 0}
    source, whole = gids.distributed.open(dataset, memory="64MB", bulk=3), gids.open(dataset, memory="64MB")
    with source, whole:
        for sampler in samplers:
            options["batch_size"] = batch_size
            mine = gids.NodeLoader(source, seeds, sampler, cooperative=True, **options)
            options["batch_size"] = batch_size * size
            alone = gids.NodeLoader(whole, seeds, sampler, rank=0, world_size=1, **options)
            with mine, alone:
                for part, expected in zip(mine, alone, strict=True):
                    check_part(part, expected, repr(sampler))


def check_part(part: Any, expected: Minibatch, sampler: str) -> None:
    sources = []
    for layer in range(len(part.blocks)):
        owned = zip(by_type(part.input_nodes).items(), part.exchanges[layer], strict=True)
        rows = {t: ids[: plan.rows].double()[:, None] for (t, ids), plan in owned}
        came = part.exchange(layer, rows if isinstance(part.input_nodes, dict) else rows["paper"])
        sources.append({t: r[:, 0].long() for t, r in by_type(came).items()})
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (edges_of(part, sources), by_type(part.seeds), by_type(part.input_nodes)))
    for layer, edges in enumerate(edges_of(expected)):
        assert sum((p[0][layer] for p in parts), Counter()) == edges, sampler
    for place, nodes in ((1, expected.seeds), (2, expected.input_nodes)):
        for ntype, ids in by_type(nodes).items():
            found = torch.cat([p[place][ntype] for p in parts if ntype in p[place]])
            assert torch.equal(found.sort().values, ids.sort().values), sampler
    assert part.seed_count == sum(len(i) for i in by_type(expected.seeds).values())


def test_parts_make_up_the_minibatch_of_one_process(cited: Path, ranks: RankPool) -> None:
    seeds = torch.cat([torch.arange(0, 900, 36), torch.tensor([36, 36, 72])])
    ranks.run(3, cooperate, cited, ONE_TYPE, seeds, 4)


def cooperate_near(dataset: Path, masks: list[torch.Tensor]) -> None:
    sampler = Neighbor([3, 4], locality=LocalityBias(masks, 6))
    mine = sampler.of_rank(dist.get_rank(), len(masks))
    options: dict[str, Any] = {"batch_size": 50, "tables": [], "cooperative": True, "seed": 0}
    with gids.distributed.open(dataset, memory="64MB") as source:
        for part in gids.NodeLoader(source, SEEDS, sampler, **options):
            alone = mine.sample(source.graphs()[0], part.seeds, seed=0, epoch=part.epoch, step=part.step)
            assert torch.equal(part.blocks[-1].edge_ids, alone.blocks[-1].edge_ids)


def test_the_owner_of_a_node_draws_by_its_mask(cited: Path, ranks: RankPool) -> None:
    ranks.run(2, cooperate_near, cited, [torch.arange(900) % 2 == rank for rank in range(2)])


def test_several_types(ranks: RankPool, tmp_path: Path) -> None:
    several = write_cited(tmp_path / "several.gids", CITED)
    seeds = {"paper": torch.arange(0, 900, 36), "author": torch.arange(0, 300, 44)}
    ranks.run(2, cooperate, several, SEVERAL_TYPES, seeds, 6)


def train(
    dataset: Path, replicas: int, batch_size: int, seeds: torch.Tensor
) -> tuple[list[torch.Tensor], int]:
    """The weights after an epoch, and the seeds that this rank had."""
    model, count = Sage(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "seed": 0}
    with gids.distributed.open(dataset, memory="32MB", replicas=replicas) as source:
        for minibatch in gids.NodeLoader(source, seeds, [3, 4], cooperative=True, **options):
            optimizer.zero_grad()
            out = model(minibatch)
            loss = torch.nn.functional.cross_entropy(out, minibatch.labels, reduction="sum")
            (loss / minibatch.seed_count).backward()
            for p in model.parameters():
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(grad)
                p.grad = grad
            optimizer.step()
            count += len(minibatch.seeds)
    return [p.detach() for p in model.parameters()], count


def test_columns_share_the_seeds_and_train_the_model_of_one_process(
    cited: Path, cited_parts: Path, ranks: RankPool
) -> None:
    """The last step has one seed, and so one column has none."""
    seeds = torch.arange(0, 900, 9)[:65]
    [(expected, _)] = ranks.run(1, train, cited, 1, 32, seeds)
    told = ranks.run(4, train, cited_parts, 2, 8, seeds)
    assert sum(count for _, count in told) == len(seeds)
    for weights, _ in told:
        for mine, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def exchange_otherwise(dataset: Path, changes: list[str]) -> list[str]:
    """The errors of exchanges where rank 1 differs. The group goes on after each."""
    errors = []
    with gids.distributed.open(dataset, memory="32MB") as source:
        loader = gids.NodeLoader(source, SEEDS, [3, 4], batch_size=10, cooperative=True, seed=0)
        for change, minibatch in zip(changes, loader, strict=False):
            h, layer = minibatch.features["paper.feat"], 0
            minibatch.exchange(layer, h)  # these rows are known
            if dist.get_rank() == 1:
                h = {"width": h[:, :5], "dtype": h.double(), "rows": h[1:], "layer": h}[change]
                layer = int(change == "layer")
            count = None if layer == 0 else minibatch.blocks[0].num_dst
            errors.append(error_of(lambda m=minibatch, la=layer, h=h[:count]: m.exchange(la, h)))
    return errors


def test_rows_that_differ_in_an_exchange_are_an_error_at_once(cited: Path, ranks: RankPool) -> None:
    width, dtype, rows, layer = zip(
        *ranks.run(3, exchange_otherwise, cited, ["width", "dtype", "rows", "layer"]), strict=True
    )
    for errors, odd in ((width, "[5]"), (dtype, "float64"), (layer, "exchange(1, h)")):
        for error in errors:
            assert error.startswith("RankError: the ranks are at different minibatches"), errors
            assert "rank 0: loader 0, epoch 0, step" in error
            assert odd in error
    mine = "ValueError: exchange(0, h): h has"
    for rank, error in enumerate(rows):
        assert error.startswith(mine if rank == 1 else f"RankError: rank 1 failed with {mine}")
