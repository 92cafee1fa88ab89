"""Draws a scenario from a number: a loader, a dataset, a sampler, options of gids.open(), and acts: whole
epochs, epochs that are left and resumed, and validation in between. Runs nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torture_loaders import KINDS
from torture_samplers import ERRORS, FOREIGN, ODD, ON_DEVICE, OWN

KiB, MiB = 1 << 10, 1 << 20


@dataclass
class Act:
    """An epoch. before: what another loader does first. stop: minibatches until it is left, None: all. leave:
    how. resume: what takes the rest. between: what another loader does before minibatch `at`. reset: the next
    epoch has this one's number.
    """

    before: str = ""
    stop: int | None = None
    leave: str = ""
    resume: str = ""
    between: str = ""
    at: int = 0
    reset: bool = False


@dataclass
class Scenario:
    """scratches: directories for scratch. apart: tables are in other datasets with another order of nodes."""

    number: int
    kind: str = "NodeLoader"
    typed: bool = False
    tables: list[str] = field(default_factory=list)
    dtype: torch.dtype | None = None
    sampler: str = "neighbor"
    foreign: str | None = None
    odd: str | None = None
    odd_from: int = 0
    error: str | None = None
    fails: int = 0
    batch_size: int = 40
    stride: int = 5
    count: int = 20
    shuffle: bool = True
    drop_last: bool = False
    seed: int = 0
    labels: Any = True
    negatives: int = 1
    workers: int = 0
    holds: int = 0
    device: str = "cpu"
    late: bool = False
    world: int = 1
    share: str = ""
    cooperative: bool = False
    scratches: int = 1
    apart: bool = False
    misuse: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    acts: list[Act] = field(default_factory=list)

    def __repr__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return "\n".join(["Scenario:", *(f"  {name} = {value!r}" for name, value in given.items())])


def draw(number: int, *, ranks: bool = False) -> Scenario:
    """The scenario of a number. ranks: of several processes."""
    r = random.Random(f"{number} {ranks}")

    def maybe(chance: float) -> bool:
        return r.random() < chance

    s = Scenario(number)
    s.kind = r.choice(["NodeLoader"] * 3 + ["EdgeLoader", "PyG", "PyG links"] + list(KINDS))
    s.typed, s.seed = maybe(0.4), r.randrange(1 << 30)
    _draw_sampling(s, r)
    _draw_reading(s, r)
    _draw_tables(s, r)
    if ranks:
        s.world = 2
        s.share = r.choice(["seeds", "rows", "rows", "parts", "parts", "replicas"])
        if s.kind in ("FeatureLoader", "DGL", "GraphBolt"):
            s.share = "seeds"
        s.cooperative = s.kind == "NodeLoader" and s.share in ("rows", "parts", "replicas") and maybe(0.35)
        if s.share != "seeds":
            s.misuse = r.choice(["", "", "", "order of tables", "epoch", "loaders"])
            s.options |= {"owners": r.choice(["hash", "range"]), "bulk": r.choice([1, 3, 4])}
    elif s.kind in ("NodeLoader", "EdgeLoader", "PyG") and maybe(0.2):
        s.world = r.choice([2, 3])
    _restrict(s, r)
    s.acts = [_draw_act(s, r) for _ in range(r.choice([2, 3, 3, 4]))]
    s.apart = s.share in ("", "seeds") and s.kind != "GraphBolt" and random.Random(number).random() < 0.3
    s.scratches = r.choice([1, 1, 2, 3])
    return s


def _draw_sampling(s: Scenario, r: random.Random) -> None:
    s.sampler = r.choice(list(OWN))
    if r.random() < 0.4:
        s.foreign = r.choice(list(FOREIGN))
    if r.random() < 0.2:
        s.odd, s.odd_from = r.choice(list(ODD)), r.choice([0, 0, 3, 18])
    if r.random() < 0.15:
        s.error, s.fails = r.choice(list(ERRORS)), r.choice([0, 1, 2, 5, 9])
    s.batch_size, s.stride = r.choice([8, 20, 40, 64]), r.choice([7, 13, 25])
    s.count = r.choice([1, 5, 20, 40])
    s.shuffle, s.drop_last = r.random() < 0.7, r.random() < 0.3
    s.labels, s.negatives = r.choice([True, True, False, "inputs"]), r.choice([0, 1, 2])
    if r.random() < 0.3:
        s.workers = r.choice([1, 2])


def _draw_reading(s: Scenario, r: random.Random) -> None:
    s.options = {
        "reads": r.choice(["auto", "auto", "pack", "pack", "random"]),
        "scratch_bytes": r.choice([None, None, None, 0, 1, 20 * KiB, 400 * KiB, 3 * MiB, 64 * MiB]),
        "memory": r.choice([3, 4, 5, 8, 12, 24, 64]) * MiB,
        "window": r.choice([0, 1, 4, 16]),
        "planned": r.choice([None, None, 1, 2, 8]),
        "engine": r.choice(["uring", "threads", "mmap"]),
        "queue_depth": r.choice([4, 16]),
        "check_crc": r.random() < 0.3,
        "direct": r.random() < 0.8,
        "threads": r.choice([None, 1, 2, 4]),
        "cache": 0 if r.random() < 0.05 else None,
        "policy": r.choice(["lookahead"] * 4 + ["window-pin", "lru", "random", "static"]),
    }
    s.holds = r.choice([0, 0, 1, 4])
    if r.random() < 0.12:
        s.device, s.late = "cuda", r.random() < 0.5


def _draw_tables(s: Scenario, r: random.Random) -> None:
    types = ["paper", "author"] if s.typed else ["paper"]
    keys = ["feat", "tiny", "half", "long", "ordered", "by_row", "by_column"]
    every = [f"{ntype}.{key}" for ntype in types for key in keys]
    edges = ["paper.cites.paper.w"] + (["author.writes.paper.w"] if s.typed else [])
    s.tables = r.sample(every, r.choice([1, 1, 2, 3, 5])) + [name for name in edges if r.random() < 0.25]
    r.shuffle(s.tables)
    if r.random() < 0.3 and not any("tiny" in name for name in s.tables):
        s.dtype = r.choice([torch.float32, torch.float16, torch.bfloat16])


def _restrict(s: Scenario, r: random.Random) -> None:
    """Replace what does not go together."""
    nodes = [name for name in s.tables if name.count(".") == 1] or ["paper.feat"]
    if s.kind in ("DGL", "GraphBolt"):
        s.device = "cpu"
        if s.kind == "DGL" and (s.sampler == "disjoint" or s.workers):
            s.odd = s.error = None
        if s.error == "stop":
            s.error = "value"
    else:
        s.workers = 0
    if s.kind in ("FeatureLoader", "GraphBolt"):
        s.batch_size = 1
        if s.error == "stop":
            s.error = None
    if s.kind.startswith("PyG"):
        s.labels = True
        s.foreign = s.odd = s.error = None
        if s.sampler == "induced" and s.device == "cuda":
            s.sampler = "neighbor"
    if s.kind in ("NodeLoader", "EdgeLoader"):
        if s.foreign in ("derived", "mutable"):
            s.sampler = "neighbor"
        if s.kind == "EdgeLoader":
            s.odd = None
            if s.sampler in ("walks", "induced", "temporal"):
                s.sampler = "labor"
        if s.typed and s.sampler in ("walks", "temporal"):
            s.sampler = "labor"
        if s.sampler == "walks":
            s.tables = nodes
        if s.sampler == "disjoint" and s.labels == "inputs":
            s.labels = True
    if s.device == "cuda":
        s.options["engine"] = "threads"
        s.options |= {"device_memory": s.options["memory"] + 8 * MiB, "staging": 1 * MiB, "memory": 16 * MiB}
        s.options["policy"] = "lookahead"
        s.foreign = None if s.foreign == "mutable" else s.foreign
        s.stride = max(s.stride, 13)
    if s.share:
        if s.share == "parts" or s.cooperative:
            s.foreign = s.odd = None
        s.error = None
        s.workers, s.device = 0, "cpu"
        for name in ("device_memory", "staging"):
            s.options.pop(name, None)
        if s.sampler in ("induced", "walks", "disjoint", "temporal") or s.kind.startswith("PyG"):
            s.sampler = "neighbor"
        if s.cooperative:
            s.tables, s.labels = nodes, True
            if s.sampler in ("nested",):
                s.sampler = "labor"
    if s.foreign == "mutable" and s.kind in ("NodeLoader", "EdgeLoader"):
        s.error = s.odd = None
    if s.device == "cuda" and s.sampler not in ON_DEVICE:
        s.sampler = "neighbor"
    if s.options["window"] + (s.options["planned"] or 1) > 24:
        s.options["planned"] = None


def _draw_act(s: Scenario, r: random.Random) -> Act:
    act = Act()
    resumes = KINDS[s.kind].resumes
    if r.random() < 0.5:
        act.stop = r.choice([0, 1, 2, 3, 5, 8, 13])
        act.leave = r.choice(["close", "drop", "keep", "loader"])
        if resumes and act.leave in ("close", "drop"):
            act.resume = r.choice(["", "same", "new", "new", "other"])
        act.reset = r.random() < 0.3
    if r.random() < 0.2:
        act.before = r.choice(["few", "whole", "tables"])
    if r.random() < 0.4:
        act.between = r.choice(["short", "whole", "same", "tables", "fork"])
        act.at = r.choice([0, 0, 1, 3, 6])
    if s.error:  # in the first epoch, which is taken to its end
        act.stop, act.leave, act.resume = None, "", ""
    if act.between == "same" and (s.error or act.resume or s.kind == "GraphBolt"):
        act.between = "short"
    if s.foreign == "mutable" and act.resume in ("new", "other"):
        act.resume = "same"  # a sampler with other weights would be refused
    if s.share:  # all ranks do the same; a thread or a dropped epoch would end at another time
        act.leave = act.leave and "close"
        act.before = ""
        act.between = act.between and r.choice(["", "short"])
        act.at = 0
    return act
