"""Samplers of gids, and of users: wrapped ones, random ones, ones that fail or return odd objects."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torture_data import PAPERS, TortureData

from gids.errors import StorageError
from gids.sampler import Labor, Ladies, LocalityBias, Minibatch, Neighbor, RandomWalk


def _weights(data: TortureData, *, by_id: bool = False) -> Any:
    found = {relation: torch.arange(edges.shape[1]) % 7 + 0.5 for relation, edges in data.edges.items()}
    if by_id:
        found = {relation: w[np.argsort(data.edge_ids[relation])] for relation, w in found.items()}
    return found if data.typed else next(iter(found.values()))


def weighted_by_id(data: TortureData) -> Neighbor:
    """The sampler "weighted", for a dataset in parts."""
    return Neighbor([3, 4], weights=_weights(data, by_id=True))


def _locality(data: TortureData) -> LocalityBias:
    mask = torch.arange(PAPERS) % 5 == 0
    return LocalityBias({"paper": mask} if data.typed else mask, 4)


OWN: dict[str, Callable[[TortureData], Any]] = {
    "neighbor": lambda data: Neighbor([3, 4]),
    "fanouts": lambda data: [4, 3],
    "dependent": lambda data: Neighbor([3, 4], batch_dependency=8),
    "replace": lambda data: Neighbor([3, 4], replace=True),
    "weighted": lambda data: Neighbor([3, 4], weights=_weights(data)),
    "all": lambda data: Neighbor([-1, 2]),
    "locality": lambda data: Neighbor([3, 4], locality=_locality(data)),
    "disjoint": lambda data: Neighbor([2, 2], disjoint=True),
    "temporal": lambda data: Neighbor([3, 2], temporal="nodes"),
    "induced": lambda data: Neighbor([3, 2], subgraph="induced"),
    "labor": lambda data: Labor([3, 4], batch_dependency=4),
    "nested": lambda data: Labor([3, 4], batch_dependency=4, nested=True),
    "labor-*": lambda data: Labor([3, 4], importance_sampling=-1, batch_dependency=math.inf),
    "ladies": lambda data: Ladies([200, 100]),
    "poisson": lambda data: Ladies([200, 100], poisson=True),
    "walks": lambda data: RandomWalk([3, 3]),
}
ON_DEVICE = {*OWN} - {"induced", "walks", "labor-*", "ladies", "poisson"}
OTHER_EDGES = {"induced", "walks"}
"""Samplers whose blocks may have edges that the graph does not have, or not once."""


class Wrapped:
    """A user's sampler that calls another one with the same numbers."""

    def __init__(self, inner: Any) -> None:
        self.inner = Neighbor(inner) if isinstance(inner, list) else inner

    def sample(self, graphs: Any, seeds: Any, *, seed: int = 0, epoch: int = 0, step: int = 0) -> Minibatch:
        return self.inner.sample(graphs, seeds, seed=seed, epoch=epoch, step=step)


class Random(Wrapped):
    """Draws anew each time."""

    rng = np.random.default_rng(0)

    def sample(self, graphs: Any, seeds: Any, **numbers: int) -> Minibatch:
        return super().sample(graphs, seeds, **{**numbers, "seed": int(self.rng.integers(1 << 60))})


class Derived(Neighbor):
    """A user's subclass of ours that draws anew each time, and marks its minibatches."""

    rng = np.random.default_rng(0)

    def sample(self, graphs: Any, seeds: Any, **numbers: int) -> Minibatch:
        sampled = super().sample(graphs, seeds, **{**numbers, "seed": int(self.rng.integers(1 << 60))})
        sampled.is_of_a_subclass = True  # type: ignore[attr-defined]
        return sampled


class Mutable(Neighbor):
    """Ours; its weights are changed in place between minibatches."""

    def __init__(self, data: TortureData) -> None:
        weights = _weights(data)
        self.changed = [w.float().clone() for w in (weights.values() if data.typed else [weights])]
        given = dict(zip(weights, self.changed, strict=True)) if data.typed else self.changed[0]
        super().__init__([3, 4], weights=given)

    def disturb(self) -> None:
        for weights in self.changed:
            weights.copy_(torch.rand(len(weights)) ** 8 + 1e-3)


FOREIGN: dict[str, Callable[[TortureData, Any], Any]] = {
    "wrapped": lambda data, own: Wrapped(own),
    "random": lambda data, own: Random(own),
    "derived": lambda data, own: Derived([3, 4], threads=2),
    "mutable": lambda data, own: Mutable(data),
}


class TwoArgumentsError(Exception):
    """Pickles, and does not unpickle."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{number} {text}")


ERRORS: dict[str, Callable[[], Exception]] = {
    "value": lambda: ValueError("the sampler failed"),
    "two arguments": lambda: TwoArgumentsError(1, "two"),
    "storage": lambda: StorageError(5, "the sampler cannot read", "/somewhere", 7),
    "stop": lambda: StopIteration("of the sampler"),
}


class _BadKey:
    def __reduce__(self) -> Any:
        raise KeyError("does not pickle")


class _BadLoad:
    def __init__(self, a: int, b: int) -> None:
        self.a = a

    def __reduce__(self) -> Any:
        return _BadLoad, (1,)


class Carrier:
    """Has an odd object, and goes to any device, as DGL wants it."""

    def __init__(self, kind: str) -> None:
        self.kind, self.value = kind, ODD[kind]()

    def to(self, *_: Any, **__: Any) -> Carrier:
        return self


ODD: dict[str, Callable[[], Any]] = {
    "plain": lambda: {"text": "kept", "numbers": np.arange(5)},
    "lambda": lambda: lambda: 1,
    "pointer": lambda: ctypes.pointer(ctypes.c_int(1)),
    "key": _BadKey,
    "load": lambda: _BadLoad(1, 2),
    "lock": threading.Lock,
    "error": lambda: TwoArgumentsError(1, "two"),
    "strided": lambda: torch.arange(40).reshape(5, 8).t()[::2],
    "sparse": lambda: torch.eye(4).to_sparse(),
}
"""Objects in minibatches. Few of them pickle."""


def odd(s: Any, step: int) -> Carrier:
    """The object of a minibatch. Those of the first ones may be plain."""
    return Carrier(s.odd if step >= s.odd_from else "plain")


def check_odd(carrier: Carrier) -> None:
    kind, found, made = carrier.kind, carrier.value, ODD[carrier.kind]()
    assert type(found) is type(made), (kind, found)
    if isinstance(made, torch.Tensor):
        assert torch.equal(found.to_dense(), made.to_dense())
    if kind == "plain":
        assert found["text"] == "kept"
        assert np.array_equal(found["numbers"], made["numbers"])


@dataclass(repr=False)
class OddMinibatch(Minibatch):
    extra: Any = None


class Odd(Wrapped):
    """Its minibatches have an odd object, or sample() fails in a step of epoch 0. s: the scenario."""

    def __init__(self, inner: Any, s: Any) -> None:
        super().__init__(inner)
        self._s = s

    def sample(self, graphs: Any, seeds: Any, *, seed: int = 0, epoch: int = 0, step: int = 0) -> Minibatch:
        if self._s.error and (epoch, step) == (0, self._s.fails):
            raise ERRORS[self._s.error]()
        sampled = super().sample(graphs, seeds, seed=seed, epoch=epoch, step=step)
        if self._s.odd is None:
            return sampled
        given = {f.name: getattr(sampled, f.name) for f in fields(Minibatch)}
        return OddMinibatch(**given, extra=odd(self._s, step))
