"""Draws random splits of labelled nodes for sources without splits. Called by run.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gids.convert.edges import BLOCK_BYTES
from gids.errors import FormatError
from gids.store.names import SPLITS
from gids.store.rows import Rows, TensorRows, blocks


def random_split(labels: Rows, fractions: Sequence[float], seed: int) -> dict[str, Rows]:
    """Split the nodes that have a label at random. Each part is sorted.

    fractions: of train, val and test; their sum is at most 1. A label below 0 or NaN means no label. The
    result depends on labels, fractions and seed only, not on the machine.
    """
    if len(fractions) != len(SPLITS) or min(fractions) < 0 or sum(fractions) > 1 + 1e-9:
        raise FormatError(f"--split needs three fractions with a sum of at most 1 (got {list(fractions)})")
    found = [start + _labelled(block) for start, block in blocks(labels, BLOCK_BYTES)]
    labelled = torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
    # The raw bits of a generator are the same in all NumPy versions; those of permutation() may change.
    order = np.argsort(np.random.PCG64(seed).random_raw(len(labelled)), kind="stable")
    ends = np.round(np.cumsum(fractions) * len(labelled)).astype(np.int64)
    parts = np.split(labelled.numpy()[order], ends)[: len(SPLITS)]
    return {
        split: TensorRows(torch.from_numpy(np.sort(part))) for split, part in zip(SPLITS, parts, strict=True)
    }


def _labelled(labels: torch.Tensor) -> torch.Tensor:
    has = ~torch.isnan(labels) if labels.dtype.is_floating_point else labels.to(torch.int64) >= 0
    return torch.nonzero(has.any(dim=tuple(range(1, has.dim()))) if has.dim() > 1 else has)[:, 0]
