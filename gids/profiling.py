"""Ranges of PyTorch's profiler around the stages of a minibatch: gids::sample, gids::plan and so on.

Called by the loader, the caches and packs. torch.profiler shows the ranges. Nsight Systems shows them inside
torch.autograd.profiler.emit_nvtx(). While no profiler runs no range is made, which would take 12 us: a stage
then costs 0.4 us.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

_NO_RANGE: AbstractContextManager[object] = nullcontext()


def stage(name: str) -> AbstractContextManager[object]:
    """A context to run a stage in: the range gids::NAME while this thread has a profiler, else nothing."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return record_function(f"gids::{name}")
    return _NO_RANGE
