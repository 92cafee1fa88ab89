"""IGB and IGBH: edges of shape (E, 2), large files without headers."""

import numpy as np
import pytest
from datasets import save_arrays
from reader_example import assert_dataset, assert_graph, convert, refuses

from gids.convert.readers import igb

RNG = np.random.default_rng(5)
COUNTS = {"paper": 100, "author": 140, "institute": 7, "fos": 30}
FEAT = {ntype: RNG.standard_normal((count, 1024), np.float32) for ntype, count in COUNTS.items()}
RELATIONS = {
    ("paper", "cites", "paper"): 500,
    ("paper", "written_by", "author"): 300,
    ("author", "affiliated_to", "institute"): 150,
    ("paper", "topic", "fos"): 200,
}
LABEL = RNG.integers(0, 19, 100).astype(np.float32)
SPLITS = {"paper": {"train": range(60), "val": range(60, 80), "test": range(80, 100)}}


def write(root, relations=RELATIONS, *, headers=True):
    """Write the dataset. Returns its edges, (2, E)."""
    edges = {}
    for relation, count in relations.items():
        pairs = np.stack([RNG.integers(0, COUNTS[t], count) for t in relation[::2]], axis=1)
        edges[relation] = pairs.T
        save_arrays(root / "processed" / "__".join(relation), edge_index=pairs)
    for ntype in {t for relation in relations for t in relation[::2]}:
        save_arrays(root / "processed" / ntype, node_feat=FEAT[ntype])
    paper = root / "processed/paper"
    save_arrays(paper, node_label_19=LABEL, node_label_2K=LABEL + 100)
    np.save(paper / "paper_id_index_mapping.npy", {7: 0}, allow_pickle=True)
    if not headers:
        FEAT["paper"].tofile(paper / "node_feat.npy")
        LABEL.tofile(paper / "node_label_19.npy")
    return edges


def test_igbh(tmp_path):
    edges = write(tmp_path / "small")
    store = convert(tmp_path / "small", tmp_path / "i.gids")
    assert_dataset(
        store,
        tables={f"{ntype}.feat": rows for ntype, rows in FEAT.items()},
        edges=edges,
        labels={"paper": LABEL.astype(np.int64)},
        splits=SPLITS,
    )


def test_igb_without_npy_headers(tmp_path):
    edges = write(tmp_path / "full", {("paper", "cites", "paper"): 500}, headers=False)
    store = convert(tmp_path / "full/processed", tmp_path / "i.gids", "--from", "igb")
    labels = {"paper": LABEL.astype(np.int64)}
    assert_dataset(store, tables={"paper.feat": FEAT["paper"]}, edges=edges, labels=labels, splits=SPLITS)


def test_labels_option_takes_the_other_labels(tmp_path, capsys):
    write(tmp_path / "i")
    store = convert(tmp_path / "i", tmp_path / "i.gids", "--labels", "2K")
    assert store.labels["paper"].tolist() == (LABEL + 100).tolist()
    assert "left out node_label_19.npy" in capsys.readouterr().err


def test_type_without_a_folder_is_counted_by_its_edges(tmp_path, capsys):
    edges = write(tmp_path / "i")
    (tmp_path / "i/processed/fos/node_feat.npy").unlink()
    (tmp_path / "i/processed/fos").rmdir()
    store = convert(tmp_path / "i", tmp_path / "i.gids")
    topics = edges["paper", "topic", "fos"]
    assert store.num_nodes("fos") == topics[1].max() + 1
    assert_graph(store, ("paper", "topic", "fos"), *topics)
    assert "'fos' nodes have no features and no count" in capsys.readouterr().err


@pytest.mark.parametrize("loops", [(), ("--self-loops",)])
def test_self_loops_are_advised_unless_asked_for(tmp_path, capsys, loops):
    write(tmp_path / "i")
    convert(tmp_path / "i", tmp_path / "i.gids", *loops)
    assert ("use --self-loops" in capsys.readouterr().err) == (not loops)


def test_full_size_has_labels_for_a_part(tmp_path, monkeypatch):
    monkeypatch.setattr(igb, "_FULL_PAPERS", 100)
    monkeypatch.setitem(igb._LABELLED, "node_label_19", 50)
    write(tmp_path / "full", headers=False)
    store = convert(tmp_path / "full", tmp_path / "i.gids")
    assert store.labels["paper"].tolist() == [*LABEL[:50].tolist(), *[-1] * 50]
    assert store.splits["paper"]["test"].tolist() == list(range(40, 50))


def cites(edge_index):
    return lambda root: save_arrays(root / "processed/paper__cites__paper", edge_index=edge_index)


test_a_bad_dataset_is_refused = refuses(
    write,
    (cites(np.zeros((2, 9), int)), "in IGB it must be (E, 2)"),
    (cites(np.zeros((9, 2)) + 0.5), "must be whole numbers"),
    (cites(np.full((9, 2), 100)), "is 100; it must be from 0 to"),
    (lambda root: (root / "processed/paper/node_feat.npy").write_bytes(b"x" * 4100), "not a multiple"),
    (lambda root: (root / "processed/paper/x.pt").touch(), "'processed/paper/x.pt' would be left out"),
    (lambda root: None, "--labels 7: unknown; choose node_label_19, node_label_2K", "--labels", "7"),
)
