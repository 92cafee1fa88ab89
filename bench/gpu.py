"""Measurements that need a GPU. Each prints ratios to peers in the same run, after verifying the results.

    python bench/gpu.py bus         copies and loads from pinned host memory, in GB/s
    python bench/gpu.py streams     which streams a waiting stream holds up
    python bench/gpu.py gather      cached rows in device memory, compared with copying and index_select
    python bench/gpu.py planning    cost of planning a minibatch, on the device and on the host
    python bench/gpu.py queue       pages read through the request queue, compared with its engine
    python bench/gpu.py extents     large reads into device memory: pinned staging, kvikio
    python bench/gpu.py packs       an epoch of short rows by packs, compared with random reads
    python bench/gpu.py sampling    input nodes/s from a topology in pinned host memory
    python bench/gpu.py overlap     training beside reads and sampling, compared with each alone
    python bench/gpu.py life        loaders opened and closed while little memory is free
    python bench/gpu.py large       lines beyond 4 GiB, more than 2^31 edges
    python bench/gpu.py training    GraphSAGE from features on disk, compared with two other ways, by stage

Medians of alternating repeats after a warm-up; kernels are timed by CUDA events. Each module has the details.
`--small` takes seconds and only shows that it works. tools/gpu_check.sh runs all of them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import gpu_bus
import gpu_cache
import gpu_extents
import gpu_limits
import gpu_overlap
import gpu_packs
import gpu_queue
import gpu_sampling
import gpu_training
from figures import Figures
from gpu_sampling import pcie_link

from gids import cuda
from gids.cuda import Device

# Name -> (question, default sizes, small sizes)
QUESTIONS: dict[str, tuple[Callable[[Device, Path, Any, Figures], None], Any, Any]] = {
    "bus": (gpu_bus.bus, gpu_bus.BusSizes(), gpu_bus.SMALL),
    "streams": (gpu_bus.streams, gpu_bus.BusSizes(), gpu_bus.SMALL),
    "gather": (gpu_cache.gather, gpu_cache.CacheSizes(), gpu_cache.SMALL),
    "planning": (gpu_cache.planning, gpu_cache.CacheSizes(), gpu_cache.SMALL),
    "queue": (gpu_queue.queue, gpu_queue.QueueSizes(), gpu_queue.SMALL),
    "extents": (gpu_extents.extents, gpu_extents.ExtentSizes(), gpu_extents.SMALL),
    "packs": (gpu_packs.packs, gpu_packs.PackSizes(), gpu_packs.SMALL),
    "sampling": (gpu_sampling.sampling, gpu_sampling.SamplingSizes(), gpu_sampling.SMALL),
    "overlap": (gpu_overlap.overlap, gpu_overlap.OverlapSizes(), gpu_overlap.SMALL),
    "life": (gpu_limits.life, gpu_limits.LimitSizes(), gpu_limits.SMALL),
    "large": (gpu_limits.large, gpu_limits.LimitSizes(), gpu_limits.SMALL),
    "training": (gpu_training.training, gpu_training.TrainingSizes(), gpu_training.SMALL),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question", choices=[*QUESTIONS, "all"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dir", type=Path, help="directory on the disk to measure (default: temporary)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results after each of them")
    parser.add_argument(
        "--feature-gb", type=float, default=0, help="size of the features for training (default: 4.3)"
    )
    parser.add_argument(
        "--file-gb", type=float, default=0, help="size of the file for the queue (default: 2.1)"
    )
    parser.add_argument(
        "--log2-nodes", type=int, default=0, help="size of the graph for sampling (default: 23)"
    )
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args(arguments)
    changed = {
        "feature_bytes": int(args.feature_gb * 1e9),
        "file_bytes": int(args.file_gb * 1e9),
        "log2_nodes": args.log2_nodes,
    }
    device = cuda.open_device(args.device)
    print(f"{device.name}, {pcie_link()}", flush=True)
    figures = Figures(args.json, judged=not args.small)
    with tempfile.TemporaryDirectory(prefix="gids-bench-", dir=args.dir) as directory:
        for name, (question, full, tiny) in QUESTIONS.items():
            if args.question in (name, "all"):
                folder = Path(directory) / name
                folder.mkdir()
                sizes = tiny if args.small else full
                sizes = replace(sizes, **{k: n for k, n in changed.items() if n and hasattr(sizes, k)})
                question(device, folder, sizes, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
