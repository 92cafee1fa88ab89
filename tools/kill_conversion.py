"""Kill conversions at random moments until they are done: are the datasets those of undisturbed ones?

    python tools/kill_conversion.py --kills 200
    python tools/kill_conversion.py --kills 15 --seed 7

Each case has features, edges and labels; together they cover several readers and every option that changes
the graph. A conversion is killed (SIGKILL) at a random moment, half of them drawn from the time that it takes
and half from the bytes that it writes, and started again, until it is done; then every byte of every file is
compared with what an undisturbed conversion wrote, the dataset is verified, and nothing else may be left.
Syncs are frequent and memory is scarce, so that kills fall into the middle of tables, of sorting and of
publishing. Exits with 1 at the first difference.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gids.store import verify
from gids.store.convert import Options, convert
from gids.store.convert.readers import Choices, find_reader, open_source
from gids.store.convert.source import source_files

NODES, EDGES = 20_000, 150_000
MOST_KILLS = 6  # of one conversion; then it may finish
RNG = np.random.default_rng(11)
FORK = multiprocessing.get_context("fork")  # nothing to import again, so a kill costs milliseconds


def arrays() -> dict[str, np.ndarray]:
    return {
        "feat": RNG.standard_normal((NODES, 100), np.float32),
        "pos": RNG.standard_normal((NODES, 3)),
        "edge_index": RNG.integers(0, NODES, (2, EDGES)),
        "edge_weight": RNG.standard_normal(EDGES, np.float32),
        "label": RNG.integers(0, 9, NODES),
    }


def save(folder: Path, **values: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in values.items():
        np.save(folder / f"{name}.npy", array)


def write_directory(path: Path) -> None:
    save(path, **arrays())


def write_packed(path: Path) -> None:
    path.mkdir()
    found = arrays()
    del found["edge_weight"]  # edges with features can be neither added nor left out
    np.savez_compressed(path / "all.npz", **found)


def write_text(path: Path) -> None:
    found = arrays()
    save(path, feat=found["feat"], label=found["label"])
    np.savetxt(path / "edges.csv", found["edge_index"].T, fmt="%d", delimiter=",")


def write_igbh(path: Path) -> None:
    processed, counts = path / "processed", {"paper": 2000, "author": 900}
    for ntype, count in counts.items():
        save(processed / ntype, node_feat=RNG.standard_normal((count, 1024), np.float32))
    save(processed / "paper", node_label_19=RNG.integers(0, 19, counts["paper"]).astype(np.float32))
    for relation in ("paper__cites__paper", "paper__written_by__author"):
        ends = [counts[t] for t in relation.split("__")[::2]]
        save(processed / relation, edge_index=RNG.integers(0, ends, (60_000, 2)))


@dataclass(frozen=True)
class Case:
    """write(path) makes a source, which the reader of that name converts by these options."""

    write: Callable[[Path], None]
    reader: str
    options: Options
    stripes: int = 0


CASES = {
    "arrays, two stripes": Case(write_directory, "directory", Options(), stripes=2),
    "arrays, reverse edges, int32": Case(
        write_directory, "directory", Options(reverse_edges=True, index_dtype="auto", workers=3)
    ),
    "packed, self-loops, no repeats": Case(
        write_packed, "directory", Options(self_loops=True, dedup=True, keep_edge_ids=False)
    ),
    "text, sorted neighbors, float16": Case(
        write_text, "edges", Options(sort_neighbors=True, dtypes={"": "float16"}, page_bytes=512, workers=1)
    ),
    "IGBH, reverse relations, a stripe": Case(
        write_igbh, "igb", Options(reverse_edges=True, page_bytes=8192), stripes=1
    ),
}


class Target:
    """A place for one dataset of a case."""

    def __init__(self, root: Path, source: Path, case: Case) -> None:
        self.path, self.log, self._root = root / "a.gids", root.with_name(root.name + ".log"), root
        self._source, self._case = source, case
        self.written = FORK.Value("q", 0, lock=False)  # a killed process would never let go of a lock
        self.stripes = [root / f"ssd{i}" for i in range(case.stripes)]
        for folder in (root, *self.stripes):
            folder.mkdir()

    def start(self) -> multiprocessing.process.BaseProcess:
        self.written.value = 0
        process = FORK.Process(target=self._convert)
        process.start()
        return process

    def _convert(self) -> None:
        options = replace(self._case.options, stripe=tuple(map(str, self.stripes)), memory_bytes=1 << 20)
        reader = find_reader(self._source, self._case.reader)

        def say(sentence: str) -> None:
            with self.log.open("a") as file:
                file.write(sentence + "\n")

        lock = threading.Lock()

        def on_bytes(size_bytes: int) -> None:
            with lock:
                self.written.value += size_bytes

        convert(
            source_files(self._source),
            lambda scratch: open_source(reader, self._source, scratch, Choices()),
            self.path,
            options,
            say=say,
            on_bytes=on_bytes,
            sync_bytes=200_000,
        )

    def contents(self) -> dict[str, bytes]:
        """Every file's bytes, with a fixed name in place of each folder of shards, whose own is random."""
        places = {str(f): f"shards{n}" for n, s in enumerate(self.stripes) for f in s.iterdir()}
        places[str(self._root)] = ""
        found = {}
        for file in (p for p in self._root.rglob("*") if p.is_file()):
            name, data = str(file), file.read_bytes()
            for place, fixed in places.items():
                name = name.replace(place, fixed)
                data = data.replace(place.encode(), fixed.encode()) if file.suffix == ".json" else data
            if name.endswith("manifest.json") and self.stripes:  # its checksum is of the random names too
                data = re.sub(rb'"checksum": "crc32c:[0-9a-f]{8}"\n}', b"}", data)
            found[name] = data
        return found

    def resumed(self) -> int:
        return self.log.read_text().count("resuming") if self.log.exists() else 0


@dataclass(frozen=True)
class Whole:
    """What a conversion writes that nobody kills, and how long it and its progress are."""

    source: Path
    contents: dict[str, bytes]
    seconds: float
    size_bytes: int

    @classmethod
    def of(cls, source: Path, target: Target) -> Whole:
        begun = time.perf_counter()
        process = target.start()
        process.join()
        if process.exitcode != 0:
            raise SystemExit("the undisturbed conversion failed")
        return cls(source, target.contents(), time.perf_counter() - begun, target.written.value)


def kill_until_done(target: Target, whole: Whole, most: int, rng: random.Random) -> int:
    """Convert, with at most so many kills on the way; how many there were."""
    kills = 0
    while not target.path.exists():
        process = target.start()
        if kills == most:
            process.join()
        elif rng.random() < 0.5:
            process.join(rng.uniform(0, whole.seconds))
        else:
            until = rng.uniform(0, whole.size_bytes)
            while target.written.value < until and process.is_alive():
                time.sleep(0.0005)
            process.join(rng.uniform(0, 0.01))
        process.kill()
        process.join()
        if process.exitcode not in (0, -signal.SIGKILL):
            raise SystemExit(f"a conversion failed after {kills} kills; see above")
        kills += process.exitcode != 0
    # A kill between publishing and removing the workplace leaves it, beside the whole dataset.
    shutil.rmtree(target.path.with_name(target.path.name + ".partial"), ignore_errors=True)
    return kills


def fault(target: Target, expected: dict[str, bytes]) -> str:
    """What is wrong with a dataset, in one line; "" when nothing is."""
    found = target.contents()
    if found.keys() != expected.keys():
        return f"other files: {sorted(found.keys() ^ expected.keys())}"
    differing = [name for name in expected if found[name] != expected[name]]
    if differing:
        return f"other bytes: {differing}"
    return next(iter(verify(target.path, allow_dirs=target.stripes)), "")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    rng = random.Random(args.seed)
    kills = resumed = datasets = 0
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        root = Path(name)
        whole: dict[str, Whole] = {}
        for number, (title, case) in enumerate(CASES.items()):
            source = root / f"source{number}"
            case.write(source)
            whole[title] = Whole.of(source, Target(root / f"whole{number}", source, case))
            print(f"{title}: {whole[title].seconds:.2f} s undisturbed", flush=True)
        for title in itertools.cycle(CASES):
            if kills >= args.kills:
                break
            target = Target(root / f"killed{datasets}", whole[title].source, CASES[title])
            count = kill_until_done(target, whole[title], min(MOST_KILLS, args.kills - kills), rng)
            wrong = fault(target, whole[title].contents)
            print(f"{title}: {count} kills, {target.resumed()} resumed{wrong and ': '}{wrong}", flush=True)
            if wrong:
                return 1
            kills, resumed, datasets = kills + count, resumed + target.resumed(), datasets + 1
            shutil.rmtree(root / f"killed{datasets - 1}")
    print(f"{kills} kills, {resumed} resumed: {datasets} datasets, each as if undisturbed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
