"""gids.open: a dataset, its options and one memory budget for all loaders of it. The user's entry.

Loaders take a Source in place of a dataset. It knows which FeatureLoaders exist, but not how they read.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import torch

from gids import cuda
from gids.errors import MemoryBudgetError
from gids.loader.options import Options, Reads, Size, Tuning, explain_names
from gids.loader.ranks import Ranks, find_ranks
from gids.loader.row_source import Lender, RowSource, StepSampling, Tables, chosen_tables, log
from gids.loader.sampling import sample_steps
from gids.packs import find_scratch
from gids.sampler import Topology
from gids.sizes import format_bytes, parse_bytes
from gids.store import FeatureStore, Graph, Table, graphs_of
from gids.store.numbering import matched_tables
from gids.store.part import refuse_part

if TYPE_CHECKING:
    from gids.loader.feature_loader import FeatureLoader

Dataset = FeatureStore | str | os.PathLike[str]
_LEAST = 1000  # bytes of memory; fewer are meant as gigabytes


class Source(RowSource):
    """A dataset, or several, with options and one memory budget. Made by gids.open().

    Attributes: store (the first dataset's); stores (each in its own numbers); options.

    One thread uses a source; a forked child opens its own. Loaders of a source share its memory. Those with
    the same tables, dtype and device share one cache, which stays warm between their epochs, and one window,
    which the epoch that began last has. A loader of other tables takes over the memory when its epoch begins.
    It raises MemoryBudgetError while another loader's epoch is open.
    """

    together = False

    def __init__(
        self,
        stores: Sequence[FeatureStore],
        matched: Mapping[Table, Table],
        options: Options,
        lender: Lender,
        opened: ExitStack,
    ) -> None:
        super().__init__(stores, matched, options, lender)
        self._opened = opened

    def with_options(self, **changes: Any) -> Source:
        """The same datasets and the same memory budget, read with other options."""
        options = dataclasses.replace(self.options, **changes)
        return Source(self.stores, self.matched, options, self.lender, ExitStack())

    def graphs(self) -> list[Graph]:
        return graphs_of(self.store)

    def refuse_parts(self, what: str) -> None:
        """Raise ValueError if a dataset is one of several parts. what: what needs all of them."""
        for store in self.stores:
            refuse_part(store, what)

    def ranks(self, rank: int | None, world_size: int | None) -> Ranks:
        return find_ranks(rank, world_size)

    def sampling(
        self, topology: Topology, ranks: Ranks, device: torch.device, *, cooperative: bool
    ) -> StepSampling:
        if cooperative:
            raise ValueError("cooperative=True needs a source of gids.distributed.open()")
        return StepSampling(sample_steps, None)

    def feature_loader(
        self,
        user: object,
        tables: Tables,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        minibatch_rows: int | Mapping[str, int] | None = None,
        cooperative: bool = False,
        pin_memory: bool = False,
    ) -> FeatureLoader:
        """The FeatureLoader that all loaders of these tables, dtype, device and pin_memory share. Called by
        loaders.

        user: the loader, which calls leave(user) when it is closed.
        """
        from gids.loader.feature_loader import FeatureLoader

        chosen = chosen_tables(self, tables)
        read = frozenset(
            (n, *t.identity, t.dtype, tuple(t.shape), t.scale is None) for n, t in chosen.items()
        )
        where = torch.device(device)
        if where.type == "cuda":  # "cuda" is the current device
            where = torch.device("cuda", cuda.open_device(where).index)
        key = (read, dtype, where, self.options, pin_memory)
        loader: FeatureLoader | None = self.lender.shared.get(key)
        if loader is None or loader.closed:
            loader = FeatureLoader(
                self,
                chosen,
                dtype=dtype,
                device=where,
                minibatch_rows=minibatch_rows,
                pin_memory=pin_memory,
            )
            self.lender.shared[key] = loader
        elif minibatch_rows is not None:
            loader.expect_rows(minibatch_rows)
        loader.users.add(user)
        return loader

    def close(self) -> None:
        """End the open epochs, free the caches, close the datasets that gids.open() opened. Idempotent."""
        self.lender.close()
        self._opened.close()

    def __repr__(self) -> str:
        return f"Source({', '.join(repr(store.name) for store in self.stores)})"


@explain_names("gids.open")
def open(
    dataset: Dataset | Sequence[Dataset],
    *,
    memory: Size | None = None,
    device_memory: Size | None = None,
    window: int = 16,
    reads: Reads = "auto",
    scratch: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    scratch_bytes: Size | None = None,
    heat: str = "auto",
    threads: int | None = None,
    check_crc: bool = False,
    allow_dirs: Sequence[str | os.PathLike[str]] = (),
    tuning: Tuning | None = None,
) -> Source:
    """Open a dataset for loading, with the options and the memory that its loaders share.

    Args:
        dataset: a path, an open FeatureStore, or a list of these that have the same nodes and edges. The
            first one is the main one: it has the topology, labels, splits and heat. Rows of the others are
            matched to its nodes by ids if both store ids, else by number; the log says which.
        memory: host memory for all loaders of this source: cache lines, outputs, bounce pool, window, page
            tables. In bytes, or text such as ``"16GB"`` or ``"512MiB"``. Default: half of the memory
            available, divided by the number of ranks on this machine (LOCAL_WORLD_SIZE). It must hold at
            least the page tables, the bounce pool and the features of two minibatches. With ``device="cuda"``
            it holds the staging memory and a tier of pinned lines under the device's cache (default: no
            tier); if rows are read by packs, all that these need on the host.
        device_memory: memory for loaders on a GPU, of each GPU that has some. Default: half of what is free
            there.
        window: minibatches sampled ahead, 0 to 23 (default 16). The window is shorter if its memory is more
            useful as cache lines: ``stats()["window"]`` reports it.
        reads: how loaders read: ``"random"`` (one read per missing page, through the cache), ``"pack"``
            (rows of many minibatches by one sequential pass, through a scratch file), or ``"auto"``: the one
            with the lower predicted time (default).
        scratch: directory for scratch files, on a disk; or several, on disks that then work at the same
            time. Default: the dataset's own, if it can be written. The files have no names, so nothing is
            left behind.
        scratch_bytes: limit of all scratch files together, in all directories. Default: half of the free
            space, divided by the number of ranks on this machine; each directory gets as many bytes.
        heat: the stored heat of nodes, by which the policy ranks pages that the window does not use:
            ``"out-degree"`` (stored by conversion), ``"reverse-pagerank"`` or ``"sampled"`` (stored by ``gids
            heat``), or ``"none"``. ``"auto"`` (default) takes, for each table, the first that is stored of
            reverse-pagerank, sampled, out-degree. Only tables of the main dataset's nodes have heat.
        threads: threads that copy rows and sample. Default: torch's number.
        check_crc: compare every page that is read, and the orders of tables, with their checksums (default
            False). Orders then take 4 or 8 bytes of memory per row.
        allow_dirs: directories outside the dataset that may hold its shards.
        tuning: a gids.Tuning, for what rarely needs another value.

    Raises FileNotFoundError and FormatError for a dataset that cannot be opened, ValueError for a number out
    of its range and for datasets with other ids, TypeError for a number that is not whole and for an argument
    that does not exist, MemoryBudgetError for less than 1000 bytes, StorageError for a scratch directory that
    does not exist or cannot be written.
    """
    if not isinstance(tuning, Tuning | None):
        raise TypeError(f"tuning is {type(tuning).__name__}: give gids.Tuning(...)")
    if not isinstance(dataset, FeatureStore | str | os.PathLike | Sequence) or isinstance(dataset, bytes):
        raise TypeError(f"dataset is {type(dataset).__name__}: give a path, a FeatureStore or a list of them")
    datasets = [dataset] if isinstance(dataset, FeatureStore | str | os.PathLike) else list(dataset)
    if not datasets:
        raise ValueError("dataset is an empty list; give a path or a FeatureStore")
    options = Options(
        memory=_memory("memory", memory),
        device_memory=_memory("device_memory", device_memory),
        window=window,
        reads=reads,
        scratch=cast("tuple[str, ...] | None", scratch),
        scratch_bytes=_bytes("scratch_bytes", scratch_bytes),
        heat=heat,
        threads=threads,
        check_crc=check_crc,
        **vars(tuning or Tuning()),
    )
    if options.scratch is not None and options.reads != "random":
        find_scratch(options.scratch, options.scratch_bytes, ())
    with ExitStack() as opening:
        stores = []
        for one in datasets:
            if not isinstance(one, FeatureStore):
                one = FeatureStore(one, allow_dirs=allow_dirs)
                opening.callback(one.close)
            stores.append(one)
        matched = matched_tables(stores, options.scratch or ())
        lender = Lender(options.memory, options.device_memory)
        return Source(stores, matched, options, lender, opening.pop_all())


def as_source(
    dataset: RowSource | Dataset | Sequence[Dataset], closing: ExitStack, *, memory: Size | None = None
) -> Source:
    """The source that is given, or one with this memory and default options, which `closing` then closes.

    Raises ValueError if it is closed, or is one whose ranks read together.
    """
    source = as_row_source(dataset, closing, memory=memory)
    if not isinstance(source, Source):
        raise ValueError(
            f"{source!r} divides rows among ranks, so that all of them read together: use gids.NodeLoader, "
            "gids.EdgeLoader or the loaders of gids.pyg, or open the whole dataset with gids.open()"
        )
    return source


def as_row_source(
    dataset: RowSource | Dataset | Sequence[Dataset],
    closing: ExitStack,
    *,
    what: str = "",
    memory: Size | None = None,
) -> RowSource:
    """As as_source(), for loaders whose ranks may read together. what: a loader that needs all parts."""
    if isinstance(dataset, RowSource):
        if memory is not None:
            made_by = f"{dataset.made_by[:-1]}PATH, memory=...)"
            raise TypeError(f"memory= is for a loader of a path; a source has its own: {made_by}")
        if dataset.lender.closed:
            raise ValueError(f"{dataset!r} is closed: call {dataset.made_by} again")
        source = dataset
    else:
        source = open(dataset, memory=memory)
        closing.callback(source.close)
    if what and not source.together:
        for store in source.stores:
            refuse_part(store, what)
    return source


def _bytes(name: str, value: Size | None) -> int | None:
    return None if value is None else parse_bytes(value, name)


def _memory(name: str, value: Size | None) -> int | None:
    nbytes = _bytes(name, value)
    if nbytes is not None and 0 < nbytes < _LEAST:
        raise MemoryBudgetError(f"{name}={value!r} is {nbytes} bytes: did you mean '{nbytes}GB'?")
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if name == "memory" and nbytes is not None and nbytes > most:
        log.warning("memory=%r is more than this machine has: %s", value, format_bytes(most))
    return nbytes
