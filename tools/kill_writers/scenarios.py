"""The commands that kill_writers ends: what is there before, what each does, and what it may leave.

Every function here that touches a dataset runs in a forked child.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import gids
from gids import FeatureStore
from gids.cli import main
from gids.convert import Options, convert
from gids.convert.readers import Choices, find_reader, open_source
from gids.convert.source import source_files
from gids.inference import layerwise
from gids.store import verify
from gids.store.part import part_paths
from gids.write.partition import partition

NAME = "a.gids"
DISKS = ("ssd0", "ssd1", "ssd2")


@dataclass(frozen=True)
class Place:
    """Where a scenario happens. work: all that it may change. sources: made once, by make_sources."""

    work: Path
    sources: Path

    @property
    def dataset(self) -> Path:
        return self.work / NAME

    @property
    def disks(self) -> list[Path]:
        return [self.work / name for name in DISKS]


Step = Callable[[Place], None]


@dataclass(frozen=True)
class Scenario:
    """before: makes what is there, the "old" dataset where there is one. command: makes the "new" one. then:
    what is run after the kill, the same command unless given. changes: the command changes the dataset, and
    may be run when it was through; else FileExistsError is right then. kills: how often a command may be
    killed before it may finish.
    """

    command: Step
    before: tuple[Step, ...] = ()
    then: Step | None = None
    changes: bool = False
    kills: int = 2


def prepare(place: Place) -> None:
    shutil.rmtree(place.work, ignore_errors=True)
    place.work.mkdir()
    for disk in place.disks:
        disk.mkdir()


def state(place: Place) -> str:
    """ "nothing", "fault: …", or a digest of all values of the dataset."""
    if not place.dataset.exists():
        return "nothing"
    fault = next(iter(verify(place.dataset, allow_dirs=place.disks, workers=1)), None)
    if fault is not None:
        return f"fault: {fault}"
    digest = hashlib.sha256()
    for store in _stores(place):
        for name, values in _values(store):
            digest.update(f"{name} {values.dtype} {values.shape}".encode())
            digest.update(values.tobytes())
    return digest.hexdigest()[:16]


def _stores(place: Place) -> list[FeatureStore]:
    """The dataset, or its parts."""
    paths = part_paths(place.dataset) or [place.dataset]
    return [FeatureStore(path, allow_dirs=place.disks) for path in paths]


def _values(store: FeatureStore) -> Iterator[tuple[str, np.ndarray]]:
    for table in sorted(store.tables.values(), key=lambda t: t.name):
        rows = np.arange(table.row_count) if table.held is None else table.held.ids()
        yield table.name, table.read_rows(rows).contiguous().view(torch.uint8).numpy()
    for ntype in sorted(store.node_types):
        if ntype in store.labels:
            yield f"{ntype} labels", store.labels[ntype].numpy()
        for split, ids in sorted(store.splits.get(ntype, {}).items()):
            yield f"{ntype} {split}", ids.numpy()
        for method in sorted(store.heat_methods(ntype)):
            yield f"{ntype} {method}", store.heat(method, ntype)
    for relation in sorted(store.relations):
        graph = store.graph(relation)
        yield f"{relation} indptr", graph.indptr
        yield f"{relation} indices", graph.indices
        if graph.edge_ids is not None:
            yield f"{relation} ids", graph.edge_ids


# Sources: graphs of 60 nodes; "graph 0" and "graph 1" differ in all values.

NODES, EDGES = 60, 3_000
_SORTED_EDGES = 20_000  # more than fit into the least memory, so that sorting goes through scratch files


def _arrays(seed: int, edges: int = EDGES) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "feat": rng.standard_normal((NODES, 100), np.float32),
        "pos": rng.standard_normal((NODES, 3)),
        "edge_index": rng.integers(0, NODES, (2, edges)),
        "edge_weight": rng.standard_normal(edges, np.float32),
        "label": rng.integers(0, 9, NODES),
    }


def _save(folder: Path, **values: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in values.items():
        np.save(folder / f"{name}.npy", array)


def make_sources(root: Path) -> None:
    for seed in (0, 1):
        _save(root / f"graph{seed}", **_arrays(seed))
        words = ["convert", str(root / f"graph{seed}"), str(root / f"graph{seed}.gids")]
        if main([*words, "--quiet", "--page-bytes", "512"]):
            raise SystemExit("gids convert failed")
    _save(root / "sorted", **_arrays(2, _SORTED_EDGES))


# Commands.


def converted(source: str, *, stripes: Sequence[int] = (), **options: object) -> Step:
    def step(place: Place) -> None:
        path = place.sources / source
        reader = find_reader(path, "directory")
        stripe = tuple(str(place.disks[i]) for i in stripes)
        given = {"page_bytes": 512, "workers": 1, "memory_bytes": 1 << 20, **options}
        convert(
            source_files(path),
            lambda scratch: open_source(reader, path, scratch, Choices()),
            place.dataset,
            Options(stripe=stripe, **given),  # type: ignore[arg-type]
        )

    return step


def partitioned(source: str, parts: int, *, method: str = "hash") -> Step:
    return lambda place: _partition(place, source, parts, method)


def _partition(place: Place, source: str, parts: int, method: str) -> None:
    path = place.sources / f"{source}.gids"
    partition(path, place.dataset, parts, method=method, workers=1, memory_bytes=1 << 20)


def _run(place: Place, command: str, *arguments: str) -> None:
    allowed = [word for disk in place.disks for word in ("--allow-dir", str(disk))]
    status = main([command, str(place.dataset), *arguments, *allowed, "--quiet"])
    if status:
        raise SystemExit(f"gids {command} ended with {status}")


def heated(seed: int) -> Step:
    options = ("--method", "sampled", "--fanouts", "2", "--batch-size", "4", "--seed", str(seed))
    return lambda place: _run(place, "heat", *options)


def inferred(scale: float) -> Step:
    """Its output is the dataset."""

    def layer(block: object, rows: torch.Tensor) -> torch.Tensor:
        return rows[: block.num_dst] * scale  # type: ignore[attr-defined]

    def step(place: Place) -> None:
        layerwise(
            [layer, layer],
            gids.open(place.sources / "graph0.gids", memory=64 << 20, tuning=gids.Tuning(engine="threads")),
            tables=["feat"],
            output=place.dataset,
        )

    return step


STRIPED = converted("graph0", stripes=(0, 1))

SCENARIOS = {
    "convert": Scenario(converted("graph1"), kills=4),
    "convert --stripe": Scenario(STRIPED, kills=4),
    "convert, then with other options": Scenario(
        converted("graph1"), then=converted("graph1", sort_neighbors=True)
    ),
    "convert --stripe, then another source": Scenario(STRIPED, then=converted("graph1", stripes=(0, 2))),
    "convert --stripe, then without": Scenario(STRIPED, then=converted("graph1")),
    "convert --order, sorted in files": Scenario(
        converted("sorted", stripes=(0, 1), order="degree", reverse_edges=False, index_dtype="auto"), kills=6
    ),
    "partition": Scenario(partitioned("graph0", 2), kills=4),
    "partition, then into more parts": Scenario(
        partitioned("graph1", 2), then=partitioned("graph1", 3, method="range")
    ),
    "partition, then convert": Scenario(partitioned("graph0", 2), then=STRIPED),
    "heat": Scenario(heated(0), (STRIPED,), changes=True),
    "heat, computed anew": Scenario(heated(1), (STRIPED, heated(0)), changes=True),
    "layerwise": Scenario(inferred(2.0)),
    "layerwise, then convert": Scenario(inferred(3.0), then=converted("graph0")),
}
