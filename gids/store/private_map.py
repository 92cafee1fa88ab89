"""A memory-mapped array as a tensor that may be written to, without copying it. Called by the adapters."""

from __future__ import annotations

import mmap

import numpy as np
import torch

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def private_tensor(array: np.ndarray) -> torch.Tensor:
    """int64 values of an array of int32 or int64, in a tensor.

    A memory map of int64 is mapped anew, privately: code of frameworks that sorts a graph's rows in place
    would crash on a store's read-only mapping. Pages that nobody writes stay the file's own, and the file
    itself never changes. Any other array is copied.
    """
    if array.dtype != np.int64 or not isinstance(array, np.memmap) or not array.size or not array.filename:
        return torch.from_numpy(array.astype(np.int64))
    with open(array.filename, "rb") as file:
        mapping = mmap.mmap(
            file.fileno(),
            0,
            flags=mmap.MAP_PRIVATE
            | _MAP_NORESERVE,  # else the kernel asks for as much memory as the file is long
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
    return torch.frombuffer(mapping, dtype=torch.int64, count=array.size, offset=array.offset)
