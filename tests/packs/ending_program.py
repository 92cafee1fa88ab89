"""What the children of test_packs_that_end.py do: `ending_program.py DATASET SCRATCH WHEN`.

Prints "go" in mid-sweep or in training, then goes on until it is killed or interrupted. An interrupted one
prints "ended" once nothing is left in the background.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from children import go_once
from packs_example import background_threads, open_source, scratch_files, wait_until_all_has_ended

import gids
from gids.packs import memory

signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes ignore SIGINT
dataset, scratch, when = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]

share = memory.PackBudget.share
if when == "sweeping":  # which shall take long
    memory.PackBudget.share = lambda *args: dataclasses.replace(share(*args), piece_bytes=4096)  # type: ignore
    go_once(lambda: any(name.startswith("gids-sweep") for name in background_threads()))

with open_source(dataset, "pack", 64 << 20, scratch=scratch) as source:
    rows = source.store.table("paper.feat").row_count
    generator = torch.Generator().manual_seed(1)
    batches = [{"paper.feat": torch.randint(rows, (4000,), generator=generator)} for _ in range(40)]
    loader = gids.FeatureLoader(source, ["paper.feat"])
    try:
        while True:
            for step, _ in enumerate(loader.attach(batches, lambda ids: ids, count=len(batches))):
                if when == "training" and step == 3:
                    assert scratch_files(scratch)
                    print("go", flush=True)
    except KeyboardInterrupt:  # whose traceback keeps the frames of the loader
        wait_until_all_has_ended(scratch)
        print("ended", flush=True)
