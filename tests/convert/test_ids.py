"""Ids of nodes that are text, or whole numbers with gaps. The model is a dictionary from id to node."""

import contextlib
import csv

import numpy as np
import pytest
import torch
from reader_example import convert, refused, write_csv

import gids
from gids.cli import main
from gids.inference import layerwise
from gids.store import FeatureStore
from gids.write import DatasetWriter
from gids.write.partition import partition

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("pyarrow.csv")
RNG = np.random.default_rng(23)
N, E = 300, 1500
TEXTS = [f"ü{i * 7919 % 100_003}" + "x" * (i % 19) for i in range(N)]
TEXTS[5], TEXTS[6], TEXTS[7] = "NA", "007", 'a,"b"'
NUMBERS = (RNG.permutation(10 * N)[:N] * 1_000_003 - (1 << 40)).tolist()
NUMBERS[11], NUMBERS[12] = -(1 << 63), (1 << 63) - 1
FEAT = RNG.standard_normal((N, 3), np.float32)
ENDS = RNG.integers(0, N, (2, E))
WEIGHT = RNG.standard_normal(E, np.float32)
IDS = {"text": TEXTS, "numbers": NUMBERS}


def write_parquet(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=97)
    return path


WRITERS = {".csv": write_csv, ".tsv.gz": write_csv, ".parquet": write_parquet}


def write_nodes(folder, ids, suffix=".csv", name="nodes", **columns):
    features = {f"x_{i}": FEAT[: len(ids), i] for i in range(3)}
    return WRITERS[suffix](folder / f"{name}{suffix}", **(columns or {"id": ids}), **features)


def write_edges(folder, sources, destinations, suffix=".csv", name="edges", **names):
    src, dst = names.get("src", "src"), names.get("dst", "dst")
    columns = {src: sources, dst: destinations, "w": WEIGHT[: len(sources)]}
    return WRITERS[suffix](folder / f"{name}{suffix}", **columns)


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


@pytest.mark.parametrize(
    ("kind", "suffix"), [("text", ".csv"), ("numbers", ".tsv.gz"), ("numbers", ".parquet")]
)
def test_edges_name_the_nodes_of_one_type(tmp_path, kind, suffix):
    ids = IDS[kind]
    nodes = write_nodes(tmp_path / "s", ids, suffix)
    edges = write_edges(tmp_path / "s", named(ids, ENDS[0]), named(ids, ENDS[1]), suffix)
    model = {"_N": {id_: node for node, id_ in enumerate(ids)}}
    for number, sources in enumerate(([nodes, edges], [edges, nodes], [tmp_path / "s"])):
        store = convert(*sources, tmp_path / f"{number}.gids")
        assert_ids(store, "_N", ids)
        expected = zip(named(ids, ENDS[0]), named(ids, ENDS[1]), WEIGHT, strict=True)
        assert_edges(store, ("_N", "_E", "_N"), model, list(expected))
        assert sorted(store.tables) == ["_N._E._N.w", "_N.x"]


def read_source(path):
    """id -> features, by a plain parser."""
    with open(path, newline="", encoding="utf-8") as file:
        return {row["id"]: [float(row[f"x_{i}"]) for i in range(3)] for row in csv.DictReader(file)}


def test_a_loader_returns_the_rows_of_the_source_by_id(tmp_path):
    nodes = write_nodes(tmp_path, TEXTS)
    edges = write_edges(tmp_path, named(TEXTS, ENDS[0]), named(TEXTS, ENDS[1]))
    by_id = read_source(nodes)
    source = gids.open(convert(nodes, edges, tmp_path / "a.gids"), memory="64MB")
    ids = source.store.ids()
    seeds = ids.find(["NA", "007", 'a,"b"', *TEXTS[50:90]])
    count = 0
    for minibatch in gids.NodeLoader(source, seeds, gids.sampler.Neighbor([3, 3]), batch_size=8, seed=0):
        rows = minibatch.features["_N.x"]
        count += len(rows)
        for id_, row in zip(ids[minibatch.input_nodes], rows.tolist(), strict=True):
            assert row == by_id[id_]
    assert count > len(seeds)


def typed(folder, suffix=".csv"):
    """Papers with ids that are text, authors with numbers, venues with positions and without a table."""
    write_nodes(folder / "nodes", TEXTS, suffix, "paper")
    write_nodes(folder / "nodes", NUMBERS[:40], suffix, "author")
    edges = {
        ("author", "writes", "paper"): (named(NUMBERS, ENDS[0] % 40), named(TEXTS, ENDS[1])),
        ("paper", "cites", "paper"): (named(TEXTS, ENDS[0]), named(TEXTS, ENDS[1])),
        ("paper", "in", "venue"): (named(TEXTS, ENDS[0]), (ENDS[1] % 9).tolist()),
    }
    for relation, (sources, destinations) in edges.items():
        write_edges(folder / "edges", sources, destinations, suffix, ".".join(relation))
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


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_edges_name_the_nodes_of_several_types(tmp_path, suffix):
    edges = typed(tmp_path / "s", suffix)
    store = convert(tmp_path / "s", tmp_path / "a.gids")
    assert_typed(store, edges)
    files = [p for p in sorted((tmp_path / "s").rglob("*.*")) if p.is_file()]
    assert convert(*files, tmp_path / "b.gids").content_crc == store.content_crc


def test_an_edge_to_an_unknown_node_is_refused_with_its_line(tmp_path, capsys):
    nodes = write_csv(tmp_path / "s/nodes.csv", id=["a", "b", "c d"], x=[1, 2, 3])
    edges = tmp_path / "s/edges.csv"
    edges.write_text('\nsrc,dst,note\na,b,"two\nlines"\n\n"c d",a,\nb,zz,\n')
    error = refused(capsys, tmp_path / "s", tmp_path / "a.gids")
    assert f"{edges}, row 5: 'dst' is 'zz', which no '_N' node has as its id" in error
    edges.write_text("src,dst\na,b\n,a\n")
    assert "row 3: 'src' is empty, which no" in refused(capsys, tmp_path / "s", tmp_path / "a.gids")
    write_csv(nodes, id=[0, 1, 2], x=[1, 2, 3])  # these are node numbers
    write_csv(edges, src=[0, 2, 1], dst=[1, 3, 7])
    assert "row 3: 'dst' is 3, which no '_N' node has" in refused(capsys, tmp_path / "s", tmp_path / "a.gids")
    parts = tmp_path / "p/edges/n.to.n"
    write_parquet(tmp_path / "p/nodes/n.parquet", node_id=[70, 10], x=[1, 2])
    write_parquet(parts / "0.parquet", src=[70, 10], dst=[10, 10])
    write_parquet(parts / "1.parquet", src=[70, 70], dst=[10, 11])
    error = refused(capsys, tmp_path / "p", tmp_path / "a.gids")
    assert f"{parts}/1.parquet, row 1 (the first is 0): 'dst' is 11, which no 'n' node" in error
    assert nodes.exists()


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_edges_to_unknown_nodes_are_dropped_and_counted(tmp_path, capsys, monkeypatch, suffix):
    """Also their features. The other edges get the ids 0, 1, 2, …"""
    write_nodes(tmp_path / "s", TEXTS[:200], suffix)
    write_edges(tmp_path / "s", named(TEXTS, ENDS[0]), named(TEXTS, ENDS[1]), suffix)
    kept = [
        (TEXTS[s], TEXTS[d], w) for s, d, w in zip(*ENDS.tolist(), WEIGHT, strict=True) if s < 200 and d < 200
    ]
    monkeypatch.setattr("gids.convert.readers.tables._BLOCK_ROWS", 64)
    store = convert(tmp_path / "s", tmp_path / "a.gids", "--drop-unknown")
    assert f"dropped {E - len(kept)} of {E} edges '_N._E._N', whose ends" in capsys.readouterr().err
    assert_edges(store, ("_N", "_E", "_N"), {"_N": {id_: i for i, id_ in enumerate(TEXTS)}}, kept)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize(
    ("ids", "end", "other"),
    [
        (["0", "24", "25"], "25.0", "25"),
        (["0", "1", "2"], "02", "2"),  # node numbers in a CSV file
        (["a", "025", "7"], "25", "025"),
        (["7", "25", "a"], " 25", "25"),
        (["a", "25 ", "7"], "25", "25 "),
        (["7", "doi/B", "a"], "DOI/b", "doi/B"),
        (["7.0", "b", "a"], "+7", "7.0"),
        (["7", "0", "a"], "000", "0"),
        (["a", "b", "7"], "77", None),
        (["7", "b", "a"], "7a", None),
    ],
)
def test_an_unknown_id_is_named_with_the_id_that_it_resembles(tmp_path, capsys, suffix, ids, end, other):
    """And --drop-unknown may not drop all edges."""
    nodes = WRITERS[suffix](tmp_path / f"s/nodes{suffix}", id=ids, age=[1, 2, 3])
    WRITERS[suffix](tmp_path / f"s/edges{suffix}", src=[ids[0], ids[0]], dst=[ids[0], end])
    hint = f"'dst' is {end!r}, which no '_N' node has as its id{f', but one has {other!r}' if other else ''}"
    assert f"{hint}: write ids as in the table of" in refused(capsys, tmp_path / "s", tmp_path / "a.gids")
    store = convert(tmp_path / "s", tmp_path / "a.gids", "--drop-unknown")
    assert store.num_edges() == 1
    assert f"dropped 1 of 2 edges '_N._E._N', whose ends no nodes have as their ids, such as {tmp_path}" in (
        capsys.readouterr().err
    )
    WRITERS[suffix](tmp_path / f"s/edges{suffix}", src=[end, "zz"], dst=[end, "zz"])
    error = refused(capsys, tmp_path / "s", tmp_path / "b.gids", "--drop-unknown")
    assert "--drop-unknown would drop all 2 edges '_N._E._N': " in error
    assert hint.replace("dst", "src") in error
    assert nodes.exists()


def test_ids_of_one_key_are_different_nodes(tmp_path, capsys, monkeypatch):
    for module in ("gids.convert.node_ids", "gids.store.ids"):
        monkeypatch.setattr(f"{module}.text_keys", lambda data, offsets: np.diff(offsets) % 3)
    nodes = write_nodes(tmp_path / "s", TEXTS[:60])
    edges = [TEXTS[i] for i in ENDS[0] if i < 60]
    write_edges(tmp_path / "s", edges, edges[::-1])
    store = convert(tmp_path / "s", tmp_path / "a.gids")
    assert_ids(store, "_N", TEXTS[:60])
    model = {"_N": {id_: node for node, id_ in enumerate(TEXTS[:60])}}
    assert_edges(store, ("_N", "_E", "_N"), model, list(zip(edges, edges[::-1], WEIGHT, strict=False)))
    error = refused(capsys, write_nodes(tmp_path, [*TEXTS[:60], TEXTS[9]]), tmp_path / "b.gids")
    assert f"two '_N' nodes have the id {TEXTS[9]!r}: " in error
    assert nodes.exists()


@pytest.mark.parametrize(("kind", "suffix"), [("text", ".csv"), ("numbers", ".parquet")])
def test_an_id_of_two_nodes_is_refused_with_both_places(tmp_path, capsys, kind, suffix):
    ids = list(IDS[kind])
    ids[250] = ids[31]
    nodes = write_nodes(tmp_path / "s", ids, suffix)
    error = refused(capsys, nodes, tmp_path / "a.gids")
    first, second = ("row 33", "row 252") if suffix == ".csv" else ("row 31", "row 250")
    assert f"two '_N' nodes have the id {ids[31]!r}: {nodes}, {first}" in error
    assert f" and {nodes}, {second}" in error


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_node_without_an_id_is_refused_with_its_place(tmp_path, capsys, suffix):
    nodes = write_nodes(tmp_path / "s", TEXTS, suffix)
    if suffix == ".csv":
        nodes.write_text(nodes.read_text().replace(TEXTS[70] + ",", ",", 1))
    else:
        write_parquet(nodes, id=[*TEXTS[:70], None, *TEXTS[71:]], x=range(N))
    error = refused(capsys, nodes, tmp_path / "a.gids")
    place = "row 72" if suffix == ".csv" else "row 70 (the first is 0)"
    assert f"{nodes}, {place}: the node has no id in column 'id'" in error
    write_parquet(tmp_path / "long/nodes.parquet", id=["a", "b" * 1025], x=[1, 2])
    assert "row 1 (the first is 0): the id in column 'id' has more than 1024 bytes" in refused(
        capsys, tmp_path / "long/nodes.parquet", tmp_path / "a.gids"
    )


def test_columns_are_chosen_by_name_and_ambiguity_is_refused(tmp_path, capsys):
    nodes = write_csv(tmp_path / "s/nodes.csv", id=[5, 6], node_id=["a", "b"], x=[1.5, 2.5])
    edges = write_csv(tmp_path / "s/edges.csv", who=["a", "b"], target=["b", "b"], whom=["a", "a"])
    command, chosen = (nodes, edges, tmp_path / "a.gids"), "--id-column=node_id"
    for message, *arguments in (
        ("has the columns id and node_id: choose the ids with --id-column",),
        ("--id-column: '_N' nodes have no column 'name'; they have 'id', 'node_id', 'x'", "--id-column=name"),
        ("exactly one must be named src", chosen),
        ("exactly one must be named 'x'; or choose columns with --src-column", chosen, "--src-column=x"),
        ("--id-column paper=doi: there is no 'paper', only '_N'", "--id-column=paper=doi"),
        ("--src-column b=c: there is no 'b', only '_N._E._N'", chosen, "--src-column=b=c"),
    ):
        assert message in refused(capsys, *command, *arguments)
    store = convert(*command, chosen, "--src-column", "who")
    assert store.ids()[:] == ["a", "b"]
    assert store.table("_N.x").columns == ("id", "x")
    assert store.table("_N.x").read_rows([0, 1]).tolist() == [[5, 1.5], [6, 2.5]]
    assert store.graph().indices.tolist() == [0, 1]
    assert np.diff(store.graph().indptr).tolist() == [0, 2]
    columns = ("--src-column", "_N._E._N=who", "--dst-column", "whom")
    store = convert(nodes, edges, tmp_path / "again.gids", chosen, *columns)
    assert np.diff(store.graph().indptr).tolist() == [2, 0]


@pytest.mark.parametrize(
    ("node_ids_", "sources", "message"),
    [
        (["a", "b"], [0, 1], "is of type int64, but the ids of its nodes are text: make both the same"),
        ([5, 9], ["5", "9"], "is of type string, but the ids of its nodes are whole numbers"),
        ([1.5, 2.5], [0, 1], "is of type double: ids must be text or whole numbers"),
        (
            pa.array([5, 1 << 63], pa.uint64()),
            [5, 5],
            "cannot be read: Integer value 9223372036854775808",
        ),
        (None, ["a", "b"], "'_N' nodes have no ids but 0, 1, 2, …: give their table a column of ids"),
    ],
)
def test_ids_of_other_types_are_refused(tmp_path, capsys, node_ids_, sources, message):
    columns = {"x": [1, 2]} | ({} if node_ids_ is None else {"id": node_ids_})
    write_parquet(tmp_path / "s/nodes.parquet", **columns)
    write_parquet(tmp_path / "s/edges.parquet", src=sources, dst=sources)
    assert message in refused(capsys, tmp_path / "s", tmp_path / "a.gids")


def test_positions_in_any_order_and_all_kinds_of_text_are_ids(tmp_path):
    order = RNG.permutation(N)
    write_parquet(tmp_path / "s/nodes.parquet", id=order.astype(np.uint16), x=FEAT[:, 0])
    write_parquet(tmp_path / "s/edges.parquet", src=ENDS[0].astype(np.int32), dst=ENDS[1])
    graph = convert(tmp_path / "s", tmp_path / "a.gids").graph()
    model = np.argsort(order)
    assert np.array_equal(np.bincount(model[ENDS[0]], minlength=N), np.bincount(graph.indices, minlength=N))
    texts = pa.array(["", "b", "ü"]).dictionary_encode()
    write_parquet(tmp_path / "t/nodes.parquet", id=texts, x=[1, 2, 3])
    write_parquet(tmp_path / "t/edges.parquet", src=pa.array(["ü", ""], pa.large_string()), dst=["b", "b"])
    store = convert(tmp_path / "t", tmp_path / "b.gids")
    assert store.ids()[:] == ["", "b", "ü"]
    assert store.graph().indices.tolist() == [2, 0]
    write_parquet(tmp_path / "u/nodes.parquet", id=np.arange(3, dtype=np.int8), x=[1, 2, 3])
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
    for number in ("9007199254740993", "-1e400", "1" + "0" * 400):
        table.write_text(f"id,x\na,{number}\nb,0.5\n")
        error = refused(capsys, table, tmp_path / "b.gids")
        assert f"float64 of column 'x' cannot hold '{number[:6]}" in error
    table.write_text("id,x\na,1\nb\n")
    error = refused(capsys, table, tmp_path / "b.gids")
    assert "nodes.csv cannot be read: CSV parse error: Row #3: Expected 2 columns, got 1: b" in error
    table.write_text("id,id\na,1\n")
    assert "has two columns 'id'" in refused(capsys, table, tmp_path / "b.gids")


def test_ids_stay_with_their_nodes_when_a_dataset_is_changed(tmp_path, capsys):
    edges = typed(tmp_path / "s")
    convert(tmp_path / "s", tmp_path / "a.gids")
    changed = convert(tmp_path / "a.gids", tmp_path / "b.gids", "--order", "degree")
    assert changed.table("paper.x").order is not None
    assert_typed(changed, edges)
    assert np.array_equal(changed.table("paper.x").read_rows(range(N)), FEAT.astype(np.float64))
    assert main(["info", str(tmp_path / "b.gids")]) == 0
    assert "  paper  300  ids text" in capsys.readouterr().out
    for against in ("a.gids", "s"):
        assert main(["verify", str(tmp_path / "b.gids"), "--against", str(tmp_path / against)]) == 0
        assert "ids of 'author' nodes: equal" in capsys.readouterr().err
    partition(tmp_path / "b.gids", tmp_path / "parts", 2)
    assert main(["verify", str(tmp_path / "parts"), "--quiet"]) == 0
    assert_ids(FeatureStore(tmp_path / "parts/part-001.gids"), "paper", TEXTS)


def test_damaged_ids_raise_and_verify_finds_them(tmp_path, capsys):
    convert(write_nodes(tmp_path, TEXTS), tmp_path / "a.gids")
    for role, value in (("id_offset", 1 << 40), ("id_key", 1 << 60), ("id_node", N)):
        path = tmp_path / f"a.gids/nodes/_N.{role}.npy"
        data = path.read_bytes()
        values = np.load(path, mmap_mode="r+")
        values[10] = value
        values.flush()
        assert main(["verify", str(tmp_path / "a.gids")]) == 1
        assert f"{role}" in capsys.readouterr().out
        if role == "id_offset":
            with pytest.raises(gids.FormatError, match="the ids of '_N' are damaged"):
                FeatureStore(tmp_path / "a.gids").ids()[9]
        path.write_bytes(data)


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
    assert main(arguments) == 2
    assert "already exists" in capsys.readouterr().err
    again = convert(out, tmp_path / "b.gids", "--dtype", "float32")
    assert again.content_crc == FeatureStore(tmp_path / "a.gids").content_crc
    partition(tmp_path / "a.gids", tmp_path / "parts", 2)
    found = {}
    for part in range(2):
        arguments = ["export", str(tmp_path / f"parts/part-00{part}.gids"), "x", str(out), "--overwrite"]
        assert main(arguments) == 0
        found |= read_by_id(out, "x")
    assert found == exported


def test_what_cannot_be_exported_by_id_is_refused(tmp_path, capsys):
    rows = torch.zeros(4, 2, 2)
    with DatasetWriter(tmp_path / "a.gids") as writer:
        writer.write_table("node", "a", "x", rows)
        writer.write_table("node", "a", "id", rows[:, 0, 0].to(torch.bfloat16))
        writer.write_table("node", "a", "y", rows[:, 0, 0].to(torch.bfloat16))
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


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_inference_writes_its_output_by_id(tmp_path, suffix):
    """Of all nodes, to a table; and of some, in memory, in the order in which they were asked for."""
    edges = typed(tmp_path / "s")
    store = convert(tmp_path / "s", tmp_path / "a.gids", "--dtype", "float32")
    model = {id_: FEAT[node] for id_, node in MODEL["paper"].items()}
    sums = {id_: row.astype(np.float64) for id_, row in model.items()}
    for source, destination in zip(*edges["paper", "cites", "paper"], strict=True):
        sums[destination] = sums[destination] + model[source]

    def layer(blocks, h):
        block = blocks["paper", "cites", "paper"]
        src, dst = block.coo()
        total = h["paper"][: block.num_dst].double()
        return {"paper": total.index_add_(0, dst, h["paper"][src].double())} if block.num_dst else {}

    out, tables = tmp_path / f"out{suffix}", ["paper.x", "author.x"]
    wanted = [TEXTS[i] for i in (70, 5, 6, 70, 7)]
    nodes = {"paper": store.ids("paper").find(wanted)}
    some = layerwise([layer], store, tables=tables, nodes=nodes).values["paper"]
    for id_, row in zip(wanted, some, strict=True):
        np.testing.assert_allclose(row, sums[id_], atol=1e-5)
    layerwise([layer], store, tables=tables, output=tmp_path / "sum.gids", key="sum")
    assert main(["export", str(tmp_path / "sum.gids"), "paper.sum", str(out)]) == 0
    exported = read_by_id(out, "sum")
    assert list(exported) == TEXTS
    for id_, row in exported.items():
        np.testing.assert_allclose(row, sums[id_], atol=1e-4)


def test_mistakes_on_the_command_line_are_explained(tmp_path, capsys):
    nodes = write_csv(tmp_path / "nodes.csv", id=["a", "b"], x=[1, 2])
    edges = write_csv(tmp_path / "cites.csv", src=["a"], dst=["b"])
    target = str(tmp_path / "a.gids")

    more = write_csv(tmp_path / "likes.csv", src=["a"], dst=["b"])
    write_csv(tmp_path / "s/nodes.csv", id=["a", "b"], x=[1, 2])
    write_parquet(tmp_path / "s/nodes.parquet", id=["a", "b"], x=[1, 2])
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
    (tmp_path / "s").mkdir()
    (tmp_path / "s/nodes.csv").write_text("id,x\n")
    (tmp_path / "s/edges.csv").write_text("src,dst,w\n")
    store = convert(tmp_path / "s", tmp_path / "a.gids")
    assert (store.num_nodes(), store.num_edges()) == (0, 0)
    write_parquet(tmp_path / "s/nodes.parquet", id=pa.array([], pa.string()), x=pa.array([], pa.int64()))
    (tmp_path / "s/nodes.csv").unlink()
    store = convert(tmp_path / "s", tmp_path / "b.gids")
    assert store.ids()[:] == []
    with pytest.raises(KeyError):
        store.ids().find(["a"])


@pytest.mark.parametrize(
    ("table", "others"),
    [
        ("nodes/_N.csv", ["feat.bin", "nodes.csv"]),
        ("nodes.csv", ["edges/_N.cites._N.csv"]),
        ("edges.csv", ["edges/_N._E._N/w.npy", "nodes/paper/feat.npy"]),
    ],
)
def test_data_beside_the_tables_of_a_directory_is_never_dropped(tmp_path, capsys, table, others):
    source = tmp_path / "s"
    write_csv(source / "edges.csv", src=[0], dst=[0])
    write_csv(source / table, id=[0], src=[0], dst=[0])
    for other in others:
        (source / other).parent.mkdir(parents=True, exist_ok=True)
        (source / other).touch()
    for arguments in [()] + [("--from", "edges")] * (table == "edges.csv"):
        error = refused(capsys, source, tmp_path / "a.gids", *arguments)
        assert f"{', '.join(map(repr, others))} would be left out" in error
    (source / "README.txt").write_text("text")
    for other in others:
        (source / other).unlink()
    convert(source, tmp_path / "a.gids")


@pytest.mark.parametrize("end", ["007", "0x10", "", "1.0"])
def test_ids_that_are_positions_are_compared_as_they_are(tmp_path, capsys, end):
    source = tmp_path / "s"
    write_csv(source / "nodes.csv", id=range(20), x=range(20))
    (source / "edges.csv").write_text(f"src,dst,w\n3,2,5\n{end},1,6\n4,9,7\n")
    error = refused(capsys, source, tmp_path / "a.gids")
    assert f"row 3: 'src' is {repr(end) if end else 'empty'}, which no '_N' node has as its id" in error
    store = convert(source, tmp_path / "a.gids", "--drop-unknown")
    assert "dropped 1 of 3 edges" in capsys.readouterr().err
    assert store.graph().indices.tolist() == [3, 4]
    (source / "edges.csv").unlink()
    write_parquet(source / "edges.parquet", src=[3, None, 4], dst=[2, 1, 9])
    assert "row 1 (the first is 0): 'src' is empty" in refused(capsys, source, tmp_path / "b.gids")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_empty_ends_of_nodes_without_ids_are_refused_or_dropped(tmp_path, capsys, suffix):
    WRITERS[suffix](tmp_path / f"s/nodes{suffix}", x=[1, 2, 3])
    empty = "" if suffix == ".csv" else None
    WRITERS[suffix](tmp_path / f"s/edges{suffix}", src=[0, 1, 2], dst=[1, empty, 2], w=[5, 6, 7])
    error = refused(capsys, tmp_path / "s", tmp_path / "a.gids")
    assert "--skip" not in error
    assert ("correct it, or leave it out with --drop-unknown" in error) == (suffix == ".parquet")
    store = convert(tmp_path / "s", tmp_path / "a.gids", "--drop-unknown")
    assert store.graph().indices.tolist() == [0, 2]
    assert store.table("_N._E._N.w").read_rows([0, 1]).tolist() == [5, 7]
    if suffix == ".parquet":  # the edges count the nodes
        store = convert(tmp_path / "s/edges.parquet", tmp_path / "b.gids", "--drop-unknown")
        assert (store.num_nodes(), store.graph().indices.tolist()) == (3, [0, 2])


def test_verify_takes_the_options_of_tables(tmp_path, capsys):
    nodes = write_csv(tmp_path / "nodes.csv", doi=["d0", "d1"], x=[0, 1])
    edges = write_csv(tmp_path / "edges.csv", a=["d0", "d0"], dst=["d0", "d0"], w=[1, 2])
    options = ["--id-column", "doi", "--src-column", "a"]
    path = str(convert(nodes, edges, tmp_path / "a.gids", *options).path)
    against = ["verify", path, "--against", str(nodes), "--against", str(edges)]
    assert main([*against, *options]) == 0
    assert "ids of '_N' nodes: equal" in capsys.readouterr().err
    write_csv(nodes, doi=["d0", "d2"], x=[0, 1])
    assert main([*against, *options]) == 1


def test_an_empty_line_of_one_column_is_an_empty_field(tmp_path, capsys):
    folder = tmp_path / "s"
    write_edges(folder, [0], [1])
    (folder / "nodes.csv").write_text("x\n0.5\n\n2.5\n")
    rows = convert(folder, tmp_path / "a.gids").table("x").read_rows(range(3))
    assert rows[[0, 2]].tolist() == [0.5, 2.5]
    assert rows[1].isnan()
    (folder / "nodes.csv").write_text("id\na\n\nb\n")
    write_edges(folder, ["a"], ["b"])
    assert "nodes.csv, row 3: the node has no id" in refused(capsys, folder, tmp_path / "b.gids")
