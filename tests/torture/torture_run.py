"""Runs a loader as a scenario says, and compares every minibatch with the dataset by id."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
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
from torture_samplers import ERRORS
from torture_scenario import Act, MiB, Scenario, draw

import gids
from gids import cuda
from gids.errors import MemoryBudgetError

PLAIN = {"memory": "64MB", "reads": "random", "queue_depth": 16}
"""Options of the loader whose minibatches are compared with."""


class OddError(AssertionError):
    """An error that is none of the user's."""


class Run:
    """A scenario on one rank. place: arguments that name the rank, if there is no process group."""

    def __init__(self, s: Scenario, data: TortureData, rank: int, place: dict[str, Any]) -> None:
        self.s, self.rank, self.place = s, rank, place
        self.kind: Kind = KINDS[s.kind](s, data)
        self.data, self.held = data, list[Any]()
        self.expected_of: dict[int, list[Looked]] = {}
        self.seeds: dict[int, list[int]] = {}
        """Of whole epochs, by number."""
        self.minibatches = 0

    # --- what must come ---

    def expected(self, epoch: int) -> list[Looked]:
        """The minibatches of an epoch as another loader returns them."""
        if epoch not in self.expected_of:
            with gids.open(self.data.path, **tuned(PLAIN)) as source:
                kind = KINDS[self.s.kind](self.s, self.data)
                place = dict(self.place)
                if self.s.share and not self.kind.alone:
                    place |= {"rank": self.rank, "world_size": self.s.world}
                loader = kind.make(source, plain=True, **place)
                kind.reset(loader, epoch)
                self.expected_of[epoch] = [kind.look(batch) for batch in loader]
                loader.close()
        return self.expected_of[epoch]

    def compare(self, epoch: int, found: list[Looked], first: int) -> None:
        if self.kind.repeatable and not self.s.cooperative:
            expected = self.expected(epoch)[first : first + len(found)]
            differ = [i for i, (a, b) in enumerate(zip(found, expected, strict=True), first) if a != b]
            assert not differ, f"epoch {epoch}: minibatches {differ} are not those of random reads"

    # --- opening ---

    def open(self, **changes: Any) -> Any:
        s = self.s
        options = {**s.options, **changes}
        if s.scratches > 1:
            options["scratch"] = [self.data.path.parent / f"scratch {i}" for i in range(s.scratches)]
            for folder in options["scratch"]:
                folder.mkdir(exist_ok=True)
        if s.share in ("rows", "parts", "replicas"):
            path = self.data.parts if s.share == "parts" else self.data.path
            replicas = 2 if s.share == "replicas" else 1
            return gids.distributed.open(path, replicas=replicas, **tuned(options | {"reads": "random"}))
        return gids.open(self.data.apart if s.apart else self.data.path, **tuned(options))

    def make(self, source: Any, **more: Any) -> Any:
        place = {**self.place, **more}
        if self.s.share and self.s.kind == "DGL":
            place["use_ddp"] = True
        if self.s.misuse == "order of tables" and self.rank % 2:
            place["tables"] = self.s.tables[::-1]
        return self.kind.make(source, **place)

    # --- acts ---

    def run(self) -> None:
        s = self.s
        with contextlib.ExitStack() as closing:
            self.source = closing.enter_context(self.open())
            loader = self.make(self.source)
            if s.misuse == "loaders":
                other_kind = KINDS[s.kind](replace(s, seed=s.seed + 1), self.data)
                other = other_kind.make(self.source, **self.place)
                for each in (loader, other)[:: 1 if self.rank else -1]:
                    for batch in each:
                        self.look(batch)
                return
            if s.misuse == "epoch":
                loader.epoch += self.rank
            for act in s.acts:
                loader = self.act(loader, act, closing)
            for epoch, iterator, got in self.held:
                self.go_on(epoch, iterator, got)
            self.held.clear()
            self.close(loader)

    def act(self, loader: Any, act: Act, closing: contextlib.ExitStack) -> Any:
        epoch = loader.epoch
        if act.before:
            self.between(act.before, loader)
        iterator, got, kept, error = iter(loader), list[Looked](), list[Any](), False
        length, ended = len(loader), False
        while act.stop is None or len(got) < act.stop:
            if act.between and len(got) == act.at:
                self.between(act.between, loader)
            try:
                batch = next(iterator)
            except StopIteration:
                ended = True
                break
            except BaseException as raised:
                self.check_error(raised, len(got))
                error = True
                break
            got.append(self.look(batch))
            if len(kept) < self.s.holds:
                kept.append(batch)
            del batch
            self.kind.disturb()
        self.compare(epoch, got, 0)
        changed = [i for i, batch in enumerate(kept) if self.kind.look(batch) != got[i]]
        assert not changed, f"minibatches {changed} change while the consumer has them"
        if error:
            with pytest.raises((RuntimeError, StopIteration)):
                next(iterator)
            return loader
        if ended or len(got) == length:
            assert len(got) == length, f"epoch {epoch} has {len(got)} of {length} minibatches"
            self.take_seeds(epoch, got)
            if ended:
                assert next(iterator, None) is None, "a minibatch comes after the end"
            return loader
        return self.leave(loader, act, closing, epoch, iterator, got)

    def leave(
        self,
        loader: Any,
        act: Act,
        closing: contextlib.ExitStack,
        epoch: int,
        iterator: Any,
        got: list[Looked],
    ) -> Any:
        begun = act.stop != 0  # else the state is that of the epoch before
        state = loader.state_dict() if act.resume and begun and not self.s.error else None
        if act.leave == "keep" and begun and not self.kind.one_epoch_at_a_time:
            self.held.append((epoch, iterator, got))
        elif act.leave == "close":
            iterator.close()
            assert next(iterator, None) is None
        elif act.leave == "loader":
            self.close(loader)
            self.ends(iterator)
            with pytest.raises(ValueError, match="closed"):
                next(iter(loader))
            loader = self.make(self.source)
            self.kind.reset(loader, epoch + 1)
        del iterator
        if act.leave == "drop":
            gc.collect()
        if state is not None:
            state = json.loads(json.dumps(state))
            if act.resume == "new":
                self.close(loader)
                loader = self.make(self.source)
            elif act.resume == "other":
                loader = self.open_again(loader, closing, **self.other_options())
            loader.load_state_dict(state)
            assert loader.epoch == epoch
            rest = [self.look(batch) for batch in loader]
            self.compare(epoch, rest, len(got))
            counts = f"{len(got)} + {len(rest)} of {len(loader)} minibatches"
            assert len(got) + len(rest) == len(loader), counts
            self.take_seeds(epoch, got + rest)
            if act.resume == "other":
                loader = self.open_again(loader, closing)
                self.kind.reset(loader, epoch + 1)
        elif act.reset:
            self.kind.reset(loader, epoch)
        return loader

    def open_again(self, loader: Any, closing: contextlib.ExitStack, **changes: Any) -> Any:
        self.close(loader)
        for held in self.held:
            self.go_on(*held)
        self.held.clear()
        self.source.close()
        self.source = closing.enter_context(self.open(**changes))
        return self.make(self.source)

    def close(self, loader: Any) -> None:
        loader.close()

    def other_options(self) -> dict[str, Any]:
        reads = "pack" if self.s.options["reads"] == "random" else "random"
        plenty = {"memory": 64 * MiB, "scratch_bytes": None}
        return {"reads": reads, "window": 3, "planned": None, **plenty}

    def look(self, batch: Any) -> Looked:
        self.minibatches += 1
        return self.kind.look(batch)

    def between(self, what: str, loader: Any) -> None:
        """Validation, in the middle of an epoch or before it."""
        if what == "same":  # Lightning's sanity check
            epoch = loader.epoch
            second = iter(loader)
            found = [self.look(batch) for _, batch in zip(range(2), second, strict=False)]
            if not self.s.error:
                self.compare(epoch, found, 0)
            self.kind.reset(loader, epoch)
            return
        if what == "fork":
            if (child := os.fork()) == 0:
                os._exit(0)
            os.waitpid(child, 0)
            return
        s = self.s
        if what == "few":
            s = replace(s, stride=8 * s.stride, count=2)
        elif what == "tables" and s.kind != "GraphBolt":
            tables = [name for name in ("paper.feat", "paper.half") if name not in s.tables][:1]
            s = replace(s, tables=tables or s.tables, dtype=None)
        kind = KINDS[s.kind](s, self.data)
        other = kind.make(self.source, plain=True, **self.place)
        try:
            for number, batch in enumerate(other):
                kind.look(batch)
                if what == "short" and number == 1:
                    break
        except MemoryBudgetError:
            pass  # of another cache, while an epoch is open
        finally:
            other.close()

    def ends(self, iterator: Any) -> None:
        """An iterator whose loader is closed has no minibatches."""
        with contextlib.suppress(ValueError):
            assert next(iterator, None) is None

    def go_on(self, epoch: int, iterator: Any, got: list[Looked]) -> None:
        """The rest of an epoch that was kept open while others ran."""
        with contextlib.suppress(MemoryBudgetError):
            first, rest = len(got), list[Looked]()
            try:
                rest += [self.look(batch) for batch in iterator]
            except Exception as error:
                self.check_error(error, first + len(rest))
            self.compare(epoch, got + rest, 0)

    # --- errors ---

    def check_error(self, error: BaseException, step: int) -> None:
        """Raise an error that is not the scenario's, or that is raised for another minibatch."""
        s = self.s
        if s.error is None or isinstance(error, AssertionError | MemoryBudgetError):
            raise error
        made = ERRORS[s.error]()
        if s.error == "stop":
            if not isinstance(error, RuntimeError | StopIteration):
                raise error
            return
        args = error.args if s.kind != "GraphBolt" else made.args  # torch changes those of a pipe
        if type(error) is not type(made) or args != made.args:
            raise OddError(f"{error!r} in place of {made!r}") from error
        assert step == s.fails, f"the error of minibatch {s.fails} is raised for minibatch {step}"

    # --- seeds ---

    def take_seeds(self, epoch: int, got: list[Looked]) -> None:
        self.seeds[epoch] = [seed for seeds, _ in got for seed in seeds]


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
        if s.kind == "DGL" and len(runs) > 1:  # which repeats or drops seeds so that ranks have as many
            assert s.drop_last or set(found) == set(every)
            continue
        assert set(found) <= set(every), "seeds that nobody gave"
        more = (found - every).total()
        assert more < s.world, f"epoch {epoch}: {more} seeds come more than once"
        missing = (every - found).total()
        dropped = s.drop_last and missing < s.batch_size * s.world
        assert missing == 0 or dropped, f"{missing} seeds are missing"


@contextlib.contextmanager
def patched(s: Scenario, *, gpu: bool = False) -> Iterator[None]:
    """gpu: a device is the GPU."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as closing:
        if s.device == "cuda" and not gpu:
            from emulator import EmulatedDevice
            from late_device import LateDevice

            device = (LateDevice if s.late else EmulatedDevice)(s.number)
            patch.setattr(cuda, "open_device", lambda name="cuda": device)
            closing.callback(lambda: device.close() if isinstance(device, LateDevice) else None)
        if s.kind == "GraphBolt":
            import graphbolt_model

            closing.enter_context(graphbolt_model.importable())
        yield


def torture(number: int, data: dict[bool, TortureData], *, gpu: bool = False) -> Counter[str]:
    """Run the scenario of a number in this process. Returns what was done, by kind of loader."""
    s = draw(number)
    torch.manual_seed(number)
    random.seed(number)
    done: Counter[str] = Counter()
    try:
        with patched(s, gpu=gpu):
            places = [{"rank": r, "world_size": s.world} for r in range(s.world)] if s.world > 1 else [{}]
            runs = [Run(s, data[s.typed], rank, place) for rank, place in enumerate(places)]
            for run in runs:
                run.run()
            check_seeds(runs)
        done[f"{s.kind}: minibatches"] = sum(run.minibatches for run in runs)
    except BaseException as error:
        if isinstance(error, MemoryBudgetError) and s.options["memory"] <= 16 * MiB:
            return Counter({s.kind: 1, f"{s.kind}: memory is too small": 1})
        again = f"python tools/torture.py --first {number} --count 1{' --gpu' if gpu else ''}"
        error.add_note(f"{s!r}\nto repeat: {again}")
        raise
    done[s.kind] = 1
    return done


def torture_on_rank(number: int, folder: Path) -> dict[str, Any]:
    """What this rank did in the scenario of a number, or its error."""
    s = draw(number, ranks=True)
    torch.manual_seed(number)
    run = Run(s, _loaded(folder, s.typed), dist.get_rank(), {})
    try:
        with patched(s):
            run.run()
    except BaseException as error:
        told = "".join(traceback.format_exception(error))
        return {"error": f"{type(error).__name__}: {error}", "traceback": told}
    return {"seeds": run.seeds, "minibatches": run.minibatches}


@functools.cache
def _loaded(folder: Path, typed: bool) -> TortureData:
    found: TortureData = pickle.loads((folder / f"{typed}.pickle").read_bytes())
    return found


def torture_ranks(number: int, data: dict[bool, TortureData], pool: RankPool) -> Counter[str]:
    """Run the scenario of a number on two ranks. Returns what was done, by kind of loader."""
    s = draw(number, ranks=True)
    told = pool.run(s.world, torture_on_rank, number, data[s.typed].path.parent)
    errors = [of_rank.get("error", "") for of_rank in told]
    name = f"ranks, {s.kind}, {s.share}{', cooperative' if s.cooperative else ''}"
    done = Counter({name: 1})
    done[f"{name}: minibatches"] = sum(of_rank.get("minibatches", 0) for of_rank in told)
    try:
        if s.misuse and all(error.startswith(("ValueError", "RankError")) for error in errors):
            return done + Counter({f"{name}: refused {s.misuse}": 1})
        if any("MemoryBudgetError" in error for error in errors) and s.options["memory"] <= 16 * MiB:
            return done + Counter({f"{name}: memory is too small": 1})
        assert not any(errors), "\n".join(of_rank.get("traceback", "no error") for of_rank in told)
        assert s.misuse in ("", "order of tables"), f"no rank notices: {s.misuse}"
        runs = [Run(s, data[s.typed], rank, {}) for rank in range(s.world)]
        for run, of_rank in zip(runs, told, strict=True):
            run.seeds = of_rank["seeds"]
        check_seeds(runs)
    except BaseException as error:
        repeat = f"python tools/torture.py --ranks --first {number} --count 1"
        error.add_note(f"{s!r}\nto repeat: {repeat}")
        raise
    return done


def open_data(folder: Path) -> dict[bool, TortureData]:
    """Both datasets, which ranks load from this folder too."""
    data = {typed: TortureData(folder, typed=typed) for typed in (False, True)}
    for typed, of in data.items():
        (folder / f"{typed}.pickle").write_bytes(pickle.dumps(of))
    return data
