"""Does the request queue's service read as fast as the engine behind it?

    python bench/device_queue.py           # 4 GB file, 60 000 pages, 7 rounds
    python bench/device_queue.py --cached  # from the page cache: the limit of the processors
    python bench/device_queue.py --small   # seconds; only shows that it works

Baseline: gids.io.Engine.read of the same random 4 KiB pages of the same file, in one call, with the same
engine and depth, without merging, with O_DIRECT. On the queue side host threads play the GPU
(bench/device_queue.cpp, compiled here): they post rounds, sleep until a round is answered, and copy 64 bytes
of each page. Sides alternate over new draws of pages; first both read a draw that is compared with the file.
With a GPU, `bench/gpu.py queue` measures the whole path.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
from harness import PAGE_BYTES, Figures, Script, alternate, check_pages, page_file, read_pages

import gids.io
from gids.write.files import aligned_zeros

COPIED = 64  # bytes of each page, by the threads that play the GPU
HERE = Path(__file__).parent
NATIVE = HERE.parent / "native"
BAR = 0.9
STAGING_BYTES = {False: 256 << 20, True: 4 << 20}  # by --small


def build(folder: Path, optimize: str) -> ctypes.CDLL:
    """The host threads and the queue, compiled as one program: most of the time goes to headers."""
    alone = NATIVE / "io/queue_memory.cpp"  # has names of other sources
    together = [HERE / "device_queue.cpp", *(path for path in NATIVE.glob("io/*.cpp") if path != alone)]
    together += [NATIVE / "store/crc32c.cpp", NATIVE / "store/mapped_file.cpp"]
    library = folder / "device_queue.so"
    command = [os.environ.get("CXX", "g++"), "-std=c++20", optimize, "-fPIC", "-shared", "-pthread"]
    command += [f"-I{NATIVE}", f"-I{NATIVE / 'include'}", str(alone), "-x", "c++", "-", "-o", str(library)]
    includes = "".join(f'#include "{path}"\n' for path in together)
    subprocess.run(command, check=True, text=True, input=includes)
    built = ctypes.CDLL(str(library))
    built.read_through_queue.restype = ctypes.c_double
    return built


class Sides:
    """Both ways to read a draw of pages; each returns pages per second."""

    def __init__(self, args: argparse.Namespace, path: Path, page_count: int, library: ctypes.CDLL) -> None:
        self.args, self.path, self.page_count, self.library = args, path, page_count, library
        self.out = aligned_zeros(args.reads, PAGE_BYTES)
        self.turns = {"engine": 0, "queue": 0}

    def draw(self, side: str) -> np.ndarray:
        """Distinct random pages; both sides read the same in a round."""
        self.turns[side] += 1
        if not self.args.cached:
            gids.io.drop_page_cache(self.path)
        rng = np.random.default_rng([self.args.seed, self.turns[side]])
        return rng.permutation(self.page_count)[: self.args.reads]

    def engine(self) -> float:
        pages = self.draw("engine")
        options = {"max_read_bytes": PAGE_BYTES, "max_merge_bytes": 0, "direct": not self.args.cached}
        with gids.io.open_engine([self.path], depth=self.args.depth, **options) as engine:
            return read_pages(engine, [pages], self.out)[0]

    def queue(self, nbytes: int = COPIED) -> float:
        """nbytes: of each page, which the threads that play the GPU copy."""
        pages, args = self.draw("queue").astype(np.uint64), self.args
        to = self.out.reshape(-1)[: len(pages) * nbytes].reshape(len(pages), nbytes)
        errors = np.full(len(pages), -1, np.int32)
        text = ctypes.create_string_buffer(500)
        size, address = ctypes.c_uint64, ctypes.c_void_p
        seconds = self.library.read_through_queue(
            *(os.fsencode(self.path), b"auto", args.depth, PAGE_BYTES, size(self.page_count)),
            *(address(pages.ctypes.data), size(len(pages)), size(STAGING_BYTES[args.small])),
            *(4, 1, int(not args.cached)),  # rounds ahead; threads that play the GPU
            *(address(to.ctypes.data), size(nbytes), address(errors.ctypes.data), text, size(len(text))),
        )
        if seconds < 0:
            raise RuntimeError(text.value.decode())
        if errors.any():
            raise RuntimeError(f"reads failed, the first with {errors[errors != 0][0]}")
        check_pages(pages, to)
        return len(pages) / float(seconds)


def compare(args: argparse.Namespace, figures: Figures) -> None:
    page_count = int(args.size_gb * 1e9) // PAGE_BYTES
    args.reads = min(args.reads, page_count)
    with tempfile.TemporaryDirectory() as folder, page_file(args, page_count) as path:
        library = build(Path(folder), "-O0" if args.small else "-O3")  # as the wheel
        sides = Sides(args, path, page_count, library)
        sides.engine()
        sides.queue(PAGE_BYTES)  # whole pages are compared here
        speeds = alternate({"queue": sides.queue, "engine": sides.engine}, args.rounds)
    for side, rates in speeds.items():
        note = f"{min(rates):,.0f} to {max(rates):,.0f}"
        figures.add(f"random pages, {side}", median(rates), "pages/s", note=note)
    figures.ratio("random pages, queue over engine", speeds["queue"], speeds["engine"], bar=BAR)


if __name__ == "__main__":
    script = Script(__doc__, "dir", "keep", "rounds", "seed")
    option = script.option
    option("size-gb", 4.0, small=0.016)
    option("reads", 60_000, small=2000)
    option("depth", 256)
    option("cached", text="read from the page cache, without the disk", action="store_true")
    script.run(compare)
