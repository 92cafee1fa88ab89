"""LogStats: a callback of PyTorch Lightning that logs what a loader read and waited for in each epoch."""

from __future__ import annotations

from typing import Any

from gids.loader.stats import epoch_figures

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError as error:
    raise ImportError(f"gids.lightning needs PyTorch Lightning: pip install lightning ({error})") from error


class LogStats(Callback):
    """Logs epoch_figures of a loader after each epoch of training, as gids/hit_ratio, gids/seconds/wait, …

    loader: any that has stats(), usually the training loader.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called by the Trainer. An epoch that it resumes in its middle does not start."""
        self._before = self.loader.stats()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Called by the Trainer."""
        self._before = self.loader.stats()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Called by the Trainer."""
        figures = epoch_figures(self._before, self.loader.stats())
        pl_module.log_dict({f"gids/{name}": value for name, value in figures.items()})
