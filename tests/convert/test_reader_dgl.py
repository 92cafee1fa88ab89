"""DGL's graph files and caches of its datasets."""

import os
import pickle

import numpy as np
import pytest
import torch
from reader_example import assert_dataset, convert, refused, truncate

RNG = np.random.default_rng(13)
EDGES = RNG.integers(0, 40, (2, 200))
FEAT = RNG.standard_normal((40, 6), np.float32)


@pytest.fixture(scope="module")
def dgl():
    pytest.importorskip("gids.dgl", exc_type=ImportError)
    return pytest.importorskip("dgl")


def save(dgl, path):
    graph = dgl.graph((EDGES[0], EDGES[1]), num_nodes=40)
    graph.ndata["feat"] = torch.from_numpy(FEAT)
    graph.ndata["label"] = torch.arange(40) % 3 - 1
    graph.ndata["val_mask"] = torch.arange(40) > 30
    dgl.save_graphs(str(path), [graph], {"whole": torch.ones(1)})


def test_cache_directory_of_dgl_dataset(tmp_path, dgl, capsys):
    """DGLDataset.save writes the graphs, and a pickle, which is not opened."""
    (tmp_path / "cora_v2").mkdir()
    save(dgl, tmp_path / "cora_v2/dgl_graph.bin")
    (tmp_path / "cora_v2/info.pkl").write_bytes(pickle.dumps({"num_classes": 3}))
    assert_dataset(
        convert(tmp_path / "cora_v2", tmp_path / "c.gids"),
        tables={"_N.feat": FEAT},
        edges={("_N", "_E", "_N"): EDGES},
        labels={"_N": np.arange(40) % 3 - 1},
        splits={"_N": {"val": range(31, 40)}},
    )
    assert "left out 'whole': a label of the whole graph" in capsys.readouterr().err


@pytest.mark.slow
def test_heterogeneous_graph(tmp_path, dgl):
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


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["coo", "csr"])
def test_a_graph_that_has_no_csc_format_is_converted(tmp_path, dgl, kept):
    graph = dgl.graph((EDGES[0], EDGES[1]), num_nodes=40).formats(kept)
    graph.edata["w"] = torch.arange(200)
    dgl.save_graphs(str(tmp_path / "g.dgl"), [graph])
    store = convert(tmp_path / "g.dgl", tmp_path / "g.gids")
    assert store.table("_N._E._N.w").read_rows(range(200)).flatten().tolist() == list(range(200))
    stored = store.graph()
    destinations = np.repeat(np.arange(40), np.diff(stored.indptr))
    assert np.array_equal(EDGES[:, stored.edge_ids], [stored.indices, destinations])


@pytest.mark.slow
def test_several_graphs_are_refused(tmp_path, dgl, capsys):
    dgl.save_graphs(str(tmp_path / "g.dgl"), [dgl.graph(([0], [1]))] * 2)
    message = refused(capsys, tmp_path / "g.dgl", tmp_path / "g.gids")
    assert "holds 2 graphs; save one graph per file" in message


@pytest.mark.slow
def test_damaged_file_prints_one_line(tmp_path, dgl, capsys):
    save(dgl, tmp_path / "g.bin")
    truncate(tmp_path / "g.bin")
    assert "cannot be read" in refused(capsys, tmp_path / "g.bin", tmp_path / "x.gids")
    np.save(tmp_path / "x.npy", FEAT)
    error = refused(capsys, tmp_path / "x.npy", tmp_path / "x.gids", "--from", "dgl")
    assert "is not a file of dgl.save_graphs" in error
