"""OGB's node property datasets: binary, text, several types."""

import gzip
import zipfile

import numpy as np
import torch
from reader_example import assert_dataset, convert, needs_torch_2_6, refused, refuses, truncate

RNG = np.random.default_rng(3)
NODES, EDGES = 400, 3000
E = RNG.integers(0, NODES, (2, EDGES))
FEAT = RNG.standard_normal((NODES, 16), np.float32)
YEAR = RNG.integers(1990, 2020, (NODES, 1))
LABEL = np.where(RNG.random((NODES, 1)) < 0.3, np.nan, RNG.integers(0, 9, (NODES, 1))).astype(np.float32)
SPLITS = {"train": [5, 3, 9], "valid": [1, 2], "test": [7, 8, 0, 4]}
HOMOGENEOUS = ("_N", "_E", "_N")


def csv(path, values):
    """Write a gzipped text without a header, as pandas does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        for row in values:
            file.write(",".join(str(v) for v in np.atleast_1d(row)) + "\n")


def column(values):
    return np.asarray(values).reshape(-1, 1)


def classes(label):
    return np.nan_to_num(label, nan=-1).astype(np.int64)


def papers100m(root, **changes):
    """A small ogbn-papers100M: compressed .npz files, the split in a file of torch."""
    data = {
        "edge_index": E,
        "node_feat": FEAT,
        "node_year": YEAR,
        "num_nodes_list": np.array([NODES]),
        "num_edges_list": np.array([EDGES]),
        **changes,
    }
    (root / "raw").mkdir(parents=True)
    np.savez_compressed(root / "raw/data.npz", **{k: v for k, v in data.items() if v is not None})
    np.savez_compressed(root / "raw/node-label.npz", node_label=LABEL)
    for part, ids in SPLITS.items():
        csv(root / f"split/time/{part}.csv.gz", column(ids))
    return root


def arxiv(root):
    """A small ogbn-arxiv: text files."""
    csv(root / "raw/edge.csv.gz", E.T)
    csv(root / "raw/node-feat.csv.gz", FEAT)
    csv(root / "raw/node_year.csv.gz", YEAR)
    csv(root / "raw/node-label.csv.gz", column(np.arange(NODES) % 7))
    csv(root / "raw/num-node-list.csv.gz", [[NODES]])
    csv(root / "raw/num-edge-list.csv.gz", [[EDGES]])
    for part, ids in SPLITS.items():
        csv(root / f"split/time/{part}.csv.gz", column(ids))
    return root


def expected_splits():
    return {"_N": {"train": SPLITS["train"], "val": SPLITS["valid"], "test": SPLITS["test"]}}


def assert_homogeneous(store, labels, **tables):
    tables |= {"_N.feat": FEAT, "_N.year": YEAR}
    edges, splits = {HOMOGENEOUS: E}, expected_splits()
    assert_dataset(store, tables=tables, edges=edges, labels={"_N": labels}, splits=splits)


def test_papers100m(tmp_path):
    store = convert(papers100m(tmp_path / "ogbn_papers100M"), tmp_path / "p.gids")
    assert_homogeneous(store, classes(LABEL))


@needs_torch_2_6
def test_stored_members_and_a_torch_split(tmp_path):
    root = papers100m(tmp_path / "s", edge_attr=RNG.standard_normal((EDGES, 2), np.float32))
    data = dict(np.load(root / "raw/data.npz"))
    np.savez(root / "raw/data.npz", **data)
    for part in SPLITS:
        (root / f"split/time/{part}.csv.gz").unlink()
    torch.save({k: np.array(v) for k, v in SPLITS.items()}, root / "split/time/split_dict.pt")
    store = convert(root, tmp_path / "p.gids", "--from", "ogb")
    assert_homogeneous(store, classes(LABEL), **{"_N._E._N.attr": data["edge_attr"]})


def test_text_and_a_note_that_reverse_edges_are_missing(tmp_path, capsys):
    store = convert(arxiv(tmp_path / "ogbn_products"), tmp_path / "a.gids")
    assert_homogeneous(store, column(np.arange(NODES) % 7))
    assert "has one direction of each edge; --reverse-edges" in capsys.readouterr().err


def test_a_whole_number_beyond_int64_is_not_rounded(tmp_path, capsys):
    root = arxiv(tmp_path / "ogbn_products")
    csv(root / "raw/node-feat.csv.gz", column([(1 << 63) + 1] * NODES))
    assert "cannot hold '9223372036854775809'" in refused(capsys, root, tmp_path / "a.gids")


def mag(root):
    """A small ogbn-mag: relations; only papers have features, labels and splits."""
    counts = {"author": 30, "institution": 5, "paper": 50}
    triplets = {
        ("author", "affiliated_with", "institution"): 40,
        ("author", "writes", "paper"): 200,
        ("paper", "cites", "paper"): 90,
    }
    raw = root / "raw"
    csv(raw / "num-node-dict.csv.gz", [list(counts), list(counts.values())])
    csv(raw / "triplet-type-list.csv.gz", list(triplets))
    csv(raw / "nodetype-has-feat.csv.gz", [list(counts), ["False", "False", "True"]])
    edges = {}
    for triplet, count in triplets.items():
        pair = [RNG.integers(0, counts[triplet[0]], count), RNG.integers(0, counts[triplet[2]], count)]
        edges[triplet] = np.stack(pair)
        folder = raw / "relations" / "___".join(triplet)
        csv(folder / "edge.csv.gz", edges[triplet].T)
        csv(folder / "num-edge-list.csv.gz", [[count]])
        csv(folder / "edge_reltype.csv.gz", column(np.full(count, 2)))
    csv(raw / "node-feat/paper/node-feat.csv.gz", FEAT[:50])
    csv(raw / "node-feat/paper/node_year.csv.gz", YEAR[:50])
    csv(raw / "node-label/paper/node-label.csv.gz", column(np.arange(50)))
    csv(root / "split/time/nodetype-has-split.csv.gz", [list(counts), ["False", "False", "True"]])
    for part, ids in SPLITS.items():
        csv(root / f"split/time/paper/{part}.csv.gz", column(ids))
    return edges


def test_several_types(tmp_path):
    edges = mag(tmp_path / "ogbn_mag")
    store = convert(tmp_path / "ogbn_mag", tmp_path / "m.gids")
    types = {".".join([*r, "reltype"]): np.full((e.shape[1], 1), 2) for r, e in edges.items()}
    assert_dataset(
        store,
        tables={"paper.feat": FEAT[:50], "paper.year": YEAR[:50], **types},
        edges=edges,
        labels={"paper": column(np.arange(50))},
        splits={"paper": expected_splits()["_N"]},
    )
    assert store.num_nodes("institution") == 5


def data(**changes):
    """Other arrays in data.npz; None: without one."""

    def harm(root):
        arrays = dict(np.load(root / "raw/data.npz")) | changes
        np.savez_compressed(root / "raw/data.npz", **{k: v for k, v in arrays.items() if v is not None})

    return harm


def damage(name):
    """Flip a byte in the middle of a member's compressed data."""

    def apply(root):
        with zipfile.ZipFile(root / "raw/data.npz") as archive:
            member = archive.getinfo(f"{name}.npy")
        data = bytearray((root / "raw/data.npz").read_bytes())
        data[member.header_offset + member.compress_size // 2] ^= 0xFF
        (root / "raw/data.npz").write_bytes(data)

    return apply


test_a_bad_binary_dataset_is_refused = refuses(
    papers100m,
    (data(node_feat=FEAT[:-1]), "'node_feat' of"),
    (data(num_nodes_list=np.array([NODES, 3])), "is for 2 graphs"),
    (data(num_edges_list=np.array([EDGES + 1])), f"edge_index has {EDGES} edges, but num_edges_list gives"),
    (data(edge_index=None), "lacks edge_index"),
    (data(num_nodes_list=None), "but lacks num_nodes_list"),
    (damage("node_feat"), "member node_feat.npy, cannot be read"),
    (lambda root: truncate(root / "raw/data.npz"), "cannot be read"),
    (lambda root: (root / "raw/node-label.npz").write_bytes(b"PK\x03\x04"), "cannot be read"),
    (lambda root: truncate(root / "split/time/test.csv.gz", 0.8), "cannot be read"),
    (lambda root: (root / "raw/x.jsonl").touch(), "is read as ogb, and 'raw/x.jsonl' would be left out"),
    (lambda root: csv(root / "split/time/test.csv.gz", [[NODES]]), f"test_idx[0] is {NODES}"),
    (lambda root: csv(root / "split/random/test.csv.gz", [[1]]), "keep one of them"),
)


def text(name, *rows):
    return lambda root: csv(root / "raw" / f"{name}.csv.gz", rows)


test_a_bad_text_dataset_is_refused = refuses(
    arxiv,
    (text("edge", [1, 2], [3, 4], [5]), "columns"),
    (text("edge", [1, 2, 3]), "edges must be two columns of whole numbers"),
    (text("edge", ["dst", "src"], [1, 2]), "has the columns dst, src; the first must be the sources"),
    (text("edge", ["# dst", "src"], [1, 2]), "has the columns dst, src; the first must be the sources"),
    (text("node-feat", *[[1e39, 2.0]] * NODES), "float32 of column '0' cannot hold '1e+39'"),
    (text("num-edge-list", [7]), "edges, but num-edge-list.csv.gz gives 7"),
    (text("node-feat", [1.0, 2.0]), "gives 1 '_N' nodes"),
)
