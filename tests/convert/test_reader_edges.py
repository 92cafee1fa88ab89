"""Edge lists in text, .npy and raw binary, alone or beside arrays of nodes."""

import gzip

import numpy as np
import pytest
from datasets import save_arrays
from reader_example import assert_dataset, assert_graph, assert_table, convert, refused, truncate

RNG = np.random.default_rng(11)
N, E = 90, 700
EDGES = RNG.integers(0, N, (2, E))
EDGES[0, 3] = N - 1
FEAT = RNG.standard_normal((N, 5), np.float32)
HOMOGENEOUS = ("_N", "_E", "_N")


def text(path, *, header="", delimiter=",", values=EDGES.T):
    content = header + "".join(delimiter.join(map(str, row)) + "\n" for row in values)
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())


@pytest.mark.parametrize(
    ("name", "header", "delimiter"),
    [
        ("e.csv", "", ","),
        ("e.csv", "src,dst\n", ","),
        ("e.csv.gz", "", ", "),
        ("e.csv.gz", "# comments\n\n# and then\nsrc,dst\n", ","),
        ("e.tsv", "", "\t"),
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
    "header",
    [
        "id,src,dst,w",
        "\ufeffdst,w,id,source",
        '"w","id","Target","SRC"',
        "id,u,v,w",
        "# w,dst,id,src",
        "#from to id w",
        "# w;dst; id;src",
    ],
)
def test_names_in_the_first_line_are_used(tmp_path, header):
    names = [n.strip('"') for n in header.strip("# \ufeff").replace(",", " ").replace(";", " ").split()]
    columns = dict.fromkeys(("src", "source", "SRC", "u", "from"), EDGES[0])
    columns |= dict.fromkeys(("dst", "Target", "v", "to"), EDGES[1])
    columns |= {"id": np.arange(E)[::-1] + (1 << 60), "w": np.arange(E) / 8}
    text(tmp_path / "e.csv", header=f"{header}\n", values=zip(*(columns[n] for n in names), strict=True))
    tables = {"_N._E._N.id": columns["id"], "_N._E._N.w": columns["w"]}
    store = convert(tmp_path / "e.csv", tmp_path / "e.gids")
    assert_dataset(store, tables=tables, edges={HOMOGENEOUS: EDGES})


def test_files_of_konect(tmp_path):
    """Comments begin with %, lines may end with a blank, and the columns have no names."""
    values = [*EDGES, np.arange(E) % 5, np.arange(E) * 3]
    for count, tables in ((2, ()), (3, ("weight",)), (4, ("weight", "time"))):
        text(
            tmp_path / f"out.{count}",
            header="% sym positive\n% 700 90\n",
            delimiter=" ",
            values=zip(*values[: count - 1], (f"{v} " for v in values[count - 1]), strict=True),
        )
        store = convert(tmp_path / f"out.{count}", tmp_path / f"{count}.gids")
        expected = {f"_N._E._N.{name}": values[2 + i] for i, name in enumerate(tables)}
        assert_dataset(store, tables=expected, edges={HOMOGENEOUS: EDGES})


def test_text_that_has_numbers_is_refused(tmp_path, capsys):
    values = zip(*EDGES, ["a", *["b"] * (E - 1)], ["?", *range(E - 1)], strict=True)
    text(tmp_path / "e.csv", header="src,dst,kind,w\n", values=values)
    error = refused(capsys, tmp_path / "e.csv", tmp_path / "e.gids")
    assert "column 'w' of '_N._E._N': '?' is no number (" in error
    assert error.endswith("or leave it out with --skip w")
    store = convert(tmp_path / "e.csv", tmp_path / "e.gids", "--skip", "w")
    assert_dataset(store, tables={}, edges={HOMOGENEOUS: EDGES})
    assert "left out columns of '_N._E._N': 'kind': 'a' is no number" in capsys.readouterr().err


def test_column_without_a_name_is_left_out_with_a_note(tmp_path, capsys):
    """As pandas writes the index."""
    values = np.stack([np.arange(E), *EDGES[::-1], np.arange(E)], axis=1)
    text(tmp_path / "e.csv", header=",dst,src,skipped\n", values=values)
    store = convert(tmp_path / "e.csv", tmp_path / "e.gids", "--skip", "skipped")
    assert_dataset(store, tables={}, edges={HOMOGENEOUS: EDGES})
    assert "without a name, or of pandas' index: '(unnamed) 1'" in capsys.readouterr().err


def test_large_whole_numbers_stay_exact_beside_fractions(tmp_path):
    times = (1 << 60) + np.arange(E)
    values = zip(*EDGES, np.arange(E) / 8, times, strict=True)
    text(tmp_path / "e.csv", header="src,dst,w,time\n", values=values)
    store = convert(tmp_path / "e.csv", tmp_path / "e.gids")
    assert_table(store, "_N._E._N.time", times)
    assert_table(store, "_N._E._N.w", np.arange(E) / 8)


def test_two_by_two_array_prints_how_it_is_read(tmp_path, capsys):
    np.save(tmp_path / "e.npy", [[0, 1], [2, 3]])
    store = convert(tmp_path / "e.npy", tmp_path / "e.gids", "--from", "edges", "--quiet")
    assert_graph(store, HOMOGENEOUS, [0, 1], [2, 3])
    assert "e.npy has shape (2, 2), read as (2, E): its first row is the sources" in capsys.readouterr().err


@pytest.mark.parametrize("transposed", [False, True])
def test_npy_edges_of_either_shape(tmp_path, transposed):
    np.save(tmp_path / "e.npy", EDGES.T.astype(np.int32) if transposed else EDGES)
    store = convert(tmp_path / "e.npy", tmp_path / "e.gids", "--from", "edges", "--num-nodes", N + 9)
    assert store.num_nodes() == N + 9
    assert_graph(store, HOMOGENEOUS, *EDGES)


def test_edges_beside_arrays_of_nodes(tmp_path):
    save_arrays(tmp_path / "s", feat=FEAT, labels=np.arange(N) % 4, val_idx=np.array([3]))
    text(tmp_path / "s/edges.csv")
    assert_dataset(
        convert(tmp_path / "s", tmp_path / "s.gids"),
        tables={"_N.feat": FEAT},
        edges={HOMOGENEOUS: EDGES},
        labels={"_N": np.arange(N) % 4},
        splits={"_N": {"val": [3]}},
    )


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ("1,2,3,4\n", (), "has 4 columns; edges must have 2"),
        (
            "1.5,2\n",
            (),
            "e.csv has ids that are not whole numbers of int64; if the ends of edges are ids, convert",
        ),
        ("# ids\n\nsrc,dst\n0,x\n", (), "'x' is no number ("),
        ("0,1\nsrc,dst\n", (), "e.csv, row 2); if the ends of edges are ids, convert them together with a"),
        (
            "0,1\n# a comment\n2,3\n",
            (),
            "Expected 2 columns, got 1: # a comment; separate columns by",
        ),
        ("0  1\n", (), "e.csv, line 1: separate columns by one tab, comma, semicolon or blank"),
        ("1,2\n-1,2\n", (), "is -1; it must be"),
        ("1,2\n5,2\n", ("--num-nodes", "5"), "is 5; it must be from 0 to 4"),
        ("1,99999999999999999999\n", (), "e.csv has ids that are not whole numbers of int64; if"),
        ("1,2,1e400\n", (), "float64 of column 'weight' cannot hold '1e400'"),
        ("id_1,id_2\n1,2\n", (), "have the columns id_1, id_2; exactly one must be named src or source"),
        ("name,x\na,1\n", (), "if these are nodes, call the file nodes.csv, or give --id-column"),
        ("# nothing\n", (), "e.csv has no edges"),
        (
            "%%MatrixMarket matrix coordinate\n3 3 1\n1 2 .5\n",
            (),
            "is a matrix of Matrix Market",
        ),
    ],
)
def test_bad_text_prints_one_line(tmp_path, capsys, content, arguments, message):
    (tmp_path / "e.csv").write_text(content)
    assert message in refused(capsys, tmp_path / "e.csv", tmp_path / "x.gids", *arguments)


def test_other_bad_sources_print_one_line(tmp_path, capsys):
    def error(path, *arguments):
        return refused(capsys, path, tmp_path / "x.gids", *arguments)

    np.save(tmp_path / "e.npy", EDGES + 0.5)
    assert "edges must be whole numbers of shape" in error(tmp_path / "e.npy", "--from", "edges")
    np.save(tmp_path / "e.npy", EDGES.reshape(4, -1))
    assert "of shape (2, E) or (E, 2)" in error(tmp_path / "e.npy", "--from", "edges")
    text(tmp_path / "e.csv.gz")
    truncate(tmp_path / "e.csv.gz")
    assert "e.csv.gz cannot be read" in error(tmp_path / "e.csv.gz")
    (tmp_path / "d").mkdir()
    assert "must have one file edges.csv" in error(tmp_path / "d", "--from", "edges")
    save_arrays(tmp_path / "d", feat=FEAT[:9])
    text(tmp_path / "d/edges.csv")
    assert "it must be from 0 to 8" in error(tmp_path / "d")
