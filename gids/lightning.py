"""Callback: PyTorch Lightning logs what a loader reads, and resumes it from a checkpoint. Users make it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from gids.loader.epoch_loader import EpochLoader
from gids.loader.stats import epoch_figures

try:
    import lightning.pytorch as pl
except ModuleNotFoundError as error:
    raise ImportError(f"gids.lightning needs PyTorch Lightning: pip install lightning ({error})") from error

log = logging.getLogger("gids")


class Callback(pl.Callback):
    """A callback of Lightning's Trainer: logs epoch_figures of a loader after each epoch of training, as
    gids/hit_ratio, gids/seconds/wait, …, and resumes the loader where a checkpoint was saved.

    loader: None: the one that the Trainer trains on. Another one with stats() is logged only.

    If the Trainer trains on one loader of gids or gids.pyg, checkpoints have its state_dict(), with the
    position of the first minibatch that is not trained. ``fit(ckpt_path=…)`` goes on there, in the middle of
    an epoch or between epochs: each minibatch is trained once, and is the one that it would have been without
    an interruption. Loaders without a state_dict(), such as gids.dgl.DataLoader, are logged only.

    Raises, when training starts: TypeError if the Trainer trains on several loaders, or on one without
    stats(), and none is given; ValueError for reload_dataloaders_every_n_epochs, or if the checkpoint is of a
    loader with other arguments.
    """

    def __init__(self, loader: Any = None) -> None:
        self.loader = loader
        self._resumed: Mapping[str, Any] | None = None  # the loader's state in the checkpoint
        self._trains: EpochLoader | None = None  # the loader of the last fit()
        self._begin = 0, 0  # its epoch and step where the Trainer's epoch begins

    @property
    def state_key(self) -> str:
        """Where the state is in a checkpoint."""
        return "gids.lightning.Callback"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called by the Trainer."""
        if stage == "fit":
            self._resumed = self._trains = None

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        """Called by the Trainer, before there is a loader."""
        self._resumed = checkpoint["callbacks"].get(self.state_key)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Called by the Trainer."""
        if self.loader is not None:
            return
        state, loader = self._resumed, self._trains
        if loader is not None:
            (epoch, begin), trained = self._begin, _trained(trainer)
            step = begin + (trained or 0)
            if trained is None or step >= len(loader):  # the epoch is over, perhaps by limit_train_batches
                epoch, step = loader.epoch, 0
            state = {**loader.state_dict(), "epoch": epoch, "step": step}
        if state is not None:
            checkpoint["callbacks"][self.state_key] = state

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called by the Trainer. An epoch that it resumes in its middle does not start."""
        loader = self._loader_of(trainer)
        self._before = loader.stats()
        if self.loader is not None or not isinstance(loader, EpochLoader):
            return
        if trainer.reload_dataloaders_every_n_epochs:
            raise ValueError(
                "gids.lightning.Callback cannot resume loaders that reload_dataloaders_every_n_epochs makes: "
                "leave it out. A gids loader has another order in each epoch"
            )
        if self._resumed is not None:
            loader.load_state_dict(self._resumed)
        elif trainer.ckpt_path is not None:
            log.warning(
                "%s has no position of a gids loader: between two epochs, it begins at epoch 0 again",
                trainer.ckpt_path,
            )
        epoch, step = _next(loader)
        self._trains, self._begin = loader, (epoch, step - (_trained(trainer) or 0))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Called by the Trainer."""
        self._before = self._loader_of(trainer).stats()
        if self._trains is not None:
            self._begin = _next(self._trains)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Called by the Trainer."""
        figures = epoch_figures(self._before, self._loader_of(trainer).stats())
        pl_module.log_dict({f"gids/{name}": value for name, value in figures.items()}, sync_dist=True)

    def _loader_of(self, trainer: Any) -> Any:
        loader = trainer.train_dataloader if self.loader is None else self.loader
        if not hasattr(loader, "stats"):
            raise TypeError(
                f"the Trainer trains on a {type(loader).__name__}, which has no stats(): give "
                "gids.lightning.Callback the loader of gids to log"
            )
        return loader


def _trained(trainer: Any) -> int | None:
    """Number of minibatches of the Trainer's epoch that are trained. None: all, and the next one has none.

    A minibatch that was handed out when an error came counts as not trained.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    trained: int = progress.current.processed
    return None if progress.is_last_batch and trained == progress.current.ready else trained


def _next(loader: EpochLoader) -> tuple[int, int]:
    """Epoch and step where the loader's next iterator begins: not in an epoch that was left early."""
    state = loader.state_dict()
    return loader.epoch, state["step"] if state["epoch"] == loader.epoch else 0
