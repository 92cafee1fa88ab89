"""Partitions by community and METIS: balanced, with few edges between parts."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from partition_example import check_union, open_parts, write_rich_dataset

from gids import FeatureStore, FormatError, dgl_finder
from gids.store import verify
from gids.write import DatasetWriter, edge_list
from gids.write.partition import owners, partition

LOADS = ("rows", "seeds", "in_edges")


def write_graph(path, sources, destinations, node_count, rng):
    with DatasetWriter(path) as writer:
        ends = (torch.from_numpy(sources), torch.from_numpy(destinations))
        writer.write_edges(("_N", "_E", "_N"), edge_list(*ends, num_src=node_count, num_dst=node_count))
        writer.write_split("_N", "train", torch.from_numpy(rng.permutation(node_count)[: node_count // 10]))
    return path


@pytest.fixture(scope="module")
def clustered(tmp_path_factory):
    """60 groups of 100 nodes with shuffled ids; 19 of 20 edges stay within a group."""
    rng = np.random.default_rng(1)
    count, groups = 6000, 60
    shuffled = rng.permutation(count)
    destinations, members = rng.integers(0, count, 60_000), rng.integers(0, count // groups, 60_000)
    sources = destinations % groups + groups * members
    far = rng.random(60_000) < 0.05
    sources[far] = rng.integers(0, count, int(far.sum()))
    path = tmp_path_factory.mktemp("clustered") / "a.gids"
    return write_graph(path, shuffled[sources], shuffled[destinations], count, rng)


@pytest.fixture(scope="module")
def skewed(tmp_path_factory):
    """An R-MAT graph: a few nodes have most of the edges."""
    rng = np.random.default_rng(2)
    sources, destinations = np.zeros((2, 100_000), np.int64)
    for _ in range(13):
        drawn = rng.random(100_000)
        sources = 2 * sources + (drawn > 0.76)
        destinations = 2 * destinations + (((drawn > 0.57) & (drawn <= 0.76)) | (drawn > 0.95))
    shuffled = rng.permutation(1 << 13)
    path = tmp_path_factory.mktemp("skewed") / "a.gids"
    return write_graph(path, shuffled[sources], shuffled[destinations], 1 << 13, rng)


def test_communities_cut_few_edges_and_are_balanced(clustered, tmp_path):
    for parts in (2, 7):
        by_hash = partition(clustered, tmp_path / f"hash-{parts}", parts, method="hash")
        report = partition(clustered, tmp_path / f"community-{parts}", parts, method="community")
        assert max(report.balance(load) for load in LOADS) < 1.1
        assert report.cut_share < 0.2 * by_hash.cut_share
        assert list(verify(tmp_path / f"community-{parts}")) == []


def test_communities_of_a_skewed_graph_are_balanced(skewed, tmp_path):
    for parts in (3, 8):
        report = partition(skewed, tmp_path / f"parts-{parts}", parts, method="community")
        assert max(report.balance(load) for load in LOADS) < 1.1
        assert report.cut_share < 1 - 1 / parts


@pytest.mark.few(1)
@pytest.mark.parametrize("heterogeneous", [False, True])
def test_parts_by_community_are_the_dataset(tmp_path, heterogeneous):
    source = write_rich_dataset(tmp_path / "mag.gids", heterogeneous=heterogeneous)
    for count in (1, 3):
        out = tmp_path / f"parts-{count}"
        report = partition(source, out, count, method="community")
        check_union(FeatureStore(source), open_parts(out))
        assert list(verify(out)) == []
        assert max(report.balance(load) for load in LOADS) < 1.1
        papers = np.bincount(open_parts(out)[0].owners("paper"), minlength=count)
        assert papers.max() < 1.1 * papers.mean()


def test_communities_of_two_types_stay_together(tmp_path):
    """Authors have no in-edges; each writes papers of one group."""
    rng = np.random.default_rng(3)
    authors, papers, groups = 400, 2000, 100  # of 24 nodes: a community may have 30
    group_of_paper = rng.permutation(papers) % groups
    papers_of = [np.flatnonzero(group_of_paper == g) for g in range(groups)]
    sources = rng.integers(0, authors, 12_000)
    destinations = np.array([rng.choice(papers_of[a % groups]) for a in sources])
    with DatasetWriter(tmp_path / "a.gids") as writer:
        ends = edge_list(sources, destinations, num_src=authors, num_dst=papers)
        writer.write_edges(("author", "writes", "paper"), ends)
    report = partition(tmp_path / "a.gids", tmp_path / "parts", 4, method="community")
    assert report.cut_share < 0.1
    for ntype in ("author", "paper"):
        counts = np.bincount(open_parts(tmp_path / "parts")[0].owners(ntype), minlength=4)
        assert counts.max() < 1.1 * counts.mean()


@pytest.mark.slow
def test_metis_of_dgl_divides_several_types(clustered, tmp_path, monkeypatch):
    try:
        dgl_finder.import_dgl()
    except ImportError as error:
        pytest.skip(str(error))
    monkeypatch.setitem(sys.modules, "pymetis", None)
    report = partition(clustered, tmp_path / "parts", 4, method="metis")
    assert report.cut_share < 0.2
    assert max(report.balance(load) for load in LOADS) < 1.2
    source = write_rich_dataset(tmp_path / "mag.gids")
    for count in (1, 3):
        out = tmp_path / f"rich-{count}"
        partition(source, out, count, method="metis")
        check_union(FeatureStore(source), open_parts(out))
        assert list(verify(out)) == []


def test_pymetis_gets_a_symmetric_graph_without_loops(clustered, tmp_path, monkeypatch):
    given = {}

    def part_graph(parts, *, xadj, adjncy, vweights):
        given.update(xadj=np.array(xadj), adjncy=np.array(adjncy), vweights=np.array(vweights))
        return 0, (np.arange(len(vweights)) % parts).tolist()

    module = ModuleType("pymetis")
    module.part_graph = part_graph
    monkeypatch.setitem(sys.modules, "pymetis", module)
    partition(clustered, tmp_path / "parts", 3, method="metis")
    owners = open_parts(tmp_path / "parts")[0].owners()
    assert np.array_equal(owners, np.arange(6000) % 3)
    ends = np.repeat(np.arange(6000), np.diff(given["xadj"]))
    pairs = set(zip(ends.tolist(), given["adjncy"].tolist(), strict=True))
    assert len(pairs) == len(ends), "no edge twice"
    assert all((b, a) in pairs and a != b for a, b in pairs)
    graph = FeatureStore(clustered).graph()
    wanted = np.repeat(np.arange(6000), np.diff(graph.indptr))
    assert {(b, int(a)) for a, b in zip(graph.indices, wanted.tolist(), strict=True) if a != b} <= pairs
    assert given["vweights"].min() >= 1
    assert 900 < given["vweights"].mean() < 1100


def test_without_metis_the_error_says_what_to_install(clustered, tmp_path, monkeypatch):
    def no_dgl():
        raise ImportError("gids.dgl needs DGL")

    monkeypatch.setitem(sys.modules, "pymetis", None)
    monkeypatch.setattr(owners.dgl_finder, "import_dgl", no_dgl)
    with pytest.raises(ImportError, match="pip install pymetis, or install DGL"):
        partition(clustered, tmp_path / "parts", 3, method="metis")
    assert list(tmp_path.iterdir()) == []


def test_a_graph_is_needed_and_memory_for_its_nodes(clustered, tmp_path):
    with DatasetWriter(tmp_path / "a.gids") as writer:
        writer.write_table("node", "paper", "feat", np.ones((50, 1)))
    with pytest.raises(FormatError, match=r"--method community needs a graph.*use --method hash"):
        partition(tmp_path / "a.gids", tmp_path / "parts", 3, method="community")
    with DatasetWriter(tmp_path / "b.gids") as writer:
        ends = edge_list(np.array([0]), np.array([1]), num_src=100_000, num_dst=100_000)
        writer.write_edges(("_N", "_E", "_N"), ends)
    with pytest.raises(FormatError, match="needs 2800000 bytes, but --memory is 1048576: give --memory 3MB"):
        partition(tmp_path / "b.gids", tmp_path / "parts", 2, method="community", memory_bytes=1 << 20)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gids", "b.gids"]


@pytest.mark.parametrize("kind", ["skewed", "two types"])
def test_communities_do_not_depend_on_threads_and_memory(skewed, tmp_path, kind):
    source = skewed if kind == "skewed" else write_rich_dataset(tmp_path / "mag.gids")
    for name, workers, memory_bytes in (("a", 1, 1 << 20), ("b", 2, 1 << 28)):
        options = {"workers": workers, "memory_bytes": memory_bytes, "method": "community"}
        partition(source, tmp_path / name, 3, **options)
    first, second = (open_parts(tmp_path / name)[0] for name in ("a", "b"))
    for ntype in first.node_types:
        assert np.array_equal(first.owners(ntype), second.owners(ntype))
