"""Does the request queue read random pages as fast as its engine does from the host? Called by gpu.py.

Distinct random pages of 4 KiB, new in each round, past the page cache, in turn: by the engine in sorted
batches, three in flight, into host memory; and by kernels that post requests, wait for the service and copy
the pages into device memory, with both kinds of wait. All bytes of every round are compared, of the last one
too, when each slot was used many times.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
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
from gids.io.device.device_queue import DeviceQueue, QueueTable

_BATCH = 8192
_IN_FLIGHT = 3
_WORDS = _PAGE // 8


@dataclass(frozen=True)
class QueueSizes:
    file_bytes: int = 2 << 30
    pages: int = 65536
    rounds: int = 7  # each uses every slot `pages` / (slots of `staging_bytes`) times
    depth: int = 512
    staging_bytes: int = 256 << 20
    rounds_ahead: int = 8  # the last one's pages are copied while nothing is read


SMALL = QueueSizes(file_bytes=4 << 20, pages=300, rounds=1, depth=64, staging_bytes=256 << 10)


def wrong_pages(found: torch.Tensor, pages: torch.Tensor) -> int:
    """The number of pages that differ from the file. found: uint8[n, 4096]; pages: int64[n]."""
    word = torch.arange(_WORDS, dtype=torch.int64, device=pages.device)
    wrong = 0
    for part, numbers in zip(found.view(torch.int64).split(_BATCH), pages.split(_BATCH), strict=True):
        expected = (numbers[:, None] * _WORDS + word) * (0x9E3779B97F4A7C15 - (1 << 64))  # modulo 2^64
        wrong += int((part != expected).any(dim=1).sum())
    return wrong


def queue(device: Device, directory: Path, sizes: QueueSizes, figures: Figures) -> None:
    path, page_count = directory / "pages.bin", sizes.file_bytes // _PAGE
    write_pages(path, page_count)
    rng = np.random.default_rng(3)
    stream = device.new_stream()
    out = device.empty((sizes.pages, _PAGE), torch.uint8)
    errors = device.empty((sizes.pages,), torch.int32)
    count = torch.tensor([sizes.pages], dtype=torch.int64).to(device.torch_device)
    on_host = np.zeros((sizes.pages, _PAGE), np.uint8)
    drawn = [rng.permutation(page_count)[: sizes.pages] for _ in range(3 * (sizes.rounds + 1))]
    device.current_stream().synchronize()
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        engine = enter(gids.io.open_engine([path], depth=sizes.depth, max_read_bytes=_PAGE))
        tables = [QueueTable(page_count, 0, 1, _PAGE)]
        options = {"staging_bytes": sizes.staging_bytes, "rounds_max": sizes.rounds_ahead}
        queues = {
            wait: enter(DeviceQueue(device, engine, tables, wait=wait, **options))  # type: ignore[arg-type]
            for wait in ("stream", "warp")
        }
        pool = enter(ThreadPoolExecutor(_IN_FLIGHT))

        def by_queue(wait: str) -> float:
            """Pages per second."""
            pages = drawn.pop()
            requests = torch.from_numpy(pages).to(device.torch_device)  # table 0: a request is its page
            read = queues[wait].read_pages
            out.zero_()
            errors.fill_(-1)
            device.current_stream().synchronize()
            seconds = host_seconds(stream, lambda: read(stream, requests, count, 0, out, errors))
            assert not errors.any(), "a request failed"
            if wrong := wrong_pages(out, requests):
                raise AssertionError(f"wait {wait}: {wrong} of {len(pages)} pages are wrong")
            return len(pages) / seconds

        def by_engine() -> float:
            pages = drawn.pop()
            parts = [slice(i, i + _BATCH) for i in range(0, len(pages), _BATCH)]
            batches = [(np.sort(pages[part]), on_host[part]) for part in parts]

            def read(batch: tuple[np.ndarray, np.ndarray]) -> int:
                chosen, rows = batch
                failed = engine.read(np.zeros(len(chosen), np.uint32), chosen * _PAGE, _PAGE, rows)
                return int(np.count_nonzero(failed))

            results: list[int] = []
            seconds = host_seconds(stream, lambda: results.extend(pool.map(read, batches)))
            assert not any(results), "a read failed"
            assert all(np.array_equal(rows, page_contents(chosen)) for chosen, rows in batches)
            return len(pages) / seconds

        sides = {"stream": lambda: by_queue("stream"), "warp": lambda: by_queue("warp"), "engine": by_engine}
        for side in sides.values():
            side()
        speeds = alternate(sides, sizes.rounds)
        named = f"{engine.name}, depth {sizes.depth}, rounds of {queues['stream'].round_max}"
    ratio = median_ratio(speeds["stream"], speeds["engine"])
    figures.add("queue path, wait stream, over the engine on the host", ratio, "x", bar=0.9, note=named)
    figures.add(
        "queue path, wait warp, over the engine on the host",
        median_ratio(speeds["warp"], speeds["engine"]),
        "x",
    )
    for side in sides:
        figures.add(f"random pages of 4 KiB, {side}", median(speeds[side]), "pages/s")
