"""What a first script asks: sizes of a source, seeds by a split's name, features by key, clear mistakes."""

import copy
import pickle
from pathlib import Path

import pytest
import torch

import gids
from gids.write import DatasetWriter

TRAIN, CITES = torch.tensor([3, 0, 7]), ("paper", "cites", "paper")
INDPTR, SOURCES = torch.arange(0, 31, 3), torch.arange(30) % 10


def write(path: Path, *, several: bool) -> Path:
    with DatasetWriter(path) as writer:
        writer.write_table("node", "paper", "feat", torch.arange(80.0).reshape(10, 8))
        writer.write_labels("paper", torch.tensor([0, 4, 1, 2, 3, 0, 0, 1, 2, 3]))
        writer.write_split("paper", "train", TRAIN)
        writer.write_graph(CITES, INDPTR, SOURCES, num_src=10)
        if several:
            writer.write_table("node", "author", "feat", torch.arange(20.0).reshape(10, 2))
            writer.write_table("node", "author", "name", torch.arange(10.0).reshape(10, 1))
            writer.write_split("author", "train", TRAIN + 1)
            writer.write_graph(("author", "writes", "paper"), INDPTR, SOURCES, num_src=10)
    return path


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("one") / "one.gids", several=False)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("several") / "several.gids", several=True)


def test_a_source_answers_what_a_model_needs(one: Path, several: Path) -> None:
    with gids.open(one) as source:
        assert (source.num_nodes, source.num_features, source.num_classes) == (10, 8, 5)
        assert source.metadata() == (["paper"], [CITES])
        assert list(source.tables) == ["paper.feat"]
        assert source.table("feat") is source.tables["paper.feat"]
        assert torch.equal(source.split("train"), TRAIN)
        assert source.ids()[3] == 3
        assert source.labels["paper"][1] == 4
    with gids.open(several) as source:
        assert source.num_nodes == {"paper": 10, "author": 10}
        assert source.num_features == {"paper": 8, "author": 2}
        assert source.num_classes == {"paper": 5}
        assert source.metadata()[1] == source.edge_types == [CITES, ("author", "writes", "paper")]
    with gids.open([one, several]) as source:
        assert list(source.tables) == ["paper.feat", "author.feat", "author.name"]
        assert source.table("name").name == "author.name"


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (torch.tensor([0.0, 2.0, float("nan")]), 3),
        (torch.zeros(3, 7), 7),
        (torch.tensor([0.5, 1.0, 0.0]), None),
    ],
)
def test_classes_of_labels(tmp_path: Path, labels: torch.Tensor, classes: int | None) -> None:
    with DatasetWriter(tmp_path / "d.gids") as writer:
        writer.write_table("node", "a", "u", torch.zeros(3, 1))
        writer.write_table("node", "a", "v", torch.zeros(3, 1))
        writer.write_labels("a", labels)
    with gids.open(tmp_path / "d.gids") as source:
        with pytest.raises(gids.MissingError, match=r"features of 'a' nodes.*'a\.u', 'a\.v'"):
            source.num_features  # noqa: B018
        if classes is None:
            with pytest.raises(ValueError, match="fractions"):
                source.num_classes  # noqa: B018
        else:
            assert source.num_classes == classes


def test_keys_with_dots_and_tables_of_the_first_dataset_that_has_one(one: Path, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "graph.gids") as writer:
        writer.write_graph(CITES, INDPTR, SOURCES, num_src=10)
    with DatasetWriter(tmp_path / "dots.gids") as writer:
        writer.write_table("node", "paper", "my.feat", torch.zeros(10, 1))
        writer.write_table("node", "paper", "feat", torch.ones(10, 2))
        writer.write_table("node", "paper", "x", torch.ones(10, 3))
        writer.write_graph(CITES, INDPTR, SOURCES, num_src=10)
    with gids.open(tmp_path / "dots.gids") as source:
        assert source.num_features == 3
        [minibatch] = gids.NodeLoader(source, TRAIN, [2])
        assert [minibatch.features[key].shape[1] for key in ("my.feat", "feat", "x")] == [1, 2, 3]
        [minibatch] = gids.NodeLoader(source, TRAIN, [2], tables={"h": "feat"})
        assert torch.equal(minibatch.features["feat"], minibatch.features["h"])
        again = pickle.loads(pickle.dumps(minibatch))
        assert torch.equal(again.features["feat"], minibatch.features["h"])
        assert minibatch.to("meta").features["feat"].shape == minibatch.features["h"].shape
    with gids.open([tmp_path / "graph.gids", one]) as source:
        assert source.table().name == "paper.feat"
        assert source.num_features == 8


def test_a_source_has_no_data_in_memory(one: Path) -> None:
    with gids.open(one) as source:
        assert not hasattr(source, "x")
        with pytest.raises(AttributeError, match=r"gids\.inference\.layerwise"):
            source.x  # noqa: B018
        with pytest.raises(AttributeError, match="no attribute 'nodes'"):
            source.nodes  # type: ignore[attr-defined]  # noqa: B018
        with pytest.raises(TypeError, match="cannot be pickled"):
            copy.copy(source)


def test_seeds_are_the_split_of_this_name(one: Path, several: Path) -> None:
    [minibatch] = gids.NodeLoader(one, "train", [2], memory="64MB")
    assert torch.equal(minibatch.seeds, TRAIN)
    assert torch.equal(minibatch.features["feat"], minibatch.features["paper.feat"])
    [minibatch] = gids.NodeLoader(several, "train", [2])
    assert {t: ids.tolist() for t, ids in minibatch.seeds.items()} == {
        "paper": [3, 0, 7],
        "author": [4, 1, 8],
    }
    with pytest.raises(gids.MissingError, match=r"no features 'feat' \(it has"):
        minibatch.features["feat"]
    for of_type in ("paper", "train"), {"paper": "train"}, ("paper", TRAIN):
        [minibatch] = gids.NodeLoader(several, of_type, [2])
        assert [ids.tolist() for ids in minibatch.seeds.values()] == [[3, 0, 7]]
    with pytest.raises(gids.MissingError, match="no split 'valid'"):
        gids.NodeLoader(one, "valid", [2])


def test_seed_edges_may_have_their_relation(several: Path) -> None:
    edges, relation = torch.tensor([[1, 2], [3, 4]]), ("author", "writes", "paper")
    named = gids.EdgeLoader(several, edges, [2], relation=relation, seed=1)
    typed = gids.EdgeLoader(several, (relation, edges), [2], seed=1, memory="64MB")
    mapped = gids.EdgeLoader(several, {relation: edges}, [2], seed=1)
    for a, b, c in zip(named, typed, mapped, strict=True):
        assert torch.equal(a.pairs, b.pairs)
        assert torch.equal(a.pairs, c.pairs)


def test_arguments_about_workers_are_ignored_with_a_warning(one: Path) -> None:
    with pytest.warns(UserWarning, match="num_workers= and prefetch_factor= have no effect"):
        gids.NodeLoader(one, TRAIN, [2], num_workers=2, prefetch_factor=4)  # type: ignore[call-arg]
    with pytest.warns(UserWarning, match="in_order= has no effect"):
        gids.NodeLoader(one, TRAIN, [2], in_order=False)  # type: ignore[call-arg]
    gids.NodeLoader(one, TRAIN, [2], num_workers=0, in_order=True)  # type: ignore[call-arg]


def test_more_memory_than_the_machine_has_is_named(one: Path, caplog: pytest.LogCaptureFixture) -> None:
    gids.open(one, memory="900TB")
    assert "memory='900TB' is more than this machine has" in caplog.text
