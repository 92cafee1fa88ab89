"""gids.distributed.open: a dataset whose rows, and perhaps edges, are divided among ranks. The user's entry.

Loaders take a GroupSource like any other Source. It replaces what they sample by and what they read by.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from gids.cache.feature_cache import page_weights
from gids.cuda import open_device
from gids.distributed.cooperative import Cooperation
from gids.distributed.owners import Owners, PlacedOwners, hash_owners, placed_owners, range_owners
from gids.distributed.sampling import GroupSampling, whole_graphs
from gids.distributed.stream import LockstepRows
from gids.errors import FormatError
from gids.loader import source as loader_source
from gids.loader.feature_loader import FeatureLoader
from gids.loader.ranks import Group, Ranks
from gids.loader.row_source import RowSource, StepSampling, Tables, chosen_tables
from gids.loader.sampling import sample_steps
from gids.loader.source import Source
from gids.sampler import Block, Topology
from gids.store import FeatureStore, Graph, Table, graphs_of
from gids.store.names import Relation
from gids.store.part import part_name, part_paths

OwnedBy = Literal["hash", "range", "heat"]
_BLOCK = 1 << 20


class GroupSource(RowSource):
    """A dataset that the ranks of a process group read together. Made by gids.distributed.open().

    Attributes: those of RowSource, of this rank's part; group: the ranks that this one exchanges with; part:
    this rank's, or None; sampling_counts: what was exchanged to sample since the beginning; everyone: all
    ranks.
    """

    together = True

    def __init__(self, local: Source, group: Group, everyone: Group, owned_by: OwnedBy, bulk: int) -> None:
        super().__init__(local.stores, local.matched, local.options, local.lender)
        self.group, self.everyone, self._owned_by, self.bulk = group, everyone, owned_by, bulk
        self._local = local
        self.part = self.store.part
        self.sampling_counts = {"nodes asked": 0, "edges sent": 0, "bytes sent": 0}
        self._owners: dict[tuple[Any, ...], Owners] = {}

    def graphs(self) -> list[Graph]:
        if self.part is None:
            return graphs_of(self.store)
        counts = {relation: self.store.num_edges(relation) for relation in self.store.relations}
        return whole_graphs(graphs_of(self.store), counts)

    def ranks(self, rank: int | None, world_size: int | None) -> Ranks:
        if rank is not None or world_size is not None:
            raise ValueError(
                f"rank={rank}, world_size={world_size}: all ranks of gids.distributed.open() share the "
                "seeds. For a loader of one rank alone, open the whole dataset with gids.open()"
            )
        return Ranks(self.everyone.rank, self.everyone.size, lambda: nullcontext(self.everyone))

    def sampling(
        self, topology: Topology, ranks: Ranks, device: torch.device, *, cooperative: bool
    ) -> StepSampling:
        self._check_device(device, cooperative)
        if self.part is None and not cooperative:
            return StepSampling(sample_steps, self.bulk)
        owners = [self._node_owners(ntype) for ntype in topology.node_types]
        of_all: tuple[Any, ...] = self.group, ranks, topology, owners
        divided: GroupSampling | None = None
        if self.part is not None:
            graphs = graphs_of(self.store)
            local = Topology(graphs[0] if topology.homogeneous else graphs)
            divided = GroupSampling(*of_all, local=local, counts=self.sampling_counts)
        if not cooperative:
            assert divided is not None
            return StepSampling(divided.sample_steps, self.bulk)
        columns = self.everyone.size // self.group.size
        column = self.everyone.rank % columns
        together = Cooperation(*of_all, divided=divided, column=column, columns=columns)
        return StepSampling(together.sample_steps, self.bulk)

    def _check_parts(self, tables: Mapping[str, Table]) -> None:
        """Raise ValueError for a table of another part than this rank's."""
        for name, table in tables.items():
            if table.in_part not in (None, None if self.part is None else self.store.locate.contents):
                raise ValueError(
                    f"{name} is in a part of another dataset: give the table of the whole dataset, or add it "
                    "to this dataset before `gids partition`"
                )

    def _check_device(self, device: torch.device, cooperative: bool) -> None:
        if device.type == "cpu":
            return
        whole = ", or gids.distributed.open() of the whole dataset"
        if cooperative:
            what, instead = "cooperative minibatches are sampled on the CPU", ""
        elif self.part is not None:
            what, instead = "a partitioned dataset is sampled on the CPU", whole
        else:
            return
        raise ValueError(f"device={str(device)!r}: {what}. Use device='cpu' and move minibatches{instead}")

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
    ) -> LockstepRows:
        """Collective: all ranks must have tables of the same layout."""
        chosen = chosen_tables(self, tables)
        loader: FeatureLoader | None = None

        def make() -> dict[str, Any]:
            nonlocal loader
            self._check_parts(chosen)
            # Rows that are exchanged are decoded by the rank that gets them.
            loader = self._local.feature_loader(
                user,
                {name: (t if cooperative else t.stored()).by_row() for name, t in chosen.items()},
                dtype=dtype if cooperative else None,
                device=device,
                minibatch_rows=minibatch_rows,
                pin_memory=pin_memory and cooperative,  # rows that are exchanged are copied
            )
            return {"device": torch.device(device).type} | {n: _layout(t) for n, t in chosen.items()}

        try:
            self.everyone.agree(make, "opened tables", "All ranks must load the same tables")
        except Exception:
            if loader is not None:
                loader.leave(user)
            raise
        assert loader is not None
        owners = None
        if not cooperative:
            owners = {name: self.owners_of(chosen[name], loader.line_bytes) for name in sorted(chosen)}
        for name, of_rows in (owners or {}).items():
            if isinstance(of_rows, PlacedOwners):  # these pages stay in the lines of this rank
                loader.keep_pages(name, of_rows.held)
        return LockstepRows(
            self.group,
            self.everyone,
            loader,
            chosen,
            owners,
            owners_of_edges=self._owners_of_edges,
            dtype=dtype,
            waiting_batches=self.bulk - 1,
        )

    def owners_of(self, table: Table, line_bytes: int = 0) -> Owners | None:
        """The owners of a table's rows; None for edges, whose owner is that of their destination.

        line_bytes: of this rank's memory for cache lines.
        """
        if self.part is not None:
            return self._node_owners(table.type) if isinstance(table.type, str) else None
        key: tuple[Any, ...] = (table.type, table.rows_per_page, table.order is None or table.name)
        if key not in self._owners:
            self._owners[key] = self._dealt([table], table.row_count, table.order)
            if self._owned_by == "heat" and isinstance(table.type, str):
                self._owners[key] = self._placed(table, table.type, self._owners[key], line_bytes)
        return self._owners[key]

    def own_nodes(self, table: str, *, device: str | torch.device = "cpu") -> list[torch.Tensor]:
        """By rank, the nodes whose rows of a table the rank reads itself; it asks other ranks for the rest.

        For gids.sampler.LocalityBias. table: of nodes, such as "paper.feat". device: of the loaders: the
        copies of owners="heat" are in its memory. Collective. Returns bool[num_nodes] on the CPU for each
        rank, the same on all ranks.

        Raises MissingError for an unknown table, ValueError for a table of edges, and for owners="heat" with
        replicas, whose copies are not known to all ranks.
        """
        stored = self.store.table(table)
        if not isinstance(stored.type, str):
            raise ValueError(f"{table} is a table of edges: give a table of nodes")
        columns = self.everyone.size // self.group.size
        cache = self.options.cache
        line_bytes = self.memory
        if torch.device(device).type != "cpu":
            line_bytes = self.lender.device_bytes(open_device(device), cache)
        owners = self.owners_of(stored, line_bytes if cache is None else min(line_bytes, cache))
        assert owners is not None
        if isinstance(owners, PlacedOwners) and columns > 1:
            raise ValueError(f"owners='heat' with replicas={columns}: use 'hash' or 'range', or replicas=1")
        own = [torch.empty(stored.id_count, dtype=torch.bool) for _ in range(self.group.size)]
        for first in range(0, stored.id_count, _BLOCK):
            ids = np.arange(first, min(first + _BLOCK, stored.id_count))
            for rank, nodes in enumerate(own):
                of_rank = owners.seen_by(rank) if isinstance(owners, PlacedOwners) else owners
                nodes[first : first + _BLOCK] = torch.from_numpy(of_rank(ids) == rank)
        return [own[rank // columns] for rank in range(self.everyone.size)]

    def _dealt(self, tables: Sequence[Table], ids: int, order: np.ndarray | None) -> Owners:
        """Owners of so many ids, by "hash" or "range". Rows on a page of the tables have one owner.

        order: Table.order of the only table, or None.
        """
        count, block = self.group.size, max((t.rows_per_page for t in tables), default=1)
        if self._owned_by == "range":
            return range_owners(count, ids, block, order)
        return hash_owners(count, block, order)

    def _placed(self, table: Table, ntype: str, rest: Owners, line_bytes: int) -> Owners:
        """Owners by heat, if the dataset has the heat of these nodes. Collective."""
        methods = self.store.heat_methods(ntype)
        if not methods:
            return rest
        heat = self.store.heat(methods[0], ntype)
        weights = page_weights(heat, table.rows_per_page, table.order)
        tables = {t.name: t for t in (*self.store.tables.values(), table)}  # it may be of another dataset
        nbytes = sum(t.page_count * t.page_bytes for t in tables.values())
        share = line_bytes * table.page_count * table.page_bytes // max(1, nbytes)
        return placed_owners(self.group, table, weights, share, self.options, rest)

    def _owners_of_edges(self, minibatch: Any, relation: Relation) -> np.ndarray:
        """The owners of the edges of a relation that a minibatch reads, in their order."""
        src, _, dst = relation
        nodes = minibatch.input_nodes
        src_ids, dst_ids = (nodes, nodes) if not isinstance(nodes, dict) else (nodes[src], nodes[dst])
        if hasattr(minibatch, "destinations_of"):  # of gids.pyg
            return self._node_owners(dst)(dst_ids[minibatch.destinations_of(relation)].numpy())
        blocks: list[Block] = [b[relation] if isinstance(b, dict) else b for b in minibatch.blocks]
        ends = []
        for block in blocks:
            sources, destinations = block.coo()
            added = block.positions < 0  # reverse edges of a bidirectional subgraph
            ends.append(torch.where(added, src_ids[sources], dst_ids[destinations]))
        return self._node_owners(dst)(torch.cat(ends).numpy())

    def close(self) -> None:
        self._local.close()
        self.group.close()
        self.everyone.close()

    def __repr__(self) -> str:
        part = f", part {self.part.index} of {self.part.count}" if self.part is not None else ""
        return f"GroupSource({self.store.name!r}, rank {self.everyone.rank} of {self.everyone.size}{part})"

    def _node_owners(self, ntype: str) -> Owners:
        """The owners of nodes: of a partitioned dataset, or in cooperative minibatches."""
        key = ("nodes", ntype)
        if key not in self._owners:
            owners = self.store.owners(ntype)
            if owners is not None:
                self._owners[key] = owners.__getitem__
            else:  # nodes of one page belong together, so that one rank reads it
                tables = [t for t in self.store.tables.values() if t.type == ntype]
                orders = {None if t.order is None else t.name for t in tables}
                order = tables[0].order if len(orders) == 1 else None
                self._owners[key] = self._dealt(tables, self.store.num_nodes(ntype), order)
        return self._owners[key]


def open(
    dataset: str | os.PathLike[str],
    *,
    owners: OwnedBy = "hash",
    replicas: int = 1,
    bulk: int = 4,
    **options: Any,
) -> GroupSource:
    """Open a dataset for loaders of several ranks, which read each page once and send each other its rows.

    Call it on every rank, after torch.distributed.init_process_group(), and make the same loaders on every
    rank. Minibatches are the same as without: rank p gets its part of each step.

    Args:
        dataset: the directory that `gids partition` made, of which a rank needs only its part; or a dataset
            that all ranks can read.
        owners: of a dataset that all ranks can read, which rank reads a page: "hash" spreads pages evenly,
            "range" gives a rank successive pages. "heat" is "hash", but ranks hold copies of the hottest
            pages: as many as pay, by the dataset's heat (`gids heat`) and by what it costs here to get a page
            from another rank and from the disk. A partitioned dataset has its owners.
        replicas: ranks that have the same part, c. Of P ranks, rank r has part r // c, and exchanges with the
            P / c ranks whose r % c is the same ("1.5D"). There must be P / c parts.
        bulk: minibatches of a partitioned dataset that are sampled in one go. More save exchanges, and take
            memory.
        options: of gids.open(). ``memory`` is of each rank. ``window`` must be the same on all ranks. Ranks
            that share rows read at random, so ``reads="pack"`` is refused.

    Raises ValueError without a process group, for a number of ranks that does not fit the parts, and if ranks
    give different arguments or datasets; FileNotFoundError for a part that is missing; RankError if another
    rank fails, ends, or does not come within the ``timeout`` of init_process_group(); and the errors of
    gids.open().
    """
    everyone = Group()
    local: Source | None = None

    def say() -> dict[str, Any]:
        nonlocal local
        if not isinstance(dataset, str | os.PathLike):
            raise TypeError(
                "gids.distributed.open() takes the path of one dataset: give a Table of another in tables="
            )
        _check_arguments(owners, replicas, bulk, everyone.size, options)
        local = _open_part(Path(dataset), everyone.rank // replicas, everyone.size // replicas, options)
        said = {"owners": owners, "replicas": replicas, "bulk": bulk, "dataset": _identity(local.store)}
        methods = {ntype: local.store.heat_methods(ntype) for ntype in local.store.node_types}
        return said | {"window": local.options.window, "heat": methods if owners == "heat" else None}

    try:
        cure = "Give every rank the same arguments and the same dataset"
        everyone.agree(say, "called gids.distributed.open()", cure)
    except Exception:
        everyone.close()
        if local is not None:
            local.close()
        raise
    assert local is not None
    group = everyone
    if replicas > 1:
        group = Group([range(column, everyone.size, replicas) for column in range(replicas)])
    return GroupSource(local, group, everyone, owners, bulk)


def _check_arguments(
    owners: object, replicas: object, bulk: object, world_size: int, options: Mapping[str, Any]
) -> None:
    if owners not in get_args(OwnedBy):
        raise ValueError(f"owners={owners!r} must be 'hash', 'range' or 'heat'")
    for name, value in (("replicas", replicas), ("bulk", bulk)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number, 1 or more")
    assert isinstance(replicas, int)
    if options.get("reads") == "pack":
        raise ValueError("reads='pack': ranks that share rows read at random. Leave reads= out")
    if "timeout" in options:
        raise TypeError(
            f"timeout={options['timeout']}: give it to init_process_group(timeout=timedelta(seconds=…))"
        )
    if world_size % replicas:
        raise ValueError(f"replicas={replicas}: the {world_size} ranks cannot be divided by it")


def _open_part(path: Path, index: int, count: int, options: Mapping[str, Any]) -> Source:
    if options.get("reads", "auto") == "auto":
        options = {**options, "reads": "random"}
    if not part_paths(path):
        source = loader_source.open(path, **options)
        if source.store.part is not None:
            source.close()
            raise ValueError(
                f"{path} is one part of a dataset: give the directory of all parts, {path.parent}"
            )
        return source
    mine = path / part_name(index)
    source = loader_source.open(mine, **options)
    part = source.store.part
    if part is not None and (part.index, part.count) == (index, count):
        return source
    source.close()
    if part is None or part.index != index:
        raise FormatError(f"{mine} is not part {index}: partition the dataset again")
    raise ValueError(
        f"{path} has {part.count} parts, for {count} ranks (ranks / replicas): start as many ranks as "
        "there are parts, times replicas, or partition the dataset again"
    )


def _identity(store: FeatureStore) -> str:
    """What all ranks must agree on: the dataset, without the part."""
    if store.part is not None:
        return f"parts of {store.part.of} by {store.part.method}, owners {store.owners_crc:08x}"
    nodes = {ntype: store.num_nodes(ntype) for ntype in store.node_types}
    edges = {str(relation): store.num_edges(relation) for relation in store.relations}
    return f"nodes {nodes}, edges {edges}, content {store.content_crc:08x}"


def _layout(table: Table) -> list[Any]:
    """What ranks that send each other rows of a table rely on, and its content unless it is a part."""
    type_ = table.type if isinstance(table.type, str) else list(table.type)
    rows = [type_, table.id_count, list(table.shape), str(table.dtype), table.scale, table.row_bytes]
    whole = table.held is None
    return [*rows, table.page_bytes, table.order is not None, table.content_crc if whole else None]
