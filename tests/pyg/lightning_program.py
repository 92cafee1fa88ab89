"""Trains with Lightning in two processes. Run by test_pyg_lightning; Lightning runs it again, for rank 1.

Arguments: dataset, folder, checkpoint to resume or "". Each rank writes the nodes of its minibatches.
"""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import gids.lightning
import gids.pyg


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(24, 5)
        self.nodes: list[list[int]] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.nodes.append(batch.n_id.tolist())
        return torch.nn.functional.cross_entropy(self.linear(batch.x), batch.y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Loaders(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        source = gids.open(sys.argv[1], memory=64 << 20)
        return gids.pyg.NeighborLoader(source, [3], torch.arange(90), batch_size=15, shuffle=True)


if __name__ == "__main__":
    folder, checkpoint = Path(sys.argv[2]), sys.argv[3] or None
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[
            gids.lightning.Callback(),
            ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1),
        ],
    )
    model = Model()
    trainer.fit(model, datamodule=Loaders(), ckpt_path=checkpoint)
    (folder / f"rank {trainer.global_rank}").write_text(repr(model.nodes))
