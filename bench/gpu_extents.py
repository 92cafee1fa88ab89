"""How fast are extents of files read into device memory? Called by gpu.py.

Extents of 64 KiB and of 1 MiB in random order, new in each round, past the page cache, in turn: by the engine
into host memory, which is the disk's rate; by the engine through pinned staging into device memory; and by
kvikio, if it is installed and works, by GPUDirect Storage or through host memory. The bytes of the first
round are compared.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from device_timer import host_seconds
from figures import Figures
from harness import PAGE_BYTES as _PAGE
from harness import alternate, median_ratio, page_contents, write_pages

import gids.io
from gids.cuda import Device
from gids.io.device.extents import ExtentReader, open_extent_reader


@dataclass(frozen=True)
class ExtentSizes:
    """out_bytes: read in a round. The page cache is dropped before each read: kvikio may go through it."""

    file_bytes: int = 2 << 30
    out_bytes: int = 512 << 20
    rounds: int = 3
    depth: int = 256


SMALL = ExtentSizes(file_bytes=4 << 20, out_bytes=2 << 20, rounds=1, depth=32)


def extents(device: Device, directory: Path, sizes: ExtentSizes, figures: Figures) -> None:
    path = directory / "pages.bin"
    write_pages(path, sizes.file_bytes // _PAGE)
    out = device.zeros((sizes.out_bytes,), torch.uint8)
    on_host = np.zeros(sizes.out_bytes, np.uint8)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(gids.io.open_engine([path], depth=sizes.depth))
        readers: dict[str, ExtentReader] = {}
        for kind in ("pinned", "kvikio"):
            try:
                reader = open_extent_reader(device, engine, [path], kind=kind)  # type: ignore[arg-type]
            except (ImportError, OSError) as error:
                print(f"{kind}: {error}", flush=True)
                continue
            readers[reader.name] = stack.enter_context(contextlib.closing(reader))
        for run_bytes in (64 << 10, 1 << 20):
            _compare(device, path, engine, readers, run_bytes, on_host, out, sizes, figures)


def _compare(
    device: Device,
    path: Path,
    engine: gids.io.Engine,
    readers: dict[str, ExtentReader],
    run_bytes: int,
    on_host: np.ndarray,
    out: torch.Tensor,
    sizes: ExtentSizes,
    figures: Figures,
) -> None:
    rng = np.random.default_rng(run_bytes)
    count = sizes.out_bytes // run_bytes
    files, lengths = np.zeros(count, np.uint32), np.full(count, run_bytes)
    places = np.arange(count) * run_bytes
    compared: set[str] = set()

    def draw() -> np.ndarray:
        gids.io.drop_page_cache(path)
        return rng.permutation(sizes.file_bytes // run_bytes)[:count] * run_bytes

    def bytes_per_s(name: str, reader: ExtentReader | None) -> float:
        offsets = draw()

        def read() -> None:
            if reader is None:
                assert not engine.read_extents(files, offsets, lengths, on_host, places).any()
            else:
                reader.read(files, offsets, lengths, out, places)

        seconds = host_seconds(device.current_stream(), read)
        if name not in compared:
            compared.add(name)
            got = on_host if reader is None else out.cpu().numpy()
            pages = offsets[:, None] // _PAGE + np.arange(run_bytes // _PAGE)
            assert np.array_equal(got.reshape(-1, _PAGE), page_contents(pages.ravel())), name
        return sizes.out_bytes / seconds

    everyone: dict[str, ExtentReader | None] = {"engine into host memory": None, **readers}
    sides = {name: (lambda n=name, r=reader: bytes_per_s(n, r)) for name, reader in everyone.items()}  # type: ignore[misc]
    for side in sides.values():
        side()
    speeds = alternate(sides, sizes.rounds)
    for name in everyone:
        size = f"extents of {run_bytes >> 10} KiB, {name}"
        figures.add(size, median(speeds[name]) / 1e9, "GB/s")
        if everyone[name] is not None:
            ratio = median_ratio(speeds[name], speeds["engine into host memory"])
            figures.add(f"{size}, over the engine into host memory", ratio, "x")
