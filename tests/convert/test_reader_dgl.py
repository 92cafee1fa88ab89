"""DGL's graph files and caches of its datasets."""

import os
import pickle

import numpy as np
import pytest
import torch
from reader_example import assert_dataset, convert, refused

RNG = np.random.default_rng(13)
EDGES = RNG.integers(0, 40, (2, 200))
FEAT = RNG.standard_normal((40, 6), np.float32)


@pytest.fixture(scope="module")
def dgl():
    pytest.importorskip("gids.dgl", exc_type=ImportError)
    return pytest.importorskip("dgl")


@pytest.mark.parametrize("kept", ["coo", "csc"])
def test_cache_directory_of_dgl_dataset(tmp_path, dgl, capsys, kept):
    """DGLDataset.save writes the graphs, here in one format, and a pickle, which is not opened."""
    graph = dgl.graph((EDGES[0], EDGES[1]), num_nodes=40).formats(kept)
    graph.ndata["feat"] = torch.from_numpy(FEAT)
    graph.ndata["label"] = torch.arange(40) % 3 - 1
    graph.ndata["val_mask"] = torch.arange(40) > 30
    graph.edata["w"] = torch.arange(200)
    folder = tmp_path / "cora_v2"
    folder.mkdir()
    dgl.save_graphs(str(folder / "dgl_graph.bin"), [graph], {"whole": torch.ones(1)})
    (folder / "info.pkl").write_bytes(pickle.dumps({"num_classes": 3}))
    assert_dataset(
        convert(folder, tmp_path / "c.gids"),
        tables={"_N.feat": FEAT, "_N._E._N.w": np.arange(200)},
        edges={("_N", "_E", "_N"): EDGES},
        labels={"_N": np.arange(40) % 3 - 1},
        splits={"_N": {"val": range(31, 40)}},
    )
    assert "left out 'whole': a label of the whole graph" in capsys.readouterr().err


def test_heterogeneous_graph(tmp_path, dgl, capsys):
    writes = RNG.integers(0, 20, (2, 60))
    relations = {("author", "writes", "paper"): writes, ("paper", "cites", "paper"): EDGES}
    ends = {relation: (pairs[0], pairs[1]) for relation, pairs in relations.items()}
    graph = dgl.heterograph(ends, num_nodes_dict={"author": 25, "paper": 40})
    weights = np.arange(180, dtype=np.float32).reshape(60, 3)
    graph.nodes["paper"].data["feat"] = torch.from_numpy(FEAT)
    graph.nodes["author"].data["feat"] = torch.from_numpy(FEAT[:25]).half()
    graph.edges["writes"].data["w"] = torch.from_numpy(weights)
    dgl.save_graphs(str(tmp_path / "g.dgl"), [graph])
    source = (tmp_path / "g.dgl").rename(tmp_path / os.fsdecode(b"\xff.dgl"))  # which DGL does not open
    assert_dataset(
        convert(source, tmp_path / "g.gids"),
        tables={
            "paper.feat": FEAT,
            "author.feat": FEAT[:25].astype(np.float16),
            "author.writes.paper.w": weights,
        },
        edges=relations,
    )
    source.unlink()
    dgl.save_graphs(str(tmp_path / "g.dgl"), [graph] * 2)
    error = refused(capsys, tmp_path / "g.dgl", tmp_path / "x.gids")
    assert "holds 2 graphs; save one graph per file" in error
