"""The dtype that rows are handed out in. Called by both caches and the loader."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from gids.store import Table

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that rows are converted between."""


def out_dtype_of(table: Table, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype of a table's rows in the output: floating ones become the wanted one."""
    return wanted if wanted is not None and table.dtype in FLOATS else table.dtype


def check_out_dtype(wanted: torch.dtype | None) -> None:
    """ValueError for an output dtype that rows cannot be converted to."""
    if wanted is not None and wanted not in FLOATS:
        names = ", ".join(str(d).removeprefix("torch.") for d in FLOATS)
        raise ValueError(
            f"dtype={wanted}: rows can be converted to {names}; None leaves them as they are stored"
        )
