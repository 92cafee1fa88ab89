"""What every loader promises, on the host or a device."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from datasets import damage
from emulator import EmulatedDevice
from loader_example import DIM, ROWS, TABLES, Ids, check, ids_of, minibatches, write

import gids
from gids.cuda.device import Device
from gids.loader.stream import EpochStream

BAD_PAGE = 52
"""Of paper.feat, in the first of two shards: rows 208 to 211."""


class Way:
    """Opens loaders on one device. source: of gids.open(), once a loader is open."""

    def __init__(self, path: Path, device: str) -> None:
        self.path, self.device = path, device

    def open(self, tables: list[str] = TABLES, *, check_crc: bool = False) -> gids.FeatureLoader:
        self.source = gids.open(
            self.path,
            window=4,
            device_memory=1 << 25,
            memory=1 << 27,
            check_crc=check_crc,
            tuning=gids.Tuning(cache=300_000, queue_depth=8, staging=1 << 20),
        )
        return gids.FeatureLoader(self.source, tables, device=self.device)

    def attach(self, loader: gids.FeatureLoader, batches: list[Ids]) -> EpochStream[Ids]:
        return loader.attach(batches, ids_of, count=len(batches))


@pytest.fixture(params=["host", "device", pytest.param("cuda", marks=pytest.mark.gpu)])
def way(request: pytest.FixtureRequest, path: Path, cuda_is: Callable[[Device], None]) -> Iterator[Way]:
    device: Device | None = None
    if "cuda" in request.param:
        device = request.getfixturevalue("gpu")
    elif "device" in request.param:
        device = EmulatedDevice()
    if device is not None:
        cuda_is(device)
    way = Way(path, "cpu" if device is None else "cuda")
    yield way
    way.source.close()
    if isinstance(device, EmulatedDevice):
        assert not device.mapped, "host memory is still mapped"


def threads_of_gids() -> int:
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return sum(name.startswith("gids") for name in names)


def test_no_minibatches_no_ids_and_no_tables(way: Way) -> None:
    with way.open() as loader:
        assert list(way.attach(loader, [])) == []
        ((_, features),) = way.attach(loader, [{"paper.feat": torch.empty(0, dtype=torch.int64)}])
        assert features["paper.feat"].shape == (0, DIM)
        assert list(way.attach(loader, [{}, {}])) == [({}, {}), ({}, {})]


def test_ids_that_name_no_row_are_an_error_at_their_turn(way: Way, source: Ids) -> None:
    with way.open() as loader:
        for bad, error, message in (
            (torch.tensor([5, -1]), IndexError, "table 'paper.feat': id -1 at position 1"),
            (torch.tensor([5, ROWS]), IndexError, f"id {ROWS} at position 1 .* {ROWS} rows"),
            (torch.tensor([5], dtype=torch.int32), TypeError, r"convert them with .long\(\)"),
            (torch.empty(1, dtype=torch.int64, device="meta"), ValueError, "are on meta"),
        ):
            stream = way.attach(loader, [*minibatches(2), {"paper.feat": bad}, *minibatches(1)])
            for _ in range(2):
                check(source, *next(stream))
            with pytest.raises(error, match=message):
                next(stream)
        for minibatch, features in way.attach(loader, minibatches(4)):
            check(source, minibatch, features)


def test_a_page_that_cannot_be_read_fails_the_minibatch_that_needs_it(
    way: Way, source: Ids, tmp_path: Path
) -> None:
    batches = [{"paper.feat": torch.arange(40 * i, 40 * i + 40)} for i in range(10)]
    offset = BAD_PAGE // 2 * 4096
    way.path = write(tmp_path / "damaged.gids", source)
    damage(way.path / "tables/paper.feat/shard-00.bin", b"damaged", offset)
    with way.open(["paper.feat"], check_crc=True) as loader:
        stream = way.attach(loader, batches)
        for i in range(5):
            minibatch, features = next(stream)
            assert torch.equal(minibatch["paper.feat"], batches[i]["paper.feat"])
            check(source, minibatch, features)
        with pytest.raises(gids.StorageError, match="shard-00") as caught:
            next(stream)
        assert (caught.value.errno, caught.value.offset) == (errno.EBADMSG, offset)
        with pytest.raises(RuntimeError, match="an error ended this epoch after 5 of 10 minibatches"):
            next(stream)
        for minibatch, features in way.attach(loader, batches[6:]):
            check(source, minibatch, features)


def test_a_stream_may_end_at_any_moment(way: Way, source: Ids) -> None:
    def held() -> tuple[int, int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count(), threads_of_gids()

    gc.collect()
    before = held()
    with way.open() as loader:
        for how, stop in (("break", 0), ("exception", 2), ("close", 3)):
            stream = way.attach(loader, minibatches(5, stop))
            with suppress(LookupError):
                for i, (minibatch, features) in enumerate(stream):
                    check(source, minibatch, features)
                    if i == stop:
                        if how == "exception":
                            raise LookupError("in the training step")
                        break
            if how == "close":
                stream.close()
                with pytest.raises(StopIteration):
                    next(stream)
            del stream
            for minibatch, features in way.attach(loader, minibatches(3, 99)):
                check(source, minibatch, features)
    way.source.close()
    gc.collect()
    assert all(after <= at_first for after, at_first in zip(held(), before, strict=True))
