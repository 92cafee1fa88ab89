"""Checks of parts of a dataset: owners and edges of one part, and all parts together. Called by verify."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from gids import _core
from gids.errors import FormatError
from gids.store.array_checks import MARK_ROWS
from gids.store.files import Locator, map_array, read_manifest
from gids.store.manifest import OWNER, Manifest, NodesEntry, Part, RelationEntry
from gids.store.names import describe_type
from gids.store.part import part_name

_BLOCK = 1 << 20


def owner_faults(nodes: NodesEntry, part: Part, locate: Locator) -> Iterator[str]:
    """Yield one line if an owner is no part, or if the part does not own as many nodes as it says."""
    entry = nodes.arrays[OWNER]
    path, owners = locate.array(entry), map_array(locate.array(entry), entry)
    held = 0
    for first in range(0, nodes.count, _BLOCK):
        block = owners[first : first + _BLOCK]
        wrong = np.flatnonzero(block >= part.count)
        if len(wrong):
            bad = first + int(wrong[0])
            yield f"{path}: owner[{bad}] is {owners[bad]}; it must be from 0 to {part.count - 1}"
            return
        held += int(np.count_nonzero(block == part.index))
    if held != nodes.held:
        yield f"{path}: {held} nodes belong to part {part.index}, but the manifest says {nodes.held}"


def edge_faults(
    relation: RelationEntry, destinations: NodesEntry, part: Part, locate: Locator
) -> Iterator[str]:
    """Yield a line if the part has edges to a node of another part, and one if an edge id is repeated.

    destinations: the entry of the destinations' type. The values of indptr and edge_ids are in range.
    """
    arrays = {role: map_array(locate.array(entry), entry) for role, entry in relation.arrays.items()}
    owners = map_array(locate.array(destinations.arrays[OWNER]), destinations.arrays[OWNER])
    for first in range(0, destinations.count, _BLOCK):
        degrees = np.diff(arrays["indptr"][first : first + _BLOCK + 1])
        foreign = np.flatnonzero((degrees > 0) & (owners[first : first + _BLOCK] != part.index))
        if len(foreign):
            bad = first + int(foreign[0])
            yield (
                f"{locate.array(relation.arrays['indptr'])}: node {bad} has in-edges here, but belongs to "
                f"part {owners[bad]}; this is part {part.index}"
            )
            break
    ids = arrays["edge_ids"]
    marks = np.empty(min(MARK_ROWS, relation.count), np.uint8)
    for lowest in range(0, relation.count, MARK_ROWS):
        marks[:] = 0
        for first in range(0, len(ids), _BLOCK):
            bad_at = _core.mark_positions(ids[first : first + _BLOCK], relation.count, lowest, marks)
            if bad_at is not None:
                at = first + bad_at
                path = locate.array(relation.arrays["edge_ids"])
                yield f"{path}: edge_ids[{at}] is {ids[at]}, as is an entry before it"
                return


def directory_faults(paths: Sequence[Path]) -> Iterator[str]:
    """Yield one line for each way in which the parts of a directory do not fit together."""
    manifests: dict[Path, Manifest] = {}
    for path in paths:
        try:
            manifests[path] = read_manifest(path)
        except (FormatError, OSError) as error:
            yield str(error)
            return
    whole = [path for path, manifest in manifests.items() if manifest.part is None]
    if whole:
        yield f"{whole[0]} is not a part, but a whole dataset"
        return
    first_path, first = next(iter(manifests.items()))
    assert first.part is not None
    count = first.part.count
    names = {path.name for path in paths}
    yield from (
        f"{first_path.parent} has no {part_name(i)}, part {i} of {count}: copy it there"
        for i in range(count)
        if part_name(i) not in names
    )
    for path, manifest in manifests.items():
        assert manifest.part is not None
        if path.name != part_name(manifest.part.index):
            yield f"{path} is {manifest.part}: its name must be {part_name(manifest.part.index)}"
        for what, property_of in _SAME.items():
            if property_of(manifest) != property_of(first):
                yield f"{path} and {first_path} differ in {what}: they are not parts of one dataset"
                return
    if len(manifests) != count:
        return
    for index, nodes in enumerate(first.nodes):
        total = sum(m.nodes[index].held or 0 for m in manifests.values())
        if total != nodes.count:
            yield f"the parts hold {total} nodes of {nodes.type!r}; there are {nodes.count}"
    for index, relation in enumerate(first.relations):
        total = sum(m.relations[index].held or 0 for m in manifests.values())
        if total != relation.count:
            name = describe_type(relation.type)
            yield f"the parts hold {total} edges of {name}; there are {relation.count}"


def _part_of(manifest: Manifest) -> tuple[int, str, str]:
    part = manifest.part
    assert part is not None
    return part.count, part.of, part.method


_SAME: dict[str, Callable[[Manifest], object]] = {
    "the dataset that was partitioned": _part_of,
    "their nodes": lambda m: [(n.type, n.count) for n in m.nodes],
    "their relations": lambda m: [(r.type, r.count, r.sorted_by) for r in m.relations],
    "the owners of nodes": lambda m: [n.arrays[OWNER].crc32c for n in m.nodes],
    "their tables": lambda m: [(t.name, t.dtype, t.shape, t.page_bytes) for t in m.tables],
}
