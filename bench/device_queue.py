"""Does the request queue's service read as fast as the engine behind it?

    python bench/device_queue.py           # 4 GB file, 60 000 pages, 7 rounds
    python bench/device_queue.py --cached  # from the page cache: the limit of the processors
    python bench/device_queue.py --small   # seconds; only shows that it works

Baseline: gids.io.Engine.read of the same random 4 KiB pages of the same file, in one call, with the same
engine and depth, without merging, with O_DIRECT. On the queue side host threads play the GPU
(bench/device_queue.cpp, compiled here): they post rounds, sleep until a round is complete, and copy 64 bytes
of each page. Sides alternate over new draws of pages; first both read a draw that is compared with the file.
With a GPU, `bench/gpu.py queue` measures the whole path.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from harness import alternate, make_parser, median_ratio, page_contents, write_json, write_pages

import gids.io
from gids.bench.probe import aligned_rows

PAGE = 4096
COPIED = 64  # bytes of each page, by the threads that play the GPU
HERE = Path(__file__).parent
NATIVE = HERE.parent / "native"
BAR = 0.9


def build(folder: Path, optimize: str) -> ctypes.CDLL:
    """The host threads, with the queue's sources."""
    sources = [
        HERE / "device_queue.cpp",
        *sorted(NATIVE.glob("io/*.cpp")),
        *sorted(NATIVE.glob("store/*.cpp")),
    ]
    library = folder / "device_queue.so"
    command = [os.environ.get("CXX", "g++"), "-std=c++20", optimize, "-fPIC", "-shared", "-pthread"]
    command += [f"-I{NATIVE}", f"-I{NATIVE / 'include'}", *map(str, sources), "-o", str(library)]
    subprocess.run(command, check=True)
    built = ctypes.CDLL(str(library))
    built.read_through_queue.restype = ctypes.c_double
    return built


class Sides:
    """Both ways to read a draw of pages; each returns pages per second."""

    def __init__(self, args: argparse.Namespace, path: Path, page_count: int, library: ctypes.CDLL) -> None:
        self.args, self.path, self.page_count, self.library = args, path, page_count, library
        self.out = aligned_rows(args.reads, PAGE)
        self.turns = {"engine": 0, "queue": 0}

    def draw(self, side: str) -> np.ndarray:
        """Distinct random pages; both sides read the same in a round."""
        self.turns[side] += 1
        rng = np.random.default_rng([self.args.seed, self.turns[side]])
        return rng.permutation(self.page_count)[: self.args.reads].astype(np.uint64)

    def engine(self) -> float:
        pages = self.draw("engine")
        files, offsets = np.zeros(len(pages), np.uint32), pages.astype(np.int64) * PAGE
        with self.open_engine() as engine:
            begun = time.perf_counter()
            errors = engine.read(files, offsets, PAGE, self.out)
            seconds = time.perf_counter() - begun
        self.check(pages, errors, self.out)
        return len(pages) / seconds

    def queue(self) -> float:
        return self.through_queue(COPIED)

    def through_queue(self, nbytes: int) -> float:
        pages = self.draw("queue")
        to, errors = self.out.reshape(-1)[: len(pages) * nbytes].reshape(len(pages), nbytes), self.errors()
        text = ctypes.create_string_buffer(500)
        self.drop_cache()
        seconds = self.library.read_through_queue(
            *(os.fsencode(self.path), self.args.engine.encode(), self.args.depth, PAGE),
            *(
                ctypes.c_uint64(self.page_count),
                ctypes.c_void_p(pages.ctypes.data),
                ctypes.c_uint64(len(pages)),
            ),
            *(ctypes.c_uint64(self.args.staging_mb << 20), self.args.rounds_ahead, self.args.posters),
            int(not self.args.cached),
            *(ctypes.c_void_p(to.ctypes.data), ctypes.c_uint64(nbytes), ctypes.c_void_p(errors.ctypes.data)),
            *(text, ctypes.c_uint64(len(text))),
        )
        if seconds < 0:
            raise RuntimeError(text.value.decode())
        self.check(pages, errors, to)
        return len(pages) / float(seconds)

    def drop_cache(self) -> None:
        if not self.args.cached:
            gids.io.drop_page_cache(self.path)

    def open_engine(self) -> gids.io.Engine:
        self.drop_cache()
        return gids.io.open_engine(
            [self.path],
            self.args.engine,
            depth=self.args.depth,
            max_read_bytes=PAGE,
            max_merge_bytes=0,
            direct=not self.args.cached,
        )

    def errors(self) -> np.ndarray:
        return np.full(self.args.reads, -1, np.int32)

    @staticmethod
    def check(pages: np.ndarray, errors: np.ndarray, got: np.ndarray) -> None:
        """Raise RuntimeError if a read failed, or the bytes differ from the file's."""
        if errors.any():
            raise RuntimeError(
                f"{np.count_nonzero(errors)} reads failed, the first with {errors[errors != 0][0]}"
            )
        for first in range(0, len(pages), 8192):
            part = slice(first, first + 8192)
            if not np.array_equal(got[part], page_contents(pages[part], got.shape[1])):
                raise RuntimeError("other bytes than the file's were read")


def main() -> None:
    parser = make_parser(__doc__, "dir", "json", "keep", "rounds", "seed")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--size-gb", type=float, default=4.0)
    parser.add_argument("--reads", type=int, default=60_000)
    parser.add_argument("--depth", type=int, default=256)
    parser.add_argument("--staging-mb", type=int, default=256)
    parser.add_argument("--rounds-ahead", type=int, default=4)
    parser.add_argument("--posters", type=int, default=1, help="host threads that play the GPU")
    parser.add_argument("--cached", action="store_true", help="read from the page cache, without the disk")
    args = parser.parse_args()
    if args.small:
        args.size_gb, args.reads, args.rounds, args.staging_mb = 0.016, 2000, 1, 4
    page_count = int(args.size_gb * 1e9) // PAGE
    args.reads = min(args.reads, page_count)
    path = args.dir / f"gids-bench-queue-{page_count}.bin"
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder), "-O0" if args.small else "-O3")  # as the wheel
        try:
            write_pages(path, page_count)
            compare(Sides(args, path, page_count, library), args)
        finally:
            if not args.keep:
                path.unlink(missing_ok=True)


def compare(sides: Sides, args: argparse.Namespace) -> None:
    print(
        f"{args.reads} of {sides.page_count} pages of {PAGE} B, depth {args.depth}, "
        f"staging {args.staging_mb} MiB, "
        f"{args.rounds_ahead} rounds ahead, {args.posters} poster(s), seed {args.seed}, {args.rounds} rounds"
    )
    sides.engine()  # whole pages are compared here
    sides.through_queue(PAGE)
    speeds = alternate({"engine": sides.engine, "queue": sides.queue}, args.rounds)
    for side, values in speeds.items():
        print(f"{side:8} {median(values):10,.0f} pages/s   ({min(values):,.0f} to {max(values):,.0f})")
    ratio = median_ratio(speeds["queue"], speeds["engine"])
    print(f"the service, host threads posting: {ratio:.2f} of Engine.read (target {BAR})")
    write_json(args.json, {"pages_per_s": speeds, "of_engine": ratio, "bar": BAR})


if __name__ == "__main__":
    sys.exit(main())
