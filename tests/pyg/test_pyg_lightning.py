"""PyTorch Lightning: its Trainer on gids.pyg's loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pyg_model import PAPERS
from torch_geometric.data import Data

import gids
import gids.pyg

pl = pytest.importorskip("lightning.pytorch")
from gids.lightning import LogStats  # noqa: E402
from gids.loader import epoch_figures  # noqa: E402


class Model(pl.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(24, 5)
        self.seen: dict[str, list[Any]] = {"train": [], "val": [], "predict": []}

    def training_step(self, batch: Data, index: int) -> torch.Tensor:
        self.seen["train"].append(batch)
        seeds = getattr(batch, "batch_size", None) or len(batch.x)
        return torch.nn.functional.cross_entropy(self.linear(batch.x)[:seeds], batch.y[:seeds])

    def validation_step(self, batch: Data, index: int) -> None:
        self.seen["val"].append(batch)

    def predict_step(self, batch: Data, index: int) -> torch.Tensor:
        self.seen["predict"].append(batch)
        return batch.input_id

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(root: Path, epochs: int = 2) -> Any:
    return pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_takes_loaders_of_a_dataset(one: Data, one_path: Path, tmp_path: Path) -> None:
    model, fit = Model(), trainer(tmp_path)
    options: dict[str, Any] = {"batch_size": 100, "shuffle": True}
    with (
        gids.open(one_path, memory=64 << 20) as source,
        gids.pyg.NeighborLoader(source, [3, 2], torch.arange(0, PAPERS, 2), **{"seed": 0} | options) as train,
        gids.pyg.NeighborLoader(source, [3, 2], torch.arange(1, PAPERS, 2), batch_size=100, seed=0) as val,
        gids.pyg.LinkNeighborLoader(source, [3], one.edge_index[:, :300], batch_size=150, seed=0) as links,
    ):
        fit.callbacks.append(LogStats(train))
        fit.fit(model, train, val)
        stats = train.stats()
        logged = {name: float(fit.callback_metrics[f"gids/{name}"]) for name in epoch_figures(stats, stats)}
        assert 0 < logged["hit_ratio"] <= 1
        assert logged["seconds/gather"] < stats["seconds"]["gather"], "of the second epoch only"
        assert len(model.seen["train"]) == 2 * len(train) == 6
        assert len(model.seen["val"]) >= 2 * len(val)
        for batch in model.seen["train"]:
            assert torch.equal(batch.x, one.x[batch.n_id])
        first, second = (torch.cat([b.input_id for b in model.seen["train"][k : k + 3]]) for k in (0, 3))
        assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(PAPERS // 2))
        assert first.tolist() != second.tolist()  # another epoch
        found = torch.cat(fit.predict(model, links))
        assert found.tolist() == list(range(300))


class Numbered(Model):
    """With the line of docs/pyg.md for checkpoints that are saved at the end of an epoch."""

    def on_train_epoch_start(self) -> None:
        self.trainer.train_dataloader.epoch = self.current_epoch


class Loaders(pl.LightningDataModule):  # type: ignore[misc, name-defined]
    def __init__(self, source: gids.Source) -> None:
        super().__init__()
        self.source = source

    def train_dataloader(self) -> Any:
        return gids.pyg.NeighborLoader(
            self.source, [3], torch.arange(120), batch_size=40, shuffle=True, seed=0
        )

    def val_dataloader(self) -> Any:
        return gids.pyg.NeighborLoader(self.source, [3], torch.arange(20), batch_size=10, seed=0)


class Saving(pl.Callback):  # type: ignore[misc, name-defined]
    """Saves after the first step, after the validation of the first epoch, and at the end of this epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.folder / "step")

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step and not trainer.current_epoch:
            trainer.save_checkpoint(self.folder / "validation")

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.current_epoch:
            trainer.save_checkpoint(self.folder / "end")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("most", [1.0, 2])
def test_a_trainer_goes_on_where_a_checkpoint_was_saved(one_path: Path, tmp_path: Path, most: float) -> None:
    def fitted(resumed: Path | None) -> list[list[int]]:
        model, fit = Numbered(), trainer(tmp_path, epochs=3)
        fit.limit_train_batches = most
        with gids.open(one_path, memory=64 << 20) as source:
            fit.callbacks.append(Saving(tmp_path if resumed is None else tmp_path / "again"))
            fit.fit(model, datamodule=Loaders(source), ckpt_path=resumed, weights_only=False)
        return [batch.n_id.tolist() for batch in model.seen["train"]]

    whole = fitted(None)
    for saved, step in (("step", 1), ("validation", len(whole) // 3), ("end", len(whole) // 3)):
        assert fitted(tmp_path / saved) == whole[step:], saved


@pytest.mark.filterwarnings("ignore")
def test_a_loader_that_is_made_anew_for_each_epoch_has_another_order(one_path: Path, tmp_path: Path) -> None:
    """By torch.manual_seed, as a DataLoader of torch."""

    class Anew(Loaders):
        def train_dataloader(self) -> Any:
            return gids.pyg.NeighborLoader(self.source, [3], torch.arange(120), batch_size=40, shuffle=True)

    def epochs() -> list[list[int]]:
        model, fit = Model(), trainer(tmp_path, epochs=3)
        fit.reload_dataloaders_every_n_epochs = 1
        torch.manual_seed(0)
        with gids.open(one_path, memory=64 << 20) as source:
            fit.fit(model, datamodule=Anew(source))
        ids = torch.cat([batch.input_id for batch in model.seen["train"]]).view(3, 120)
        assert torch.equal(ids.sort().values, torch.arange(120).expand(3, 120))
        return ids.tolist()

    orders = epochs()
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert epochs() == orders


@pytest.mark.filterwarnings("ignore")
def test_every_epoch_of_a_trainer_reads_ahead_as_in_a_plain_loop(
    one_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a sanity check before, and a validation after, each epoch."""

    def loaders(source: gids.Source) -> tuple[Any, Any]:
        parts = torch.arange(PAPERS // 2), torch.arange(PAPERS // 2, PAPERS)
        options: dict[str, Any] = {"num_neighbors": [3, 2], "batch_size": 20}
        train = gids.pyg.NeighborLoader(source, input_nodes=parts[0], shuffle=True, **{"seed": 0} | options)
        return train, gids.pyg.NeighborLoader(source, input_nodes=parts[1], **{"seed": 0} | options)

    def opened() -> gids.Source:
        return gids.open(one_path, memory=2 << 20, window=4, tuning=gids.Tuning(cache=40_000, queue_depth=8))

    with opened() as source:
        train, val = loaders(source)
        trainer(tmp_path, epochs=3).fit(Model(), train, val)
        fitted = train.stats()
    with opened() as source:
        train, val = loaders(source)
        _open = [iter(train), iter(val)]  # as the Trainer does: each makes an epoch
        for _, _ in zip(range(2), val, strict=False):  # the sanity check
            pass
        for _ in range(3):
            for loader in (train, val):
                for _ in loader:
                    pass
        alone = train.stats()
    assert "another iterator" not in caplog.text
    for counter in ("pages", "hits"):
        assert fitted[counter] == alone[counter], counter
    # Reads of the sanity check that are in flight as it ends, at most queue_depth, may count as training's.
    assert abs(fitted["pages_read"] - alone["pages_read"]) <= 8
