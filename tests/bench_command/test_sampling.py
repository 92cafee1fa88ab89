"""`gids bench sampling`: results, verification, bad input. Speed is not checked."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from gids.bench.sampling import verify
from gids.errors import FormatError
from gids.sampler import Neighbor
from gids.store import FeatureStore
from gids.write import DatasetWriter

SMALL = ("--batch-size", "8,16", "--fanouts", "3,3", "--batches", 5)


def test_nodes_and_edges_are_counted_by_batch_and_threads(dataset, bench):
    args = ("--threads", "1,2", "--bulk", "1,4", "--repeat", 2)
    _, report = bench("sampling", dataset, *SMALL, *args)
    settings = [tuple(f["setting"][s] for s in ("batch", "threads", "at_once")) for f in report["figures"]]
    assert settings == list(itertools.product(("8 seeds", "16 seeds"), (1, 2), (1, 4)))
    metrics = [f["metrics"] for f in report["figures"]]
    for name in ("nodes_per_batch", "edges_per_batch"):  # threads and calls change no minibatch
        assert all(m[name] == metrics[0][name] for m in metrics[:4])
    assert len(metrics[0]["nodes_per_s"]["values"]) == 2


def test_several_node_types_are_sampled(bench, tmp_path):
    rng = np.random.default_rng(0)
    with DatasetWriter(tmp_path / "two.gids") as writer:
        for relation, sources, count in (
            (("paper", "cites", "paper"), 300, 300),
            (("author", "writes", "paper"), 50, 300),
        ):
            indptr = np.concatenate([[0], np.cumsum(rng.integers(0, 6, count))])
            writer.write_graph(relation, indptr, rng.integers(0, sources, indptr[-1]), num_src=sources)
    args = ("--seeds", "all", "--batch-size", 20, "--fanouts", "2,2", "--batches", 3)
    _, report = bench("sampling", tmp_path / "two.gids", *args)
    assert report["figures"][0]["metrics"]["nodes_per_batch"]["median"] >= 20


def test_a_missing_gpu_is_reported_in_one_line(dataset, bench, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    said, _ = bench("sampling", dataset, *SMALL, "--device", "cuda", status=2)
    assert said.startswith("gids bench: device='cuda' needs a CUDA build of torch; this is ")
    assert "GIDS_TRACEBACK" not in said


def test_an_edge_that_is_not_in_the_graph_is_found(dataset):
    graph = FeatureStore(dataset).graph()
    minibatch = Neighbor([3, 3]).sample(graph, torch.arange(10))
    verify(minibatch)
    block = minibatch.blocks[0]
    wrong = replace(
        minibatch, blocks=[replace(block, positions=block.positions.flip(0)), minibatch.blocks[1]]
    )
    with pytest.raises(FormatError, match=r"an edge of .* twice, or an edge that is not in the graph"):
        verify(wrong)
    twice = replace(minibatch, input_nodes=minibatch.input_nodes[[0, *range(len(minibatch.input_nodes))]])
    with pytest.raises(FormatError):
        verify(twice)
