"""gids= for code that names DGL's own class. Called by the user; knows only the two classes."""

from __future__ import annotations

import dgl

from gids.dgl.dataloader import DataLoader, stock_init, stock_iter

_ADDED = ("stats", "close", "feature_loader", "__enter__", "__exit__")


def enable() -> None:
    """Let ``dgl.dataloading.DataLoader`` itself take ``gids=`` and what goes with it (see DataLoader).

    The class stays the same object, so earlier imports, subclasses and isinstance keep working; without
    ``gids=`` it behaves as before. May be called again.
    """
    for name in ("__init__", "__iter__", *_ADDED):
        setattr(dgl.dataloading.DataLoader, name, vars(DataLoader)[name])


def disable() -> None:
    """Undo ``enable()``. Loaders made with ``gids=`` through DGL's own class cannot be iterated any more."""
    stock = dgl.dataloading.DataLoader
    stock.__init__, stock.__iter__ = stock_init, stock_iter
    for name in _ADDED:
        if name in vars(stock):
            delattr(stock, name)
