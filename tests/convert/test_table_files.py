"""Directories: parts of tables are in order, arrays stand beside tables, no file of data is passed over."""

import numpy as np
import pytest
from datasets import save_arrays
from reader_example import assert_dataset, assert_graph, convert, refused, write_csv

from gids.convert.table_files import check_order, table_files
from gids.errors import FormatError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
N, E = 24, 60
RNG = np.random.default_rng(12)
FEAT = RNG.standard_normal((N, 2), np.float32)
LABEL = np.arange(N) % 3
EDGES = RNG.integers(0, N, (2, E))
WEIGHT = np.arange(E) * 10
RELATION = ("_N", "_E", "_N")
UUIDS = ["0f8fad5b-d9cb-469f-a165-70867728950e", "1f8fad5bd9cb469fa16570867728950e"]


def write(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".parquet", ".pq"):
        pq.write_table(pa.table(columns), path)
    else:
        write_csv(path, **columns)


def write_edges(*paths):
    """The edges, divided among files."""
    for path, rows in zip(paths, np.array_split(np.arange(E), len(paths)), strict=True):
        write(path, src=EDGES[0, rows], dst=EDGES[1, rows], w=WEIGHT[rows])


@pytest.mark.parametrize(
    "names",
    [
        [f"part.{i}.parquet" for i in range(12)],
        [f"part-{i}.csv" for i in range(12)],
        [f"part-{i:05d}-{UUIDS[0]}-c000.snappy.parquet" for i in range(9, 21)],
        [f"part-{i:05d}-{UUIDS[i % 2]}.parquet" for i in range(12)],
        [f"{i}.pq" for i in range(98, 110)],
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
        ["a.parquet", "b.parquet"],
        ["part-0.parquet", "part-1.parquet", "rest.parquet"],
        ["part-1.parquet", "part-01.parquet"],
        [f"{uuid}.parquet" for uuid in UUIDS],
        [f"part-00000-{uuid}.parquet" for uuid in UUIDS],
        ["3fa85f64.csv", "4b1c9d77.csv", "12.csv"],
        ["1/x.csv", "2/x.csv", "2/y.csv"],
        ["part-0.parquet", "more/part-1.parquet"],
    ],
)
def test_names_that_leave_the_order_open_are_refused(tmp_path, names):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(FormatError, match="no numbers in these names give the order of the parts"):
        check_order(table_files(tmp_path))


@pytest.mark.parametrize("seed", range(6))
def test_drawn_parts_of_nodes_and_of_edges(tmp_path, seed):
    draw = np.random.default_rng(seed)
    tables = {
        "nodes": {"label": np.arange(N), "test_mask": np.arange(N) > 3},
        "edges": {"w": WEIGHT, "dst": EDGES[1], "src": EDGES[0]},
    }
    for table, columns in tables.items():
        suffix, count = draw.choice([".parquet", ".pq", ".csv", ".tsv.gz"]), draw.integers(11, 20)
        names = [
            "part.{}",
            f"part-{{:04}}-{UUIDS[0]}.c000.snappy",
            "part_{}/x",
            f"{{}}/{UUIDS[1]}",
            "{}",
            "x{}.y",
        ]
        in_folder = draw.random() < 0.5
        name = draw.choice(names[:3] if in_folder else names)
        parts = np.array_split(np.arange(len(columns[next(iter(columns))])), count)
        for i in draw.permutation(count):
            file = (table if in_folder else table + suffix) + "/" + name.format(i + seed) + suffix
            write(tmp_path / "s" / file, **{key: values[parts[i]] for key, values in columns.items()})
    assert_dataset(
        convert(tmp_path / "s", tmp_path / "d.gids"),
        tables={"_N._E._N.w": WEIGHT},
        edges={RELATION: EDGES},
        labels={"_N": np.arange(N)},
        splits={"_N": {"test": np.arange(4, N)}},
    )


def test_only_a_table_with_ids_may_have_parts_without_numbers(tmp_path, capsys):
    write(tmp_path / "s/nodes/part-0-b.csv", id=["n0", "n1"], label=[0, 1])
    write(tmp_path / "s/nodes/part-0-a.csv", id=["n2", "n3"], label=[2, 3])
    write(tmp_path / "s/edges.csv", src=["n0", "n3"], dst=["n1", "n2"])
    store = convert(tmp_path / "s", tmp_path / "d.gids")
    assert store.labels["_N"][store.ids().find(["n0", "n1", "n2", "n3"])].tolist() == [0, 1, 2, 3]
    assert_graph(store, RELATION, store.ids().find(["n0", "n3"]), store.ids().find(["n1", "n2"]))
    for name in ("a", "b"):
        write(tmp_path / f"s/nodes/part-0-{name}.csv", label=[0, 1])
    error = refused(capsys, tmp_path / "s", tmp_path / "e.gids")
    assert "s/nodes/part-0-a.csv and " in error
    assert (
        "call them part-0, part-1, …, or give the table of nodes a column of ids, and choose it with" in error
    )


@pytest.mark.parametrize(
    "edges",
    [
        ["edges.parquet"],
        ["edges.pq"],
        ["edges.csv"],
        ["edges.parquet/part-0.parquet", "edges.parquet/part-1.parquet"],
        ["edges.csv/a0/part.csv.gz", "edges.csv/a1/part.csv.gz"],
        ["edges/part-0.parquet", "edges/part-1.parquet"],
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


def test_arrays_and_tables_of_one_type(tmp_path):
    write(tmp_path / "s/nodes.parquet", id=np.arange(N), label=LABEL, train_mask=np.arange(N) < 2)
    save_arrays(tmp_path / "s", feat=FEAT, edge_index=EDGES, edge_w=WEIGHT)
    assert_dataset(
        convert(tmp_path / "s", tmp_path / "d.gids"),
        tables={"_N.feat": FEAT, "_N._E._N.w": WEIGHT},
        edges={RELATION: EDGES},
        labels={"_N": LABEL},
        splits={"_N": {"train": [0, 1]}},
    )


def test_arrays_and_tables_of_several_types(tmp_path):
    save_arrays(tmp_path / "s/nodes/paper", feat=FEAT)
    for i, rows in enumerate((slice(9), slice(9, N))):
        write(tmp_path / f"s/nodes/paper/part-{i}.parquet", label=LABEL[rows], val_mask=LABEL[rows] >= 0)
    write(tmp_path / "s/nodes/author.csv", id=["b", "a"], train_mask=[1, 0])
    write(tmp_path / "s/edges/author.writes.paper.csv", src=["a", "b", "a"], dst=[N - 1, 1, 0])
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


def test_types_may_be_called_as_parts_are(tmp_path):
    for ntype in ("part1", "part2"):
        write(tmp_path / f"s/nodes/{ntype}.csv", x=[0.5, 1.5])
    write(tmp_path / "s/edges/part1.to.part2.csv", src=[0, 1], dst=[1, 1])
    assert_dataset(
        convert(tmp_path / "s", tmp_path / "d.gids"),
        tables={f"{ntype}.x": np.array([0.5, 1.5]) for ntype in ("part1", "part2")},
        edges={("part1", "to", "part2"): ([0, 1], [1, 1])},
    )


@pytest.fixture
def source(tmp_path):
    """A directory of a table of edges beside arrays of nodes."""
    save_arrays(tmp_path / "s", feat=FEAT)
    write_edges(tmp_path / "s/edges.parquet/part-0.parquet")
    return tmp_path / "s"


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            lambda s: write(s / "edges.parquet/part-0.parquet", src=["a"], dst=["b"]),
            "must be of whole numbers, but it is of type",
        ),
        (
            lambda s: write(s / "nodes.csv", id=np.arange(N)[::-1]),
            "by which the arrays beside it number nodes",
        ),
        (lambda s: write(s / "nodes.csv", id=[f"n{i}" for i in range(N)]), "has ids other than 0, 1, 2, …"),
        (
            lambda s: (s / "edges.parquet/part-1.parquet").symlink_to("nowhere"),
            "part-1.parquet is a link to a file that is missing: get the file, or remove the link",
        ),
        (lambda s: save_arrays(s, edge_index=EDGES), "has a second graph '_N._E._N': keep one"),
    ],
)
def test_arrays_and_tables_that_do_not_fit_are_refused(tmp_path, capsys, source, harm, message):
    harm(source)
    assert message in refused(capsys, source, tmp_path / "d.gids")


def test_a_graph_of_one_type_between_nodes_of_another_is_refused(tmp_path, capsys, source):
    write(source / "nodes/author.csv", label=LABEL)
    write_edges(source / "edges/author.knows.author.parquet")
    (source / "edges.parquet").rename(tmp_path / "edges.parquet")
    assert "and 'feat.npy' would be left out" in refused(capsys, source, tmp_path / "d.gids")
    (tmp_path / "edges.parquet").rename(source / "edges.parquet")
    (source / "edges/author.knows.author.parquet").unlink()
    (source / "nodes/paper").mkdir(parents=True)
    (source / "feat.npy").rename(source / "nodes/paper/feat.npy")
    error = refused(capsys, source, tmp_path / "d.gids")
    assert "part-0.parquet does not say which types of nodes its edges join" in error


def test_a_second_array_of_labels_is_refused(tmp_path, capsys, source):
    save_arrays(source, label=LABEL)
    write(source / "nodes.csv", label=LABEL)
    assert "is a second array of labels: keep one" in refused(capsys, source, tmp_path / "d.gids")


OTHERS = [
    *(
        f"x.{suffix}"
        for suffix in ("parquet", "pq", "arrow", "feather", "csv", "tsv.gz", "json", "jsonl", "orc")
    ),
    *(f"x.{suffix}" for suffix in ("avro", "pkl", "bin", "csv.bz2", "zst", "snappy")),
    *("NODES.CSV", "labels.txt", "feat.bin", "nodes/x.npz", "edges/deep/x.pq.zst", "edges.parquet/000000_0"),
    *("links.txt", "cora.cites", "part-r-00000", "edges.tar.gz", "edge_list", "feat.zarr/0.0"),
    *("edges.parquet/part-r-00000", "edges.parquet/0_copy_1", "edges.parquet/part-0.parquet.tmp"),
    *("edges.parquet/part-1.jsonl", "edges.parquet/_temporary/0/part-1.parquet", "edges.csv/a/x.ipc"),
]


def test_every_file_that_may_be_data_is_named(tmp_path, capsys, source):
    for other in OTHERS:
        (source / other).parent.mkdir(parents=True, exist_ok=True)
        (source / other).touch()
    for other in OTHERS:
        skips = [word for name in OTHERS if name != other for word in ("--skip", name)]
        error = refused(capsys, source, tmp_path / "d.gids", *skips)
        assert f"is read as parquet, and '{other}' would be left out" in error
        assert f"--skip {other}" in error
    names = ("old", *OTHERS)
    (source / "old/deep").mkdir(parents=True)
    (source / "old/deep/a.csv").touch()
    for name in (
        ".hidden.csv",
        ".cache/x.csv",
        "README.txt",
        "LICENSE",
        "notes.md",
        "convert.log",
        "__pycache__/a.pyc",
        "edges.parquet/_SUCCESS",
    ):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).touch()
    (source / ".#feat.npy").symlink_to("user@host")  # of an editor
    for name in ("a.gids", "b.gids"):  # in the source itself, beside the first one
        skips = [word for name in names for word in ("--skip", name)]
        assert_graph(convert(source, source / name, *skips), RELATION, *EDGES)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            "edges.parquet/_delta_log/00000.json",
            "is of a Delta or Hudi table, of which some files may be outd",
        ),
        ("_delta_log/00000.json", "is of a Delta or Hudi table"),
        (
            "edges.parquet/.hoodie/hoodie.properties",
            "write its rows to Parquet files with the library of such",
        ),
        (
            "edges.parquet/metadata/v1.metadata.json",
            "'edges.parquet/metadata/v1.metadata.json' would be left",
        ),
        (
            "edges.parquet/day=2/part-0.parquet",
            "s/edges.parquet/day=2/part-0.parquet is in a folder KEY=VALUE",
        ),
        ("nodes/lang=en/part-0.csv", "s/nodes/lang=en/part-0.csv is in a folder KEY=VALUE"),
    ],
)
def test_folders_and_versions_of_table_formats_are_refused(tmp_path, capsys, source, other, message):
    (source / other).parent.mkdir(parents=True)
    (source / other).touch()
    assert message in refused(capsys, source, tmp_path / "d.gids")
