"""FeatureCache: the caches of several tables, which go through the steps of one stream together.

Called by the loader, which decides when. It turns ids into native calls and bytes into tensors. The native
planner chooses the pages that stay.

page_heat estimates how often each page is used, when a cache is built.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.cache.output_dtype import Outputs, out_dtype_of, overflow_error
from gids.errors import FormatError, MissingError, StorageError
from gids.profiling import stage
from gids.store.table import positions_of

if TYPE_CHECKING:
    from gids.io import Engine
    from gids.store import Table

POLICIES = ("lookahead", "window-pin", "random", "lru", "static", "pinned")

Ids = npt.NDArray[np.int64]
_NO_IDS: Ids = np.empty(0, np.int64)
_CPU = torch.device("cpu")


class FeatureCache:
    """Cache lines of several tables in host memory. One I/O engine fills them from disk.

    engine: opened on the shards of all tables, in order. lines: number of cache lines, by table. heats:
    uint8[page_count], by table; tables without heat are left out. keep: pages of heat 255 keep their lines
    for good. check_crc: compare every page that is read with its checksum. output_dtype: float32, float16 or
    bfloat16; gather() converts tables of these dtypes and of int8 with a scale. None: the stored dtype;
    float32 for int8 with a scale. output_rows: rows that an output has room for, by table, so that outputs of
    smaller minibatches are reused for larger ones. keep_output_bytes: bytes of outputs to keep for reuse.
    pinned: rows are in pinned memory.
    """

    def __init__(
        self,
        engine: Engine,
        tables: Sequence[Table],
        *,
        lines: Mapping[str, int],
        heats: Mapping[str, npt.NDArray[np.uint8]],
        policy: str = "lookahead",
        keep: bool = False,
        threads: int = 1,
        check_crc: bool = False,
        keep_output_bytes: int = 0,
        output_rows: Mapping[str, int] | None = None,
        output_dtype: torch.dtype | None = None,
        pinned: bool = False,
    ) -> None:
        self.tables = {t.name: t for t in tables}
        self._engine = engine
        self._memory = Outputs(
            tables, output_dtype, keep_bytes=keep_output_bytes, rows=output_rows, pinned=pinned
        )
        self._shards = [path for t in tables for path in t.shard_paths]
        workers = _core.Workers.create(threads)
        self._caches: dict[str, Any] = {}
        self._output_dtype = output_dtype
        self._first_files: dict[int, Table] = {}
        first_file = 0
        for t in tables:
            form = self._memory.forms[t.name]
            self._caches[t.name] = _core.PageCache(
                engine.native,
                workers,
                row_count=t.row_count,
                row_bytes=t.row_bytes,
                page_bytes=t.page_bytes,
                rows_per_page=t.rows_per_page,
                shard_count=len(t.shard_paths),
                first_file=first_file,
                lines=lines[t.name],
                policy=policy,
                seed=0,
                heat=heats.get(t.name),
                keep=keep,
                checksums=np.asarray(t.checksums()) if check_crc else None,
                stored_as=form.stored_as,
                wanted_as=form.wanted_as,
                row_values=form.values,
                scales=form.scales,
            )
            self._first_files[first_file] = t
            first_file += len(t.shard_paths)
        self.next_step = 0
        """The first step that a new stream may enter; steps never repeat."""
        self._orders = {t.name: order for t in tables if (order := t.order) is not None}
        self._ids: dict[int, dict[str, Ids]] = {}
        self._outputs: dict[int, dict[str, torch.Tensor]] = {}

    def enter(self, step: int, ids: Mapping[str, torch.Tensor]) -> None:
        """Mark the pages that minibatch `step` will read. Steps enter in order.

        ids: int64[n] on the CPU, by table, may repeat. They must not change until the step retires. Raises
        IndexError for an id out of range (nothing is marked), KeyError for an unknown table, TypeError or
        ValueError for a wrong dtype, device or shape.
        """
        checked = self._check(ids)
        self.next_step = step + 1
        for name, cache in self._caches.items():
            cache.enter(step, self._positions(name, checked))
        self._ids[step] = checked

    def plan(self, step: int) -> None:
        """Choose the pages to read, keep and drop, and submit the reads. Steps are planned in order."""
        outputs = {}
        for name, cache in self._caches.items():
            ids = self._positions(name, self._ids[step])
            outputs[name] = self._memory.take(self.tables[name], len(ids))
            cache.plan(step, ids, outputs[name].numpy())
        self._outputs[step] = outputs

    def gather(self, step: int) -> tuple[dict[str, torch.Tensor], Exception | None]:
        """Wait for the step's reads and copy its rows.

        Returns ({table: rows in the order of its ids}, error); error is None, a StorageError if a page could
        not be read, or an OverflowError if a finite value became infinite in output_dtype. The tensors belong
        to the caller.
        """
        outputs, failures = self._outputs[step], []
        for cache in self._caches.values():
            cache.gather_ready(step)
            with stage("wait"):
                cache.wait(step)
            failures += cache.gather_rest(step)
        features = {name: self._memory.tensor(self.tables[name], outputs[name]) for name in self._ids[step]}
        del self._outputs[step]
        return features, self._error(failures)

    def retire(self, step: int) -> None:
        """Remove the step's marks. Steps retire in order."""
        for cache in self._caches.values():
            cache.retire(step)
        self._ids.pop(step)
        self._outputs.pop(step, None)

    def cancel(self) -> None:
        """Wait for the reads, then retire every live step. No mark is left.

        Does nothing in a forked child, where steps and reads raise RuntimeError.
        """
        # A stream may have been interrupted between two tables, so each table finds its own next step.
        self.next_step = max(cache.cancel() for cache in self._caches.values())
        self._ids.clear()
        self._outputs.clear()

    def close(self) -> None:
        """Wait for reads and remove every mark. Idempotent. The last reference frees the memory."""
        self.cancel()

    def read_through(
        self, ids: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], Exception | None]:
        """Rows without a step: from lines, else from disk. Returns like gather(); changes nothing."""
        features, failures = {}, []
        checked = self._check(ids)
        for name, array in checked.items():
            rows = self._memory.take(self.tables[name], len(array))
            failures += self._caches[name].read_through(self._positions(name, checked), rows.numpy())
            features[name] = self._memory.tensor(self.tables[name], rows)
        return features, self._error(failures)

    def stats(self) -> dict[str, dict[str, Any]]:
        """The native counters of each table."""
        return {name: dict(cache.stats()) for name, cache in self._caches.items()}

    def memory(self) -> dict[str, int]:
        """Bytes by purpose. "outputs" is the peak."""
        tables = self.stats().values()
        return {
            "page tables": sum(t["page_table_bytes"] for t in tables),
            "lines": sum(t["lines_bytes"] for t in tables),
            "line metadata": sum(t["line_metadata_bytes"] for t in tables),
            "outputs": self._memory.peak_bytes,
            "window": sum(t["step_bytes"] for t in tables),
            "requests": sum(cache.plan_bytes for cache in self._caches.values()),
        }

    def audit(self) -> None:
        """Recount all metadata from the page tables. Raise RuntimeError if they disagree. For tests."""
        for cache in self._caches.values():
            cache.audit()

    def page_words(self, table: str) -> npt.NDArray[np.uint64]:
        """A copy of a table's page words, uint64[page_count]."""
        words: npt.NDArray[np.uint64] = self._caches[table].words()
        return words

    def _check(self, ids: Mapping[str, torch.Tensor]) -> dict[str, Ids]:
        """The ids as arrays, after all were checked."""
        check_ids(ids, self._caches, _CPU)
        checked = {name: tensor.contiguous().numpy() for name, tensor in ids.items()}
        for name, array in checked.items():
            try:
                self._caches[name].check(array)
            except IndexError as error:
                raise IndexError(f"table '{name}': {error}") from None
        return checked

    def _positions(self, name: str, ids: Mapping[str, Ids]) -> Ids:
        """The row positions of a minibatch, which native code takes in place of ids.

        Looked up on each call: positions of a whole window would take memory beside the sampler's ids.
        """
        array = ids.get(name, _NO_IDS)
        return positions_of(array, self._orders[name]) if name in self._orders else array

    def _error(self, failures: Sequence[tuple[int, int, int]]) -> Exception | None:
        if not failures:
            return None
        for file, _, code in failures:
            if code == errno.ERANGE:
                table = self._first_files[file]
                return overflow_error(table, out_dtype_of(table, self._output_dtype))
        file, offset, code = failures[0]
        more = f" (and {len(failures) - 1} more pages of this minibatch)" if len(failures) > 1 else ""
        return read_error(code, self._shards[file], offset, more)


def read_error(code: int, shard: str | os.PathLike[str], offset: int, more: str = "") -> StorageError:
    """The error of a page, or of a row in it. code: an errno, EBADMSG for a wrong checksum."""
    reasons = {
        errno.EBADMSG: "the page's checksum is wrong",
        errno.ENODATA: "the shard ends before this page; it was truncated",
    }
    reason = reasons.get(code) or os.strerror(code)
    return StorageError(code, f"cannot read a page: {reason}{more}", shard, offset)


def check_ids(ids: Mapping[str, torch.Tensor], tables: Iterable[str], device: torch.device) -> None:
    """Raise KeyError for an unknown table, TypeError or ValueError for ids that are not int64[n].

    Ids may be on the CPU, or on device.
    """
    for name, tensor in ids.items():
        if name not in tables:
            raise MissingError(f"no table '{name}' in this loader (it loads {', '.join(map(repr, tables))})")
        what = f"ids for table '{name}'"
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{what} are {type(tensor).__name__}; expected a torch.Tensor of int64")
        if tensor.dtype != torch.int64:
            raise TypeError(f"{what} are {tensor.dtype}; expected torch.int64: convert them with .long()")
        if tensor.device != device and tensor.device.type != "cpu":
            wanted, cure = (device, ".cpu()") if device.type == "cpu" else (f"{device} or cpu", ".to()")
            raise ValueError(f"{what} are on {tensor.device}; expected {wanted}: move them with {cure}")
        if tensor.dim() != 1:
            raise ValueError(f"{what} have shape {tuple(tensor.shape)}; expected one dimension")


_BLOCK_PAGES = 1 << 20
_OCTAVES = 24  # 255 steps over 24 octaves: about ten per factor of 2


def page_heat(
    weights: npt.NDArray[np.generic], rows_per_page: int, order: npt.NDArray[Any] | None = None
) -> npt.NDArray[np.uint8]:
    """Quantise the weights of rows (out-degrees, expected visits) to one byte per page.

    weights: non-negative number[row_count], in any unit, memory-mapped or in memory; read in blocks. order:
    Table.order, or None if rows are stored by id. Returns uint8[page_count]: the sum over a page's rows on a
    logarithmic scale. 0 means no weight, 255 is the heaviest page. Pages more than 24 octaves below the
    heaviest get the same heat.
    """
    sums = page_weights(weights, rows_per_page, order)
    top = float(sums.max(initial=0.0))
    if top == 0:
        return np.zeros(len(sums), np.uint8)
    lightest = float(np.min(sums, where=sums > 0, initial=top))
    sums /= max(lightest, top / 2**_OCTAVES)
    sums += 1
    logs = np.log2(sums, out=sums)
    logs *= 255.0 / float(logs.max())
    return np.rint(logs, out=logs).astype(np.uint8)


def page_weights(
    weights: npt.NDArray[np.generic], rows_per_page: int, order: npt.NDArray[Any] | None = None
) -> npt.NDArray[np.float32]:
    """The sum of the weights of each page's rows: float32[page_count]. Arguments as of page_heat."""
    row_count = len(weights)
    page_count = -(-row_count // rows_per_page)
    sums = np.zeros(page_count, np.float32)
    for first in range(0, page_count, _BLOCK_PAGES):
        last = min(page_count, first + _BLOCK_PAGES)
        part = slice(first * rows_per_page, last * rows_per_page)
        if order is not None:
            bad = _core.sum_by_page(order[part], np.asarray(weights[part], np.float32), rows_per_page, sums)
            if bad is not None:
                raise FormatError(
                    f"the order of rows is damaged at row {part.start + bad}; run `gids verify` for details"
                )
            continue
        rows = np.asarray(weights[part], np.float64)
        if rows_per_page > 1:
            rows = np.add.reduceat(rows, np.arange(0, len(rows), rows_per_page))
        sums[first:last] = rows
    return sums
