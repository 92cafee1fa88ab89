"""How fast are pages and extents of files read into device memory? Called by gpu.py.

queue: distinct random pages of 4 KiB, new in each round, past the page cache, in turn: by the engine in
sorted batches, three in flight, into host memory; and by kernels that post requests, whose pages a copy
engine brings into device memory. All bytes of every round are compared, of the last one too, when each slot
was used many times.

extents: of 64 KiB and of 1 MiB in random order, new in each round, past the page cache, in turn: by the
engine into host memory, which is the disk's rate; and by kvikio into device memory, if it is installed, by
GPUDirect Storage or through host memory. The bytes of the first round are compared.
"""

from __future__ import annotations

import contextlib
import importlib.util
from statistics import median

import numpy as np
import torch
from gpu_harness import Bench, host_seconds
from harness import PAGE_BYTES, alternate, check_pages, read_pages, write_pages

import gids.io
from gids.io.device.device_queue import DeviceQueue, QueueTable
from gids.io.device.kvikio_reader import KvikioReader, why_no_gds

QUEUE = {
    "file_bytes": (2 << 30, 4 << 20),
    "pages": (65536, 300),
    "rounds": (7, 1),  # each uses every slot `pages` / (slots of `staging_bytes`) times
    "depth": (512, 64),
    "staging_bytes": (256 << 20, 256 << 10),
}
EXTENTS = {
    "file_bytes": (2 << 30, 4 << 20),
    "out_bytes": (512 << 20, 2 << 20),  # read in a round
    "rounds": (3, 1),
    "depth": (256, 32),
}
_BATCH = 8192
_WORDS = PAGE_BYTES // 8


def wrong_pages(out: torch.Tensor, pages: torch.Tensor) -> int:
    """The number of pages that differ from the file. out: uint8[n, 4096]; pages: int64[n]."""
    word = torch.arange(_WORDS, dtype=torch.int64, device=pages.device)
    wrong = 0
    for part, numbers in zip(out.view(torch.int64).split(_BATCH), pages.split(_BATCH), strict=True):
        expected = (numbers[:, None] * _WORDS + word) * (0x9E3779B97F4A7C15 - (1 << 64))  # modulo 2^64
        wrong += int((part != expected).any(dim=1).sum())
    return wrong


def queue(bench: Bench) -> None:
    device, sizes = bench.device, bench.sizes
    path, page_count = bench.directory / "pages.bin", sizes.file_bytes // PAGE_BYTES
    write_pages(path, page_count)
    rng = np.random.default_rng(3)
    stream = device.new_stream()
    out = device.empty((sizes.pages, PAGE_BYTES), torch.uint8)
    count = torch.tensor([sizes.pages], dtype=torch.int64).to(device.torch_device)
    on_host = np.zeros((sizes.pages, PAGE_BYTES), np.uint8)
    drawn = [rng.permutation(page_count)[: sizes.pages] for _ in range(2 * (sizes.rounds + 1))]
    device.current_stream().synchronize()
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(
            gids.io.open_engine([path], depth=sizes.depth, max_read_bytes=PAGE_BYTES)
        )
        tables = [QueueTable(page_count, 0, 1, PAGE_BYTES)]
        made = DeviceQueue(device, engine, tables, stream=stream, staging_bytes=sizes.staging_bytes)
        queue = stack.enter_context(made)

        def read(requests: torch.Tensor) -> None:
            """The pages of requests go to out."""
            begins = range(0, sizes.pages, queue.round_max)
            posts = iter(begins)
            for begin in begins:
                while queue.room and (first := next(posts, None)) is not None:
                    queue.post(0, requests, count, first)
                part = out[begin : begin + queue.round_max]
                device.copy(stream, part, queue.take(len(part)).pages)

        def by_queue() -> float:
            """Pages per second."""
            pages = drawn.pop()
            requests = torch.from_numpy(pages).to(device.torch_device)
            out.zero_()
            device.current_stream().synchronize()
            seconds = host_seconds(stream, lambda: read(requests))
            assert queue.stats()["failed"] == 0, "a request failed"
            if wrong := wrong_pages(out, requests):
                raise AssertionError(f"{wrong} of {len(pages)} pages are wrong")
            return len(pages) / seconds

        def by_engine() -> float:
            pages = drawn.pop()
            batches = [np.sort(pages[i : i + _BATCH]) for i in range(0, len(pages), _BATCH)]
            return read_pages(engine, batches, on_host)[0]

        sides = {"queue": by_queue, "engine": by_engine}
        for side in sides.values():
            side()
        speeds = alternate(sides, sizes.rounds)
        note = f"{engine.name}, depth {sizes.depth}, rounds of {queue.round_max}"
    name = "queue path over the engine on the host"
    bench.figures.ratio(name, speeds["queue"], speeds["engine"], bar=0.9, note=note)
    for side, rates in speeds.items():
        bench.figures.add(f"random pages of 4 KiB, {side}", median(rates), "pages/s")


def extents(bench: Bench) -> None:
    path = bench.directory / "pages.bin"
    write_pages(path, bench.sizes.file_bytes // PAGE_BYTES)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(gids.io.open_engine([path], depth=bench.sizes.depth))
        readers: dict[str, KvikioReader] = {}
        if importlib.util.find_spec("kvikio"):
            no_gds = why_no_gds(path, bench.device.index)
            kvikio = KvikioReader(bench.device, [path], gds=not no_gds)
            readers[f"kvikio ({'compat' if no_gds else 'GDS'})"] = stack.enter_context(kvikio)
        for run_bytes in (64 << 10, 1 << 20):
            _compare_extents(bench, engine, readers, run_bytes)


def _compare_extents(
    bench: Bench, engine: gids.io.Engine, readers: dict[str, KvikioReader], run_bytes: int
) -> None:
    device, sizes = bench.device, bench.sizes
    path = bench.directory / "pages.bin"
    rng = np.random.default_rng(run_bytes)
    count = sizes.out_bytes // run_bytes
    files, lengths = np.zeros(count, np.uint32), np.full(count, run_bytes)
    positions = np.arange(count) * run_bytes
    on_host = np.zeros(sizes.out_bytes, np.uint8)
    out = device.zeros((sizes.out_bytes,), torch.uint8)
    compared: set[str] = set()

    def bytes_per_s(name: str) -> float:
        gids.io.drop_page_cache(path)  # kvikio may go through it
        offsets = rng.permutation(sizes.file_bytes // run_bytes)[:count] * run_bytes

        def read() -> None:
            if name in readers:
                readers[name].read(files, offsets, lengths, out, positions)
            else:
                assert not engine.read_extents(files, offsets, lengths, on_host, positions).any()

        seconds = host_seconds(device.current_stream(), read)
        if name not in compared:
            compared.add(name)
            came = out.cpu().numpy() if name in readers else on_host
            pages = offsets[:, None] // PAGE_BYTES + np.arange(run_bytes // PAGE_BYTES)
            check_pages(pages.ravel(), came.reshape(-1, PAGE_BYTES))
        return sizes.out_bytes / seconds

    sides = {name: (lambda n=name: bytes_per_s(n)) for name in ("engine into host memory", *readers)}
    for side in sides.values():
        side()
    speeds = alternate(sides, sizes.rounds)
    for name, rates in speeds.items():
        size = f"extents of {run_bytes >> 10} KiB, {name}"
        bench.figures.add(size, median(rates) / 1e9, "GB/s")
        if name in readers:
            name = f"{size}, over the engine into host memory"
            bench.figures.ratio(name, rates, speeds["engine into host memory"])
