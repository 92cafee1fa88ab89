"""A dataset has exactly what its source has, in each form that users have; what some formats do besides."""

import numpy as np
import pytest
import torch
from datasets import save_arrays
from reader_example import assert_dataset, convert, needs_torch_2_6, refused
from user_sources import CLASSES, EDGES, FEAT, SOURCES, entry, graphbolt, igbh, mag240m

from gids.convert.readers import igb

WITH_PICKLED_ARRAYS = ("mag240m",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=needs_torch_2_6 if n in WITH_PICKLED_ARRAYS else ()) for n in SOURCES]
)
def test_a_dataset_has_what_its_source_has(tmp_path, capsys, name):
    expected = SOURCES[name](tmp_path / name)
    store = convert(tmp_path / name, tmp_path / "x.gids", "--split", "none")
    assert_dataset(
        store, tables=expected.tables, edges=expected.edges, labels=expected.labels, splits=expected.splits
    )
    assert {ntype: store.num_nodes(ntype) for ntype in expected.nodes} == expected.nodes
    error = capsys.readouterr().err
    assert [line for line in expected.said if line not in error] == []


def test_arrays_and_types_are_left_out_by_name(tmp_path):
    SOURCES["directory"](tmp_path / "s")
    skips = ("--skip", "nodes/paper/feat.npy", "--skip", "edges/author.writes.paper")
    store = convert(tmp_path / "s", tmp_path / "t.gids", *skips)
    assert (list(store.tables), store.relations) == (["a/b.feat"], [("paper", "cites", "paper")])


def test_igb_has_two_arrays_of_labels_and_self_loops_by_option(tmp_path, capsys):
    igbh(tmp_path / "i")
    store = convert(tmp_path / "i/processed", tmp_path / "i.gids", "--labels", "2K", "--self-loops")
    assert store.labels["paper"].tolist() == (CLASSES + 100).tolist()
    error = capsys.readouterr().err
    assert "left out node_label_19.npy" in error
    assert "use --self-loops" not in error
    assert store.num_edges(("paper", "cites", "paper")) >= store.num_nodes("paper")


def test_igb_in_full_size_has_labels_for_a_part(tmp_path, monkeypatch):
    monkeypatch.setattr(igb, "_FULL_PAPERS", 60)
    monkeypatch.setitem(igb._LABELLED, "node_label_19", 50)
    igbh(tmp_path / "full")
    store = convert(tmp_path / "full", tmp_path / "i.gids")
    assert store.labels["paper"].tolist() == [*CLASSES[:50].tolist(), *[-1] * 10]
    assert store.splits["paper"]["test"].tolist() == list(range(40, 50))


def test_newer_names_of_the_test_split_of_mag240m(tmp_path):
    mag240m(tmp_path / "m")
    newer = {"train": torch.arange(3), "test-whole": torch.tensor([8, 6]), "test-dev": torch.tensor([8])}
    torch.save(newer, tmp_path / "m/mag240m_kddcup2021/split_dict.pt")
    splits = convert(tmp_path / "m/mag240m_kddcup2021", tmp_path / "m.gids").splits["paper"]
    assert {name: ids.tolist() for name, ids in splits.items()} == {"train": [0, 1, 2], "test": [8, 6]}


def test_tasks_of_graphbolt_whose_seeds_are_not_nodes_are_skipped_by_name(tmp_path, capsys):
    yaml = pytest.importorskip("yaml")
    graphbolt(tmp_path / "g")
    meta = yaml.safe_load((tmp_path / "g/metadata.yaml").read_text())
    pairs = [{"type": "_N:_E:_N", "data": [entry("set/pairs.npy", name="seeds")]}]
    meta["tasks"].insert(0, {"name": "links", "train_set": pairs})
    save_arrays(tmp_path / "g/set", pairs=EDGES.T)
    (tmp_path / "g/metadata.yaml").write_text(yaml.safe_dump(meta))
    error = refused(capsys, tmp_path / "g", tmp_path / "x.gids")
    assert "leave it out with --skip node_classification --skip links: " in error
    assert "a dataset has one task, here 'links'" in error
    assert "its seeds are not nodes" in error
    store = convert(tmp_path / "g", tmp_path / "x.gids", "--skip", "links", "--from", "graphbolt")
    assert len(store.splits["_N"]["test"]) == 4


def test_labels_of_graphbolt_that_are_nan_in_the_test_set(tmp_path):
    """They are floating numbers, which do not round the whole numbers of the other sets."""
    graphbolt(tmp_path / "g")
    save_arrays(tmp_path / "g/set", train_labels=np.full(3, (1 << 24) + 1), test_labels=np.full(4, np.nan))
    labels = convert(tmp_path / "g", tmp_path / "g.gids").labels["_N"]
    assert labels[[5, 3, 9]].tolist() == [(1 << 24) + 1] * 3
    assert labels[[7, 8, 0, 4, 1]].tolist() == [-1] * 5


def test_numbers_that_cannot_be_stored_are_skipped_by_name(tmp_path, capsys):
    np.savez(tmp_path / "x.npz", feat=FEAT + 1j, edge_index=EDGES, num_nodes=60)
    error = refused(capsys, tmp_path / "x.npz", tmp_path / "x.gids", "--quiet")
    assert "correct it, or leave it out with --skip feat: 'feat' of x.npz: " in error
    store = convert(tmp_path / "x.npz", tmp_path / "x.gids", "--skip", "feat", "--quiet")
    assert (list(store.tables), store.num_edges()) == ([], 300)
