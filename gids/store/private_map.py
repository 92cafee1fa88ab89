"""A memory-mapped array as a writable tensor, without a copy. Called by the adapters."""

from __future__ import annotations

import mmap

import numpy as np
import torch

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def private_tensor(array: np.ndarray) -> torch.Tensor:
    """An array of int32 or int64 as an int64 tensor that may be written.

    A MappedArray of int64 is mapped again, privately: frameworks that sort a graph's rows in place would
    crash on the read-only map of a store. Only pages that are written are copied; the file never changes. Any
    other array is copied. Nothing guards reads of the private map: if one fails, SIGBUS ends the process.
    """
    descriptor = getattr(array, "descriptor", None)
    if array.dtype != np.int64 or descriptor is None or not array.size:
        return torch.from_numpy(array.astype(np.int64))
    mapping = mmap.mmap(
        descriptor,
        0,
        flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,  # else the kernel reserves memory for the whole file
        prot=mmap.PROT_READ | mmap.PROT_WRITE,
    )
    return torch.frombuffer(mapping, dtype=torch.int64, count=array.size, offset=array.offset)  # type: ignore[attr-defined]
