"""Ranks tell each other plain values through a key-value store."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from gids.errors import RankError
from gids.loader.ranks import Process, StoreGroup, key_prefix


def make(store: Any, ranks: tuple[int, ...] = (3, 5, 8), *, timeout_s: float = 10.0) -> list[StoreGroup]:
    """The same group, as each of its ranks sees it."""
    return [StoreGroup(rank, ranks, store, "key", timeout_s) for rank in ranks]


def with_process(group: StoreGroup, rank: int, **changes: Any) -> StoreGroup:
    """The group, where a rank has such a process."""
    group._processes[rank] = dataclasses.replace(Process.this(), **changes)
    return group


def together(groups: list[StoreGroup], work: Callable[[StoreGroup], Any]) -> list[Any]:
    def run(group: StoreGroup) -> Any:
        try:
            return work(group)
        except RankError as error:
            return str(error)

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(run, groups))


def test_each_hears_what_all_say_and_little_is_left_in_the_store() -> None:
    store = HashStore()
    groups = make(store)
    names = [(g.index, g.size, g.name_of(g.index)) for g in groups]
    assert names == [(0, 3, "rank 3"), (1, 3, "rank 5"), (2, 3, "rank 8")]
    for number in range(20):
        values = together(groups, lambda g, number=number: g.gather({"said": [number, g.index]}, "here"))  # type: ignore[misc]
        assert values == [[{"said": [number, index]} for index in range(3)]] * 3
        assert store.num_keys() == 3, "of this round"


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_each_hears_all_through_any_store_of_torch_2_2(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stores have no check()."""
    monkeypatch.delattr(dist.Store, "check", raising=False)
    store = {
        "hash": HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True),
    }[kind]()
    groups = make(dist.PrefixStore("prefix", store))
    for number in range(3):
        assert (
            together(groups, lambda g, number=number: g.gather([number, g.index]))
            == [  # type: ignore[misc]
                [[number, index] for index in range(3)]
            ]
            * 3
        )


def test_one_alone_hears_itself() -> None:
    with StoreGroup.alone(7) as group:
        assert (group.index, group.size, group.gather("a")) == (0, 1, ["a"])
        group.fail(ValueError("nobody hears it"))


def test_ranks_that_do_something_else_are_named_on_all() -> None:
    groups = make(HashStore())
    for error in together(groups, lambda g: g.meet("there" if g.index == 1 else "here")):
        assert "the ranks are at different minibatches: rank 3 and rank 8: here; rank 5: there." in error


@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("said", [False, True])
def test_a_rank_that_fails_is_named_wherever_the_others_are(rounds: int, failing: int, said: bool) -> None:
    """said: it failed once the others had heard this round from it."""
    groups = make(HashStore())
    for _ in range(rounds):
        together(groups, lambda g: g.gather(None))

    def work(group: StoreGroup) -> Any:
        with group:
            if said:
                group.gather(None)
            if group.index == failing:
                raise RankError("its own")
            return group.gather(None)

    told = together(groups, work)
    name = groups[0].name_of(failing)
    assert told.pop(failing) == "its own"
    assert told == [f"{name} failed with RankError: its own"] * 2


def test_the_first_failure_is_told_and_not_what_follows_from_it() -> None:
    groups = make(HashStore(), (0, 1, 2))
    groups[1].fail(MemoryError("short"))

    def follow(group: StoreGroup) -> Any:
        with group:
            return group.gather(None)

    assert together([groups[0], groups[2]], follow) == ["rank 1 failed with MemoryError: short"] * 2
    assert groups[0]._failed


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_says_nothing_is_named_on_all(
    missing: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gids.loader.ranks._VERDICT_S", 0.3)
    monkeypatch.setattr("gids.loader.ranks._PATIENCE_S", 0.05)
    groups = make(HashStore(), timeout_s=0.2)
    name = groups[0].name_of(missing)
    del groups[missing]
    with caplog.at_level(logging.WARNING, "gids"):
        for error in together(groups, lambda g: g.gather(None, "makes loader 0")):
            assert f"{name} did not come in time to where this rank is (makes loader 0)" in error
    assert f"waiting for {name} (makes loader 0)" in caplog.text


@pytest.mark.parametrize("ended", [0, 1])
def test_a_rank_that_ended_is_named_at_once_unless_it_had_said_its_value(ended: int) -> None:
    groups = [
        with_process(g, ended, started="1") for g in make(HashStore(), (0, 1))
    ]  # its number is another's
    with pytest.raises(RankError, match=f"rank {ended} has ended"):
        groups[1 - ended].gather(None)
    groups = [with_process(g, ended, started="1") for g in make(HashStore(), (0, 1))]
    if ended:
        groups[1]._say(0, {"place": "", "value": "last words", "process": dataclasses.asdict(Process.this())})
        assert groups[0].gather("mine") == ["mine", "last words"]


def test_processes_are_known_once_all_have_met() -> None:
    groups = make(HashStore(), (0, 1, 2))
    together(groups, lambda g: g.gather(None))
    this = Process.this()
    assert [g._processes for g in groups] == [dict.fromkeys((0, 1, 2), this), {0: this}, {0: this}]


def test_a_store_that_does_not_answer_is_an_error() -> None:
    class Gone(HashStore):
        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(RankError, match="store of the process group does not answer while this rank waits"):
        make(Gone())[0].gather(None)


def test_a_process_of_another_machine_or_namespace_is_not_known_to_have_ended() -> None:
    here = Process.this()
    assert len(here.machine.split()) == 3, "name, start and namespace"
    ended = dataclasses.replace(here, started="1")  # another process had this number
    assert ended.has_ended(here)
    assert not here.has_ended(here)
    assert not dataclasses.replace(ended, machine=here.machine + "0").has_ended(here)
    assert not dataclasses.replace(ended, started="").has_ended(here)


def test_a_second_process_group_does_not_hear_what_the_first_one_said_in_the_same_store() -> None:
    store, keys = HashStore(), set()
    for _ in range(2):
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            keys |= {key_prefix(), key_prefix()}
        finally:
            dist.destroy_process_group()
    assert len(keys) == 2
