"""NodeLoader: every seed once an epoch, with features and labels of its minibatch, the same every time."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import random_in_edges
from open_options import node_loader

import gids
from gids.cuda import Device
from gids.errors import FormatError
from gids.sampler import Block, LocalityBias, Minibatch, Neighbor, RandomWalk
from gids.write import DatasetWriter, edge_list

PAPERS, AUTHORS, DIM = 2000, 300, 64
Rows = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def source() -> Rows:
    generator = torch.Generator().manual_seed(1)
    return {
        "paper.feat": torch.randn(PAPERS, DIM, generator=generator),
        "author.feat": torch.randn(AUTHORS, 32, generator=generator).to(torch.float16),
        "paper.label": torch.randint(0, 9, (PAPERS,), generator=generator),
    }


@pytest.fixture(scope="module")
def one_type(tmp_path_factory: pytest.TempPathFactory, source: Rows) -> Path:
    path = tmp_path_factory.mktemp("nodes") / "one.gids"
    with DatasetWriter(path) as writer:
        writer.write_table("node", "paper", "feat", source["paper.feat"])
        writer.write_labels("paper", source["paper.label"])
        writer.write_graph(("paper", "cites", "paper"), *random_in_edges(PAPERS, PAPERS, 1), num_src=PAPERS)
    return path


@pytest.fixture(scope="module")
def two_types(tmp_path_factory: pytest.TempPathFactory, source: Rows) -> Path:
    path = tmp_path_factory.mktemp("nodes") / "two.gids"
    with DatasetWriter(path) as writer:
        for name in ("paper.feat", "author.feat"):
            writer.write_table("node", name.split(".")[0], "feat", source[name])
        count = len(random_in_edges(AUTHORS, PAPERS, PAPERS)[1])
        writer.write_table("edge", ("author", "writes", "paper"), "year", torch.arange(count).view(-1, 1))
        writer.write_labels("paper", source["paper.label"])
        for relation, num_src, num_dst in (
            (("paper", "cites", "paper"), PAPERS, PAPERS),
            (("author", "writes", "paper"), AUTHORS, PAPERS),
            (("paper", "written by", "author"), PAPERS, AUTHORS),
        ):
            writer.write_graph(relation, *random_in_edges(num_src, num_dst, num_dst), num_src=num_src)
    return path


def fingerprint(minibatch: Minibatch) -> list[list[int]]:
    """Everything of a homogeneous minibatch but the features."""
    lists = [minibatch.seeds, minibatch.input_nodes]
    for block in minibatch.blocks:
        lists += [block.indptr, block.indices, block.positions]
    return [t.tolist() for t in lists]  # type: ignore[union-attr]


def open_loader(path: Path, **options: Any) -> gids.NodeLoader:
    given: dict[str, Any] = {
        "batch_size": 100,
        "shuffle": True,
        "memory": 1 << 30,
        "cache": 100_000,
    } | options
    seeds = given.pop("seeds", torch.arange(0, PAPERS, 3))
    return node_loader(path, seeds, given.pop("sampler", [3, 4]), **given)


def test_only_the_tables_asked_for(two_types: Path, source: Rows) -> None:
    seeds = {"paper": torch.arange(50)}
    with open_loader(two_types, seeds=seeds, tables=["author.feat"], labels=False) as loader:
        m = next(iter(loader))
        assert m.features.keys() == {"author.feat"}
        assert m.labels is None
        with pytest.raises(KeyError, match=r"no features 'paper.feat' \(it has 'author.feat'\)"):
            m.features["paper.feat"]
    with open_loader(two_types, seeds=seeds, tables=[]) as loader:
        m = next(iter(loader))
        assert m.features == {}
        assert len(m.labels["paper"]) == 50  # type: ignore[index]


def test_edge_ids_are_looked_up_once_for_all_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    indptr, indices = random_in_edges(200, 200, 1)
    ids = np.random.default_rng(2).permutation(len(indices))
    relation = ("a", "to", "a")
    with DatasetWriter(tmp_path / "edges.gids") as writer:
        writer.write_table("node", "a", "feat", torch.zeros(200, 4))
        writer.write_graph(relation, indptr, indices, num_src=200, edge_ids=ids)
        for factor, key in enumerate("xyz"):
            writer.write_table("edge", relation, key, (factor * torch.arange(len(ids))).view(-1, 1))
    looked_up = []

    def edge_ids(block: Block) -> torch.Tensor:
        looked_up.append(block)
        return torch.from_numpy(ids[block.positions])

    monkeypatch.setattr(Block, "edge_ids", property(edge_ids))
    tables = [f"a.to.a.{key}" for key in "xyz"]
    with open_loader(tmp_path / "edges.gids", seeds=torch.arange(200), tables=tables) as loader:
        minibatches = list(loader)
    assert len(looked_up) == 2 * len(minibatches)  # of two blocks each
    for m in minibatches:
        read = torch.cat([torch.from_numpy(ids[block.positions]) for block in m.blocks])  # type: ignore[union-attr]
        for factor, table in enumerate(tables):
            assert torch.equal(m.features[table], factor * read.view(-1, 1))


def test_edges_of_random_walks_have_no_rows(two_types: Path) -> None:
    walks = RandomWalk([3], metapath=[("paper", "cites", "paper")])
    with pytest.raises(ValueError, match="RandomWalk are not in the dataset"):
        open_loader(
            two_types, seeds={"paper": torch.arange(9)}, sampler=walks, tables=["author.writes.paper.year"]
        )


def test_rows_of_reverses_need_the_ids_of_their_edges(tmp_path: Path) -> None:
    writes, back = ("author", "writes", "paper"), ("paper", "rev_writes", "author")
    sources, destinations = torch.arange(40) % 7, torch.arange(40) % 11
    options: dict[str, Any] = {"seeds": {"paper": torch.arange(11)}, "tables": ["author.writes.paper.year"]}
    for count in (40, 39):
        path, of_back = tmp_path / f"{count}.gids", (destinations[:count], sources[:count])
        with DatasetWriter(path) as writer:
            writer.write_edges(writes, edge_list(sources, destinations, num_src=7, num_dst=11))
            writer.write_edges(back, edge_list(*of_back, num_src=11, num_dst=7))
            writer.write_table("edge", writes, "year", torch.arange(40))
        options["sampler"] = Neighbor([2, 2], subgraph="bidirectional")
        if count == 39:
            with pytest.raises(ValueError, match="edges with features must have the ids of their reverses"):
                open_loader(path, **options)
            continue
        with open_loader(path, **options) as loader:
            [m] = loader
        [blocks] = m.blocks
        ids = blocks[writes].edge_ids  # type: ignore[call-overload]
        assert torch.equal(m.features["author.writes.paper.year"], ids)
        assert torch.equal(m.input_nodes["author"][blocks[writes].indices], sources[ids])  # type: ignore[call-overload]


@pytest.mark.parametrize("by_type", [False, True])
@pytest.mark.parametrize("given", [torch.from_numpy, np.asarray])
def test_seeds_that_the_user_changes_later_stay_those_given(
    one_type: Path, two_types: Path, given: Any, by_type: bool
) -> None:
    array = np.arange(0, PAPERS, 3)
    seeds: Any = {"paper": given(array)} if by_type else given(array)
    with open_loader(two_types if by_type else one_type, seeds=seeds, tables=[]) as loader:
        epoch = iter(loader)
        first, expected = next(epoch).seeds, torch.from_numpy(array[loader.order(0).numpy()])
        array[:] = 1 << 40  # no node
        found = [first, *(m.seeds for m in epoch)]
    assert torch.equal(torch.cat([s["paper"] if isinstance(s, dict) else s for s in found]), expected)


def test_a_state_has_the_epoch_and_the_next_step(one_type: Path) -> None:
    with open_loader(one_type) as loader:

        def at() -> tuple[int, int]:
            state = loader.state_dict()
            return state["epoch"], state["step"]

        assert at() == (0, 0)
        epoch = iter(loader)
        assert at() == (0, 0)
        next(epoch)
        next(epoch)
        assert at() == (0, 2)
        saved = loader.state_dict()
        second = iter(loader)  # the one begun last counts
        next(second)
        assert at() == (1, 1)
        list(second)
        assert at() == (2, 0)
        loader.epoch = 9
        assert at() == (9, 0)
        loader.load_state_dict(saved)
        assert at() == (0, 2)
        loader.epoch = 5  # asks for that epoch's beginning
        assert at() == (5, 0)
        assert next(iter(loader)).step == 0


def test_a_state_of_another_loader_is_refused(one_type: Path, two_types: Path) -> None:
    with open_loader(one_type) as loader:
        state = loader.state_dict()
        weighted = Neighbor([3, 4], weights=torch.ones(loader._topology.graphs[0].num_edges))
    paper = {"paper": torch.arange(0, PAPERS, 3)}
    for message, path, options in (
        ("seed = 0, and this one has 1", one_type, {"seed": 1}),
        (r"batch_size \* world_size = 100, and this one has 50", one_type, {"batch_size": 50}),
        ("shuffle = True", one_type, {"shuffle": False}),
        ("drop_last = False", one_type, {"drop_last": True}),
        ("seeds = '667 ", one_type, {"seeds": torch.arange(1, PAPERS, 3)}),
        (r"sampler = 'Neighbor\(\[3, 4\]\)'", one_type, {"sampler": [3, 5]}),
        (r"Neighbor\(\[3, 4\], weights='\d+ \(\w+\)'\)", one_type, {"sampler": weighted}),
        ("topology = ", two_types, {"seeds": paper}),
    ):
        with open_loader(path, tables=[], **options) as other, pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
    with open_loader(one_type, tables=[]) as loader:
        for message, wrong in (
            ("not a NodeLoader state_dict: found keys 'model'", {"model": 1}),
            ("not a NodeLoader state_dict: found keys none", {}),
            ("version 1; this version of gids reads version 2", {**state, "version": 1}),
            ("epoch -1", {**state, "epoch": -1}),
            ("step 8; an epoch has 7 steps", {**state, "step": 8}),
        ):
            with pytest.raises(ValueError, match=message):
                loader.load_state_dict(wrong)
        assert loader.state_dict() == state


def test_minibatches_depend_on_epoch_and_seed_alone(one_type: Path) -> None:
    def run(**options: Any) -> list[list[list[int]]]:
        with open_loader(one_type, **options) as loader:
            return [fingerprint(m) for _ in range(2) for m in loader]

    expected = run()
    for options in (
        {"window": 0},
        {"window": 20, "planned": 4},
        {"threads": 1},
        {"threads": 4, "policy": "lru"},
        {"cache": 0, "tables": []},
    ):
        assert run(**options) == expected, options
    assert run(seed=1) != expected
    assert expected[: len(expected) // 2] != expected[len(expected) // 2 :]
    with open_loader(one_type) as loader:
        loader.epoch = -1
        with pytest.raises(ValueError, match=r"loader\.epoch=-1 must be from 0"):
            iter(loader)
        loader.epoch = np.int64(1)
        assert type(loader.state_dict()["epoch"]) is int  # torch.load reads plain numbers only
        assert [fingerprint(m) for m in loader] == expected[len(expected) // 2 :]


class Told(Neighbor):
    """Tells how many minibatches were asked for in each call."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls: list[int] = []

    def sample_bulk(self, graphs: Any, seeds_of_steps: Any, **numbers: Any) -> list[Minibatch]:
        self.calls.append(len(seeds_of_steps))
        return super().sample_bulk(graphs, seeds_of_steps, **numbers)


@pytest.mark.parametrize(("window", "threads", "most"), [(16, 2, 4), (6, 4, 3), (3, 8, 1), (16, 1, 1)])
def test_two_minibatches_for_each_thread_are_sampled_at_once(
    one_type: Path, window: int, threads: int, most: int
) -> None:
    """And no more than half a window. The first comes alone."""
    sampler = Told([3, 4], threads=threads)
    with open_loader(one_type, sampler=sampler, window=window, batch_size=20) as loader:
        found = [fingerprint(m) for m in loader]
        count = len(loader)
        rest = [most] * ((count - 1) // most) + [(count - 1) % most]
        assert sampler.calls == [n for n in rest if n > 1]
    with open_loader(one_type, window=0, threads=1, batch_size=20) as loader:
        assert found == [fingerprint(m) for m in loader]


def test_minibatches_that_wait_for_the_window_are_told(one_type: Path) -> None:
    def run(threads: int) -> tuple[int, int]:
        sampler = Neighbor([3, 4], threads=threads)
        with open_loader(one_type, sampler=sampler, window=8, planned=2) as loader:
            first = next(iter(loader))
            return loader.stats()["memory"]["window"], first.nbytes

    (alone, nbytes), (together, _) = run(1), run(4)
    assert together - alone == 3 * nbytes


def test_an_error_is_raised_when_its_minibatch_is_due(one_type: Path) -> None:
    """Also of a sampler that others were asked of in the same call."""

    class Failing(Told):
        def sample_bulk(self, graphs: Any, seeds_of_steps: Any, **numbers: Any) -> list[Minibatch]:
            found = super().sample_bulk(graphs, seeds_of_steps, **numbers)
            if any(m.step == 7 for m in found):
                raise FormatError("step 7")
            return found

        def sample(self, graphs: Any, seeds: Any, *, step: int = 0, **numbers: Any) -> Minibatch:
            if step == 7:
                raise FormatError("step 7")
            return super().sample(graphs, seeds, step=step, **numbers)

    every: list[list[str] | None] = [None, []]
    for tables in every:
        sampler = Failing([3, 4], threads=4)
        with open_loader(one_type, sampler=sampler, tables=tables, batch_size=20) as loader:
            epoch = iter(loader)
            assert [next(epoch).step for _ in range(7)] == list(range(7))
            with pytest.raises(FormatError, match="step 7"):
                next(epoch)
            assert tables == [] or not loader.feature_loader.has_open_epoch  # type: ignore[union-attr]
            with pytest.raises(RuntimeError, match="ended this epoch after 7 of"):
                next(epoch)
        assert sampler.calls == [8]


def test_stats_count_rows_and_memory(one_type: Path) -> None:
    with open_loader(one_type) as loader:
        epoch = iter(loader)
        next(epoch)
        assert loader.stats()["memory"]["sampler"] > 0
        assert len(list(epoch)) == len(loader) - 1
        stats = loader.stats()
        assert stats["hits"] + stats["misses"] > 0
        assert stats["memory"]["sampler"] == 0  # freed once all is sampled
        assert stats["memory"]["topology"] == 0
        assert stats["memory"]["labels"] == 8 * PAPERS
        assert stats["epoch"] == 1
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(loader)
        loader.close()
        loader.close()
        assert loader.stats()["hits"] == stats["hits"]
        with pytest.raises(ValueError, match="closed"):
            iter(loader)


def test_minibatches_are_made_on_the_device(
    one_type: Path, device: Device, cuda_is: Callable[[Device], None], source: Rows
) -> None:
    cuda_is(device)
    with open_loader(one_type, tables=[]) as loader:
        expected = [fingerprint(m) for _ in range(2) for m in loader]
    with open_loader(one_type, tables=[], device="cuda", topology_on="indptr") as loader:
        for m, same in zip((m for _ in range(2) for m in loader), expected, strict=True):
            assert fingerprint(m) == same
            assert m.input_nodes.device == device.torch_device  # type: ignore[union-attr]
            assert torch.equal(m.labels.cpu(), source["paper.label"][m.seeds.cpu()])  # type: ignore[union-attr]
        memory = loader.stats()["memory"]
        assert memory["topology"] > 0
        assert memory["topology on the device"] == (PAPERS + 1) * 8
        assert memory["sampler"] > 0
    assert loader._topology.pinned[0].closed


def test_a_sampler_that_is_set_later_has_the_masks_of_its_rank(one_type: Path) -> None:
    masks = [np.arange(PAPERS) < 500, np.arange(PAPERS) >= 500]
    given: dict[str, Any] = {"seeds": torch.arange(0, PAPERS, 30), "memory": 64 << 20, "world_size": 2}
    for rank in range(2):
        sampler = Neighbor([3, 4], locality=LocalityBias(masks, 3))
        with open_loader(one_type, sampler=sampler, rank=rank, **given) as loader:
            expected = [fingerprint(m) for m in loader]
        with open_loader(one_type, sampler=[3, 4], rank=rank, **given) as loader:
            loader.sampler = sampler
            assert [fingerprint(m) for m in loader] == expected


def test_a_sampler_with_other_arguments_than_its_base_has_a_state(one_type: Path) -> None:
    class Fixed(Neighbor):
        def __init__(self, threads: int) -> None:
            super().__init__([3, 4], threads=threads)

    with open_loader(one_type, tables=[], sampler=Fixed(2)) as loader:
        assert "Fixed([3, 4]" in loader.state_dict()["made_with"]["sampler"]


def test_large_numbers_are_seeds_of_their_own(one_type: Path) -> None:
    orders = []
    for seed in (2**63 + 4, 2**63 + 5, 2**64 - 1, np.int64(3), 3):
        with open_loader(one_type, tables=[], seed=seed) as loader:
            orders.append(tuple(loader.order(0).tolist()))
    assert len(set(orders)) == 4
    assert orders[-1] == orders[-2]


def test_resumed_at_the_last_and_partial_step_memory_is_kept(one_type: Path) -> None:
    seeds = torch.arange(1001)  # one seed in the last of 11 steps
    options = {"seeds": seeds, "memory": 20 << 20, "cache": None}
    with open_loader(one_type, **options) as loader:
        state = loader.state_dict() | {"step": 10}
    with open_loader(one_type, **options) as loader:
        loader.load_state_dict(state)
        assert len(list(loader)) == 1
        assert len(list(loader)) == 11
        memory = loader.stats()["memory"]
        assert sum(n for what, n in memory.items() if what != "sampler" and what != "topology") <= 20 << 20


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_ahead_of_the_consumer_keeps_no_stream_alive(one_type: Path, threads: int) -> None:
    class Failing(Neighbor):
        def sample(self, *args: Any, step: int = 0, **numbers: Any) -> Minibatch:
            if step == 6:
                raise RuntimeError("no")
            return super().sample(*args, step=step, **numbers)

    with open_loader(one_type, sampler=Failing([3, 4], threads=threads), window=8) as loader:
        gc.disable()
        try:
            for step, _ in enumerate(loader):
                if step == 3:
                    break
            assert not loader.feature_loader.has_open_epoch  # type: ignore[union-attr]
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"workers": 3}, TypeError, "NodeLoader has no argument 'workers'.*tables"),
        ({"workers": 3, "tables": []}, TypeError, "NodeLoader has no argument 'workers'"),
        ({"memory": "8 apples"}, ValueError, "memory='8 apples' is not a size in bytes"),
        ({"sampler": 10}, TypeError, r"sampler=10: give fanouts, such as \[10, 10\], or a sampler"),
        ({"sampler": None}, TypeError, "sampler=None"),
        ({"seeds": {1, 2}}, TypeError, r"are set: give a tensor, int64\[n\] or bool\[2000\]"),
        ({"seeds": torch.zeros(9, dtype=torch.bool)}, TypeError, "a mask of all nodes"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"batch_size": 1.5}, TypeError, "batch_size=1.5: give a whole number"),
        ({"batch_size": torch.tensor(True)}, TypeError, r"batch_size=tensor\(True\): give a whole number"),
        ({"seed": True}, TypeError, "seed=True: give a whole number"),
        ({"seeds": torch.tensor([3, -1])}, IndexError, "run from -1 to 3; ids run from 0 to 1999"),
        ({"seeds": torch.arange(4.0)}, TypeError, "give int64"),
        ({"seeds": [0.5]}, TypeError, "give int64"),
        ({"seeds": ["ann", "bob"]}, TypeError, r"seeds are texts: .*store.ids\(node_type\).find\(texts\)"),
        ({"dtype": "float16"}, ValueError, r"torch.float16, .* \(got 'float16'\)"),
        ({"sampler": []}, ValueError, "fanouts="),
        ({"tables": ["x"]}, KeyError, "no table 'x'"),
        ({"tables": "paper.feat"}, TypeError, "give a list"),
        ({"labels": "all"}, ValueError, "labels='all'"),
        ({"window": 30}, ValueError, "window must be at most 23"),
        ({"window": 20, "planned": 5}, ValueError, "window . planned must be at most 24"),
    ],
)
def test_wrong_arguments_are_named(
    one_type: Path, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        open_loader(one_type, **options)


def test_seeds_that_no_graph_has_are_named(two_types: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="3 relations: give seeds by node type"):
        open_loader(two_types)
    with pytest.raises(KeyError, match="no relation has it"):
        open_loader(two_types, seeds={"venue": torch.arange(4)})
    with DatasetWriter(tmp_path / "no.gids") as writer:
        writer.write_table("node", "paper", "feat", torch.zeros(4, 4))
    with pytest.raises(gids.FormatError, match="no topology"):
        open_loader(tmp_path / "no.gids", seeds=torch.arange(3))


@pytest.mark.parametrize(
    "seeds",
    [
        list(range(7, 40)),
        range(7, 40),
        np.arange(7, 40, dtype=np.uint16),
        torch.arange(7, 40, dtype=torch.int32),
        torch.arange(PAPERS).ge(7) & torch.arange(PAPERS).lt(40),
        [7 <= node < 40 for node in range(PAPERS)],
    ],
    ids=["list", "range", "uint16", "int32", "mask", "list of bools"],
)
def test_seeds_may_be_integers_of_any_width_or_a_mask(one_type: Path, seeds: Any) -> None:
    with open_loader(one_type, seeds=seeds, shuffle=False, batch_size=50) as loader:
        (minibatch,) = loader
        assert minibatch.seeds.tolist() == list(range(7, 40))
    with open_loader(one_type, seeds=[], batch_size=50) as loader:
        assert list(loader) == []


def test_a_minibatch_moves_to_another_device(two_types: Path) -> None:
    with open_loader(two_types, seeds={"paper": torch.arange(40)}) as loader:
        minibatch = next(iter(loader))
    assert minibatch.to("cpu") is minibatch
    moved = minibatch.to("meta")
    assert type(moved) is type(minibatch)
    assert {tensor.device.type for tensor in moved.tensors()} == {"meta"}
    assert [t.shape for t in moved.tensors()] == [t.shape for t in minibatch.tensors()]
    assert moved.features.keys() == minibatch.features.keys()
    assert moved.step == minibatch.step
