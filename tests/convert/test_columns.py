"""What becomes of the columns of tables: those that are left out, ids and ends by option, names that fail."""

import pytest
from reader_example import convert, refused, write_csv

pytest.importorskip("pyarrow.csv")


def test_a_table_of_which_no_column_is_left_is_refused(tmp_path, capsys):
    users = write_csv(tmp_path / "users.csv", user_id=["a", "b"], x=[1, 2])
    follows = write_csv(tmp_path / "follows.csv", follower=["a"], followed=["b"])
    error = refused(capsys, users, follows, tmp_path / "s.gids")
    assert f"{follows} has neither a column of numbers nor one of ids" in error
    assert "--id-column" in error
    assert "--src-column and --dst-column" in error
    ends = ("--src-column", "follower", "--dst-column", "followed")
    store = convert(users, follows, tmp_path / "s.gids", "--id-column", "user_id", *ends)
    assert store.num_nodes() == 2


def test_a_bad_cell_in_a_numbered_column_is_refused(tmp_path, capsys):
    nodes = write_csv(
        tmp_path / "nodes.csv", x_0=[1, 2], x_1=["3", "hello"], x_2=[5, 6], a_0=["p", "q"], a_1=["r", "s"]
    )
    error = refused(capsys, nodes, tmp_path / "a.gids")
    assert f"column 'x_1' of '_N': 'hello' is no number ({nodes}, row 3)" in error
    assert "; give numbers, or leave it out with --skip x_1" in error
    store = convert(nodes, tmp_path / "a.gids", "--skip", "x_1")
    assert list(store.tables) == ["_N.x"]
    assert store.table("x").read_rows(range(2)).tolist() == [[1, 5], [2, 6]]
    assert "left out columns of '_N': 'a_0', 'a_1': 'p' is no number (" in capsys.readouterr().err
    store = convert(nodes, tmp_path / "c.gids", "--skip", "x_1", "--skip", "x_2")  # one is left
    assert store.table("x").read_rows(range(2)).tolist() == [[1], [2]]
    assert "--skip y: " in refused(capsys, nodes, tmp_path / "b.gids", "--skip", "x_1", "--skip", "y")


def test_labels_and_splits_that_are_text_are_refused(tmp_path, capsys):
    names = {f"t{i:02d}": ["a", "b"] for i in range(30)}
    nodes = write_csv(tmp_path / "nodes.csv", x=[1, 2], **names, label=["c", "d"], split=["train", "test"])
    error = refused(capsys, nodes, tmp_path / "a.gids")
    assert f"column 'label' of '_N': 'c' is no number ({nodes}, row 2); give labels as whole numbers" in error
    assert error.endswith(", or leave it out with --skip label --skip split")
    error = refused(capsys, nodes, tmp_path / "a.gids", "--skip", "label")
    assert "give columns train_mask, val_mask and test_mask of 1 and 0, or of True and False, or" in error
    convert(nodes, tmp_path / "a.gids", "--quiet", "--skip", "label", "--skip", "split")
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("left out columns of '_N': 't00', ")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_alone_is_of_nodes_with_an_id_column_and_of_edges_with_ends(tmp_path, capsys, suffix):
    table = write_csv(tmp_path / "t.csv", item_id=["a", "b"], src=[0, 1], dst=[1, 0])
    if suffix == ".parquet":
        pa, pq = pytest.importorskip("pyarrow.csv"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.read_csv(table), table := tmp_path / "t.parquet")
    store = convert(table, tmp_path / "a.gids", "--id-column", "item_id")
    assert store.table("_N.x").columns == ("src", "dst")
    assert store.ids()[0] == "a"
    store = convert(table, tmp_path / "b.gids", "--src-column", "dst", "--dst-column", "src")
    assert not store.tables
    assert store.num_nodes() == 2
    assert "have the columns item_id, src, dst; exactly one must be named 'from'" in refused(
        capsys, table, tmp_path / "c.gids", "--src-column", "from"
    )
