"""A task in memory: a synthetic graph whose classes GraphSAGE learns slowly.

Called by labor.py and dependent.py. Rows are in memory, as no curve of loss or accuracy depends on where rows
are read from.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from curves import layers_of
from graphs import graph_of
from sage import GraphSage, Training

from gids.convert.synthetic import GraphSpec, write_graph
from gids.loader.sampling import spans_epochs
from gids.sampler import Minibatch, Sampler, Topology

HIDDEN = 64


def hard(nodes: int, degree: float) -> GraphSpec:
    """A graph with 40 classes. Neighborhoods show a class less clearly than those of `gids generate`."""
    return GraphSpec(
        nodes,
        degree=degree,
        classes=min(40, nodes),
        homophily=0.35,
        candour=0.3,
        signal=5.0,
        dim=64,
        train_count=nodes // 5,
        val_count=nodes // 10,
        test_count=nodes // 10,
    )


@dataclass(frozen=True)
class Step:
    """nodes, edges: of the layers, from the seeds on; the input nodes last."""

    loss: float
    nodes: list[int]
    edges: list[int]


class Task:
    """A graph, rows, classes and splits."""

    def __init__(self, spec: GraphSpec) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = write_graph(folder, spec)
            names = ("indptr", "indices", "feat", "labels", "train_idx", "val_idx", "test_idx")
            arrays = {name: np.load(root / f"{name}.npy") for name in names}
        self.graph = graph_of(arrays["indptr"], arrays["indices"].astype(np.int32))
        self.topology = Topology(self.graph)
        self.rows, self.labels = torch.from_numpy(arrays["feat"]), torch.from_numpy(arrays["labels"])
        self.splits = {name: torch.from_numpy(arrays[f"{name}_idx"]) for name in ("train", "val", "test")}
        degrees = torch.from_numpy(np.diff(arrays["indptr"]))
        shares = torch.repeat_interleave(1 / degrees.clamp(min=1).float(), degrees)
        indptr, indices = torch.from_numpy(arrays["indptr"]), torch.from_numpy(arrays["indices"])
        size = (len(degrees), len(degrees))
        with warnings.catch_warnings(action="ignore"):  # sparse tensors are a beta of torch
            self._mean_of_neighbors = torch.sparse_csr_tensor(indptr, indices, shares, size)

    def minibatches(
        self, sampler: Sampler, batch_size: int, seed: int, bulk: int = 1, part: int = 0, parts: int = 1
    ) -> Iterator[Minibatch]:
        """Of the train split, epoch after epoch; each epoch is in another random order. Numbers of a sampler
        that spans epochs are those of a loader.

        bulk: number of minibatches that are sampled in one call, if more than 1. part, parts: which part of
        the seeds of each step, as a rank has it. Parts have random numbers of their own.
        """
        epoch, before, train = 0, 0, self.splits["train"]
        while True:
            order = train[
                torch.randperm(len(train), generator=torch.Generator().manual_seed(1000 * seed + epoch))
            ]
            steps = [seeds.tensor_split(parts)[part] for seeds in order.split(batch_size)]
            numbers = {"seed": seed + (part << 32), "epoch": epoch}
            if spans_epochs(sampler):
                numbers["epoch"], before = 0, epoch * len(steps)
            for first in range(0, len(steps), bulk):
                chosen = steps[first : first + bulk]
                if bulk > 1:
                    yield from sampler.sample_bulk(
                        self.topology, chosen, first_step=before + first, **numbers
                    )
                else:
                    yield sampler.sample(self.topology, *chosen, step=before + first, **numbers)
            epoch += 1

    def train(
        self, sampler: Sampler, args: argparse.Namespace, bulk: int = 1, parts: int = 1
    ) -> Iterator[tuple[Step, GraphSage]]:
        """Train a new model for args.steps. Yields each step, and the model after it.

        parts: number of minibatches in a step, each of its share of the seeds, with random numbers of its
        own, as independent ranks have them.
        """
        dims = [self.rows.shape[1], *[HIDDEN] * (len(args.fanouts) - 1), int(self.labels.max()) + 1]
        training = Training(dims, seed=args.seed, rate=0.01)
        streams = [
            self.minibatches(sampler, args.batch_size, args.seed, bulk, part, parts) for part in range(parts)
        ]
        for minibatches in islice(zip(*streams, strict=True), args.steps):
            loss = training.step_of_parts(
                [(m.blocks, self.rows[m.input_nodes], self.labels[m.seeds]) for m in minibatches]
            )
            layers = [layers_of(m) for m in minibatches]
            nodes, edges = (np.sum([of_layers[i] for of_layers in layers], axis=0).tolist() for i in (0, 1))
            nodes.append(sum(len(m.input_nodes) for m in minibatches))
            yield Step(float(loss), nodes, edges), training.model

    def curve(
        self, sampler: Sampler, args: argparse.Namespace, *, parts: int = 1, sampled: bool = False
    ) -> Iterator[tuple[dict[str, float], list[Step], GraphSage]]:
        """Train. Yields, after args.every minibatches each, a point of the curve with the mean loss since the
        one before and the accuracy on validation nodes; these steps; and the model.

        sampled: also the accuracy with neighborhoods that the sampler draws for the next minibatch. parts: as
        in train().
        """
        run, done = self.train(sampler, args, parts=parts), 0
        while some := list(islice(run, args.every)):
            done += len(some)
            steps, model = [step for step, _ in some], some[-1][1]
            loss = float(np.mean([step.loss for step in steps]))
            point = {"minibatches": done, "loss": loss, "accuracy": self.accuracy(model, "val")}
            if sampled:
                point["accuracy, sampled"] = self.sampled_accuracy(model, sampler, args, done)
            yield point, steps, model

    @torch.no_grad()
    def accuracy(self, model: GraphSage, split: str) -> float:
        """In percent, with all neighbors of every node."""
        h = self.rows
        for depth, layer in enumerate(model.layers):
            h = h if depth == 0 else torch.relu(h)
            h = layer.own(h) + self._mean_of_neighbors @ layer.neighbors(h)
        ids = self.splits[split]
        return 100 * float((h[ids].argmax(1) == self.labels[ids]).float().mean())

    @torch.no_grad()
    def sampled_accuracy(
        self, model: GraphSage, sampler: Sampler, args: argparse.Namespace, step: int
    ) -> float:
        """On validation nodes, in percent, with the neighborhoods that the sampler draws in this step."""
        right = []
        for seeds in self.splits["val"].split(args.batch_size):
            minibatch = sampler.sample(self.topology, seeds, seed=args.seed, step=step)
            logits = model(minibatch.blocks, self.rows[minibatch.input_nodes])
            right.append(logits.argmax(1) == self.labels[seeds])
        return 100 * float(torch.cat(right).float().mean())
