"""Readers with kinds of malformed sources that their format can have: one line of error, nothing left behind.

tests/cli/test_convert.py has those of .npy files and directories.
"""

import gzip
import io
import zipfile

import numpy as np
import pytest
import test_reader_dgl as dgl_graph
import test_reader_edges as edges
import test_reader_graphbolt as graphbolt
import test_reader_igb as igb
import test_reader_mag240m as mag240m
import test_reader_ogb as ogb
import test_reader_pyg as pyg
import torch
from datasets import damage, write_dataset
from reader_example import harmed, refused, save, truncate

N, E = 40, 90
RNG = np.random.default_rng(1)
EDGES = RNG.integers(0, N, (2, E))
FEAT = RNG.standard_normal((N, 6), np.float32)


def arrays(**changes):
    return {"feat": FEAT, "edge_index": EDGES, "label": np.arange(N), **changes}


def npz(root, compression=zipfile.ZIP_DEFLATED, cut=0, **changes):
    """A .npz file whose member feat is a valid member, but lacks `cut` bytes of data."""
    with zipfile.ZipFile(root / "s.npz", "w", compression) as archive:
        for name, values in arrays(**changes).items():
            file = io.BytesIO()
            np.save(file, values)
            data = file.getvalue()
            archive.writestr(f"{name}.npy", data[: len(data) - cut] if name == "feat" else data)
    return root / "s.npz"


def raw(root):
    FEAT.tofile(root / "s.data")
    return root / "s.data"


def directory(root, **changes):
    save(root / "s", **arrays(**changes))
    return root / "s"


def text(root, content):
    (root / "e.csv").write_text(content)
    return root / "e.csv"


def cut(write, name):
    return harmed(write, lambda root: truncate(root / name))


def with_array(write, folder, **values):
    return harmed(write, lambda root: save(root / folder, **values))


def torch_file(root, **changes):
    torch.save(pyg.tensors(**changes), root / "d.pt")
    return root / "d.pt"


def cut_file(path):
    truncate(path)
    return path


def dgl_file(root, dtype=None):
    pytest.importorskip("gids.dgl", exc_type=ImportError)  # makes DGL importable
    dgl = pytest.importorskip("dgl")
    dgl_graph.save(dgl, root / "g.bin")
    if dtype is not None:
        graph = dgl.graph((EDGES[0], EDGES[1]), num_nodes=N)
        graph.ndata["feat"] = torch.from_numpy(FEAT).to(dtype)
        dgl.save_graphs(str(root / "g.bin"), [graph])
    return root / "g.bin"


def tables(root, *, node=None, edge=None):
    parquet = pytest.importorskip("test_reader_parquet", exc_type=ImportError)
    changes = node(parquet) if node else {}, edge(parquet) if edge else {}
    return parquet.write(root / "p", parquet.nodes(**changes[0]), parquet.edges(**changes[1]))


def matlab(root, **changes):
    pytest.importorskip("test_reader_matlab", exc_type=ImportError).facebook(root / "x.mat", **changes)
    return root / "x.mat"


def text_of_ogb(root, name, row):
    ogb.arxiv(root / "s")
    with gzip.open(root / "s/raw" / name, "wt") as file:
        file.writelines(",".join(map(str, r)) + "\n" for r in [*ogb.E.T[:-1].tolist(), row])
    return root / "s"


def relation_of_ogb(root, values):
    ogb.mag(root / "s")
    ogb.csv(root / "s/raw/relations/paper___cites___paper/edge.csv.gz", values)
    return root / "s"


MAG_CITES, IGB_CITES = mag240m.CITES, igb.CITES
PAIRS = np.zeros((2, 5), np.int64)
RAW = ("--dtype", "float32", "--shape")
SHAPE = "(2, E)"

# (reader, kind) -> (make(directory) -> source, message, arguments)
CASES = {
    ("gids", "truncated"): (lambda r: cut(write_dataset, "nodes/paper.label.npy")(r), "is truncated"),
    ("gids", "wrong type"): (
        lambda r: harmed(write_dataset, lambda s: (s / "manifest.json").write_text('{"format": "gids"}'))(r),
        "manifest.json: ",
    ),
    ("gids", "id out of range"): (
        harmed(write_dataset, lambda s: damage(s / "nodes/paper.test_idx.npy", b"?", -8)),
        "the checksum of this file is wrong",
    ),
    ("ogb", "truncated"): (lambda r: cut(ogb.arxiv, "raw/edge.csv.gz")(r), "is damaged or truncated"),
    ("ogb", "wrong type"): (lambda r: relation_of_ogb(r, [["a", "b"]] * 90), "exactly one must be named src"),
    ("ogb", "ragged"): (
        lambda r: text_of_ogb(r, "edge.csv.gz", [1]),
        "columns",
    ),
    ("ogb", "counts differ"): (lambda r: relation_of_ogb(r, [[1, 2]] * 89), "num-edge-list.csv.gz gives 90"),
    ("ogb", "id out of range"): (
        lambda r: text_of_ogb(r, "edge.csv.gz", [1, ogb.NODES]),
        f"is {ogb.NODES}; it must be from 0 to",
    ),
    ("mag240m", "truncated"): (cut(mag240m.write, "processed/paper/node_feat.npy"), "is truncated"),
    ("mag240m", "wrong type"): (
        with_array(mag240m.write, MAG_CITES, edge_index=PAIRS + 0.5),
        "whole numbers",
    ),
    ("mag240m", "ragged"): (
        with_array(mag240m.write, MAG_CITES, edge_index=PAIRS.T),
        "of shape (2, E)",
    ),
    ("mag240m", "counts differ"): (
        with_array(mag240m.write, "processed/paper", node_year=np.arange(89)),
        "gives 89 'paper' nodes, but there are 90",
    ),
    ("mag240m", "id out of range"): (
        with_array(mag240m.write, MAG_CITES, edge_index=PAIRS - 1),
        "is -1; it must be from 0 to 89",
    ),
    ("igb", "truncated"): (cut(igb.write, "processed/paper/node_label_19.npy"), "is truncated"),
    ("igb", "wrong type"): (with_array(igb.write, IGB_CITES, edge_index=PAIRS.T + 0.5), "whole numbers"),
    ("igb", "ragged"): (with_array(igb.write, IGB_CITES, edge_index=PAIRS), "in IGB it must be (E, 2)"),
    ("igb", "counts differ"): (
        with_array(igb.write, "processed/paper", node_feat=igb.FEAT["paper"][:99]),
        "gives 99 'paper' nodes, but there are 100",
    ),
    ("igb", "id out of range"): (
        with_array(igb.write, IGB_CITES, edge_index=PAIRS.T + 100),
        "is 100; it must",
    ),
    ("dgl", "truncated"): (lambda r: cut_file(dgl_file(r)), "is damaged, or was saved by another version"),
    ("dgl", "wrong type"): (lambda r: dgl_file(r, torch.int16), "cannot hold int16"),
    ("pyg", "truncated"): (lambda r: cut_file(torch_file(r)), "is truncated", "--from", "pyg"),
    ("pyg", "wrong type"): (
        lambda r: torch_file(r, edge_index=torch.rand(2, 5)),
        "edges must be whole numbers",
    ),
    ("pyg", "ragged"): (
        lambda r: torch_file(r, edge_index=torch.zeros(3, 5).long()),
        "of shape (2, E)",
    ),
    ("pyg", "counts differ"): (lambda r: torch_file(r, x=torch.rand(pyg.N + 1, 2)), "'_N' nodes, but there"),
    ("pyg", "id out of range"): (
        lambda r: torch_file(r, edge_index=torch.full((2, pyg.E), -1)),
        "is -1; it must be",
    ),
    ("graphbolt", "truncated"): (cut(graphbolt.homogeneous, "data/feat.npy"), "is truncated"),
    ("graphbolt", "wrong type"): (
        harmed(graphbolt.homogeneous, lambda r: (r / "edges/e.csv").write_text("1.5,2\n")),
        "could not convert",
    ),
    ("graphbolt", "ragged"): (
        harmed(graphbolt.homogeneous, lambda r: (r / "edges/e.csv").write_text("1,2\n3\n")),
        "columns",
    ),
    ("graphbolt", "counts differ"): (
        with_array(graphbolt.homogeneous, "data", feat=graphbolt.FEAT[:-1]),
        "gives 69 '_N' nodes, but there are 70",
    ),
    ("graphbolt", "id out of range"): (
        harmed(graphbolt.homogeneous, lambda r: (r / "edges/e.csv").write_text("1,2\n70,3\n" * 200)),
        "is 70; it must be from 0 to 69",
    ),
    ("parquet", "truncated"): (
        lambda r: cut_file(tables(r) / "nodes.parquet").parent,
        "is damaged or truncated",
    ),
    ("parquet", "wrong type"): (
        lambda r: tables(r, edge=lambda p: {"src": p.EDGES[0] + 0.5}),
        "whole numbers",
    ),
    ("parquet", "ragged"): (
        lambda r: tables(r, node=lambda p: {"feat": p.RAGGED}),
        "a list of another length",
    ),
    ("parquet", "id out of range"): (
        lambda r: tables(r, edge=lambda p: {"dst": p.EDGES[1] + 1}),
        "'dst' is 500, which no '_N' node has as its id",
    ),
    ("matlab", "truncated"): (lambda r: cut_file(matlab(r)), "is not a valid MATLAB file"),
    ("matlab", "wrong type"): (
        lambda r: matlab(r, label=np.arange(80) + 0.5),
        "a class must be a whole number",
    ),
    ("matlab", "counts differ"): (lambda r: matlab(r, local_info=np.zeros((79, 7))), "have a row per node"),
    ("edges", "truncated"): (
        lambda r: [edges.text(r / "e.csv.gz"), cut_file(r / "e.csv.gz")][1],
        "is damaged or truncated",
    ),
    ("edges", "wrong type"): (lambda r: text(r, "1.5,2\n"), "ids with fractions"),
    ("edges", "ragged"): (lambda r: text(r, "1,2\n3\n"), "columns"),
    ("edges", "counts differ"): (
        lambda r: [directory(r, label=np.arange(9)), edges.text(r / "s/edges.csv")] and r / "s",
        "'_N' nodes, but there are 9 (from",
    ),
    ("edges", "id out of range"): (lambda r: text(r, "1,2\n5,2\n"), "is 5; it must be", "--num-nodes", "5"),
    ("npz", "truncated"): (lambda r: npz(r, cut=7), "is truncated: its member feat.npy has"),
    ("npz", "wrong type"): (lambda r: npz(r, edge_index=EDGES + 0.5), "whole numbers"),
    ("npz", "ragged"): (lambda r: npz(r, edge_index=np.zeros((3, 5), int)), f"it must be {SHAPE}"),
    ("npz", "counts differ"): (lambda r: npz(r, label=np.arange(N - 1)), "gives 40 '_N' nodes, but"),
    ("npz", "id out of range"): (lambda r: npz(r, edge_index=EDGES + N), "it must be from 0 to 39"),
    ("raw", "truncated"): (lambda r: cut_file(raw(r)), "has 480 bytes, but", *RAW, "40,6"),
    ("raw", "wrong type"): (raw, "unknown dtype 'text'", "--dtype", "text", "--shape", "40,6"),
    ("raw", "ragged"): (raw, "not a multiple of the 28 bytes of a row", *RAW[:2], "--shape=-1,7"),
    ("raw", "counts differ"): (raw, "has 960 bytes, but", *RAW, "41,6"),
}


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("reader", "kind"),
    CASES,
    ids=lambda name: name.replace(" ", "-"),
)
def test_malformed_source_prints_one_line(tmp_path, capsys, reader, kind):
    make, message, *arguments = CASES[reader, kind]
    assert message in refused(
        capsys, make(tmp_path), tmp_path / "x.gids", "--from", reader, "--quiet", *arguments
    )


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("lost", ["the end of the file", "the middle of a member"])
def test_truncated_zip_file_prints_one_line(tmp_path, capsys, compression, lost):
    source = npz(tmp_path, compression)
    data = source.read_bytes()
    middle = len(data) // 2
    source.write_bytes(data[:middle] + (data[middle + 50 :] if "middle" in lost else b""))
    error = refused(capsys, source, tmp_path / "x.gids", "--from", "npz", "--quiet")
    assert "s.npz is not a valid .npz file" in error or "s.npz is damaged" in error
