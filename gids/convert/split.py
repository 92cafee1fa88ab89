"""Random, repeatable splits of labelled nodes, for sources that come without. Called by run.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gids.errors import FormatError
from gids.store.names import SPLITS
from gids.store.rows import Rows, TensorRows, blocks


def random_split(labels: Rows, fractions: Sequence[float], seed: int) -> dict[str, Rows]:
    """Split the nodes that have a label at random, each part sorted.

    fractions: of train, val and test, at most 1 in all. A label below 0 or NaN means none. The same labels,
    fractions and seed give the same parts everywhere.
    """
    if len(fractions) != len(SPLITS) or min(fractions) < 0 or sum(fractions) > 1 + 1e-9:
        raise FormatError(f"a split needs three fractions that sum to at most 1, not {list(fractions)}")
    found = [start + _labelled(block) for start, block in blocks(labels, 8 << 20)]
    labelled = torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
    # The raw bits of a bit generator never change between NumPy versions; permutation() may.
    order = np.argsort(np.random.PCG64(seed).random_raw(len(labelled)), kind="stable")
    ends = np.round(np.cumsum(fractions) * len(labelled)).astype(np.int64)
    parts = np.split(labelled.numpy()[order], ends)[: len(SPLITS)]
    return {
        split: TensorRows(torch.from_numpy(np.sort(part))) for split, part in zip(SPLITS, parts, strict=True)
    }


def _labelled(labels: torch.Tensor) -> torch.Tensor:
    has = ~torch.isnan(labels) if labels.dtype.is_floating_point else labels.to(torch.int64) >= 0
    return torch.nonzero(has.any(dim=tuple(range(1, has.dim()))) if has.dim() > 1 else has)[:, 0]
