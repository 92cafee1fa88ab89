"""Draws a scenario from a number: what is loaded, how it is read, and what a user does. Runs nothing.

Two numbers in a row load the same, so that one reference serves both. All options of gids.open() are drawn in
draw_reading(), `reads=` among them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torture_data import KEYS
from torture_loaders import KINDS
from torture_samplers import EDGE_SAMPLERS, ON_DEVICE, OWN, PYG_SAMPLERS, TYPED_SAMPLERS

KiB, MiB = 1 << 10, 1 << 20

THEIR_SAMPLERS = ("FeatureLoader", "DGL", "GraphBolt", "GraphBolt feature")
"""Kinds of loaders that do not sample by gids."""
ONE_PROCESS = ("disjoint", "temporal", "induced", "a user's")
"""Samplers that are not drawn where ranks share rows: some are refused there."""


@dataclass
class Load:
    """What is loaded. apart: tables are in other datasets, with other orders of nodes and edges. seeds: the
    loader's arguments about seeds. stride: of the nodes that are seeds. count: minibatches, where ids are
    drawn. negatives: of each edge. world: ranks that share the seeds."""

    kind: str = "NodeLoader"
    typed: bool = False
    apart: bool = False
    tables: list[str] = field(default_factory=list)
    dtype: torch.dtype | None = None
    sampler: str = "neighbor"
    seeds: dict[str, Any] = field(default_factory=dict)
    stride: int = 5
    count: int = 10
    labels: Any = True
    negatives: int = 1
    world: int = 1


@dataclass
class Reading:
    """How it is read. memory: "roomy", "a quarter" of the tables for lines, "one page", or "hardly enough": a
    quarter more than an amount that is enough for the first minibatch, while half of it is not. options: of
    gids.open()."""

    device: str = "cpu"
    late: bool = False
    memory: str = "roomy"
    workers: int = 0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Act:
    """An epoch. stop: minibatches until it is left; None: all. resume: what takes the rest: "", the "same"
    loader, a "new" one, or one of "another" source that reads in another way. validate: by another loader,
    before the epoch "of the same source", or before minibatch `at` "of a second source". tables: this loader
    has other tables."""

    stop: int | None = None
    resume: str = ""
    validate: str = ""
    at: int = 0
    tables: bool = False


@dataclass
class Scenario:
    """other: how the loader of "another" source reads. share: what ranks of a process group share. holds:
    minibatches that the user keeps."""

    number: int
    load: Load
    reading: Reading
    other: Reading
    acts: list[Act]
    holds: int = 0
    share: str = ""
    cooperative: bool = False

    def __repr__(self) -> str:
        return "\n".join(["Scenario:", *(f"  {f.name} = {getattr(self, f.name)!r}" for f in fields(self))])


def draw(number: int, *, ranks: bool = False) -> Scenario:
    """The scenario of a number. ranks: of two processes."""
    load = draw_load(number // 2, ranks)
    r = random.Random(f"{number} {ranks}")
    s = Scenario(number, load, draw_reading(r, load, ranks), draw_reading(r, load, ranks), [])
    s.acts = [_draw_act(r, load, ranks) for _ in range(r.choice([1, 1, 2, 2, 3]))]
    if s.reading.device == "cuda":
        del s.acts[1:]  # the emulator is slow
    s.holds = r.choice([0, 0, 1, 4])
    if ranks:
        s.share = r.choice(["seeds", "rows", "rows", "parts", "parts", "replicas"])
        if load.kind in THEIR_SAMPLERS:
            s.share = "seeds"
        if s.share != "seeds":
            load.apart = False
            s.reading.options |= {"owners": r.choice(["hash", "range"]), "bulk": r.choice([1, 3, 4])}
            if load.sampler in ONE_PROCESS:
                load.sampler = "neighbor"
            if s.reading.memory == "hardly enough":  # a rank alone cannot look for it
                s.reading.memory = "a quarter"
            if load.kind == "NodeLoader" and r.random() < 0.35:
                s.cooperative, load.labels = True, bool(load.labels)
                load.tables = [name for name in load.tables if name.count(".") == 1] or ["paper.feat"]
                load.sampler = {"nested": "labor", "walks": "neighbor"}.get(load.sampler, load.sampler)
    return s


def draw_load(number: int, ranks: bool) -> Load:
    r = random.Random(f"load {number}")
    kinds = ["NodeLoader"] * 3 + ["EdgeLoader", "PyG"] + list(KINDS)
    kind = kinds[number % len(kinds)]
    load = Load(kind, typed=r.random() < 0.4, apart=r.random() < 0.15 and not kind.startswith("GraphBolt"))
    types = ["paper", "author"] if load.typed else ["paper"]
    every = [f"{ntype}.{key}" for ntype in types for key in KEYS]
    nodes = r.sample(every, r.choice([1, 1, 2, 3, 5]))
    edges = ["paper.cites.paper.w"] + (["author.writes.paper.w"] if load.typed else [])
    load.tables = nodes + [name for name in edges if r.random() < 0.3]
    r.shuffle(load.tables)
    if r.random() < 0.3 and not any("tiny" in name for name in nodes):
        load.dtype = r.choice([torch.float32, torch.float16, torch.bfloat16])
    samplers = (
        PYG_SAMPLERS if kind.startswith("PyG") else EDGE_SAMPLERS if kind == "EdgeLoader" else list(OWN)
    )
    load.sampler = r.choice([name for name in samplers if not load.typed or name in TYPED_SAMPLERS])
    if load.sampler == "walks":
        load.tables = nodes
    load.labels, load.negatives = r.choice([True, True, False, "inputs"]), r.choice([0, 1, 2])
    if (load.sampler == "disjoint" and load.labels == "inputs") or kind.startswith("PyG"):
        load.labels = True
    load.stride, load.count = r.choice([7, 13, 25]), r.choice([1, 4, 10])
    load.seeds = {
        "batch_size": r.choice([8, 12, 30]),
        "shuffle": r.random() < 0.7,
        "drop_last": r.random() < 0.3,
        "seed": r.randrange(1 << 30),
    }
    if kind in ("NodeLoader", "EdgeLoader", "PyG") and not ranks and r.random() < 0.1:
        load.world = 2
    if ranks:
        load.world = 2
    return load


def draw_reading(r: random.Random, load: Load, ranks: bool) -> Reading:
    """On tables this small, reads="auto" finds that random reads are cheap enough; "pack" packs whatever it
    costs. scratch_bytes bounds a superbatch, so that an epoch has several."""
    reading = Reading()
    reading.memory = r.choice(["roomy", "a quarter", "a quarter", "one page", "hardly enough"])
    reading.options = {
        "reads": r.choice(["auto", "pack", "pack", "random", "random"]),
        "scratch_bytes": r.choice([None, None, None, 1, 400 * KiB, 3 * MiB]),
        "policy": r.choice(["lookahead"] * 4 + ["window-pin", "lru", "random", "static", "pinned"]),
        "window": r.choice([0, 1, 4, 16]),
        "planned": r.choice([None, None, 1, 2, 7]),
        "engine": r.choice(["uring", "threads", "mmap"]),
        "queue_depth": r.choice([4, 16]),
        "check_crc": r.random() < 0.3,
        "direct": r.random() < 0.8,
        "threads": r.choice([None, 1, 2]),
    }
    on_device = load.sampler in ON_DEVICE or load.kind in THEIR_SAMPLERS
    if on_device and load.kind != "GraphBolt feature" and not ranks and r.random() < 0.08:
        reading.device, reading.late = "cuda", r.random() < 0.5
        reading.options |= {"engine": "threads", "staging": 1 * MiB}
        if reading.options["policy"] in ("lru", "pinned"):
            reading.options["policy"] = "lookahead"
    if load.kind == "DGL" and r.random() < 0.15:
        reading.workers = 1
    return reading


def _draw_act(r: random.Random, load: Load, ranks: bool) -> Act:
    act = Act()
    if r.random() < 0.5:
        act.stop = r.choice([0, 1, 2, 3, 5, 8])
        if KINDS[load.kind].resumes:
            act.resume = r.choice(["", "same", "new", "another", "another"])
    if r.random() < 0.4:
        act.validate = r.choice(["of the same source", "of a second source"])
        act.at, act.tables = r.choice([0, 1, 3]), r.random() < 0.5
    if ranks:  # all ranks do the same
        act.validate, act.resume = "", "" if act.resume == "another" else act.resume
    return act
