"""Edge lists in text, .npy and raw binary, alone or beside arrays of nodes."""

import gzip

import numpy as np
import pytest
from reader_example import assert_dataset, assert_graph, convert

RNG = np.random.default_rng(11)
N, E = 90, 700
EDGES = RNG.integers(0, N, (2, E))
EDGES[0, 3] = N - 1
HOMOGENEOUS = ("_N", "_E", "_N")


def text(path, *, header="", delimiter=",", values=EDGES.T):
    content = header + "".join(delimiter.join(map(str, row)) + "\n" for row in values)
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())


@pytest.mark.parametrize(
    ("name", "header", "delimiter"),
    [
        ("e.csv.gz", "", ", "),
        ("e.csv", "# comments\n\n# and then\nsrc,dst\n", ","),
        ("snap.txt", "# Directed graph\n# FromNodeId ToNodeId\n", "\t"),
        ("e.txt.gz", "\n% comment\n", " "),
        ("e.txt", "src;dst\n", ";"),
    ],
)
def test_text(tmp_path, capsys, name, header, delimiter):
    text(tmp_path / name, header=header, delimiter=delimiter)
    store = convert(tmp_path / name, tmp_path / "e.gids")
    assert_dataset(store, tables={}, edges={HOMOGENEOUS: EDGES})
    assert f"assuming {N} nodes (the largest id" in capsys.readouterr().err


@pytest.mark.parametrize(
    "header", ["id,src,dst,w", "\ufeffdst,w,id,source", '"w","id","Target","SRC"', "#from to id w"]
)
def test_names_in_the_first_line_are_used(tmp_path, header):
    """Whole numbers stay exact beside fractions."""
    names = [n.strip('"') for n in header.strip("# \ufeff").replace(",", " ").split()]
    columns = dict.fromkeys(("src", "source", "SRC", "from"), EDGES[0])
    columns |= dict.fromkeys(("dst", "Target", "to"), EDGES[1])
    columns |= {"id": np.arange(E)[::-1] + (1 << 60), "w": np.arange(E) / 8}
    text(tmp_path / "e.csv", header=f"{header}\n", values=zip(*(columns[n] for n in names), strict=True))
    tables = {"_N._E._N.id": columns["id"], "_N._E._N.w": columns["w"]}
    store = convert(tmp_path / "e.csv", tmp_path / "e.gids")
    assert_dataset(store, tables=tables, edges={HOMOGENEOUS: EDGES})


def test_files_of_konect(tmp_path):
    """Comments begin with %, lines may end with a blank, and the columns have no names."""
    values = [*EDGES, np.arange(E) % 5, np.arange(E) * 3]
    lines = zip(*values[:3], (f"{v} " for v in values[3]), strict=True)
    text(tmp_path / "out.x", header="% sym positive\n% 700 90\n", delimiter=" ", values=lines)
    store = convert(tmp_path / "out.x", tmp_path / "x.gids")
    tables = {"_N._E._N.weight": values[2], "_N._E._N.time": values[3]}
    assert_dataset(store, tables=tables, edges={HOMOGENEOUS: EDGES})


def test_two_by_two_array_prints_how_it_is_read(tmp_path, capsys):
    np.save(tmp_path / "e.npy", [[0, 1], [2, 3]])
    store = convert(tmp_path / "e.npy", tmp_path / "e.gids", "--from", "edges", "--quiet")
    assert_graph(store, HOMOGENEOUS, [0, 1], [2, 3])
    assert "e.npy has shape (2, 2), read as (2, E): its first row is the sources" in capsys.readouterr().err


@pytest.mark.parametrize(
    "edges",
    [EDGES, np.asfortranarray(EDGES), np.ascontiguousarray(EDGES.T, np.int32)],
    ids=["(2, E)", "(2, E) in Fortran order", "(E, 2)"],
)
def test_npy_edges_of_either_shape_and_order(tmp_path, edges):
    np.save(tmp_path / "e.npy", edges)
    store = convert(tmp_path / "e.npy", tmp_path / "e.gids", "--from", "edges", "--num-nodes", N + 9)
    assert store.num_nodes() == N + 9
    assert_graph(store, HOMOGENEOUS, *EDGES)
