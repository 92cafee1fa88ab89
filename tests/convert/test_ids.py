"""Ids of nodes that are text, or whole numbers with gaps. The model is a dictionary from id to node."""

import contextlib

import numpy as np
import pytest
import torch
from reader_example import convert, refused, write_table

import gids
from gids.cli import main
from gids.store import FeatureStore
from gids.write import DatasetWriter
from gids.write.partition import partition

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("pyarrow.csv")
RNG = np.random.default_rng(23)
N, E = 120, 400
TEXTS = [f"ü{i * 7919 % 100_003}" + "x" * (i % 19) for i in range(N)]
TEXTS[5], TEXTS[6], TEXTS[7] = "NA", "007", 'a,"b"'
NUMBERS = (RNG.permutation(10 * N)[:N] * 1_000_003 - (1 << 40)).tolist()
NUMBERS[11], NUMBERS[12] = -(1 << 63), (1 << 63) - 1
FEAT = RNG.standard_normal((N, 3), np.float32)
ENDS = RNG.integers(0, N, (2, E))
WEIGHT = RNG.standard_normal(E, np.float32)
IDS = {"text": TEXTS, "numbers": NUMBERS}


def write_nodes(folder, ids, suffix=".csv", name="nodes"):
    features = {f"x_{i}": FEAT[: len(ids), i] for i in range(3)}
    return write_table(folder / f"{name}{suffix}", id=ids, **features)


def write_edges(folder, sources, destinations, suffix=".csv", name="edges"):
    columns = {"src": sources, "dst": destinations, "w": WEIGHT[: len(sources)]}
    return write_table(folder / f"{name}{suffix}", **columns)


def named(ids, nodes):
    return [ids[node] for node in nodes.tolist()]


def assert_edges(store, relation, model, edges):
    """edges: (source id, destination id, weight). model: node type -> dictionary from id to node."""
    graph, weights = store.graph(relation), store.find_table("edge", relation, "w")
    expected = [(model[relation[0]][s], model[relation[2]][d], w) for s, d, w in edges]
    order = np.argsort([d for _, d, _ in expected], kind="stable")
    assert graph.indices.tolist() == [expected[i][0] for i in order]
    counts = np.bincount([d for _, d, _ in expected], minlength=store.num_nodes(relation[2]))
    assert np.diff(graph.indptr).tolist() == counts.tolist()
    found = weights.read_rows(range(len(expected))).numpy()
    assert np.array_equal(found.astype(np.float32), np.array([w for _, _, w in expected], np.float32))


def assert_ids(store, ntype, ids):
    stored = store.ids(ntype)
    assert len(stored) == len(ids)
    assert list(stored[:]) == ids
    assert list(stored[7:90:3]) == ids[7:90:3]
    assert repr(stored[3]) == repr(ids[3])
    assert stored[-1] == ids[-1]
    nodes = torch.tensor([9, 2, 9, 0])
    assert list(stored[nodes]) == [ids[i] for i in nodes]
    assert stored.find([ids[i] for i in nodes]).tolist() == nodes.tolist()
    assert stored.find(ids).tolist() == list(range(len(ids)))
    with pytest.raises(KeyError, match=f"no '{ntype}' node has the id"):
        stored.find(["nobody" if stored.is_text else 17])


@pytest.mark.parametrize(("kind", "suffix"), [("text", ".csv"), ("numbers", ".tsv.gz"), ("text", ".parquet")])
def test_edges_name_the_nodes_of_one_type(tmp_path, kind, suffix):
    ids = IDS[kind]
    nodes = write_nodes(tmp_path / "s", ids, suffix)
    edges = write_edges(tmp_path / "s", named(ids, ENDS[0]), named(ids, ENDS[1]), suffix)
    model = {"_N": {id_: node for node, id_ in enumerate(ids)}}
    for number, sources in enumerate(([edges, nodes], [tmp_path / "s"])):
        store = convert(*sources, tmp_path / f"{number}.gids")
        assert_ids(store, "_N", ids)
        expected = zip(named(ids, ENDS[0]), named(ids, ENDS[1]), WEIGHT, strict=True)
        assert_edges(store, ("_N", "_E", "_N"), model, list(expected))
        assert sorted(store.tables) == ["_N._E._N.w", "_N.x"]


def typed(folder):
    """Papers with ids that are text, authors with numbers, venues with positions and without a table."""
    write_nodes(folder / "nodes", TEXTS, name="paper")
    write_nodes(folder / "nodes", NUMBERS[:40], name="author")
    edges = {
        ("author", "writes", "paper"): (named(NUMBERS, ENDS[0] % 40), named(TEXTS, ENDS[1])),
        ("paper", "cites", "paper"): (named(TEXTS, ENDS[0]), named(TEXTS, ENDS[1])),
        ("paper", "in", "venue"): (named(TEXTS, ENDS[0]), (ENDS[1] % 9).tolist()),
    }
    for relation, (sources, destinations) in edges.items():
        write_edges(folder / "edges", sources, destinations, name=".".join(relation))
    return edges


MODEL = {
    "paper": {id_: node for node, id_ in enumerate(TEXTS)},
    "author": {id_: node for node, id_ in enumerate(NUMBERS[:40])},
    "venue": {node: node for node in range(9)},
}


def assert_typed(store, edges):
    assert_ids(store, "paper", TEXTS)
    stored = store.ids("author")
    assert not stored.is_text
    assert stored[:].dtype == np.int64
    assert stored[:].tolist() == NUMBERS[:40]
    assert store.ids("venue")[:].tolist() == list(range(9))  # node numbers
    assert store.ids("venue").find([8, 0]).tolist() == [8, 0]
    for relation, (sources, destinations) in edges.items():
        assert_edges(store, relation, MODEL, list(zip(sources, destinations, WEIGHT, strict=True)))


def test_edges_name_the_nodes_of_several_types_and_ids_stay_when_a_dataset_is_changed(tmp_path, capsys):
    edges = typed(tmp_path / "s")
    store = convert(tmp_path / "s", tmp_path / "a.gids")
    assert_typed(store, edges)
    files = [p for p in sorted((tmp_path / "s").rglob("*.*")) if p.is_file()]
    assert convert(*files, tmp_path / "files.gids").content_crc == store.content_crc
    changed = convert(tmp_path / "a.gids", tmp_path / "b.gids", "--order", "degree")
    assert changed.table("paper.x").order is not None
    assert_typed(changed, edges)
    assert np.array_equal(changed.table("paper.x").read_rows(range(N)), FEAT.astype(np.float64))
    assert main(["info", str(tmp_path / "b.gids")]) == 0
    assert "  paper  120  ids text" in capsys.readouterr().out
    for against in ("a.gids", "s"):
        assert main(["verify", str(tmp_path / "b.gids"), "--against", str(tmp_path / against)]) == 0
        assert "ids of 'author' nodes: equal" in capsys.readouterr().err
    partition(tmp_path / "b.gids", tmp_path / "parts", 2)
    assert main(["verify", str(tmp_path / "parts"), "--quiet"]) == 0
    assert_ids(FeatureStore(tmp_path / "parts/part-001.gids"), "paper", TEXTS)


def test_an_edge_to_an_unknown_node_is_refused_with_its_line(tmp_path, capsys):
    write_table(tmp_path / "s/nodes.csv", id=["a", "b", "c d"], x=[1, 2, 3])
    edges = tmp_path / "s/edges.csv"
    edges.write_text('\nsrc,dst,note\na,b,"two\nlines"\n\n"c d",a,\nb,zz,\n')
    error = refused(capsys, tmp_path / "s", tmp_path / "a.gids")
    assert f"{edges}, row 5: 'dst' is 'zz', which no '_N' node has as its id" in error
    edges.write_text("src,dst\na,b\n,a\n")
    assert "row 3: 'src' is empty, which no" in refused(capsys, tmp_path / "s", tmp_path / "a.gids")
    parts = tmp_path / "p/edges/n.to.n"
    write_table(tmp_path / "p/nodes/n.parquet", node_id=[70, 10], x=[1, 2])
    write_table(parts / "0.parquet", src=[70, 10], dst=[10, 10])
    write_table(parts / "1.parquet", src=[70, 70], dst=[10, 11])
    error = refused(capsys, tmp_path / "p", tmp_path / "a.gids")
    assert f"{parts}/1.parquet, row 1 (the first is 0): 'dst' is 11, which no 'n' node" in error


def test_edges_to_unknown_nodes_are_dropped_and_counted(tmp_path, capsys):
    """Also their features. The other edges get the ids 0, 1, 2, …"""
    write_nodes(tmp_path / "s", TEXTS[:80])
    write_edges(tmp_path / "s", named(TEXTS, ENDS[0]), named(TEXTS, ENDS[1]))
    kept = [
        (TEXTS[s], TEXTS[d], w) for s, d, w in zip(*ENDS.tolist(), WEIGHT, strict=True) if s < 80 and d < 80
    ]
    store = convert(tmp_path / "s", tmp_path / "a.gids", "--drop-unknown")
    assert f"dropped {E - len(kept)} of {E} edges '_N._E._N', whose ends" in capsys.readouterr().err
    assert_edges(store, ("_N", "_E", "_N"), {"_N": {id_: i for i, id_ in enumerate(TEXTS)}}, kept)


@pytest.mark.parametrize(
    ("suffix", "ids", "end", "other"),
    [
        (".csv", ["0", "1", "2"], "02", "2"),  # node numbers
        (".parquet", ["0", "24", "25"], "25.0", "25"),
        (".parquet", ["a", "025", "7"], "25", "025"),
        (".csv", ["7", "doi/B", "a "], "DOI/b", "doi/B"),
        (".csv", ["a", "b", "7"], "77", None),
    ],
)
def test_an_unknown_id_is_named_with_the_id_that_it_resembles(tmp_path, capsys, suffix, ids, end, other):
    """And --drop-unknown may not drop all edges."""
    write_table(tmp_path / f"s/nodes{suffix}", id=ids, age=[1, 2, 3])
    write_table(tmp_path / f"s/edges{suffix}", src=[ids[0], ids[0]], dst=[ids[0], end])
    hint = f"'dst' is {end!r}, which no '_N' node has as its id{f', but one has {other!r}' if other else ''}"
    assert f"{hint}: write ids as in the table of" in refused(capsys, tmp_path / "s", tmp_path / "a.gids")
    store = convert(tmp_path / "s", tmp_path / "a.gids", "--drop-unknown")
    assert store.num_edges() == 1
    assert f"dropped 1 of 2 edges '_N._E._N', whose ends no nodes have as their ids, such as {tmp_path}" in (
        capsys.readouterr().err
    )
    write_table(tmp_path / f"s/edges{suffix}", src=[end, "zz"], dst=[end, "zz"])
    error = refused(capsys, tmp_path / "s", tmp_path / "b.gids", "--drop-unknown")
    assert "--drop-unknown would drop all 2 edges '_N._E._N': " in error
    assert hint.replace("dst", "src") in error


@pytest.mark.parametrize(("kind", "suffix"), [("text", ".csv"), ("numbers", ".parquet")])
def test_an_id_of_two_nodes_is_refused_with_both_places(tmp_path, capsys, kind, suffix):
    ids = list(IDS[kind])
    ids[100] = ids[31]
    nodes = write_nodes(tmp_path / "s", ids, suffix)
    error = refused(capsys, nodes, tmp_path / "a.gids")
    first, second = ("row 33", "row 102") if suffix == ".csv" else ("row 31", "row 100")
    assert f"two '_N' nodes have the id {ids[31]!r}: {nodes}, {first}" in error
    assert f" and {nodes}, {second}" in error


def test_columns_are_chosen_by_name(tmp_path):
    nodes = write_table(tmp_path / "s/nodes.csv", id=[5, 6], node_id=["a", "b"], x=[1.5, 2.5])
    edges = write_table(tmp_path / "s/edges.csv", who=["a", "b"], target=["b", "b"], whom=["a", "a"])
    chosen = "--id-column=node_id"
    store = convert(nodes, edges, tmp_path / "a.gids", chosen, "--src-column", "who")
    assert store.ids()[:] == ["a", "b"]
    assert store.table("_N.x").columns == ("id", "x")
    assert store.table("_N.x").read_rows([0, 1]).tolist() == [[5, 1.5], [6, 2.5]]
    assert store.graph().indices.tolist() == [0, 1]
    assert np.diff(store.graph().indptr).tolist() == [0, 2]
    columns = ("--src-column", "_N._E._N=who", "--dst-column", "whom")
    store = convert(nodes, edges, tmp_path / "again.gids", chosen, *columns)
    assert np.diff(store.graph().indptr).tolist() == [2, 0]


def test_positions_in_any_order_and_all_kinds_of_text_are_ids(tmp_path):
    order = RNG.permutation(N)
    write_table(tmp_path / "s/nodes.parquet", id=order.astype(np.uint16), x=FEAT[:, 0])
    write_table(tmp_path / "s/edges.parquet", src=ENDS[0].astype(np.int32), dst=ENDS[1])
    graph = convert(tmp_path / "s", tmp_path / "a.gids").graph()
    model = np.argsort(order)
    assert np.array_equal(np.bincount(model[ENDS[0]], minlength=N), np.bincount(graph.indices, minlength=N))
    texts = pa.array(["", "b", "ü"]).dictionary_encode()
    write_table(tmp_path / "t/nodes.parquet", id=texts, x=[1, 2, 3])
    write_table(tmp_path / "t/edges.parquet", src=pa.array(["ü", ""], pa.large_string()), dst=["b", "b"])
    store = convert(tmp_path / "t", tmp_path / "b.gids")
    assert store.ids()[:] == ["", "b", "ü"]
    assert store.graph().indices.tolist() == [2, 0]
    write_table(tmp_path / "u/nodes.parquet", id=np.arange(3, dtype=np.int8), x=[1, 2, 3])
    store = convert(tmp_path / "u/nodes.parquet", tmp_path / "c.gids")  # node numbers, which are not stored
    assert "id" not in store.manifest.nodes[0].arrays
    assert store.ids()[1:].tolist() == [1, 2]


def test_columns_of_a_csv_file(tmp_path, capsys):
    """Types come from all lines: whole numbers, numbers with gaps, True and False, groups, and text."""
    table = tmp_path / "nodes.csv"
    lines = [f"n{i},{i},{'' if i == 3 else i},{i % 2 == 0},{i},{i + 0.5},{i % 3},v{i}" for i in range(9)]
    table.write_text(
        "\ufeff,id, n ,gap,train_mask,x_0,x_1,label,text\n"
        + "".join(f"{i},{line}\n" for i, line in enumerate(lines))
    )
    store = convert(table, tmp_path / "a.gids")
    error = capsys.readouterr().err
    assert "left out columns of '_N' without a name, or of pandas' index: '(unnamed) 1'" in error
    assert f"left out columns of '_N': 'text': 'v0' is no number ({table}, row 2)" in error
    values = {name: t.read_rows(range(9)) for name, t in store.tables.items()}
    assert sorted(values) == ["_N.columns", "_N.x"], "x_0 and x_1 are x"
    assert store.table("columns").columns == ("n", "gap")
    assert values["_N.columns"][3].isnan().tolist() == [False, True]
    assert values["_N.columns"][[4, 8]].tolist() == [[4, 4], [8, 8]]
    assert values["_N.x"].tolist() == [[i, i + 0.5] for i in range(9)]
    assert store.labels["_N"].tolist() == [i % 3 for i in range(9)]
    assert store.split("train").tolist() == [0, 2, 4, 6, 8]


def test_damaged_ids_raise_and_verify_finds_them(tmp_path, capsys):
    convert(write_nodes(tmp_path, TEXTS), tmp_path / "a.gids")
    values = np.load(tmp_path / "a.gids/nodes/_N.id_offset.npy", mmap_mode="r+")
    values[10] = 1 << 40
    values.flush()
    assert main(["verify", str(tmp_path / "a.gids")]) == 1
    assert "id_offset" in capsys.readouterr().out
    with pytest.raises(gids.FormatError, match="the ids of '_N' are damaged"):
        FeatureStore(tmp_path / "a.gids").ids()[9]


def test_ids_are_asked_for_in_the_right_way(tmp_path):
    ids = convert(write_nodes(tmp_path, TEXTS), tmp_path / "a.gids").ids()
    for wrong in ("n1", [1, 2], 5):
        with pytest.raises(TypeError, match="ids of '_N' nodes are text"):
            ids.find(wrong)
    for wrong in (N, -N - 1, torch.tensor([N]), np.array([-1])):
        with pytest.raises(IndexError):
            ids[wrong]
    with pytest.raises(TypeError, match="they must be whole numbers"):
        ids[np.ones(3)]
    with pytest.raises(KeyError, match=r"has the id 'nobody', nor 1 others of these ids"):
        ids.find([TEXTS[0], "nobody", "no one"])
    assert ids.find([]).tolist() == []
    assert repr(ids) == f"NodeIds('_N', {N} ids, text)"


def read_by_id(path, key):
    """id -> row, of an exported file."""
    table = pa.csv.read_csv(path) if path.suffix == ".csv" else pq.read_table(path)
    columns = [c for c in table.column_names if c != "id"]
    assert columns in ([key], [f"{key}_{i}" for i in range(len(columns))])
    rows = zip(*(table.column(c).to_pylist() for c in columns), strict=True)
    rows = [row[0] if columns == [key] and path.suffix == ".parquet" else list(row) for row in rows]
    return dict(zip(table.column("id").to_pylist(), rows, strict=True))


@pytest.mark.parametrize(("kind", "suffix"), [("text", ".csv"), ("numbers", ".parquet")])
def test_a_table_is_exported_by_id_and_can_be_converted_again(tmp_path, capsys, kind, suffix):
    ids, out = IDS[kind], tmp_path / f"nodes{suffix}"
    convert(write_nodes(tmp_path / "s", ids), tmp_path / "a.gids", "--dtype", "float32")
    arguments = ["export", str(tmp_path / "a.gids"), "x", str(out), "--memory", "20k"]
    assert main(arguments) == 0
    assert f"{out}: the ids of {N} nodes and their x" in capsys.readouterr().out
    exported = read_by_id(out, "x")
    assert list(exported) == ids
    assert np.array_equal(np.array([exported[id_] for id_ in ids], np.float32), FEAT)
    again = convert(out, tmp_path / "b.gids", "--dtype", "float32")
    assert again.content_crc == FeatureStore(tmp_path / "a.gids").content_crc
    partition(tmp_path / "a.gids", tmp_path / "parts", 2)
    found = {}
    for part in range(2):
        arguments = ["export", str(tmp_path / f"parts/part-00{part}.gids"), "x", str(out), "--overwrite"]
        assert main(arguments) == 0
        found |= read_by_id(out, "x")
    assert found == exported


def test_rows_of_any_length_are_exported_by_id_and_others_refused(tmp_path, capsys):
    rows = torch.zeros(4, 2, 2)
    with DatasetWriter(tmp_path / "a.gids") as writer:
        writer.write_table("node", "a", "x", rows)
        writer.write_table("node", "a", "id", rows[:, 0, 0].to(torch.bfloat16))
        writer.write_table("node", "a", "y", rows[:, 0, 0].to(torch.bfloat16))
        writer.write_table("node", "a", "z", torch.arange(8).view(4, 2))
        writer.write_table("edge", ("a", "r", "a"), "w", rows)
    for table, message, *options in (
        ("x", "'x' has rows of shape [2, 2], so it cannot be a column beside the ids: export it to .npy"),
        ("id", "'id' is called id, so it cannot"),
        ("w", "is a table of edges, which have no ids of their own"),
        ("y", "--raw is for .npy", "--raw"),
    ):
        assert main(["export", str(tmp_path / "a.gids"), table, str(tmp_path / "x.csv"), *options]) == 2
        assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("x.csv*"))
    assert main(["export", str(tmp_path / "a.gids"), "y", str(tmp_path / "y.csv")]) == 0
    assert (tmp_path / "y.csv").read_text() == '"id","y"\n0,0\n1,0\n2,0\n3,0\n'
    for suffix in (".csv", ".parquet"):
        assert main(["export", str(tmp_path / "a.gids"), "z", str(tmp_path / f"z{suffix}")]) == 0
        assert read_by_id(tmp_path / f"z{suffix}", "z") == {i: [2 * i, 2 * i + 1] for i in range(4)}


def test_mistakes_on_the_command_line_are_explained(tmp_path, capsys):
    nodes = write_table(tmp_path / "nodes.csv", id=["a", "b"], x=[1, 2])
    edges = write_table(tmp_path / "cites.csv", src=["a"], dst=["b"])
    target = str(tmp_path / "a.gids")

    more = write_table(tmp_path / "likes.csv", src=["a"], dst=["b"])
    (tmp_path / "none").mkdir()
    for message, *arguments in (
        ("with a table of nodes that has these ids: gids convert nodes.csv cites.csv DST", edges, target),
        ("no such file or directory: ", nodes, tmp_path / "none.csv", target),
        ("are both the table 'nodes': rename one", nodes, nodes, target),
        ("is no table: give .parquet", nodes, tmp_path / "none", target),
        ("cites.csv: the name of a relation must be SOURCE.RELATION.DEST", nodes, edges, more, target),
    ):
        with contextlib.suppress(SystemExit):
            assert main(["convert", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]


def test_tables_without_rows(tmp_path):
    (tmp_path / "nodes.csv").write_text("id,x\n")
    (tmp_path / "edges.csv").write_text("src,dst,w\n")
    store = convert(tmp_path / "nodes.csv", tmp_path / "edges.csv", tmp_path / "a.gids")
    assert (store.num_nodes(), store.num_edges()) == (0, 0)
    nodes = write_table(tmp_path / "n.parquet", id=pa.array([], pa.string()), x=pa.array([], pa.int64()))
    store = convert(nodes, tmp_path / "b.gids")
    assert store.ids()[:] == []
    with pytest.raises(KeyError):
        store.ids().find(["a"])


@pytest.mark.parametrize("end", ["007", ""])
def test_ids_that_are_positions_are_compared_as_they_are(tmp_path, capsys, end):
    source = tmp_path / "s"
    write_table(source / "nodes.csv", id=range(20), x=range(20))
    (source / "edges.csv").write_text(f"src,dst,w\n3,2,5\n{end},1,6\n4,9,7\n")
    error = refused(capsys, source, tmp_path / "a.gids")
    assert f"row 3: 'src' is {repr(end) if end else 'empty'}, which no '_N' node has as its id" in error
    store = convert(source, tmp_path / "a.gids", "--drop-unknown")
    assert "dropped 1 of 3 edges" in capsys.readouterr().err
    assert store.graph().indices.tolist() == [3, 4]


def test_empty_ends_of_nodes_without_ids_are_refused_or_dropped(tmp_path, capsys):
    write_table(tmp_path / "s/nodes.parquet", x=[1, 2, 3])
    edges = write_table(tmp_path / "s/edges.parquet", src=[0, 1, 2], dst=[1, None, 2], w=[5, 6, 7])
    error = refused(capsys, tmp_path / "s", tmp_path / "a.gids")
    assert "correct it, or leave it out with --drop-unknown" in error
    store = convert(tmp_path / "s", tmp_path / "a.gids", "--drop-unknown")
    assert store.graph().indices.tolist() == [0, 2]
    assert store.table("_N._E._N.w").read_rows([0, 1]).tolist() == [5, 7]
    store = convert(edges, tmp_path / "b.gids", "--drop-unknown")  # the edges count the nodes
    assert (store.num_nodes(), store.graph().indices.tolist()) == (3, [0, 2])


def test_verify_takes_the_options_of_tables(tmp_path, capsys):
    nodes = write_table(tmp_path / "nodes.csv", doi=["d0", "d1"], x=[0, 1])
    edges = write_table(tmp_path / "edges.csv", a=["d0", "d0"], dst=["d0", "d0"], w=[1, 2])
    options = ["--id-column", "doi", "--src-column", "a"]
    path = str(convert(nodes, edges, tmp_path / "a.gids", *options).path)
    against = ["verify", path, "--against", str(nodes), "--against", str(edges)]
    assert main([*against, *options]) == 0
    assert "ids of '_N' nodes: equal" in capsys.readouterr().err
    write_table(nodes, doi=["d0", "d2"], x=[0, 1])
    assert main([*against, *options]) == 1


def test_an_empty_line_of_one_column_is_an_empty_field(tmp_path):
    (tmp_path / "nodes.csv").write_text("x\n0.5\n\n2.5\n")
    rows = convert(tmp_path / "nodes.csv", tmp_path / "a.gids").table("x").read_rows(range(3))
    assert rows[[0, 2]].tolist() == [0.5, 2.5]
    assert rows[1].isnan()
