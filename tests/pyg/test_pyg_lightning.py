"""PyTorch Lightning: its Trainer on gids.pyg's loaders."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pyg_model import PAPERS
from torch_geometric.data import Data

import gids
import gids.pyg

pl = pytest.importorskip("lightning.pytorch")
from gids.lightning import Callback  # noqa: E402
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
        fit.callbacks.append(Callback())
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
        fit.save_checkpoint(tmp_path / "after")
        saved = torch.load(tmp_path / "after", weights_only=True)["callbacks"]
        assert saved["gids.lightning.Callback"] == train.state_dict()


class Loaders(pl.LightningDataModule):  # type: ignore[misc, name-defined]
    def __init__(self, source: gids.Source) -> None:
        super().__init__()
        self.source = source

    def train_dataloader(self) -> Any:
        return gids.pyg.NeighborLoader(self.source, [3], torch.arange(120), batch_size=40, shuffle=True)

    def val_dataloader(self) -> Any:
        return gids.pyg.NeighborLoader(self.source, [3], torch.arange(20), batch_size=10, seed=0)


class Saving(pl.Callback):  # type: ignore[misc, name-defined]
    """Saves at the first minibatch, and in the second epoch wherever a Trainer calls. The file's name has the
    number of minibatches that are trained."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, trainer: Any, model: Model, hook: str) -> None:
        trained = len(model.seen["train"])
        if trainer.current_epoch == 1 or (hook == "start" and trained == 0) or hook == "exception":
            trainer.save_checkpoint(self.folder / f"{hook} {trained}")

    def on_train_batch_start(self, trainer: Any, model: Any, *_: Any) -> None:
        self.save(trainer, model, "start")

    def on_train_batch_end(self, trainer: Any, model: Any, *_: Any) -> None:
        self.save(trainer, model, "step")

    def on_validation_end(self, trainer: Any, model: Any) -> None:
        self.save(trainer, model, "validation")

    def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
        self.save(trainer, model, "end")

    def on_exception(self, trainer: Any, model: Any, exception: BaseException) -> None:
        self.save(trainer, model, "exception")


def fitted(
    path: Path, resumed: Path | None, *callbacks: Any, model: Model | None = None, **options: Any
) -> list[list[int]]:
    """The nodes of all minibatches that are trained."""
    fit = trainer(path.parent, epochs=3)
    for name, value in options.items():
        setattr(fit, name, value)
    fit.callbacks += callbacks
    model = model or Model()
    with gids.open(path, memory=64 << 20) as source:
        fit.fit(model, datamodule=Loaders(source), ckpt_path=resumed)
    return [batch.n_id.tolist() for batch in model.seen["train"]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.few(2)
@pytest.mark.parametrize("saved_first", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"limit_train_batches": 2}, {"val_check_interval": 1}, {"accumulate_grad_batches": 2}]
)
def test_a_trainer_goes_on_where_a_checkpoint_was_saved(
    one_path: Path, tmp_path: Path, saved_first: bool, options: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    callbacks = [Saving(tmp_path), Callback()] if saved_first else [Callback(), Saving(tmp_path)]
    whole = fitted(one_path, None, *callbacks, **options)
    assert len({tuple(nodes) for nodes in whole}) == len(whole) == 3 * options.get("limit_train_batches", 3)
    saved = sorted(tmp_path.iterdir())
    assert len(saved) > 6
    for path in saved:
        rest = fitted(one_path, path, Callback(), **options)
        assert rest == whole[int(path.name.split()[1]) :], path.name


class Failing(Model):
    """An error in the training of a minibatch."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self.before = before

    def training_step(self, batch: Data, index: int) -> torch.Tensor:
        if len(self.seen["train"]) == self.before:
            raise OSError("as a test")
        return super().training_step(batch, index)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("before", [1, 2, 3, 5])
def test_a_minibatch_that_failed_is_trained_again(one_path: Path, tmp_path: Path, before: int) -> None:
    torch.manual_seed(1)
    whole = fitted(one_path, None, Callback())
    torch.manual_seed(1)
    with pytest.raises(OSError, match="as a test"):
        fitted(one_path, None, Callback(), Saving(tmp_path), model=Failing(before))
    [saved] = tmp_path.glob("exception *")
    assert fitted(one_path, saved, Callback()) == whole[before:]


@pytest.mark.slow
def test_processes_go_on_where_their_checkpoint_was_saved(one_path: Path, tmp_path: Path) -> None:
    def ranks(checkpoint: str) -> list[list[list[int]]]:
        script = Path(__file__).parent / "lightning_program.py"
        command = [sys.executable, str(script), str(one_path), str(tmp_path), checkpoint]
        subprocess.run(command, check=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return [ast.literal_eval((tmp_path / f"rank {rank}").read_text()) for rank in range(2)]

    whole = ranks("")
    assert [len(nodes) for nodes in whole] == [6, 6]
    assert whole[0] != whole[1]
    for step in (2, 3):  # in the middle of the first epoch, and at its end
        assert ranks(str(tmp_path / f"step={step}.ckpt")) == [nodes[step:] for nodes in whole]


@pytest.mark.filterwarnings("ignore")
def test_a_callback_that_only_logs_leaves_the_position_alone(one_path: Path, tmp_path: Path) -> None:
    with gids.open(one_path, memory=64 << 20) as source:
        other = gids.pyg.NeighborLoader(source, [3], torch.arange(20), batch_size=10)
        torch.manual_seed(1)
        whole = fitted(one_path, None, Callback(), Saving(tmp_path))
        for saved in ("start 0", "step 4"):  # a resumed training, whose own checkpoint is resumed
            again = tmp_path / f"again {saved}"
            again.mkdir()
            fitted(one_path, tmp_path / saved, Callback(), Callback(other), Saving(again))
            [path] = again.glob(f"step {5 - int(saved[-1])}")
            assert fitted(one_path, path, Callback(), Callback(other)) == whole[5:]


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_without_the_position_is_warned_of(
    one_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fitted(one_path, None, Saving(tmp_path))
    fitted(one_path, tmp_path / "end 6", Callback())
    assert "end 6 has no position of a gids loader" in caplog.text


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_resumed_is_refused(one_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reload_dataloaders_every_n_epochs"):
        fitted(one_path, None, Callback(), reload_dataloaders_every_n_epochs=1)
    with gids.open(one_path, memory=64 << 20) as source:
        loader = gids.pyg.NeighborLoader(source, [3], torch.arange(120), batch_size=60, seed=0)
        other = gids.pyg.NeighborLoader(source, [3], torch.arange(60), batch_size=60, seed=0)
        fit = trainer(tmp_path, epochs=1)
        fit.callbacks.append(Callback())
        with pytest.raises(TypeError, match="trains on a list, which has no stats"):
            fit.fit(Both(), [loader, other])
        fit = trainer(tmp_path, epochs=1)
        fit.callbacks.append(Callback(loader))
        fit.fit(Both(), [loader, other])
        assert "gids/hit_ratio" in fit.callback_metrics
        fit.save_checkpoint(tmp_path / "both")
        assert "gids.lightning.Callback" not in torch.load(tmp_path / "both", weights_only=True)["callbacks"]


class Both(Model):
    def training_step(self, batch: list[Data], index: int) -> torch.Tensor:
        return super().training_step(batch[0], index) + super().training_step(batch[1], index)


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
