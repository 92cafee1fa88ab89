"""gids.pyg.LinkNeighborLoader: PyG's minibatches of seed edges, from a dataset on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyg_model import CITES, PAPERS, WRITES, AllNeighbors, assert_all_same, write
from scipy import stats
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkNeighborLoader as PygLinkNeighborLoader
from torch_geometric.sampler import NegativeSampling

import gids
import gids.pyg


def pairs_of(batch: Any, relation: Any = None) -> torch.Tensor:
    """The node ids of edge_label_index."""
    if relation is None:
        return torch.stack([batch.n_id[ids] for ids in batch.edge_label_index])
    row, col = batch[relation].edge_label_index
    return torch.stack([batch[relation[0]].n_id[row], batch[relation[2]].n_id[col]])


def test_minibatches_are_those_of_pygs_own_loader(
    one: Data, one_path: Path, several: HeteroData, tmp_path: Path
) -> None:
    """All neighbors are taken, so that only negatives are drawn, and here there are none. As in PyG's example
    temporal_link_pred.py, labels of seed edges take the place of a table, and other relations keep theirs."""
    labelled = several.clone()
    for relation in (CITES, WRITES):
        labelled[relation].edge_label = torch.arange(labelled[relation].num_edges)
    labelled_path, numbers = write(tmp_path / "labelled.gids", labelled), torch.arange(100) * 3
    for data, path, edges in (
        (one, one_path, one.edge_index[:, :100]),
        (labelled, labelled_path, (WRITES, several[WRITES].edge_index[:, :100])),
    ):
        options: dict[str, Any] = {"batch_size": 32, "edge_label": torch.arange(100) + 7, "input_id": numbers}
        with gids.pyg.LinkNeighborLoader(path, [-1, -1], edges, seed=0, **options) as loader:
            ours = list(loader)
            assert len(loader) == len(ours) == 4
        sampler = AllNeighbors(gids.FeatureStore(path), [None, None])
        theirs = PygLinkNeighborLoader(data, [-1, -1], edges, neighbor_sampler=sampler, **options)
        assert_all_same(ours, theirs)


def test_all_edges_are_seeds_by_default(
    one: Data, one_path: Path, several: HeteroData, several_path: Path
) -> None:
    """In the order of their ids, so that these number labels and rows of edge tables."""
    label = torch.arange(one.num_edges) * 7
    with gids.pyg.LinkNeighborLoader(
        one_path, [1], None, label, batch_size=900, shuffle=True, seed=0
    ) as loader:
        batches = list(loader)
        for batch in batches:
            assert torch.equal(pairs_of(batch), one.edge_index[:, batch.input_id])
            assert torch.equal(batch.edge_label, label[batch.input_id])
        ids = torch.cat([batch.input_id for batch in batches])
        assert sorted(ids.tolist()) == list(range(one.num_edges))
    for edges in (WRITES, ("author", "paper"), (WRITES, None)):
        with gids.pyg.LinkNeighborLoader(several_path, [1], edges, batch_size=500, seed=0) as loader:
            batch = next(iter(loader))
            expected = several[WRITES].edge_index[:, batch[WRITES].input_id]
            assert torch.equal(pairs_of(batch, WRITES), expected)
            assert batch[WRITES].input_id.tolist() == list(range(500))


def test_negatives_have_pygs_form_and_depend_on_the_step_alone(
    one: Data, one_path: Path, several: HeteroData, several_path: Path
) -> None:
    by_ratio, by_amount = {"neg_sampling_ratio": 1.0}, {"neg_sampling": {"mode": "binary", "amount": 0.5}}
    for path, edges, relation, limits, sampling, count in (
        (one_path, one.edge_index[:, :100], None, (PAPERS, PAPERS), by_ratio, 40),
        (several_path, several[WRITES].edge_index[:, :100], WRITES, (150, PAPERS), by_amount, 20),
    ):
        given: Any = edges if relation is None else (relation, edges)
        options: dict[str, Any] = {"batch_size": 40, "shuffle": True, "seed": 0, **sampling}
        with gids.pyg.LinkNeighborLoader(path, [2], given, **options) as loader:
            found = [pairs_of(batch, relation) for _ in range(2) for batch in loader]
            state = loader.state_dict()
            batch = next(iter(loader))
            of_edges = batch if relation is None else batch[relation]
            assert torch.equal(pairs_of(batch, relation)[:, :40], edges[:, of_edges.input_id])
            assert of_edges.edge_label.tolist() == [1.0] * 40 + [0.0] * count
            assert not torch.equal(found[0][:, 40:], found[3][:, 40:])  # epoch 1
            for ends, limit in zip(torch.cat([f[:, 40:] for f in found], 1), limits, strict=True):
                assert 0 <= ends.min() < limit // 4
                assert limit - limit // 4 < ends.max() < limit
            loader.load_state_dict(state)
            assert torch.equal(pairs_of(next(iter(loader)), relation), pairs_of(batch, relation))


def test_triplets(one: Data, one_path: Path, several: HeteroData, several_path: Path) -> None:
    edges, options = one.edge_index[:, :100], {"batch_size": 40, "seed": 0}
    triplets = NegativeSampling("triplet", 3)
    with gids.pyg.LinkNeighborLoader(one_path, [2], edges, neg_sampling=triplets, **options) as loader:
        for batch in loader:
            assert torch.equal(batch.n_id[batch.src_index], edges[0, batch.input_id])
            assert torch.equal(batch.n_id[batch.dst_pos_index], edges[1, batch.input_id])
            assert batch.dst_neg_index.shape == (len(batch.input_id), 3)
            assert "edge_label_index" not in batch
    edges = several[WRITES].edge_index[:, :100]
    with gids.pyg.LinkNeighborLoader(
        several_path, [2], (WRITES, edges), neg_sampling="triplet", **options
    ) as loader:
        for batch in loader:
            ids = batch[WRITES].input_id
            assert torch.equal(batch["author"].n_id[batch["author"].src_index], edges[0, ids])
            assert torch.equal(batch["paper"].n_id[batch["paper"].dst_pos_index], edges[1, ids])
            assert batch["paper"].dst_neg_index.shape == (len(ids),)
            assert "src_index" not in batch["paper"]


def test_negatives_are_drawn_by_weight(one: Data, one_path: Path) -> None:
    weight = torch.arange(PAPERS).remainder(7).float()
    negatives = NegativeSampling("binary", 4, src_weight=None, dst_weight=weight)
    counts = np.zeros((2, PAPERS))
    options: dict[str, Any] = {"batch_size": 600, "neg_sampling": negatives, "tables": [], "seed": 0}
    with gids.pyg.LinkNeighborLoader(one_path, [], one.edge_index, **options) as loader:
        for batch in (batch for _ in range(4) for batch in loader):
            for ends, of in zip(pairs_of(batch)[:, len(batch.input_id) :], counts, strict=True):
                of += np.bincount(ends, minlength=PAPERS)
    assert (counts[1][weight == 0] == 0).all()
    for of, expected in zip(counts, (torch.ones(PAPERS), weight), strict=True):
        share = expected.double().numpy() / float(expected.sum()) * of.sum()
        free = share > 0
        assert stats.chi2.sf(((of[free] - share[free]) ** 2 / share[free]).sum(), free.sum() - 1) > 1e-3


def test_ranks_share_edges_and_negatives(one: Data, one_path: Path) -> None:
    options: dict[str, Any] = {"neg_sampling": NegativeSampling("triplet", 2), "shuffle": True, "seed": 4}

    def of_rank(rank: int, ranks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        place = {"rank": rank, "world_size": ranks, "batch_size": 40 // ranks}
        edges = one.edge_index[:, :101]
        with gids.pyg.LinkNeighborLoader(one_path, [1], edges, **place, **options) as loader:
            return [(b.input_id, b.n_id[b.dst_neg_index]) for b in loader]

    together = [of_rank(rank, 2) for rank in range(2)]
    for step, (ids, negatives) in enumerate(of_rank(0, 1)):
        assert torch.equal(torch.cat([rank[step][0] for rank in together]), ids)
        assert torch.equal(torch.cat([rank[step][1] for rank in together]), negatives)
