"""RowMemory: the memory of resident rows and packs. HostRows: the one on the CPU.

Called by superbatches, which decide what is in memory, and where.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from gids import _core
from gids.cache.output_dtype import Bytes, Outputs
from gids.packs.spool import Rows

if TYPE_CHECKING:
    from gids.io import Engine
    from gids.packs.memory import PackPlan
    from gids.store import Table

Bad = tuple[int, int]
"""The first byte of an extent of the scratch file that could not be read, and the errno."""


class Extent(NamedTuple):
    """A part of the scratch file, and where it goes in the memory."""

    offset: int
    at: int
    nbytes: int


class Wanted(NamedTuple):
    """Rows of a table that a minibatch reads. holders: (row set, where its rows begin in the memory) of the
    resident rows and of the pack, or of another pack with a part of the rows; the sets are those of keep()
    and load()."""

    table: Table
    rows: Rows
    holders: tuple[tuple[Any, int], ...]


class Load(Protocol):
    """A pack on its way from scratch to memory."""

    def wait(self) -> tuple[list[Any], list[Bad]]:
        """The row set of each table, and what could not be read. Blocks until the pack is in memory."""

    def close(self) -> None:
        """Stop it. Idempotent. Blocks for one read at most."""


class PackSource(NamedTuple):
    """A scratch file to read packs from. files: which of the engine's are those of the scratch file."""

    engine: Engine
    priority: _core.Priority
    files: range


class RowMemory(ABC):
    """Attributes: swept: memory that a sweep can write rows to; None if rows come from scratch only."""

    swept: _core.PackMemory | None

    @property
    @abstractmethod
    def peak_output_bytes(self) -> int: ...

    def lend_outputs(self) -> int:
        """Free the outputs that nobody uses, for a sweep. Returns the bytes of the others."""
        return 0

    @abstractmethod
    def load(
        self, source: PackSource, extents: Sequence[Extent], lists: Sequence[_core.RowList], half: int
    ) -> Load:
        """Begin to read a pack. Does not block. lists: its rows in each table. half: 0 or 1."""

    @abstractmethod
    def keep(self, resident: Sequence[_core.RowSet]) -> list[Any]:
        """Row sets of the resident rows."""

    @abstractmethod
    def discard(self, at: int, nbytes: int) -> None:
        """Lend these bytes to a sweep until they are written again. Their contents are lost."""

    @abstractmethod
    def gather(self, parts: Iterable[Sequence[Wanted]]) -> dict[str, torch.Tensor]:
        """The rows of a minibatch in the order in which it reads them, by table, ready for torch.

        parts: of each pack with rows of the minibatch. Its rows are copied before the next part is asked for.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. Idempotent. No load and no sweep is going on."""


class HostRows(RowMemory):
    """threads: that copy rows. output_rows: that an output has room for, by table."""

    def __init__(
        self,
        tables: Sequence[Table],
        plan: PackPlan,
        *,
        threads: int,
        output_dtype: torch.dtype | None,
        output_rows: Mapping[str, int],
    ) -> None:
        self._outputs_bytes = plan.purposes["outputs"]
        self._outputs = Outputs(tables, output_dtype, keep_bytes=self._outputs_bytes, rows=output_rows)
        self._workers = _core.Workers.create(threads)
        self.swept = _core.PackMemory.create(plan.pack_bytes)

    @property
    def peak_output_bytes(self) -> int:
        return self._outputs.pool.peak_bytes

    def lend_outputs(self) -> int:
        pool = self._outputs.pool
        pool.keep(0)
        pool.keep(self._outputs_bytes)
        return pool.taken_bytes

    def load(
        self, source: PackSource, extents: Sequence[Extent], lists: Sequence[_core.RowList], half: int
    ) -> Load:
        files, memory = source.files, self.memory
        reads = [
            _core.PackRead(
                source.engine.native, source.priority, files[0], offset, memory, at, nbytes, files=len(files)
            )
            for offset, at, nbytes in extents
        ]
        return _HostLoad(reads, extents, lists)

    def keep(self, resident: Sequence[_core.RowSet]) -> list[Any]:
        return list(resident)

    def discard(self, at: int, nbytes: int) -> None:
        self.memory.discard(at, nbytes)

    def gather(self, parts: Iterable[Sequence[Wanted]]) -> dict[str, torch.Tensor]:
        memory = self.memory
        outputs: dict[str, tuple[Table, Bytes]] = {}
        missing: Counter[str] = Counter()
        for wanted in parts:
            for table, rows, holders in wanted:
                if table.name not in outputs:
                    outputs[table.name] = (table, self._outputs.take(table, len(rows)))
                    missing[table.name] = len(rows)
                form = self._outputs.forms[table.name]
                left = _core.gather_packed(
                    self._workers,
                    rows,
                    [(rows_of_pack, memory, at) for rows_of_pack, at in holders],
                    row_bytes=table.row_bytes,
                    stored_as=form.stored_as,
                    wanted_as=form.wanted_as,
                    row_values=form.values,
                    scales=form.scales,
                    out=outputs[table.name][1],
                )
                missing[table.name] -= len(rows) - left
        if any(missing.values()):
            raise AssertionError(f"rows are in no pack, or in two: {dict(missing)}")
        return {name: self._outputs.tensor(*output) for name, output in outputs.items()}

    def close(self) -> None:
        """See RowMemory.close(). Features in use keep their memory, as does a gather in another thread."""
        self.swept = None
        self._outputs.pool.keep(0)

    @property
    def memory(self) -> _core.PackMemory:
        """Of the resident rows and packs. Raises ValueError after close()."""
        if self.swept is None:
            raise ValueError("this loader is closed: make a new one")
        return self.swept


class _HostLoad:
    def __init__(
        self, reads: list[_core.PackRead], extents: Sequence[Extent], lists: Sequence[_core.RowList]
    ) -> None:
        self._reads, self._extents, self._lists = reads, extents, lists

    def wait(self) -> tuple[list[Any], list[Bad]]:
        bad = [
            (extent.offset + begin, code)
            for read, extent in zip(self._reads, self._extents, strict=True)
            for begin, _, code in read.wait()
        ]
        return [rows.to_set() for rows in self._lists], bad

    def close(self) -> None:
        self._reads.clear()  # the end of a PackRead cancels it
