"""Measurements that need a GPU. Each prints ratios to peers in the same run, after verifying the results.

    python bench/gpu.py bus         copies and loads from pinned host memory, in GB/s
    python bench/gpu.py streams     which streams a waiting stream holds up
    python bench/gpu.py gather      cached rows in device memory, compared with copying and index_select
    python bench/gpu.py planning    cost of planning a minibatch, on the device and on the host
    python bench/gpu.py queue       pages read through the request queue, compared with its engine
    python bench/gpu.py extents     large reads into device memory by kvikio
    python bench/gpu.py packs       an epoch of short rows by packs, compared with random reads
    python bench/gpu.py sampling    input nodes/s from a topology in pinned host memory
    python bench/gpu.py sizes       sampling by the size of the graph, on the CPU and on the GPU
    python bench/gpu.py windows     rows/s and hits by window and policy, with a cache of about 1 %
    python bench/gpu.py buffer      a constant buffer in host memory, compared with none and with look-ahead
    python bench/gpu.py overlap     training beside reads, compared with each alone
    python bench/gpu.py life        loaders opened and closed while little memory is free
    python bench/gpu.py large       lines beyond 4 GiB, more than 2^31 edges
    python bench/gpu.py training    GraphSAGE from features on disk, compared with two other ways, by stage
    python bench/gpu.py array       the same from files in the page cache, a stand-in for an array of SSDs

Medians of alternating repeats after a warm-up; kernels are timed by CUDA events. Each module has the details.
`--small` takes seconds and only shows that it works. tools/gpu_check.sh runs all of them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import gpu_array
import gpu_bus
import gpu_cache
import gpu_limits
import gpu_loading
import gpu_overlap
import gpu_packs
import gpu_reads
import gpu_sampling
import gpu_training
from gpu_harness import Bench
from gpu_sampling import pcie_link
from harness import Figures, Script

from gids import cuda

QUESTIONS = {  # name -> (question, {size: (default, small)})
    "bus": (gpu_bus.bus, gpu_bus.SIZES),
    "streams": (gpu_bus.streams, gpu_bus.SIZES),
    "gather": (gpu_cache.gather, gpu_cache.SIZES),
    "planning": (gpu_cache.planning, gpu_cache.SIZES),
    "queue": (gpu_reads.queue, gpu_reads.QUEUE),
    "extents": (gpu_reads.extents, gpu_reads.EXTENTS),
    "packs": (gpu_packs.packs, gpu_packs.SIZES),
    "sampling": (gpu_sampling.sampling, gpu_sampling.SIZES),
    "sizes": (gpu_sampling.by_size, gpu_sampling.BY_SIZE),
    "windows": (gpu_loading.windows, gpu_loading.SIZES),
    "buffer": (gpu_loading.buffer, gpu_loading.SIZES),
    "overlap": (gpu_overlap.overlap, gpu_overlap.SIZES),
    "life": (gpu_limits.life, gpu_limits.LIFE),
    "large": (gpu_limits.large, gpu_limits.LARGE),
    "training": (gpu_training.training, gpu_training.SIZES),
    "array": (gpu_array.array, gpu_array.SIZES),
}


def main(arguments: list[str] | None = None) -> int:
    script = Script(__doc__, "dir")
    script.add_argument("question", choices=[*QUESTIONS, "all"])
    script.option("device", "cuda")
    args = script.parse(arguments)
    device = cuda.open_device(args.device)
    print(f"{device.name}, {pcie_link()}", flush=True)
    figures = Figures(args)
    with tempfile.TemporaryDirectory(prefix="gids-bench-", dir=args.dir) as directory:
        for name in QUESTIONS if args.question == "all" else [args.question]:
            question, pairs = QUESTIONS[name]
            folder = Path(directory) / name
            folder.mkdir()
            sizes = {key: pair[args.small] for key, pair in pairs.items()}
            question(Bench(device, folder, SimpleNamespace(**sizes), figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
