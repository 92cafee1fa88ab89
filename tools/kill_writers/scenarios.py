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
from gids.write import create_table, restripe
from gids.write.partition import partition

NAME = "a.gids"
DISKS = ("ssd0", "ssd1", "ssd2")
SYNC_BYTES = 20_000


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
    what is run after the kill, the same command unless given. old_kernel: without an exchange of two names.
    replaces: the command may be run when it was through; else FileExistsError is right then. kills: how often
    a command may be killed before it may finish.
    """

    command: Step
    before: tuple[Step, ...] = ()
    then: Step | None = None
    old_kernel: bool = False
    replaces: bool = True
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
            sync_bytes=SYNC_BYTES,
        )

    return step


def partitioned(source: str, parts: int, *, method: str = "hash", overwrite: bool = False) -> Step:
    return lambda place: _partition(place, source, parts, method, overwrite)


def _partition(place: Place, source: str, parts: int, method: str, overwrite: bool) -> None:
    partition(
        place.sources / f"{source}.gids",
        place.dataset,
        parts,
        method=method,
        workers=1,
        memory_bytes=1 << 20,
        overwrite=overwrite,
        sync_bytes=SYNC_BYTES,
    )


def _run(place: Place, command: str, *arguments: str) -> None:
    allowed = [word for disk in place.disks for word in ("--allow-dir", str(disk))]
    status = main([command, str(place.dataset), *arguments, *allowed, "--quiet"])
    if status:
        raise SystemExit(f"gids {command} ended with {status}")


def converted_in_place(*disks: int) -> Step:
    """`gids convert` of a dataset to itself, on other disks."""

    def step(place: Place) -> None:
        stripe = ["--stripe", *(str(place.disks[i]) for i in disks)] if disks else []
        _run(place, "convert", str(place.dataset), "--overwrite", *stripe)

    return step


def restriped(*disks: int) -> Step:
    return lambda place: restripe(
        place.dataset, [place.disks[i] for i in disks], allow_dirs=place.disks, workers=1
    )


def heated(seed: int) -> Step:
    options = ("--method", "sampled", "--fanouts", "2", "--batch-size", "4", "--seed", str(seed))
    return lambda place: _run(place, "heat", *options)


def table_created(value: float, key: str = "h", *, replace: bool = False) -> Step:
    def step(place: Place) -> None:
        store = FeatureStore(place.dataset, allow_dirs=place.disks)
        with create_table(store, f"_N.{key}", NODES, 40, page_bytes=512, replace=replace) as writer:
            for start in (30, 0):
                writer.write(start, torch.full((30, 40), value))

    return step


def inferred(scale: float, *, replace: bool = False) -> Step:
    def layer(block: object, rows: torch.Tensor) -> torch.Tensor:
        return rows[: block.num_dst] * scale  # type: ignore[attr-defined]

    def step(place: Place) -> None:
        store = FeatureStore(place.dataset, allow_dirs=place.disks)
        layerwise(
            [layer, layer],
            gids.open(store, memory=64 << 20, tuning=gids.Tuning(engine="threads")),
            tables=["feat"],
            output="h",
            replace=replace,
        )

    return step


OLD, OLD_STRIPED = converted("graph0"), converted("graph0", stripes=(0, 1))
OTHER_OPTIONS = converted("graph1", stripes=(0, 1), overwrite=True, sort_neighbors=True)

SCENARIOS = {
    "convert": Scenario(converted("graph1"), replaces=False),
    "convert --stripe": Scenario(converted("graph1", stripes=(0, 1)), replaces=False),
    "convert --overwrite": Scenario(converted("graph1", overwrite=True), (OLD,)),
    "convert --overwrite, old kernel": Scenario(converted("graph1", overwrite=True), (OLD,), old_kernel=True),
    "convert --overwrite, once striped": Scenario(converted("graph1", overwrite=True), (OLD_STRIPED,)),
    "convert --stripe --overwrite": Scenario(
        converted("graph1", stripes=(0, 1), overwrite=True), (OLD_STRIPED,)
    ),
    "convert --stripe --overwrite, then another": Scenario(
        converted("graph1", stripes=(0, 1), overwrite=True), (OLD_STRIPED,), then=OTHER_OPTIONS
    ),
    "convert --overwrite, old kernel, then another": Scenario(
        converted("graph1", overwrite=True), (OLD,), then=OTHER_OPTIONS, old_kernel=True
    ),
    "convert --order, sorted in files": Scenario(
        converted("sorted", stripes=(0, 1), order="degree", reverse_edges=False, index_dtype="auto"),
        replaces=False,
        kills=6,
    ),
    "partition": Scenario(partitioned("graph0", 2), replaces=False, kills=4),
    "partition --overwrite": Scenario(partitioned("graph1", 3, overwrite=True), (partitioned("graph0", 2),)),
    "partition --overwrite, then another": Scenario(
        partitioned("graph1", 2, overwrite=True),
        (partitioned("graph0", 2),),
        then=partitioned("graph1", 3, method="range", overwrite=True),
    ),
    "convert in place, to other disks": Scenario(converted_in_place(1, 2), (OLD_STRIPED,)),
    "convert in place, into the dataset": Scenario(converted_in_place(), (OLD_STRIPED,)),
    "convert in place, then to another disk": Scenario(
        converted_in_place(0), (OLD_STRIPED,), then=converted_in_place(2)
    ),
    "restripe, old kernel, then to another disk": Scenario(
        restriped(0, 1), (OLD,), then=restriped(2), old_kernel=True
    ),
    "heat": Scenario(heated(0), (OLD,)),
    "heat, computed anew": Scenario(heated(1), (OLD_STRIPED, heated(0))),
    "create_table": Scenario(table_created(2), (OLD,), replaces=False),
    "create_table, replace, striped": Scenario(
        table_created(2, "feat", replace=True), (OLD_STRIPED, table_created(1, "feat", replace=True))
    ),
    "layerwise": Scenario(inferred(2.0), (OLD,), replaces=False),
    "layerwise, replace, striped": Scenario(inferred(2.0, replace=True), (OLD_STRIPED, inferred(3.0))),
}
