"""`gids generate`: graphs of one or two types that convert; the same options give the same bytes."""

import numpy as np
import pytest
from commands import gids
from datasets import contents

from gids import FeatureStore
from gids.cli import main
from gids.sizes import format_bytes

SMALL = ["--nodes", "3e3", "--edges", "3e4", "--dim", "12", "--classes", "5"]


def generate(path, *arguments):
    gids("generate", path, *SMALL, *arguments)
    return contents(path)


def test_one_type_converts(tmp_path, capsys):
    size_bytes = sum(map(len, generate(tmp_path / "g", "--split", "0.5,0.1,0").values()))
    now = f"now: gids convert {tmp_path}/g {tmp_path}/g.gids"
    assert capsys.readouterr().out == f"{tmp_path}/g: {format_bytes(size_bytes)}; {now}\n"
    gids("convert", tmp_path / "g", tmp_path / "g.gids")
    store = FeatureStore(tmp_path / "g.gids")
    assert store.table("feat").shape == (12,)
    assert store.num_edges() == pytest.approx(30_000, rel=0.05)
    assert {name: len(ids) for name, ids in store.splits["_N"].items()} == {
        "train": 1500,
        "val": 300,
        "test": 0,
    }
    assert set(store.labels["_N"].tolist()) == set(range(5))


def test_two_types_convert_and_both_relations_show_the_class(tmp_path):
    generate(tmp_path / "g", "--hetero")
    gids("convert", tmp_path / "g", tmp_path / "g.gids", "--reverse-edges")
    store = FeatureStore(tmp_path / "g.gids")
    assert (store.num_nodes("paper"), store.num_nodes("author")) == (3000, 1500)
    assert ("paper", "rev_writes", "author") in store.relations
    labels, feat = store.labels["paper"].numpy(), {}
    for ntype in ("paper", "author"):
        feat[ntype] = store.read_rows(range(store.num_nodes(ntype)), f"{ntype}.feat").numpy()
    centroids = np.stack([feat["paper"][labels == c].mean(0) for c in range(5)])
    for relation in (("paper", "cites", "paper"), ("author", "writes", "paper")):
        graph = store.graph(relation)
        found = np.diff(graph.indptr) > 0
        rows = feat[relation[0]][graph.indices]
        means = np.add.reduceat(rows, graph.indptr[:-1][found]) / np.diff(graph.indptr)[found][:, None]
        nearest = (means @ centroids.T - (centroids**2).sum(1) / 2).argmax(1)
        assert (nearest == labels[found]).mean() > 0.6, relation


@pytest.mark.parametrize(("kind", "dtype"), [([], "float32"), (["--hetero"], "float16")])
def test_a_dataset_equals_the_converted_files_and_a_seed_gives_the_same_bytes(tmp_path, kind, dtype, capsys):
    options = [*kind, "--dtype", dtype]
    files = generate(tmp_path / "g", *options)
    gids("convert", tmp_path / "g", tmp_path / "converted.gids", "--index-dtype", "auto")
    capsys.readouterr()
    generated = generate(tmp_path / "g.gids", *options)
    assert capsys.readouterr().out.endswith(f"now: gids info {tmp_path}/g.gids\n")
    converted = contents(tmp_path / "converted.gids")
    for name in (*generated, *converted):
        if name != "manifest.json":  # which may list the types in another order
            assert generated[name] == converted[name], name
    assert generate(tmp_path / "again", *options) == files
    other = generate(tmp_path / "other", *options, "--seed", "1")
    assert [name for name in files if files[name] == other[name] and "feat" in name] == []


@pytest.mark.parametrize("out", ["g", "g.gids"])
def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch, out):
    from gids.convert import synthetic

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(synthetic.Features, "read_into", fail)
    assert main(["generate", str(tmp_path / out), *SMALL]) == 130
    assert list(tmp_path.iterdir()) == []
