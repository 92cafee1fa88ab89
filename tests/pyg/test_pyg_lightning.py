"""PyTorch Lightning: its Trainer on gids.pyg's loaders."""

from __future__ import annotations

import json
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
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from gids.lightning import Callback  # noqa: E402
from gids.loader import epoch_figures  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(pl.LightningModule):  # type: ignore[misc, name-defined]
    """seen: the minibatches of training. fails: the number of one that fails."""

    def __init__(self, fails: int | None = None) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(24, 5)
        self.seen: list[Any] = []
        self.fails = fails

    def training_step(self, batch: Data | list[Data], index: int) -> torch.Tensor:
        if len(self.seen) == self.fails:
            raise OSError("as a test")
        self.seen.append(batch)
        one = batch[0] if isinstance(batch, list) else batch
        return torch.nn.functional.cross_entropy(self.linear(one.x), one.y)

    def validation_step(self, batch: Data, index: int) -> None: ...

    def predict_step(self, batch: Data, index: int) -> torch.Tensor:
        return batch.input_id

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(root: Path, *callbacks: Any, epochs: int = 3, **options: Any) -> Any:
    usual = {"devices": 1, "enable_checkpointing": False, "logger": False, "default_root_dir": root}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    made = pl.Trainer(max_epochs=epochs, accelerator="cpu", **usual | quiet | options)
    made.callbacks += callbacks
    return made


def test_a_trainer_takes_loaders_of_a_dataset(one: Data, one_path: Path, tmp_path: Path) -> None:
    model, fit = Model(), trainer(tmp_path, Callback(), epochs=2)
    options: dict[str, Any] = {"num_neighbors": [3, 2], "batch_size": 100, "seed": 0}
    with (
        gids.open(one_path, memory=64 << 20) as source,
        gids.pyg.NeighborLoader(
            source, input_nodes=torch.arange(0, PAPERS, 2), shuffle=True, **options
        ) as train,
        gids.pyg.NeighborLoader(source, input_nodes=torch.arange(1, PAPERS, 2), **options) as val,
        gids.pyg.LinkNeighborLoader(source, [3], one.edge_index[:, :300], batch_size=150, seed=0) as links,
    ):
        fit.fit(model, train, val)
        stats = train.stats()
        logged = {name: float(fit.callback_metrics[f"gids/{name}"]) for name in epoch_figures(stats, stats)}
        assert 0 < logged["hit_ratio"] <= 1
        assert logged["seconds/gather"] < stats["seconds"]["gather"], "of the second epoch only"
        assert len(model.seen) == 2 * len(train) == 6
        for batch in model.seen:
            assert torch.equal(batch.x, one.x[batch.n_id])
        first, second = (torch.cat([b.input_id for b in model.seen[k : k + 3]]) for k in (0, 3))
        assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(PAPERS // 2))
        assert first.tolist() != second.tolist()  # another epoch
        assert torch.cat(fit.predict(model, links)).tolist() == list(range(300))
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
        trained = len(model.seen)
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
    path: Path, resumed: Path | None, *callbacks: Any, fails: int | None = None, **options: Any
) -> list[list[int]]:
    """The nodes of all minibatches that are trained."""
    fit, model = trainer(path.parent, *callbacks), Model(fails)
    for name, value in options.items():
        setattr(fit, name, value)
    with gids.open(path, memory=64 << 20) as source:
        fit.fit(model, datamodule=Loaders(source), ckpt_path=resumed)
    return [batch.n_id.tolist() for batch in model.seen]


@pytest.mark.parametrize(
    ("saved_first", "options"),
    [
        (False, {"val_check_interval": 1}),
        pytest.param(True, {"limit_train_batches": 2}, marks=pytest.mark.slow),
        pytest.param(True, {"accumulate_grad_batches": 2}, marks=pytest.mark.slow),
    ],
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
    for path in saved[::2]:
        rest = fitted(one_path, path, Callback(), **options)
        assert rest == whole[int(path.name.split()[1]) :], path.name


@pytest.mark.parametrize("fails", [2, 3])
def test_a_minibatch_that_failed_is_trained_again(one_path: Path, tmp_path: Path, fails: int) -> None:
    torch.manual_seed(1)
    whole = fitted(one_path, None, Callback())
    torch.manual_seed(1)
    with pytest.raises(OSError, match="as a test"):
        fitted(one_path, None, Callback(), Saving(tmp_path), fails=fails)
    [saved] = tmp_path.glob("exception *")
    assert fitted(one_path, saved, Callback()) == whole[fails:]


def test_a_callback_that_only_logs_leaves_the_position_alone(one_path: Path, tmp_path: Path) -> None:
    """In a resumed training, whose own checkpoint is resumed."""
    with gids.open(one_path, memory=64 << 20) as source:
        other = gids.pyg.NeighborLoader(source, [3], torch.arange(20), batch_size=10)
        torch.manual_seed(1)
        whole = fitted(one_path, None, Callback(), Saving(tmp_path))
        again = tmp_path / "again"
        again.mkdir()
        fitted(one_path, tmp_path / "step 4", Callback(), Callback(other), Saving(again))
        assert fitted(one_path, again / "step 1", Callback(), Callback(other)) == whole[5:]


def test_a_checkpoint_without_the_position_is_warned_of(
    one_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fitted(one_path, None, Saving(tmp_path))
    fitted(one_path, tmp_path / "end 6", Callback())
    assert "end 6 has no position of a gids loader" in caplog.text


def test_what_cannot_be_resumed_is_refused(one_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reload_dataloaders_every_n_epochs"):
        fitted(one_path, None, Callback(), reload_dataloaders_every_n_epochs=1)
    with gids.open(one_path, memory=64 << 20) as source:
        both = [
            gids.pyg.NeighborLoader(source, [3], torch.arange(count), batch_size=60, seed=0)
            for count in (120, 60)
        ]
        with pytest.raises(TypeError, match="trains on a list, which has no stats"):
            trainer(tmp_path, Callback(), epochs=1).fit(Model(), both)
        fit = trainer(tmp_path, Callback(both[0]), epochs=1)
        fit.fit(Model(), both)
        assert "gids/hit_ratio" in fit.callback_metrics
        fit.save_checkpoint(tmp_path / "both")
        assert "gids.lightning.Callback" not in torch.load(tmp_path / "both", weights_only=True)["callbacks"]


@pytest.mark.slow
def test_processes_go_on_where_their_checkpoint_was_saved(one_path: Path, tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(one_path), str(tmp_path)]
    subprocess.run(command, check=True, timeout=250, env=os.environ | {"OMP_NUM_THREADS": "1"})
    first, second = (json.loads((tmp_path / f"rank {rank}").read_text()) for rank in range(2))
    assert [len(nodes) for nodes in (*first, *second)] == [4, 3, 4, 3]
    assert first[0] != second[0]
    assert [first[1], second[1]] == [first[0][1:], second[0][1:]]


def train_on_ranks(path: str, folder: Path) -> None:
    """In two processes: Lightning runs this file again for rank 1. Train, then train on from the first step.
    Each writes the nodes of both trainings."""
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    nodes = []
    for callbacks, checkpoint in (([saving], None), ([], folder / "step=1.ckpt")):
        options = {"devices": 2, "strategy": "ddp", "num_sanity_val_steps": 0}
        fit, model = trainer(folder, Callback(), *callbacks, epochs=2, **options), Model()
        with gids.open(path, memory=64 << 20) as source:
            fit.fit(model, datamodule=Loaders(source), ckpt_path=checkpoint)
        nodes.append([batch.n_id.tolist() for batch in model.seen])
    (folder / f"rank {fit.global_rank}").write_text(json.dumps(nodes))


if __name__ == "__main__":
    train_on_ranks(sys.argv[1], Path(sys.argv[2]))
