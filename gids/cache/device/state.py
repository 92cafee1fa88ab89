"""The memory of a cache on a device, in the layout of native/include/gids/device_cache.h, and its budget.

Called by DeviceFeatureCache, which decides which kernels run, and when; DeviceBudget by the loader's
placement, before there is a cache.

Counters: kernels count in device memory; the host reads a copy after an event. A live step's counters have
the index step % USE_BITS; the counters of reading through have the index THROUGH.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.cache.budget import GROWTH, Budget, Sizes
from gids.cache.output_dtype import RowForm, out_dtype_of, row_form
from gids.cuda import on_host
from gids.cuda.host_memory import host_memory
from gids.errors import MemoryBudgetError
from gids.sizes import format_bytes

if TYPE_CHECKING:
    from gids.cache.device.kernels import CacheKernels
    from gids.cuda.device import Device
    from gids.cuda.device import Mapping as HostMapping
    from gids.store import Table

RESIDENT = (_core.RESIDENT << _core.STATE_SHIFT) - (1 << 64)
"""The state RESIDENT of a page word, as an int64."""

DEVICE_POLICIES: tuple[str, ...] = tuple(_core.DEVICE_POLICIES)
_CHUNK = 1 << 22
_MISSES_WORDS = 9  # of a device::Misses
_WIDEST = 16  # bytes that a lane copies at once


def check_policy(policy: str) -> None:
    """Raise ValueError for a policy that only the cache in host memory has."""
    if policy not in DEVICE_POLICIES:
        raise ValueError(
            f"policy={policy!r} works on device='cpu' only; on a GPU use one of {', '.join(DEVICE_POLICIES)}"
        )


def check_memory(device: Device, purposes: Mapping[str, int]) -> None:
    """Raise MemoryBudgetError, which lists the sum, if purposes (name -> bytes) exceed free device memory."""
    free, total = device.memory_info()
    needed = sum(purposes.values())
    if needed > free:
        listing = " + ".join(f"{purpose} {format_bytes(n)}" for purpose, n in purposes.items())
        raise MemoryBudgetError(
            f"the cache needs {listing} = {needed} bytes ({format_bytes(needed)}) on {device.name}, which "
            f"has {format_bytes(free)} of {format_bytes(total)} free: give it less, or free memory there"
        )


class HostArray:
    """Zeroed host memory that a device reads and writes in place. A forked child does not inherit it."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(host_memory(nbytes, device.numa_node), np.uint8)[
            :nbytes
        ]
        self._mapping: HostMapping | None = None
        if nbytes:
            self._mapping = device.map_host(self.bytes.ctypes.data, nbytes, memory=self.bytes)
        self.address = self._mapping.device_address if self._mapping else 0
        """The address for the device."""

    def close(self) -> None:
        """Unmap, after the device's last use. Idempotent."""
        if self._mapping is not None:
            self._mapping.close()


class TableState:
    """Page words, line owners and lines of one table."""

    def __init__(
        self,
        device: Device,
        table: Table,
        *,
        number: int,
        lines: int,
        host_lines: int,
        replaced: int,
        policy: str,
        heat: npt.NDArray[np.uint8] | None,
        output_dtype: torch.dtype | None,
    ) -> None:
        assert lines + host_lines <= _core.MAX_LINES
        self.table = table
        self.number = number
        self.device_lines = lines
        self.host_lines = host_lines
        self.replaced = replaced
        self.out_dtype, form = out_dtype_of(table, output_dtype), row_form(table, output_dtype)
        self.words = device.zeros((table.page_count,), torch.int64)
        if heat is not None:
            _copy_in_parts(heat, self.words)
            self.words <<= _core.HEAT_SHIFT
        self.owners = device.zeros((lines + host_lines,), torch.int64)
        self.near = device.allocate(lines * table.page_bytes).view(lines, table.page_bytes)
        self.far = HostArray(device, host_lines * table.page_bytes)
        self.choice = device.zeros((_core.DEVICE_CHOICE_BYTES,), torch.uint8)
        self.order = _order_on(device, table.order)
        fields = [
            *(self.words.data_ptr(), self.owners.data_ptr(), self.near.data_ptr(), self.far.address),
            *(lines, lines + host_lines, replaced),
            *(table.row_count, table.rows_per_page, table.row_bytes, table.page_bytes),
            _core.DEVICE_POLICIES[policy],
        ]
        self.record = torch.tensor(fields, dtype=torch.int64).to(device.torch_device)
        self._scales = None
        if form.scales is not None:
            self._scales = torch.from_numpy(form.scales).to(device.torch_device)
        self.row_copy = (*row_copy(form), 0 if self._scales is None else self._scales)

    @property
    def line_count(self) -> int:
        return self.device_lines + self.host_lines

    def far_lines(self) -> npt.NDArray[np.uint8]:
        """The lines in host memory, uint8[host_lines, page_bytes]."""
        return self.far.bytes.reshape(self.host_lines, self.table.page_bytes)

    def metadata_bytes(self) -> int:
        """Device memory of a table without its lines, page words and owners."""
        scales = 0 if self._scales is None else self._scales.nbytes
        return self.choice.nbytes + self.record.nbytes + scales

    def audit(self) -> None:
        """Raise RuntimeError if words and owners disagree. The device must be idle."""
        words = on_host(self.words).numpy().view(np.uint64)
        owners = on_host(self.owners).numpy()
        line = (words >> np.uint64(_core.LINE_SHIFT) & np.uint64(_core.MAX_LINES)).astype(np.int64)
        absent = words >> np.uint64(_core.STATE_SHIFT) == _core.ABSENT
        if np.any(line[absent]):
            raise RuntimeError(f"audit of '{self.table.name}': an absent page names a line")
        pages = np.flatnonzero(~absent)
        held = line[pages]
        if np.any(held >= self.line_count) or len(np.unique(held)) != len(held):
            raise RuntimeError(f"audit of '{self.table.name}': a line holds two pages, or is none")
        expected = np.zeros(self.line_count, np.int64)
        expected[held] = pages + 1
        if not np.array_equal(expected, owners):
            raise RuntimeError(f"audit of '{self.table.name}': a line's owner is not the page that names it")


class MissBuffers:
    """Memory for one table of a planned minibatch: its missing pages, a set of them, their lines and rows.

    rows: of the minibatch. pages: of the table.
    """

    def __init__(self, device: Device, rows: int, pages: int) -> None:
        self.rows, capacity = rows, min(rows, pages)
        cells = _cells(capacity)
        self.keys = device.empty((cells,), torch.int64)
        self.values = device.empty((cells,), torch.int32)
        self.requests = device.empty((capacity,), torch.int64)
        self.arrays = [device.empty((capacity,), torch.int32) for _ in range(3)]  # scores, lines, slots
        self.first_rows = device.empty((cells,), torch.int32)
        self.next_rows = device.empty((rows,), torch.int32)
        self.record = device.empty((_MISSES_WORDS,), torch.int64)  # CacheKernels.describe writes it

    @property
    def nbytes(self) -> int:
        tensors = (self.keys, self.values, self.requests, *self.arrays)
        tensors += (self.first_rows, self.next_rows, self.record)
        return sum(t.nbytes for t in tensors)


def miss_bytes(rows: int, pages: int) -> int:
    """Device memory of a MissBuffers."""
    capacity = min(rows, pages)
    return 16 * _cells(capacity) + 20 * capacity + 4 * rows + 8 * _MISSES_WORDS


def _cells(capacity: int) -> int:
    return 1 << max(1, math.ceil(math.log2(2 * max(1, capacity))))


class MissPool:
    """Reuses buffers, and allocates larger ones with headroom for a minibatch larger than any before.

    pages: of the table.
    """

    def __init__(self, device: Device, kernels: CacheKernels, pages: int) -> None:
        self._device = device
        self._kernels = kernels
        self._pages = pages
        self._idle: list[MissBuffers] = []
        self._outgrown: list[MissBuffers] = []  # that the batch of a plan may still use
        self._largest = 1
        self.nbytes = 0

    def take(self, rows: int) -> MissBuffers:
        """Buffers for this many rows, once a plan. The cache's stream must be torch's current one. Does not
        block."""
        self._outgrown.clear()
        if rows > self._largest:
            self._largest = int(GROWTH * rows)
        while self._idle:
            buffers = self._idle.pop()
            if buffers.rows >= rows:
                return buffers
            self.nbytes -= buffers.nbytes
            self._outgrown.append(buffers)
        buffers = MissBuffers(self._device, self._largest, self._pages)
        self._kernels.describe(buffers)
        self.nbytes += buffers.nbytes
        return buffers

    def put(self, buffers: MissBuffers) -> None:
        """Return buffers whose kernels are enqueued. The next user enqueues after them."""
        self._idle.append(buffers)


def line_bytes(
    tables: Sequence[Table], lines: Mapping[str, int], host_lines: Mapping[str, int]
) -> Iterator[tuple[str, int]]:
    """The device memory that a cache allocates once: (purpose, bytes)."""
    yield "lines", sum(lines[t.name] * t.page_bytes for t in tables)
    yield "page tables", sum(8 * t.page_count for t in tables)
    if orders := order_bytes(tables):
        yield "row orders", orders
    yield "line owners", sum(8 * (lines[t.name] + host_lines[t.name]) for t in tables)


def order_bytes(tables: Sequence[Table]) -> int:
    """Device memory of the tables' row orders."""
    return sum(0 if t.order is None else int(t.order.nbytes) for t in tables)


def _order_on(device: Device, order: npt.NDArray[Any] | None) -> torch.Tensor | None:
    if order is None:
        return None
    copy = device.empty((len(order),), torch.int32 if order.itemsize == 4 else torch.int64)
    _copy_in_parts(order, copy)
    return copy


def _copy_in_parts(values: npt.NDArray[Any], to: torch.Tensor) -> None:
    """Copy to the device. values: of any dtype, may be a file that is mapped."""
    for start in range(0, len(values), _CHUNK):
        part = torch.from_numpy(values[start : start + _CHUNK].copy())
        to[start : start + len(part)] = part.to(to.device)


def row_copy(form: RowForm) -> tuple[int, int, int]:
    """The first three fields of a RowCopy, for kernels; see native/include/gids/row_copy.h."""
    if not form.stored_as:
        count, values = math.gcd(form.out_row_bytes, _WIDEST), form.out_row_bytes
    else:
        count, values = 4 if form.values % 4 == 0 else 1, form.values
    return _core.copy_as(count, form.stored_as, form.wanted_as), values // count, form.out_row_bytes


SMALL_BYTES = 1 << 20
"""Upper bound of the counters and the histograms."""

OWNER_BYTES = 8
"""Device memory per line beside its page: the number of the page that it holds."""


def check_device_memory(asked: Mapping[str, int | None], *, free_bytes: int, device: str) -> None:
    """Raise MemoryBudgetError if an argument (name -> bytes) asks for more device memory than is free."""
    for name, value in asked.items():
        if value is not None and value > free_bytes:
            raise MemoryBudgetError(
                f"{name}={value} ({format_bytes(value)}), but {device} has {format_bytes(free_bytes)} free "
                f"({free_bytes} bytes): give less, or free memory of other tensors and processes there"
            )


@dataclass(frozen=True, kw_only=True)
class DeviceBudget(Budget):
    """Divides device memory. host_cache_bytes: for pinned lines in host memory, beside memory_bytes."""

    host_cache_bytes: int
    option = "device_memory"

    def needed(self, sizes: Sizes) -> dict[str, int]:
        """Bytes by purpose that minibatches of these sizes need, without lines.

        outputs: one per planned minibatch, one that the consumer holds, and one that the device still uses.
        """
        misses = sum(miss_bytes(sizes.rows[t.name], t.page_count) for t in self.tables)
        # Of tables that have an order, a minibatch holds the positions of its rows beside their ids.
        numbers = sum(sizes.rows[t.name] * (1 if t.order is None else 2) for t in self.tables)
        purposes = {
            "page tables": sum(8 * t.page_count for t in self.tables),
            "outputs": self._output_bytes(sizes) * (sizes.planned_batches + 2),
            "window": 8 * numbers * sizes.live_batches,
            "scratch": misses * sizes.planned_batches + self.bounce_bytes + SMALL_BYTES,
        }
        if orders := order_bytes(self.tables):
            purposes["row orders"] = orders
        return purposes

    def _divide(self, left: int, purposes: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
        host_lines = self._lines(self.host_cache_bytes, 0)
        lines = self._lines(max(0, left - OWNER_BYTES * sum(host_lines.values())), OWNER_BYTES)
        for t in self.tables:  # pages with a line on the device need none in host memory
            most = min(t.page_count, _core.MAX_LINES) - lines[t.name]
            host_lines[t.name] = min(host_lines[t.name], most)
        purposes["line owners"] = OWNER_BYTES * (sum(lines.values()) + sum(host_lines.values()))
        return lines, host_lines


COUNTERS: dict[str, int] = _core.DEVICE_COUNTERS
"""The word of each counter in a device::Counters."""

WORDS: int = _core.DEVICE_COUNTER_WORDS
"""Words of a device::Counters."""

THROUGH = _core.USE_BITS
"""The index of reading through, after the indices of the live steps."""

_MISSES = COUNTERS["misses"]
_ALL_BITS = (1 << 64) - 1


class Counters:
    """A device::Counters for every index and table. Allocated on torch's current stream."""

    def __init__(self, device: Device, kernels: CacheKernels, tables: Sequence[str]) -> None:
        self._kernels = kernels
        self._number = {name: i for i, name in enumerate(tables)}
        self._there = device.zeros((THROUGH + 1, len(tables), WORDS), torch.int64)
        self.shown = HostArray(device, self._there.nbytes)
        # Made once, as a view costs as much as a launch.
        self._views: list[list[torch.Tensor]] = [list(index) for index in self._there]
        self._sums = {name: dict.fromkeys(("steps", *COUNTERS), 0) for name in tables}

    @property
    def nbytes(self) -> int:
        """Device memory."""
        return self._there.nbytes

    def of(self, index: int, table: str) -> torch.Tensor:
        """int64[WORDS] on the device: the Counters that kernels take."""
        return self._views[index][self._number[table]]

    def misses(self, index: int, table: str) -> torch.Tensor:
        """int64[1] on the device."""
        return self._views[index][self._number[table]][_MISSES : _MISSES + 1]

    def shown_at(self, index: int, table: str) -> int:
        """The address, for kernels, of the host's copy of a table's counters."""
        first = self.shown.address + index * self._there[index].nbytes
        return first + self._number[table] * WORDS * 8

    def show(self, index: int) -> None:
        """Enqueue the copy of an index's counters, of all tables, to the host."""
        self._kernels.show(self._there[index], self.shown.address + index * self._there[index].nbytes)

    def seen(self, index: int, table: str, counter: str) -> int:
        """The counter when show() ran. The caller has waited for an event after it."""
        return int(self._seen(index, table)[COUNTERS[counter]])

    def add(self, index: int) -> None:
        """Add a step's counters of all tables, as shown, to the sums."""
        for table, sums in self._sums.items():
            sums["steps"] += 1
            seen = self._seen(index, table)
            for counter, word in COUNTERS.items():
                sums[counter] += int(seen[word])

    def sums(self, table: str) -> dict[str, int]:
        """The sums of the added steps, by the names that FeatureCache uses."""
        sums = dict(self._sums[table])
        sums["hits"] = sums["pages"] - sums["misses"]
        del sums["bad"], sums["unresolved"], sums["overflowed"]
        return sums

    def bad_id(
        self, index: int, ids: Mapping[str, torch.Tensor], rows: Mapping[str, int]
    ) -> IndexError | None:
        """The error for the first id out of range, if the counters shown have one."""
        for table, tensor in ids.items():
            if bad := self.seen(index, table, "bad"):
                position = ~bad & _ALL_BITS
                where = f"id {int(tensor[position])} at position {position}"
                return IndexError(
                    f"table '{table}': {where} is out of range for a table of {rows[table]} rows"
                )
        return None

    def _seen(self, index: int, table: str) -> npt.NDArray[np.uint64]:
        words = self.shown.bytes.view(np.uint64).reshape(THROUGH + 1, -1, WORDS)
        counters: npt.NDArray[np.uint64] = words[index, self._number[table]]
        return counters
