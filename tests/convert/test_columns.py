"""What becomes of the columns of tables: table x, labels and masks, those that are left out, ids and ends by
option, names that fail."""

import numpy as np
import pytest
from reader_example import assert_table, convert, refused, write_table

from gids import FeatureStore
from gids.cli import main
from gids.write.partition import partition

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")
pytest.importorskip("pyarrow.csv")
feather = pytest.importorskip("pyarrow.feather")


def test_a_table_of_which_no_column_is_left_is_refused(tmp_path, capsys):
    users = write_table(tmp_path / "users.csv", user_id=["a", "b"], x=[1, 2])
    follows = write_table(tmp_path / "follows.csv", follower=["a"], followed=["b"])
    error = refused(capsys, users, follows, tmp_path / "s.gids")
    assert f"{follows} has neither a column of numbers nor one of ids" in error
    assert "--id-column" in error
    assert "--src-column and --dst-column" in error
    ends = ("--src-column", "follower", "--dst-column", "followed")
    store = convert(users, follows, tmp_path / "s.gids", "--id-column", "user_id", *ends)
    assert store.num_nodes() == 2


def test_a_bad_cell_in_a_numbered_column_is_refused(tmp_path, capsys):
    nodes = write_table(
        tmp_path / "nodes.csv", x_0=[1, 2], x_1=["3", "hello"], x_2=[5, 6], a_0=["p", "q"], a_1=["r", "s"]
    )
    error = refused(capsys, nodes, tmp_path / "a.gids")
    assert f"column 'x_1' of '_N': 'hello' is no number ({nodes}, row 3)" in error
    assert "; give numbers, or leave it out with --skip x_1" in error
    store = convert(nodes, tmp_path / "a.gids", "--skip", "x_1")
    assert list(store.tables) == ["_N.x"]
    assert store.table("x").read_rows(range(2)).tolist() == [[1, 5], [2, 6]]
    assert "left out columns of '_N': 'a_0', 'a_1': 'p' is no number (" in capsys.readouterr().err


def test_labels_and_splits_that_are_text_are_refused(tmp_path, capsys):
    names = {f"t{i:02d}": ["a", "b"] for i in range(30)}
    nodes = write_table(tmp_path / "nodes.csv", x=[1, 2], **names, label=["c", "d"], split=["train", "test"])
    error = refused(capsys, nodes, tmp_path / "a.gids")
    assert f"column 'label' of '_N': 'c' is no number ({nodes}, row 2); give labels as whole numbers" in error
    assert error.endswith(", or leave it out with --skip label --skip split")
    error = refused(capsys, nodes, tmp_path / "a.gids", "--skip", "label")
    assert "give columns train_mask, val_mask and test_mask of 1 and 0, or of True and False, or" in error
    convert(nodes, tmp_path / "a.gids", "--quiet", "--skip", "label", "--skip", "split")
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("left out columns of '_N': 't00', ")


def test_a_table_alone_is_of_nodes_with_an_id_column_and_of_edges_with_ends(tmp_path):
    table = write_table(tmp_path / "t.csv", item_id=["a", "b"], src=[0, 1], dst=[1, 0])
    store = convert(table, tmp_path / "a.gids", "--id-column", "item_id")
    assert store.table("_N.x").columns == ("src", "dst")
    assert store.ids()[0] == "a"
    store = convert(table, tmp_path / "b.gids", "--src-column", "dst", "--dst-column", "src")
    assert not store.tables
    assert store.num_nodes() == 2


def test_a_table_with_ends_is_of_edges_unless_it_is_called_nodes(tmp_path, capsys):
    columns = {"src": [0, 2], "dst": [1, 0], "w": [5, 6]}
    table = write_table(tmp_path / "x.parquet", **columns)
    store = convert(table, tmp_path / "x.gids", "--num-nodes", "600")
    assert (sorted(store.tables), store.num_nodes(), store.num_edges()) == (["_N._E._N.w"], 600, 2)
    assert "parquet is an edge list, because it has columns of sources and dest" in capsys.readouterr().err
    store = convert(write_table(tmp_path / "nodes.parquet", **columns), tmp_path / "n.gids")
    assert store.table("x").columns == ("src", "dst", "w")


TYPES = {
    ".csv": ("int64", "float64", "bool"),
    ".parquet": ("bool", "int8", "uint8", "int32", "int64", "float32", "float64"),
}


@pytest.mark.parametrize("suffix", TYPES)
def test_columns_of_numbers_become_one_table_in_the_order_of_the_file(tmp_path, suffix):
    """In NumPy's common type. Columns with a meaning, series and lists are apart."""
    rng, count = np.random.default_rng(0), 9
    names = [f"c{i}_mean" for i in range(int(rng.integers(2, 14)))]
    columns = {name: rng.integers(0, 2, count).astype(rng.choice(TYPES[suffix])) for name in names}
    columns = {
        name: values + values.dtype.type(0.5) if values.dtype.kind == "f" else values
        for name, values in columns.items()
    }
    apart = {"Time": np.arange(count) * 3, "kept": rng.random(count)}
    labels, mask = {"LABEL": rng.integers(0, 3, count)}, {"Train_Mask": np.arange(count) < 4}
    series = {f"pos_{i}": rng.random(count) for i in rng.permutation(11)}
    every = {**columns, **apart, **labels, **mask, **series}
    order = rng.permutation(list(every)).tolist()
    source = write_table(tmp_path / f"s/nodes{suffix}", **{name: every[name] for name in order})
    store = convert(source, tmp_path / "a.gids", *["--from", suffix[1:], "--separate", "kept"])
    x = [columns[name] for name in order if name in columns]
    expected = {
        "_N.x": np.stack(x, axis=1).astype(np.result_type(*x)),
        "_N.pos": np.stack([series[f"pos_{i}"] for i in range(11)], axis=1),
        **{f"_N.{name}": values for name, values in apart.items()},
    }
    assert sorted(store.tables) == sorted(expected)
    for name, values in expected.items():
        assert_table(store, name, values)
    assert store.table("x").columns == tuple(name for name in order if name in columns)
    assert store.table("pos").columns == tuple(f"pos_{i}" for i in range(11))
    assert store.labels["_N"].tolist() == labels["LABEL"].tolist()
    assert store.split("train").tolist() == [0, 1, 2, 3]


def test_x_keeps_its_columns_wherever_it_goes(tmp_path, capsys):
    columns = {"age": [1.5, 2.5, 3.5], "height": [4, 5, 6]}
    nodes = write_table(tmp_path / "s/nodes.csv", id=["a", "b", "c"], label=[0, 1, 0], **columns)
    write_table(tmp_path / "s/edges.csv", src=["a", "b"], dst=["b", "c"], w=[0.5, 1.5], kind=[1, 2])
    store = convert(tmp_path / "s", tmp_path / "a.gids")
    assert sorted(store.tables) == ["_N._E._N.kind", "_N._E._N.w", "_N.x"], "those of edges have their names"
    path = str(tmp_path / "a.gids")
    assert main(["info", path]) == 0
    assert "\n    columns: age, height\n" in capsys.readouterr().out
    changed = convert(path, tmp_path / "b.gids", "--dtype", "float32", "--order", "degree")
    assert changed.table("_N.x").columns == ("age", "height")
    assert main(["verify", str(changed.path), "--against", str(tmp_path / "s"), "--quiet"]) == 0
    partition(tmp_path / "a.gids", tmp_path / "parts", 2)
    assert FeatureStore(tmp_path / "parts/part-001.gids").table("_N.x").columns == ("age", "height")
    assert main(["export", path, "_N.x", str(tmp_path / "out.csv")]) == 0
    again = convert(tmp_path / "out.csv", tmp_path / "again.gids")
    assert again.table("x").columns == ("age", "height")
    assert_table(again, "_N.x", np.array([*columns.values()], np.float64).T)
    write_table(nodes, id=["a", "b", "c"], label=[0, 1, 0], height=[1.5, 2.5, 3.5], age=[4, 5, 6])
    capsys.readouterr()
    assert main(["verify", path, "--against", str(tmp_path / "s"), "--quiet"]) == 1
    assert "has the columns ('age', 'height'), in the source ('height', 'age')" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("columns", "options", "tables"),
    [
        ({"x_0": [1, 2], "x_1": [1.5, 2], "age": [3, 4]}, (), {"x": (2, 2), "age": (2,)}),
        ({"x": [1, 2], "age": [3, 4]}, ("--separate", "x"), {"x": (2,), "age": (2,)}),
        ({"feat": [[1, 2], [3, 4]], "a": [1, 2], "b": [3, 4]}, (), {"feat": (2, 2), "columns": (2, 2)}),
        ({"pos": [1, 2], "pos_0": [1, 2], "pos_1": [3, 4]}, (), {"x": (2, 1), "pos": (2, 2)}),
        ({"a": [1, 2], "b_1": [1, 2], "b_2": [3, 4], "split": [0, 1]}, (), {"x": (2, 3), "split": (2,)}),
        ({"a": [1, 2], "__index_level_0__": [5, 6], "Unnamed: 0": [5, 6]}, (), {"a": (2,)}),
    ],
)
def test_names_of_tables_of_columns(tmp_path, columns, options, tables):
    store = convert(write_table(tmp_path / "nodes.parquet", **columns), tmp_path / "a.gids", *options)
    found = {t.key: (t.row_count, *t.shape) for t in store.tables.values()}
    assert found == tables


DAYS = pa.array([1, 2], pa.timestamp("us"))


@pytest.mark.parametrize(
    ("suffix", "columns", "message"),
    [
        (".csv", {"emb": ["[0.5, 1]", "[1, 2]"]}, "'[0.5, 1]' is no number"),
        (".csv", {"emb": ["2020-01-01 10:00:00", "2020-01-02"]}, "' is no number"),
        (".parquet", {"emb": [["a", "1"], ["0.5", "2"]]}, "not numbers, such as '0.5 2'"),
        (".parquet", {"emb": ["[0.5 1]", "x"]}, "of type string, not numbers, such as '[0.5 1]'"),
        (".parquet", {"emb": pa.array([[], None], pa.list_(pa.int8()))}, "'emb' is empty, as all lists are"),
        (".parquet", {"emb": DAYS}, "of type timestamp[us], not numbers"),
        (
            ".parquet",
            {"emb": [(1 << 53) + 1, 2], "a": [0.5, 1]},
            "'emb' has digits that float64 lacks (--separate emb",
        ),
    ],
)
def test_numbers_that_cannot_be_converted_are_refused_with_the_option(
    tmp_path, capsys, suffix, columns, message
):
    source = write_table(tmp_path / f"nodes{suffix}", x=[1, 2], name=["a", "b"], **columns)
    error = refused(capsys, source, tmp_path / "a.gids", "--from", suffix[1:])
    assert message in error
    assert error.endswith("--skip emb")
    assert "_N.x" in convert(source, tmp_path / "a.gids", "--skip", "emb", "--from", suffix[1:]).tables


@pytest.mark.parametrize(
    ("suffix", "label", "mask"),
    [
        (".parquet", pa.array([3, None, 1, None], pa.uint8()), pa.array([1, None, 0, 0], pa.int8())),
        (".parquet", [[3], [None], [1], [None]], [True, None, False, None]),
        (".parquet", pa.array([3, None, 1, None]).dictionary_encode(), pa.array([1.0, None, 0, 0])),
        (".csv", [3, "", 1, "NA"], [True, "", "False", "null"]),
    ],
)
def test_nulls_among_labels_and_masks_are_none_and_counted(tmp_path, capsys, suffix, label, mask):
    columns = {"age": [0, 1, 2, 3], "Label": label, "train_mask": mask}
    source = write_table(tmp_path / f"nodes{suffix}", **columns)
    store = convert(source, tmp_path / "a.gids", "--from", suffix[1:])
    assert store.labels["_N"].reshape(-1).tolist() == [3, -1, 1, -1]
    assert store.split("train").tolist() == [0]
    assert "'Label' of '_N' has 2 nulls in 4 rows: no label" in capsys.readouterr().err


def test_missing_values_of_a_csv_file_are_nan_and_text_ids_stay(tmp_path):
    source = write_table(tmp_path / "nodes.csv", id=["NA", "null", "c"], x=["NA", 2, ""], y=[0, "nan", 1])
    store = convert(source, tmp_path / "a.gids")
    assert store.ids()[:] == ["NA", "null", "c"]
    assert store.table("x").read_rows(range(3)).isnan().tolist() == [True, False, True]
    assert store.labels["_N"].tolist() == [0, -1, 1]


def test_parts_may_have_their_columns_in_another_order(tmp_path):
    parts = tmp_path / "s/nodes.arrow"
    parts.mkdir(parents=True)
    feather.write_feather(pa.table({"b": [1, 2], "t": ["p", "q"], "a": [3, 4]}), parts / "0.arrow")
    feather.write_feather(pa.table({"a": [7], "b": [9], "t": ["r"]}), parts / "1.arrow")
    x = convert(tmp_path / "s", tmp_path / "a.gids").table("x")
    assert (x.columns, x.read_rows(range(3)).tolist()) == (("b", "a"), [[1, 3], [2, 4], [9, 7]])


def test_semicolons_and_comments_in_tables(tmp_path):
    (tmp_path / "nodes.csv").write_text("% of KONECT\n# id;x;label\na;1;0\nb;2;1\n")
    (tmp_path / "edges.csv").write_text("% asym weighted\nsrc;dst\na;b\n")
    store = convert(tmp_path / "nodes.csv", tmp_path / "edges.csv", tmp_path / "a.gids")
    assert store.ids()[:] == ["a", "b"]
    assert store.table("_N.x").read_rows([0, 1]).tolist() == [1, 2]
    assert store.graph().indices.tolist() == [0]
