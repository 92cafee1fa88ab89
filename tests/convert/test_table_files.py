"""Directories: parts of tables are in order, arrays stand beside tables, no file of data is passed over."""

import numpy as np
import pytest
from datasets import save_arrays
from reader_example import assert_dataset, assert_graph, convert, refused, write_table

from gids.convert.table_files import check_order, table_files
from gids.errors import FormatError

pytest.importorskip("pyarrow.parquet")
N, E = 24, 60
RNG = np.random.default_rng(12)
FEAT = RNG.standard_normal((N, 2), np.float32)
LABEL = np.arange(N) % 3
EDGES = RNG.integers(0, N, (2, E))
WEIGHT = np.arange(E) * 10
RELATION = ("_N", "_E", "_N")
UUIDS = ["0f8fad5b-d9cb-469f-a165-70867728950e", "1f8fad5bd9cb469fa16570867728950e"]


def write_parts(*paths, **columns):
    """A table, divided among files."""
    parts = [np.array_split(values, len(paths)) for values in columns.values()]
    for path, *values in zip(paths, *parts, strict=True):
        write_table(path, **dict(zip(columns, values, strict=True)))


def write_edges(*paths):
    write_parts(*paths, src=EDGES[0], dst=EDGES[1], w=WEIGHT)


@pytest.mark.parametrize(
    "names",
    [
        [f"part-{i}.csv" for i in range(12)],
        [f"part-{i:05d}-{UUIDS[0]}-c000.snappy.parquet" for i in range(9, 21)],
        [f"part-{i:05d}-{UUIDS[i % 2]}.parquet" for i in range(12)],
        [f"a{i // 6}/b{i % 6 + 6}/x.tsv.gz" for i in range(10, 22)],
        [f"data_{i // 3}/{UUIDS[1]}_{i}.parquet" for i in (0, 2, 3, 5, 6, 30, 31)],
    ],
)
def test_parts_are_in_the_order_of_the_numbers_in_their_names(tmp_path, names):
    for name in reversed(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [str(file.relative_to(tmp_path)) for file in table_files(tmp_path)] == names
    check_order(table_files(tmp_path))


@pytest.mark.parametrize(
    "names",
    [
        ["part-0.parquet", "part-1.parquet", "rest.parquet"],
        ["part-1.parquet", "part-01.parquet"],
        [f"part-00000-{uuid}.parquet" for uuid in UUIDS],
        ["3fa85f64.csv", "4b1c9d77.csv", "12.csv"],
        ["1/x.csv", "2/x.csv", "2/y.csv"],
    ],
)
def test_names_that_leave_the_order_open_are_refused(tmp_path, names):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(FormatError, match="no numbers in these names give the order of the parts"):
        check_order(table_files(tmp_path))


@pytest.mark.parametrize(
    ("nodes", "edges"),
    [
        ("nodes.parquet/part.{}.parquet", "edges/part_{}/x.csv"),
        ("nodes.csv/{}.csv", f"edges.pq/part-{{:04}}-{UUIDS[0]}.c000.snappy.pq"),
        ("nodes/part-{}.tsv.gz", f"edges.parquet/{{}}/{UUIDS[1]}.parquet"),
    ],
)
def test_parts_of_nodes_and_of_edges(tmp_path, nodes, edges):
    def paths(name):
        return [tmp_path / "s" / name.format(i) for i in range(3, 16)]

    write_parts(*paths(nodes), label=np.arange(N), test_mask=np.arange(N) > 3)
    write_edges(*paths(edges))
    assert_dataset(
        convert(tmp_path / "s", tmp_path / "d.gids"),
        tables={"_N._E._N.w": WEIGHT},
        edges={RELATION: EDGES},
        labels={"_N": np.arange(N)},
        splits={"_N": {"test": np.arange(4, N)}},
    )


def test_a_table_with_ids_may_have_parts_without_numbers(tmp_path):
    write_table(tmp_path / "s/nodes/part-0-b.csv", id=["n0", "n1"], label=[0, 1])
    write_table(tmp_path / "s/nodes/part-0-a.csv", id=["n2", "n3"], label=[2, 3])
    write_table(tmp_path / "s/edges.csv", src=["n0", "n3"], dst=["n1", "n2"])
    store = convert(tmp_path / "s", tmp_path / "d.gids")
    assert store.labels["_N"][store.ids().find(["n0", "n1", "n2", "n3"])].tolist() == [0, 1, 2, 3]
    assert_graph(store, RELATION, store.ids().find(["n0", "n3"]), store.ids().find(["n1", "n2"]))


@pytest.mark.parametrize(
    "edges",
    [
        ["edges.parquet"],
        ["edges.csv"],
        ["edges.parquet/part-0.parquet", "edges.parquet/part-1.parquet"],
        ["edges/part-00000-x.csv", "edges/part-00001-y.csv"],
    ],
)
def test_edges_of_a_table_beside_arrays_of_nodes(tmp_path, edges):
    save_arrays(tmp_path / "s", feat=FEAT, label=LABEL, train_idx=np.array([3, 1]))
    write_edges(*(tmp_path / "s" / name for name in edges))
    for name in ("_SUCCESS", "_metadata", ".part-0.parquet.crc", "README.txt"):
        ((tmp_path / "s" / edges[0]).parent / name).write_bytes(b"PAR1")
    more = len(edges) == 1
    if more:
        save_arrays(tmp_path / "s", edge_k=np.arange(E))
    assert_dataset(
        convert(tmp_path / "s", tmp_path / "d.gids"),
        tables={"_N.feat": FEAT, "_N._E._N.w": WEIGHT} | ({"_N._E._N.k": np.arange(E)} if more else {}),
        edges={RELATION: EDGES},
        labels={"_N": LABEL},
        splits={"_N": {"train": [3, 1]}},
    )


def test_arrays_and_tables_of_several_types(tmp_path):
    save_arrays(tmp_path / "s/nodes/paper", feat=FEAT)
    for i, rows in enumerate((slice(9), slice(9, N))):
        columns = {"label": LABEL[rows], "val_mask": LABEL[rows] >= 0}
        write_table(tmp_path / f"s/nodes/paper/part-{i}.parquet", **columns)
    write_table(tmp_path / "s/nodes/author.csv", id=["b", "a"], train_mask=[1, 0])
    write_table(tmp_path / "s/edges/author.writes.paper.csv", src=["a", "b", "a"], dst=[N - 1, 1, 0])
    write_edges(tmp_path / "s/edges/paper.cites.paper.parquet")
    save_arrays(tmp_path / "s/edges/paper.cites.paper", k=np.arange(E))
    save_arrays(tmp_path / "s/edges/paper.cited.paper", edge_index=EDGES[::-1])
    assert_dataset(
        convert(tmp_path / "s", tmp_path / "d.gids"),
        tables={"paper.feat": FEAT, "paper.cites.paper.w": WEIGHT, "paper.cites.paper.k": np.arange(E)},
        edges={
            ("author", "writes", "paper"): ([1, 0, 1], [N - 1, 1, 0]),
            ("paper", "cites", "paper"): EDGES,
            ("paper", "cited", "paper"): EDGES[::-1],
        },
        labels={"paper": LABEL},
        splits={"paper": {"val": np.arange(N)}, "author": {"train": [0]}},
    )


OTHERS = [
    *("x.parquet", "x.feather", "x.tsv.gz", "x.json", "x.pkl", "x.bin", "NODES.CSV", "labels.txt"),
    *("feat.bin", "nodes/x.npz", "edges/deep/x.pq.zst", "edges.parquet/000000_0", "part-r-0", "edge_list"),
    *("edges.parquet/0.parquet.tmp", "edges.parquet/_temporary/0/part-1.parquet", "edges.csv/a/x.ipc"),
]
NO_DATA = [
    *(".hidden.csv", ".cache/x.csv", "README.txt", "LICENSE", "notes.md", "convert.log"),
    *("__pycache__/a.pyc", "edges.parquet/_SUCCESS"),
]


def test_every_file_that_may_be_data_is_named(tmp_path, capsys):
    source = tmp_path / "s"
    save_arrays(source, feat=FEAT)
    write_edges(source / "edges.parquet/part-0.parquet")
    for name in (*OTHERS, *NO_DATA, "old/deep/a.csv"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    (source / ".#feat.npy").symlink_to("user@host")  # of an editor
    skips = ["--skip", "old"]
    while others := [name for name in OTHERS if name not in skips]:
        error = refused(capsys, source, tmp_path / "d.gids", *skips)
        assert "is read as parquet, and " in error
        left_out = [name for name in others if f"'{name}'" in error]
        assert len(left_out) == min(10, len(others))
        assert any(f"--skip {name}" in error for name in left_out)
        skips += [word for name in left_out for word in ("--skip", name)]
    for name in ("a.gids", "b.gids"):  # in the source itself, beside the first one
        assert_graph(convert(source, source / name, *skips), RELATION, *EDGES)
