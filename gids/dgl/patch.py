"""Adds gids= to DGL's own DataLoader class. Users call it."""

from __future__ import annotations

import dgl

from gids.dgl.dataloader import DataLoader, stock_init, stock_iter

_ADDED = ("stats", "close", "feature_loader", "__enter__", "__exit__")


def enable() -> None:
    """Let ``dgl.dataloading.DataLoader`` itself take ``gids=`` and its companions (see DataLoader).

    The class stays the same object, so earlier imports, subclasses and isinstance keep working. Without
    ``gids=`` it behaves as before. Idempotent.
    """
    for name in ("__init__", "__iter__", *_ADDED):
        setattr(dgl.dataloading.DataLoader, name, vars(DataLoader)[name])


def disable() -> None:
    """Undo ``enable()``. Loaders that DGL's own class made with ``gids=`` cannot be iterated any more."""
    stock = dgl.dataloading.DataLoader
    stock.__init__, stock.__iter__ = stock_init, stock_iter
    for name in _ADDED:
        if name in vars(stock):
            delattr(stock, name)
