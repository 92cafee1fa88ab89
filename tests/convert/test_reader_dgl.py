"""DGL's graph files and caches of its datasets. See also tests/cli/test_convert.py."""

import pickle

import numpy as np
import pytest
from datasets import read_source
from reader_example import assert_dataset, convert, refused, truncate

from gids import FormatError

RNG = np.random.default_rng(13)
EDGES = RNG.integers(0, 40, (2, 200))
FEAT = RNG.standard_normal((40, 6), np.float32)


@pytest.fixture(scope="module")
def dgl():
    pytest.importorskip("gids.dgl", exc_type=ImportError)
    return pytest.importorskip("dgl")


def save(dgl, path):
    torch = pytest.importorskip("torch")
    graph = dgl.graph((EDGES[0], EDGES[1]), num_nodes=40)
    graph.ndata["feat"] = torch.from_numpy(FEAT)
    graph.ndata["label"] = torch.arange(40) % 3 - 1
    graph.ndata["val_mask"] = torch.arange(40) > 30
    dgl.save_graphs(str(path), [graph], {"whole": torch.ones(1)})


@pytest.mark.slow
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
def test_damaged_file_prints_one_line(tmp_path, dgl, capsys):
    save(dgl, tmp_path / "g.bin")
    truncate(tmp_path / "g.bin")
    assert "is damaged, or was saved by another version" in refused(
        capsys, tmp_path / "g.bin", tmp_path / "x.gids"
    )
    np.save(tmp_path / "x.npy", FEAT)
    error = refused(capsys, tmp_path / "x.npy", tmp_path / "x.gids", "--from", "dgl")
    assert "is not a file of dgl.save_graphs" in error


@pytest.mark.slow
def test_error_without_dgl_names_the_file(tmp_path, dgl):
    save(dgl, tmp_path / "g.bin")
    with pytest.raises(FormatError, match="which needs DGL"):
        read_source(tmp_path / "g.bin", tmp_path)
