"""Runs a loader as a scenario says, and compares every minibatch with the dataset by id."""

from __future__ import annotations

import contextlib
import functools
import json
import pickle
import random
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from open_options import tuned
from rank_pool import RankPool
from torture_data import TortureData
from torture_loaders import KINDS, Kind, Looked
from torture_scenario import Act, MiB, Reading, Scenario, draw

import gids
from gids import cuda
from gids.errors import MemoryBudgetError
from gids.sampler import Minibatch

PLAIN: dict[str, Any] = {"memory": "64MB", "reads": "random", "queue_depth": 16}
"""Options of the loaders that others are compared with, and of those that validate."""


class Run:
    """A scenario on one rank. place: arguments that name the rank, if there is no process group."""

    def __init__(self, s: Scenario, data: TortureData, rank: int, place: dict[str, Any]) -> None:
        self.s, self.data, self.rank, self.place = s, data, rank, place
        self.kind: Kind = KINDS[s.load.kind](s.load, data, s.share)
        self.seeds: dict[int, list[int]] = {}
        """Of whole epochs, by number."""
        self.done: Counter[str] = Counter()

    def run(self) -> None:
        with contextlib.ExitStack() as closing:
            source, loader = self.open(self.s.reading, closing)
            for act in self.s.acts:
                if act.validate == "of the same source":
                    self.validate(source, act)
                loader = self.act(source, loader, act)
            self.close(loader, self.s.reading)

    def act(self, source: Any, loader: Any, act: Act) -> Any:
        """Take an epoch, or its first minibatches and the rest by a loader that resumes. Returns the next
        epoch's loader."""
        epoch, length, batch = loader.epoch, len(loader), None
        found, kept = list[Looked](), list[Any]()
        if act.stop != 0:
            for batch in loader:
                found.append(self.look(batch, epoch, len(found)))
                kept += [batch] if len(kept) < self.s.holds else []
                if act.validate == "of a second source" and len(found) == act.at + 1:
                    with gids.open(self.data.stores, **tuned(PLAIN)) as second:
                        self.validate(second, act)
                if len(found) == act.stop:
                    break
            del batch
        self.compare(epoch, found, 0)
        changed = [i for i, batch in enumerate(kept) if self.kind.look(batch) != found[i]]
        assert not changed, f"minibatches {changed} change while the user has them"
        if act.stop is None:
            assert len(found) == length, f"epoch {epoch} has {len(found)} of {length} minibatches"
        if len(found) == length:
            self.take_seeds(epoch, found)
        elif act.resume and act.stop:
            return self.resume(source, loader, act, found)
        return loader

    def resume(self, source: Any, loader: Any, act: Act, found: list[Looked]) -> Any:
        state, epoch, length = json.loads(json.dumps(loader.state_dict())), loader.epoch - 1, len(loader)
        if act.resume != "same":
            self.close(loader, self.s.reading)
            loader = self.make(source, self.s.reading)
        with contextlib.ExitStack() as closing:
            resumed = self.open(self.s.other, closing)[1] if act.resume == "another" else loader
            resumed.load_state_dict(state)
            assert resumed.epoch == epoch
            rest = [self.look(batch, epoch, n) for n, batch in enumerate(resumed, len(found))]
            self.compare(epoch, rest, len(found))
            counts = f"{len(found)} + {len(rest)} of {length} minibatches"
            assert len(found) + len(rest) == length, counts
            self.take_seeds(epoch, found + rest)
            self.done[f"{self.s.load.kind} resumed"] += 1
            if resumed is not loader:
                self.close(resumed, self.s.other)
                loader.epoch = epoch + 1
        return loader

    def validate(self, source: Any, act: Act) -> None:
        """Another loader of this source takes an epoch."""
        load = replace(self.s.load, stride=4 * self.s.load.stride, count=2)
        if act.tables:
            load = replace(load, tables=["paper.half"], dtype=None)
        kind = KINDS[load.kind](load, self.data)
        loader = kind.make(source, **self.place)
        for batch in loader:
            kind.look(batch)
        loader.close()

    # --- opening and closing ---

    def open(self, reading: Reading, closing: contextlib.ExitStack) -> tuple[Any, Any]:
        """A source and its loader."""
        if reading.memory != "hardly enough":
            source = closing.enter_context(self.open_source(reading, 64 * MiB))
            return source, self.make(source, reading)
        for memory in (int(0.15 * 2**i * MiB) for i in range(9)):
            with contextlib.ExitStack() as trying:
                try:
                    source = trying.enter_context(self.open_source(reading, memory))
                    loader = self.make(source, reading)
                    next(iter(loader), None)
                except MemoryBudgetError:
                    continue
                loader.close()
            source = closing.enter_context(self.open_source(reading, memory + memory // 4))
            return source, self.make(source, reading)
        raise AssertionError("38 MiB are too little")

    def open_source(self, reading: Reading, memory: int) -> Any:
        options = {**reading.options, "memory": memory}
        if reading.device == "cuda":
            options |= {"memory": 16 * MiB, "device_memory": memory + 8 * MiB}
        if reading.memory in ("a quarter", "one page"):
            rows = [self.data.rows[name] for name in self.s.load.tables]
            tables = sum(each.numel() * each.element_size() for each in rows)
            options["cache"] = 4096 if reading.memory == "one page" else max(4096, tables // 4)
        if self.s.share in ("rows", "parts", "replicas"):
            path = self.data.parts if self.s.share == "parts" else self.data.path
            replicas = 2 if self.s.share == "replicas" else 1
            return gids.distributed.open(path, replicas=replicas, **tuned(options | {"reads": "random"}))
        return gids.open(self.data.stores_apart if self.s.load.apart else self.data.stores, **tuned(options))

    def make(self, source: Any, reading: Reading) -> Any:
        place = dict(self.place)
        if self.s.share and self.s.load.kind == "DGL":
            place["use_ddp"] = True
        if self.s.cooperative:
            place["cooperative"] = True
        return self.kind.make(source, device=reading.device, workers=reading.workers, **place)

    def close(self, loader: Any, reading: Reading) -> None:
        packs = loader.stats().get("packs")
        if packs is not None:
            self.done[f"superbatches by reads={reading.options['reads']!r}"] += packs.get("superbatches", 0)
        loader.close()

    # --- comparing ---

    def look(self, batch: Any, epoch: int, step: int) -> Looked:
        self.done[f"{self.s.load.kind}: minibatches"] += 1
        if isinstance(batch, Minibatch):
            assert (batch.epoch, batch.step) == (epoch, step), f"epoch and step {batch.epoch}, {batch.step}"
        return self.kind.look(batch)

    def compare(self, epoch: int, found: list[Looked], first: int) -> None:
        """With the minibatches of a plain loader."""
        if self.kind.repeatable and not self.s.cooperative:
            expected = self.expected(epoch)[first : first + len(found)]
            differ = [i for i, (a, b) in enumerate(zip(found, expected, strict=True), first) if a != b]
            assert not differ, f"epoch {epoch}: minibatches {differ} are not those of a plain loader"

    def expected(self, epoch: int) -> list[Looked]:
        place = dict(self.place)
        if self.s.share and not self.kind.alone:
            place |= {"rank": self.rank, "world_size": self.s.load.world}
        key = (self.data.path, repr(self.s.load), str(place), epoch)
        if key not in _EXPECTED:
            with gids.open(self.data.stores, **tuned(PLAIN)) as source:
                kind = KINDS[self.s.load.kind](self.s.load, self.data)
                loader = kind.make(source, **place)
                loader.epoch = epoch
                _EXPECTED[key] = [kind.look(batch) for batch in loader]
                loader.close()
        return _EXPECTED[key]

    def take_seeds(self, epoch: int, found: list[Looked]) -> None:
        """Of a whole epoch: in the order given, or with shuffle=True in another one each time."""
        self.seeds[epoch] = seeds = [seed for seeds, _ in found for seed in seeds]
        load = self.s.load
        if self.kind.resumes and load.world == 1 and not load.typed and len(seeds) > 20:
            orders = [self.kind.seeds(), *(other for e, other in self.seeds.items() if e != epoch)]
            for order in orders:
                assert (seeds == order[: len(seeds)]) != load.seeds["shuffle"], "the order of seeds"


_EXPECTED: dict[Any, list[Looked]] = {}
"""The minibatches of epochs, which scenarios of the same load share."""


def check_seeds(runs: list[Run]) -> None:
    """The ranks together return each seed of an epoch once."""
    s, kind = runs[0].s, runs[0].kind
    if kind.alone and len(runs) > 1:
        for run in runs:
            check_seeds([run])
        return
    every = Counter(kind.seeds())
    for epoch in set.intersection(*(set(run.seeds) for run in runs)):
        found = Counter(seed for run in runs for seed in run.seeds[epoch])
        drop_last, batch_size = s.load.seeds["drop_last"], s.load.seeds["batch_size"]
        if s.load.kind == "DGL" and len(runs) > 1:  # which repeats or drops seeds so that ranks have as many
            assert drop_last or set(found) == set(every)
            continue
        assert set(found) <= set(every), "seeds that nobody gave"
        more = (found - every).total()
        assert more < s.load.world, f"epoch {epoch}: {more} seeds come more than once"
        missing = (every - found).total()
        dropped = drop_last and missing < batch_size * s.load.world
        assert missing == 0 or dropped, f"{missing} seeds are missing"


@contextlib.contextmanager
def surroundings(s: Scenario, *, gpu: bool = False) -> Iterator[None]:
    """The device, which is emulated unless `gpu`."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as closing:
        of_device = [reading for reading in (s.reading, s.other) if reading.device == "cuda"]
        if of_device and not gpu:
            from emulator import EmulatedDevice
            from late_device import LateDevice

            late = any(reading.late for reading in of_device)
            device = LateDevice(s.number) if late else EmulatedDevice(s.number)
            patch.setattr(cuda, "open_device", lambda name="cuda": device)
            if isinstance(device, LateDevice):
                closing.callback(device.close)
                closing.enter_context(device.use(device.new_stream()))  # where the user trains
        yield


def torture(number: int, data: dict[bool, TortureData], *, gpu: bool = False) -> Counter[str]:
    """Run the scenario of a number in this process. Returns what was done, by kind of loader."""
    s = draw(number)
    torch.manual_seed(number)
    random.seed(number)
    try:
        with surroundings(s, gpu=gpu):
            world = s.load.world
            places = [{"rank": r, "world_size": world} for r in range(world)] if world > 1 else [{}]
            runs = [Run(s, data[s.load.typed], rank, place) for rank, place in enumerate(places)]
            for run in runs:
                run.run()
            check_seeds(runs)
    except BaseException as error:
        again = f"python tools/torture.py --first {number} --count 1{' --gpu' if gpu else ''}"
        error.add_note(f"{s!r}\nto repeat: {again}")
        raise
    on_device = s.reading.device == "cuda"
    drawn = {s.load.kind: 1, f"{s.load.kind} on a device": on_device, "late": on_device and s.reading.late}
    return Counter(drawn) + sum((run.done for run in runs), Counter())


def torture_on_rank(number: int, folder: Path) -> dict[str, Any]:
    """What this rank did in the scenario of a number, or its error."""
    s = draw(number, ranks=True)
    torch.manual_seed(number)
    run = Run(s, _loaded(folder, s.load.typed), dist.get_rank(), {})
    try:
        with surroundings(s), graphbolt():
            run.run()
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        return {"error": f"{type(error).__name__}: {error}", "traceback": text}
    return {"seeds": run.seeds, "done": run.done}


@functools.cache
def _loaded(folder: Path, typed: bool) -> TortureData:
    data: TortureData = pickle.loads((folder / f"{typed}.pickle").read_bytes())
    return data


def torture_ranks(number: int, data: dict[bool, TortureData], pool: RankPool) -> Counter[str]:
    """Run the scenario of a number on two ranks. Returns what was done, by kind of loader."""
    s = draw(number, ranks=True)
    name = f"ranks, {s.load.kind}, {s.share}{', cooperative' if s.cooperative else ''}"
    done = Counter({name: 1})
    results = pool.run(s.load.world, torture_on_rank, number, data[s.load.typed].path.parent)
    try:
        assert not any("error" in of_rank for of_rank in results), "\n".join(
            of_rank.get("traceback", "no error") for of_rank in results
        )
        runs = [Run(s, data[s.load.typed], rank, {}) for rank in range(s.load.world)]
        for run, of_rank in zip(runs, results, strict=True):
            run.seeds = of_rank["seeds"]
            done[f"{name}: minibatches"] += of_rank["done"][f"{s.load.kind}: minibatches"]
        check_seeds(runs)
    except BaseException as error:
        repeat = f"python tools/torture.py --ranks --first {number} --count 1"
        error.add_note(f"{s!r}\nto repeat: {repeat}")
        raise
    return done


@contextlib.contextmanager
def opened_data(folder: Path) -> Iterator[dict[bool, TortureData]]:
    """Both datasets, which ranks load from this folder too. Meanwhile GraphBolt can be imported."""
    data = {typed: TortureData(folder, typed=typed) for typed in (False, True)}
    for typed, of in data.items():
        (folder / f"{typed}.pickle").write_bytes(pickle.dumps(of))
    with graphbolt():
        yield data
    for of in data.values():
        for store in of.stores + of.stores_apart:
            store.close()


def graphbolt() -> contextlib.AbstractContextManager[object]:
    """Makes GraphBolt, or what stands for it, importable where DGL is."""
    try:
        import graphbolt_model
    except ImportError:
        return contextlib.nullcontext()
    return graphbolt_model.importable()
