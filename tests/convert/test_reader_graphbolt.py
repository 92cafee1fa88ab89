"""GraphBolt's OnDiskDataset as in its documentation, with one type and with several."""

import numpy as np
import pytest
import torch
from datasets import save_arrays
from reader_example import assert_dataset, convert, refused, refuses, truncate

yaml = pytest.importorskip("yaml")
RNG = np.random.default_rng(8)
N, E = 70, 400
EDGES = RNG.integers(0, N, (2, E))
FEAT = RNG.standard_normal((N, 12), np.float32)
WEIGHT = RNG.standard_normal((E, 2))
SETS = {"train": np.arange(20), "validation": np.array([33, 31]), "test": np.arange(40, 50)}
CLASSES = RNG.integers(0, 10, N)
HOMOGENEOUS = ("_N", "_E", "_N")


def entry(path, kind="numpy", **more):
    return {"path": path, "format": kind, "in_memory": False, **more}


def node_sets(ntype=None, *, seeds="seeds"):
    """The task, and the contents of its files."""
    task = {"name": "node_classification", "num_classes": 10}
    for part in SETS:
        arrays = [entry(f"set/{part}_{name}.npy", name=name) for name in (seeds, "labels")]
        task[f"{part}_set"] = [{"data": arrays, **({"type": ntype} if ntype else {})}]
    return task


def write(root, meta):
    save_arrays(
        root / "set",
        **{f"{part}_{name}": ids for part, ids in SETS.items() for name in ("seeds", "seed_nodes")},
    )
    save_arrays(root / "set", **{f"{part}_labels": CLASSES[ids] for part, ids in SETS.items()})
    (root / "metadata.yaml").write_text(yaml.safe_dump(meta))


def homogeneous(root, **changes):
    """The homogeneous example of the documentation: edges.csv, features of nodes and edges."""
    (root / "edges").mkdir(parents=True)
    np.savetxt(root / "edges/e.csv", EDGES.T, fmt="%d", delimiter=",")
    save_arrays(root / "data", feat=FEAT)
    torch.save(torch.from_numpy(WEIGHT), root / "data/weight.pt")
    meta = {
        "dataset_name": "homo",
        "graph": {
            "nodes": [{"num": N}],
            "edges": [{"format": "csv", "path": "edges/e.csv"}],
            "feature_data": [entry("data/feat.npy", domain="node", name="feat", type=None)],
        },
        "feature_data": [
            entry("data/feat.npy", domain="node", name="feat", type=None),
            entry("data/weight.pt", "torch", domain="edge", name="weight"),
        ],
        "tasks": [node_sets()],
        **changes,
    }
    write(root, meta)
    return meta


def labels():
    found = np.full(N, -1)
    for ids in SETS.values():
        found[ids] = CLASSES[ids]
    return found


SPLITS = {"train": SETS["train"], "val": SETS["validation"], "test": SETS["test"]}


def test_one_type(tmp_path):
    homogeneous(tmp_path / "g")
    assert_dataset(
        convert(tmp_path / "g", tmp_path / "g.gids"),
        tables={"_N.feat": FEAT, "_N._E._N.weight": WEIGHT},
        edges={HOMOGENEOUS: EDGES},
        labels={"_N": labels()},
        splits={"_N": SPLITS},
    )


def test_several_types_and_the_old_name_of_seeds(tmp_path, capsys):
    root = tmp_path / "g"
    likes = RNG.integers(0, [[30], [N]], (2, 90))
    save_arrays(root / "edges", likes=likes, also=EDGES)
    save_arrays(root / "data", user=FEAT[:30].astype(np.float16), item=FEAT)
    meta = {
        "dataset_name": "hetero",
        "graph": {
            "nodes": [{"type": "user", "num": 30}, {"type": "item", "num": N}],
            "edges": [
                {"type": "user:like:item", "format": "numpy", "path": "edges/likes.npy"},
                {"type": "item:also:item", "format": "numpy", "path": "edges/also.npy"},
            ],
        },
        "feature_data": [
            entry(f"data/{ntype}.npy", domain="node", type=ntype, name="feat") for ntype in ("user", "item")
        ],
        "tasks": [node_sets("item", seeds="seed_nodes"), {"name": "link_prediction"}],
    }
    write(root, meta)
    error = refused(capsys, root, tmp_path / "x.gids")
    assert "--skip link_prediction: task 'link_prediction': a dataset has one task, here " in error
    assert_dataset(
        convert(root, tmp_path / "g.gids", "--from", "graphbolt", "--skip", "link_prediction"),
        tables={"user.feat": FEAT[:30].astype(np.float16), "item.feat": FEAT},
        edges={("user", "like", "item"): likes, ("item", "also", "item"): EDGES},
        labels={"item": labels()},
        splits={"item": SPLITS},
    )


@pytest.mark.parametrize("names", [["seeds"], [None, None]])
def test_link_prediction_seeds_must_be_skipped(tmp_path, capsys, names):
    pairs = [{"type": "_N:_E:_N", "data": [entry("set/pairs.npy", name=name) for name in names]}]
    homogeneous(tmp_path / "g", tasks=[{"name": "link_prediction", "train_set": pairs}])
    save_arrays(tmp_path / "g/set", pairs=EDGES.T)
    assert "its seeds are not nodes" in refused(capsys, tmp_path / "g", tmp_path / "x.gids")
    store = convert(tmp_path / "g", tmp_path / "g.gids", "--skip", "link_prediction")
    assert dict(store.splits) == {}


def test_labels_of_the_test_set_that_are_nan(tmp_path):
    """They are floating numbers, which do not round the whole numbers of the other sets."""
    homogeneous(tmp_path / "g")
    large = CLASSES[SETS["train"]] + (1 << 24) + 1
    unknown = np.full(len(SETS["test"]), np.nan, np.float32)
    save_arrays(tmp_path / "g/set", train_labels=large, test_labels=unknown)
    found = convert(tmp_path / "g", tmp_path / "g.gids").labels["_N"].numpy()
    assert found[SETS["train"]].tolist() == large.tolist()
    assert set(found[SETS["test"]]) == {-1}


def meta(**changes):
    """Other fields of metadata.yaml."""

    def harm(root):
        path = root / "metadata.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))

    return harm


def graph(**changes):
    return meta(graph={"nodes": [{"num": N}], "edges": [{"format": "csv", "path": "edges/e.csv"}], **changes})


def train_set(parts):
    return meta(tasks=[{"name": "t", "train_set": parts}])


SEEDS = entry("set/train_seeds.npy")


def edge_file(kind, path, **more):
    return graph(edges=[{"format": kind, "path": path, **more}])


test_a_bad_dataset_is_refused = refuses(
    homogeneous,
    (graph(nodes=[{"num": N + 1}]), f"gives {N} '_N' nodes, but there are {N + 1}"),
    (
        meta(feature_data=[entry("data/feat.npy", domain="node", name="x", type="float32")]),
        "is of type 'float32', but the graph has '_N'",
    ),
    (train_set([{"type": "user", "data": [SEEDS]}]), "is of type 'user', but the graph has '_N'"),
    (train_set([{"type": "a:b:c", "data": [SEEDS]}]), "is of type 'a.b.c', but the graph has"),
    (
        meta(feature_data=[entry("data/feat.npy", domain="node", name="x", type="_N:_E:_N")]),
        "is of type '_N:_E:_N', but the graph has '_N'",
    ),
    (
        train_set([{"data": [SEEDS, entry("set/train_labels.npy", name="label")]}]),
        "--skip t: 'label' of task 't': only seeds and labels are read: call it so",
    ),
    (
        meta(feature_data=[entry("data/feat.npy", domain="graph", name="x")]),
        "with --skip x: feature 'x': its domain is 'graph'",
    ),
    (edge_file("numpy", "data/feat.npy"), "edges must be whole numbers of shape (2, E)"),
    (edge_file("csv", "gone.csv"), "gone.csv, which does not exist"),
    (edge_file("csv", "x", type="a:b"), "must be SOURCE:RELATION:DESTINATION"),
    (graph(edges="edges/e.csv"), "metadata.yaml cannot be read: "),
    (
        meta(feature_data=[entry("data/feat.npy", "parquet", domain="node", name="x")]),
        "format 'parquet'",
    ),
    (meta(feature_data=[entry("set/train_seeds.npy", domain="node", name="x")]), "gives 20 '_N' nodes"),
    (train_set(2 * [{"data": [SEEDS]}]), "metadata.yaml lists the train_set of '_N' twice"),
    (
        train_set([{"data": [SEEDS, entry("set/train_labels.npy")]}]),
        "has two arrays 'seeds'",
    ),
    (lambda root: (root / "metadata.yaml").write_text("a: [1"), "metadata.yaml cannot be read"),
    (lambda root: truncate(root / "data/weight.pt"), "is truncated"),
    (
        lambda root: save_arrays(
            root / "set", train_labels=np.full(20, (1 << 53) + 1), test_labels=np.ones(10)
        ),
        "9007199254740993 is not exact in torch.float64",
    ),
    (lambda root: save_arrays(root / "set", test_labels=np.arange(3)), "have shape (3,); there are 10 seeds"),
    (
        lambda root: save_arrays(root / "set", test_seeds=np.arange(N - 9, N + 1)),
        f"is {N}; it must be from 0 to {N - 1}",
    ),
    (lambda root: (root / "edges/e.csv").write_text(f"1,2\n{N},3\n" * 200), f"source[1] is {N}; it must"),
)


def test_preprocessed_graphbolt_dataset_raises(tmp_path, capsys):
    (tmp_path / "g").mkdir()
    topology = {"type": "FusedCSCSamplingGraph", "path": "fused_csc_sampling_graph.pt"}
    write(tmp_path / "g", {"graph_topology": topology, "feature_data": []})
    assert "convert the directory above" in refused(capsys, tmp_path / "g", tmp_path / "x.gids")
