"""`gids partition`: parts hold every row and edge of a dataset once."""

import pickle
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import CITES, contents
from partition_example import write_rich_dataset
from union_check import check_union, open_parts

import gids.distributed
from gids import EdgeLoader, FeatureLoader, FeatureStore, FormatError, NodeLoader, StorageError
from gids.cache import page_heat
from gids.heat import reverse_pagerank, sampled_counts
from gids.inference import layerwise
from gids.store import NotHeldError, verify
from gids.write import DatasetWriter
from gids.write.partition import partition
from gids.write.partition.owners import hash_owners


@pytest.fixture(scope="module")
def rich(tmp_path_factory):
    return write_rich_dataset(tmp_path_factory.mktemp("rich") / "mag.gids")


@pytest.fixture(scope="module")
def cut_in_four(rich, tmp_path_factory):
    out = tmp_path_factory.mktemp("four") / "parts"
    partition(rich, out, 4)
    return out


@pytest.mark.parametrize(("method", "count"), [("range", 1), ("hash", 3)])
def test_parts_together_are_the_dataset_and_the_report_counts_them(rich, tmp_path, method, count):
    whole = FeatureStore(rich)
    report = partition(rich, tmp_path / "parts", count, method=method, seed=5, memory_bytes=1 << 20)
    parts = open_parts(tmp_path / "parts")
    check_union(whole, parts)
    assert list(verify(tmp_path / "parts")) == []
    assert {p.part.method for p in parts} == {method}
    assert [f.rows for f in report.parts] == [
        sum(len(np.flatnonzero(p.owners(t) == p.part.index)) for t in p.node_types) for p in parts
    ]
    assert [f.in_edges for f in report.parts] == [
        sum(p.graph(r).num_edges for r in p.relations) for p in parts
    ]
    files = [[f for f in p.path.rglob("*.*") if f.suffix in (".npy", ".bin")] for p in parts]
    assert [f.bytes for f in report.parts] == [sum(f.stat().st_size for f in found) for found in files]
    cut = 0
    for relation in whole.relations:
        graph = whole.graph(relation)
        destinations = np.repeat(np.arange(graph.num_dst), np.diff(graph.indptr))
        of_sources, of_destinations = parts[0].owners(relation[0]), parts[0].owners(relation[2])
        cut += int((of_sources[graph.indices] != of_destinations[destinations]).sum())
    assert report.cut_edges == cut
    seeds = np.bincount(parts[0].owners("paper")[whole.split("train").numpy()], minlength=count)
    assert [f.seeds for f in report.parts] == seeds.tolist()


def test_hash_depends_on_seed_type_and_id():
    def owners(ntype, seed):
        return np.concatenate(list(hash_owners(ntype, 700, 4, seed)))

    papers = owners("paper", 1)
    assert np.array_equal(papers, owners("paper", 1))
    assert 0.6 < np.mean(papers != owners("paper", 2)) < 0.9
    assert 0.6 < np.mean(papers != owners("author", 1)) < 0.9
    assert max(np.bincount(papers)) < 1.2 * len(papers) / 4


def test_owners_of_any_partitioner(rich, tmp_path):
    whole, rng = FeatureStore(rich), np.random.default_rng(7)
    owners = {t: rng.integers(0, 3, whole.num_nodes(t)) for t in whole.node_types}
    files = {t: tmp_path / f"{t}.npy" for t in owners}
    for ntype, file in files.items():
        np.save(file, owners[ntype])
    report = partition(rich, tmp_path / "parts", 3, owners=files)
    parts = open_parts(tmp_path / "parts")
    check_union(whole, parts)
    assert report.method == parts[0].part.method == "owners"
    assert all(np.array_equal(parts[1].owners(t), owners[t]) for t in owners)
    with pytest.raises(FormatError, match=r"one file of owners per node type \(.*'author' has none"):
        partition(rich, tmp_path / "again", 3, owners={"paper": files["paper"]})
    with pytest.raises(FormatError, match=r"er.npy: the owner of node \d+ is 2; it must be a part, 0 to 1"):
        partition(rich, tmp_path / "again", 2, owners=files)
    for wrong, message in (
        (np.zeros(9, np.int64), r"int64\[9\]; owners must be 130 whole numbers"),
        (np.array([{}] * 130), "author.npy is not a .npy file of numbers"),
    ):
        np.save(files["author"], wrong, allow_pickle=True)
        with pytest.raises(FormatError, match=message):
            partition(rich, tmp_path / "again", 3, owners=files)
    assert not (tmp_path / "again.partial").exists()


@pytest.mark.slow
def test_more_than_256_parts_have_wide_owners(tmp_path):
    with DatasetWriter(tmp_path / "a.gids") as writer:
        writer.write_table("node", "paper", "feat", np.arange(514, dtype=np.float32)[:, None])
    partition(tmp_path / "a.gids", tmp_path / "parts", 257, method="range")
    last = FeatureStore(tmp_path / "parts/part-256.gids")
    assert last.owners().dtype == np.uint16
    assert last.read_rows([513]).tolist() == [[513]]
    with pytest.raises(NotHeldError, match="in part 255 of 257; this is part 256"):
        last.read_rows([511])


def test_row_of_another_part_is_refused_with_its_owner(cut_in_four):
    part = open_parts(cut_in_four)[0]
    table = part.tables["paper.float32"]
    foreign = int(np.flatnonzero(part.owners("paper") == 2)[0])
    message = f"row {foreign} of 'paper.float32' is in part 2 of 4; this is part 0"
    with pytest.raises(NotHeldError, match=re.escape(message)) as raised:
        table.read_rows([foreign])
    assert (raised.value.id, raised.value.owner) == (foreign, 2)
    assert pickle.loads(pickle.dumps(raised.value)).owner == 2
    with pytest.raises(IndexError, match="row 700 is out of range"):
        table.read_rows([700])
    with pytest.raises(IndexError, match="row -1 is out of range"):
        table.held.rows_of(np.array([-1]))
    edges = part.tables["paper.cites.paper.weight"]
    others = np.setdiff1d(np.arange(edges.id_count), edges.held.ids())
    with pytest.raises(NotHeldError, match="is in another part; this is part 0 of 4") as raised:
        edges.held.rows_of(others[:1])
    assert raised.value.owner is None
    with pytest.raises(TypeError, match="must be int64"):
        table.held.rows_of(np.array([1], np.int32))


def test_a_store_of_a_part_can_be_pickled_and_scanned(rich, cut_in_four):
    part = open_parts(cut_in_four)[1]
    table = pickle.loads(pickle.dumps(part)).tables["paper.long"]
    ids = table.held.ids()
    assert table.held.nbytes < 700 / 4 + 64
    rows = [row for _, block in table.scan(50) for row in block.tolist()]
    assert rows == table.read_rows(ids).tolist()
    store = FeatureStore(rich)
    assert (store.part, store.owners("paper"), store.table("paper.long").held) == (None, None, None)


def test_a_feature_loader_reads_rows_of_a_part_by_position_and_knows_their_heat(cut_in_four):
    part = open_parts(cut_in_four)[3]
    table = part.tables["paper.float32"]
    ids = table.held.ids()
    rows = np.array([len(ids) - 1, 0, 3, 0])
    with FeatureLoader(gids.open(part, memory="64MB", heat="sampled"), [table.by_row()]) as loader:
        with loader.attach([torch.from_numpy(rows)], lambda found: {"paper.float32": found}) as stream:
            ((_, features),) = stream
        heat = part.heat("sampled", "paper")[part.owners("paper") == 3]
        assert np.array_equal(loader.table_heat(table), page_heat(heat, table.rows_per_page))
    assert features["paper.float32"].tolist() == table.read_rows(ids[rows]).tolist()


SEEDS = {"paper": np.arange(9)}
HEAT = "compute the heat of the whole dataset"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda part: NodeLoader(part, [1], [5], batch_size=8), "gids.distributed.open()"),
        (lambda part: layerwise([], part.path), "gids.inference needs all parts"),
        (lambda part: partition(part.path, "/nonexistent/again", 2), "partition the whole dataset"),
        (lambda part: reverse_pagerank(part, SEEDS), HEAT),
        (lambda part: sampled_counts(part, SEEDS, [5]), HEAT),
    ],
    ids=["NodeLoader", "layerwise", "partition", "reverse_pagerank", "sampled_counts"],
)
def test_what_needs_all_parts_refuses_one(cut_in_four, call, message):
    with pytest.raises(ValueError, match="part-000.gids is part 0 of 4: .*" + re.escape(message)):
        call(open_parts(cut_in_four)[0])


def test_loaders_refuse_what_only_all_parts_have(rich, cut_in_four, tmp_path):
    part = open_parts(cut_in_four)[0]
    table = part.table("paper.float32")
    for source, tables in ((part, ["paper.float32"]), (rich, [table])):
        with pytest.raises(ValueError, match=r"paper\.float32 is in a part of a dataset: open"):
            FeatureLoader(source, tables)
    partition(rich, tmp_path / "one", 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with gids.distributed.open(rich) as source, pytest.raises(ValueError, match="part of another"):
            NodeLoader(source, {"paper": [1]}, [5], tables=[table])
        with (
            gids.distributed.open(tmp_path / "one") as source,
            pytest.raises(ValueError, match="edges=None does not work with a partitioned dataset"),
        ):
            EdgeLoader(source, None, [5], relation=CITES)
        with pytest.raises(ValueError, match=r"is closed: call gids\.distributed\.open\(\) again"):
            NodeLoader(source, {"paper": [1]}, [5])
    finally:
        dist.destroy_process_group()


def test_a_directory_of_parts_is_no_dataset(cut_in_four):
    with pytest.raises(FormatError, match="it is a directory of parts"):
        FeatureStore(cut_in_four)


@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        (4097, {}, "must be 1 to 4096"),
        (2, {"method": "louvain"}, "unknown method 'louvain'; choose hash, range"),
        (2, {"memory_bytes": 1000}, "at least 1 and 1 MiB"),
        (2, {"seed": 1 << 64}, "it must be 0 to 2\\^64 - 1"),
    ],
)
def test_bad_arguments_are_refused(rich, tmp_path, parts, options, message):
    with pytest.raises(ValueError, match=message):
        partition(rich, tmp_path / "parts", parts, **options)
    assert list(tmp_path.iterdir()) == []


def test_an_edge_table_without_topology_is_refused(tmp_path):
    with DatasetWriter(tmp_path / "a.gids") as writer:
        writer.add_nodes("paper", 10)
        writer.write_table("edge", ("paper", "cites", "paper"), "w", np.ones((20, 1)))
    with pytest.raises(FormatError, match=r"relation 'paper.cites.paper' has no topology"):
        partition(tmp_path / "a.gids", tmp_path / "parts", 2)
    assert [p.name for p in tmp_path.iterdir()] == ["a.gids"]


def test_a_dataset_without_nodes_or_edges_has_empty_parts(tmp_path):
    with DatasetWriter(tmp_path / "a.gids") as writer:
        writer.write_table("node", "paper", "feat", np.ones((0, 4)))
        writer.write_table("node", "author", "feat", np.ones((1, 4)))
    partition(tmp_path / "a.gids", tmp_path / "parts", 3, method="range")
    assert list(verify(tmp_path / "parts")) == []
    check_union(FeatureStore(tmp_path / "a.gids"), open_parts(tmp_path / "parts"))


def test_existing_parts_are_not_replaced(dataset, tmp_path):
    partition(dataset, tmp_path / "parts", 2)
    before = contents(tmp_path / "parts")
    for taken in (tmp_path / "parts", dataset):
        with pytest.raises(FileExistsError, match="already exists, and a dataset never changes"):
            partition(dataset, taken, 3)
    assert contents(tmp_path / "parts") == before


@pytest.mark.parametrize("part", ["tables/paper.feat/shard-00.bin", "graph/paper.cites.paper/indices.npy"])
def test_a_damaged_source_is_not_divided(dataset, tmp_path, part):
    data = bytearray((dataset / part).read_bytes())
    data[-9] ^= 1
    (dataset / part).write_bytes(data)
    with pytest.raises(StorageError, match="fails its CRC32C"):
        partition(dataset, tmp_path / "parts", 2)
    assert not (tmp_path / "parts").exists()
