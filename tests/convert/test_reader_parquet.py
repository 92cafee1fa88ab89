"""Tables of nodes and edges in Parquet and Arrow files."""

import shutil

import numpy as np
import pytest
from reader_example import assert_dataset, assert_graph, convert, refused

from gids.convert import stream_rows
from gids.convert.arrow_table import ArrowTable
from gids.store.names import RELATION
from gids.store.rows import read_range

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
RNG = np.random.default_rng(9)
N, E = 500, 2000
EDGES = RNG.integers(0, N, (2, E))
FEAT = RNG.standard_normal((N, 6), np.float32)
HOMOGENEOUS = ("_N", "_E", "_N")


def lists(values):
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def nodes(**changes):
    columns = {
        "id": np.arange(N),
        "feat": lists(FEAT),
        "year": np.arange(N, dtype=np.int32),
        "label": pa.array([None if i % 5 == 0 else float(i % 7) for i in range(N)]),
        "train_mask": np.arange(N) < 40,
        "title": ["x"] * N,
        **{f"pos_{i}": FEAT[:, i].astype(np.float64) for i in range(3)},
        **changes,
    }
    return pa.table({name: values for name, values in columns.items() if values is not None})


def edges(**changes):
    return pa.table({"src": EDGES[0], "dst": EDGES[1], "w": np.arange(E, dtype=np.float32), **changes})


def write(root, node_table, edge_table):
    root.mkdir()
    pq.write_table(node_table, root / "nodes.parquet", row_group_size=130)
    pq.write_table(edge_table, root / "edges.parquet", row_group_size=700)
    return root


def classes():
    return np.array([-1 if i % 5 == 0 else i % 7 for i in range(N)])


def assert_homogeneous(store):
    assert_dataset(
        store,
        tables={
            "_N.feat": FEAT,
            "_N.year": np.arange(N, dtype=np.int32),
            "_N.pos": FEAT[:, :3].astype(np.float64),
            "_N._E._N.w": np.arange(E, dtype=np.float32),
        },
        edges={HOMOGENEOUS: EDGES},
        labels={"_N": classes()},
        splits={"_N": {"train": np.arange(40)}},
    )


def test_one_type(tmp_path, capsys):
    root = write(tmp_path / "p", nodes(), edges())
    assert_homogeneous(convert(root, tmp_path / "p.gids"))
    assert "left out columns of '_N': 'title': of type string" in capsys.readouterr().err


def test_arrow_files_and_all_list_types(tmp_path):
    root = tmp_path / "p"
    root.mkdir()
    table = nodes(feat=pa.array(list(FEAT), pa.list_(pa.float32())))
    for name, made in (("nodes", table), ("edges", edges())):
        with pa.OSFile(str(root / f"{name}.arrow"), "wb") as file:
            with pa.ipc.new_file(file, made.schema) as writer:
                writer.write_table(made, max_chunksize=99)
    assert_homogeneous(convert(root, tmp_path / "p.gids", "--from", "parquet"))


def test_several_types_in_several_parts(tmp_path, capsys):
    root = tmp_path / "p"
    for folder in ("nodes/paper", "edges/paper.cites.paper", "edges"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for part, rows in enumerate((slice(0, 200), slice(200, N))):
        pq.write_table(nodes().select(["feat"])[rows], root / f"nodes/paper/part-{part}.parquet")
    pq.write_table(edges(), root / "edges/paper.cites.paper/part-0.parquet")
    writes = np.stack([RNG.integers(0, 30, 90), RNG.integers(0, N, 90)])
    writes[0, 5] = 29
    author = pa.table({"source": writes[0].astype(np.int32), "target": writes[1].astype(np.int32)})
    pq.write_table(author, root / "edges/author.writes.paper.parquet")
    assert_dataset(
        convert(root, tmp_path / "p.gids"),
        tables={"paper.feat": FEAT, "paper.cites.paper.w": np.arange(E, dtype=np.float32)},
        edges={("paper", "cites", "paper"): EDGES, ("author", "writes", "paper"): writes},
    )
    assert "'author' nodes have no features and no count: assuming 30 nodes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("of_nodes", "of_edges"),
    [("nodes.parquet", "edges.parquet"), ("nodes/paper.parquet", "edges/paper.cites.paper.parquet")],
)
def test_directories_of_parts_that_are_called_like_files(tmp_path, capsys, of_nodes, of_edges):
    """As Spark writes them."""
    for name, made in ((of_nodes, nodes()), (of_edges, edges())):
        (tmp_path / "p" / name).mkdir(parents=True)
        (tmp_path / "p" / name / "_SUCCESS").touch()
        for part, rows in enumerate((slice(0, 200), slice(200, None))):
            pq.write_table(made[rows], tmp_path / "p" / name / f"part-{part}.snappy.parquet")
    store = convert(tmp_path / "p", tmp_path / "p.gids")
    [relation] = store.relations
    assert relation == (("_N", "_E", "_N") if of_nodes == "nodes.parquet" else ("paper", "cites", "paper"))
    assert_graph(store, relation, *EDGES)
    assert np.array_equal(store.table(f"{relation[0]}.feat").read_rows(range(N)).numpy(), FEAT)
    if of_nodes == "nodes/paper.parquet":
        shutil.copytree(tmp_path / "p" / of_nodes, tmp_path / "p/nodes.parquet")
        error = refused(capsys, tmp_path / "p", tmp_path / "q.gids")
        assert "nodes.parquet/part-1.snappy.parquet' would be left out" in error


def test_single_file_of_edges(tmp_path, capsys):
    for name in ("edges", "x"):
        pq.write_table(edges(), tmp_path / f"{name}.parquet")
        store = convert(tmp_path / f"{name}.parquet", tmp_path / f"{name}.gids", "--num-nodes", "600")
        assert sorted(store.tables) == ["_N._E._N.w"]
        assert store.num_nodes() == 600
        assert_graph(store, RELATION, *EDGES)
        assert (
            "parquet is an edge list, because it has columns of sources and dest" in capsys.readouterr().err
        )
    pq.write_table(edges(), tmp_path / "nodes.parquet")
    store = convert(tmp_path / "nodes.parquet", tmp_path / "n.gids")
    assert store.table("x").columns == ("src", "dst", "w")
    assert np.array_equal(store.table("x").read_rows(range(E))[:, :2].T, EDGES)
    (tmp_path / "r").mkdir()
    pq.write_table(edges(src=EDGES[0] + 0.5), tmp_path / "r/x.parquet")
    assert "must be of whole numbers, but it is of type double, and '_N' nodes have no ids" in refused(
        capsys, tmp_path / "r/x.parquet", tmp_path / "r/x.gids"
    )
    pq.write_table(nodes(), tmp_path / "r/edges.parquet")
    assert "exactly one must be named src" in refused(
        capsys, tmp_path / "r/edges.parquet", tmp_path / "r/x.gids"
    )


def test_ranges_are_read_in_any_order(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_rows, "KEPT_BYTES", 1000)
    pq.write_table(nodes(), tmp_path / "x.parquet", row_group_size=70)
    rows = ArrowTable([tmp_path / "x.parquet"]).rows(["feat"])
    rng = np.random.default_rng(2)
    for start, stop in np.sort(rng.integers(0, N + 1, (60, 2)), axis=1).tolist():
        assert np.array_equal(read_range(rows, start, stop), FEAT[start:stop])


RAGGED = pa.array([list(row[: 6 - (i == 300)]) for i, row in enumerate(FEAT)], pa.list_(pa.float32()))


@pytest.mark.parametrize(
    ("node_table", "edge_table", "message"),
    [
        (
            nodes(feat=RAGGED),
            edges(),
            "nodes.parquet, row 300 (the first is 0): 'feat' is no list of 6, as others are; correct it",
        ),
        (
            nodes(feat=pa.array([None, *map(list, FEAT[1:])], pa.list_(pa.float32()))),
            edges(),
            "row 0 (the first is 0): 'feat' is no list of 6, as others are; correct it, or",
        ),
        (
            nodes(feat=pa.array([[], *map(list, FEAT[1:])], pa.list_(pa.float32()))),
            edges(),
            "row 0 (the first is 0): 'feat' is no list of 6, as others are",
        ),
        (
            nodes(year=pa.array([*range(N - 1), None])),
            edges(),
            f"row {N - 1} (the first is 0): 'year' is null; correct it, or leave it out with --skip",
        ),
        (nodes(id=np.arange(N) + 0.3), edges(), "is of type double: ids must be text or whole numbers"),
        (nodes(), edges(src=EDGES[0] + 1), f"'src' is {N}, which no '_N' node has as its id"),
        (nodes(id=None), edges(src=EDGES[0] + 1), f"is {N}; it must be from 0 to {N - 1}"),
        (nodes(), edges(src=EDGES[0] - 1), "'src' is -1, which no '_N' node"),
        (nodes(), edges().rename_columns(["a", "dst", "w"]), "exactly one must be named src or source"),
        (nodes(), edges(source=EDGES[0]), "exactly one must be named src or source"),
        (nodes(label=np.arange(N) + 0.5), edges(), ""),
        (
            nodes(feat=None, year=None, pos_0=None, pos_1=None, pos_2=None),
            edges(src=["a"] * E),
            "it is of type string, not numbers, and '_N' nodes have no ids but 0, 1, 2",
        ),
    ],
)
def test_bad_tables_print_one_line(tmp_path, capsys, node_table, edge_table, message):
    root = write(tmp_path / "p", node_table, edge_table)
    if not message:  # labels that are not classes are not changed
        assert convert(root, tmp_path / "p.gids").labels["_N"][1] == 1.5
    else:
        assert message in refused(capsys, root, tmp_path / "x.gids")


def test_parts_with_different_columns_raise(tmp_path, capsys):
    root = write(tmp_path / "p", nodes(), edges())
    (root / "nodes.parquet").unlink()
    (root / "nodes.parquet").mkdir()
    pq.write_table(nodes(), root / "nodes.parquet/1.parquet")
    pq.write_table(nodes(year=None), root / "nodes.parquet/2.parquet")
    assert "has different columns than" in refused(capsys, root, tmp_path / "x.gids")
