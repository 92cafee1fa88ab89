"""Checks of the ids that a minibatch asks for. Called by both caches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from gids.errors import MissingError


def check_ids(ids: Mapping[str, torch.Tensor], tables: Iterable[str], device: torch.device) -> None:
    """Raise KeyError for an unknown table, TypeError or ValueError for ids that are not int64[n].

    Ids may be on the CPU, or on device.
    """
    for name, tensor in ids.items():
        if name not in tables:
            raise MissingError(f"no table '{name}' in this loader (it loads {', '.join(map(repr, tables))})")
        _check(tensor, name, device)


def _check(ids: torch.Tensor, table: str, device: torch.device) -> None:
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"ids for table '{table}' are {type(ids).__name__}; expected a torch.Tensor of int64")
    if ids.dtype != torch.int64:
        raise TypeError(
            f"ids for table '{table}' are {ids.dtype}; expected torch.int64: convert them with .long()"
        )
    if ids.device != device and ids.device.type != "cpu":
        wanted, cure = (device, ".cpu()") if device.type == "cpu" else (f"{device} or cpu", ".to()")
        raise ValueError(
            f"ids for table '{table}' are on {ids.device}; expected {wanted}: move them with {cure}"
        )
    if ids.dim() != 1:
        raise ValueError(f"ids for table '{table}' have shape {tuple(ids.shape)}; expected one dimension")
