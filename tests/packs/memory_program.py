"""What the children of test_packs_memory.py do: `memory_program.py DATASET READS MEMORY SUPERBATCH [anew]`.

anew: with long minibatches, and resident rows that each superbatch chooses anew.

Prints as JSON: anonymous memory of the process before the loader, and the most while it is used; the most
that was listed; the loader's statistics; a checksum of the rows.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import gids
from gids.loader import pack_chooser, pack_switch, sampled_ahead


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


dataset, reads, memory, superbatch = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
anew = "anew" in sys.argv
batch_size = 1000 if anew else 150
pack_switch.EARLY = 2
sampled_ahead.MOST_MINIBATCHES = superbatch
if anew:
    pack_chooser.PackChooser.choose_again = lambda *_: None  # type: ignore[method-assign]
torch.set_num_threads(2)
ended = threading.Event()
most = 0


def watch() -> None:
    global most
    while not ended.wait(0.005):
        most = max(most, anonymous_bytes())


with gids.open(dataset, reads=reads, memory=memory) as source:  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    rows = source.store.table("paper.feat").row_count
    seeds = torch.randperm(rows, generator=generator)[: 24 * batch_size]
    loader = gids.NodeLoader(source, seeds, [5, 5], batch_size=batch_size, shuffle=True, seed=0)
    before = anonymous_bytes()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    checksum = 0.0
    listed: dict[str, int] = {}
    for _ in range(2):
        for minibatch in loader:
            checksum += float(minibatch.features["paper.feat"].sum(dtype=torch.float64))
            listed = max(listed, loader.stats()["memory"], key=lambda parts: sum(parts.values()))
    ended.set()
    watcher.join()
    stats = loader.stats()
print(
    json.dumps(
        {
            "before": before,
            "most": most,
            "memory": listed,
            "checksum": checksum,
            "minibatches": stats["packs"]["minibatches"],
            "choices": stats["packs"]["choices"],
        }
    )
)
