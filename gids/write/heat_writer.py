"""Adds the heat of nodes to an existing dataset, in one step. Called by `gids heat`.

New array files are written beside the old ones; then a manifest that names them replaces the old manifest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from gids.errors import FormatError
from gids.store.manifest import ArrayEntry, NodesEntry, heat_dtype
from gids.store.names import HEAT_ROLES, encode_path
from gids.write.files import sync_directory, write_array
from gids.write.publish import changing, replace_manifest


def write_heat(
    path: str | os.PathLike[str],
    method: str,
    heat: Mapping[str, np.ndarray],
    *,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Store the heat of some node types, and replace what this method stored for them before.

    method: a key of HEAT_ROLES. heat: node type -> number[num_nodes], finite and 0 or more; stored as float32
    (uint32 for "out-degree"). check: called when no other process can replace the dataset any more.

    Even if this process is killed, a reader sees all of the new heat or none; the next call removes what was
    left. Blocks while another process writes to the dataset. Raises what check raises, FormatError for heat
    that does not match the dataset, StorageError if it cannot be written.
    """
    root = Path(os.path.abspath(path))
    role = HEAT_ROLES[method]
    with changing(root, "storing heat") as manifest:
        check()
        _check(heat, {n.type: n.count for n in manifest.nodes}, root.name)
        replaced = [n.arrays[role].path for n in manifest.nodes if n.type in heat and role in n.arrays]
        nodes = tuple(
            replace(n, arrays={**n.arrays, role: _write_array(root, n, role, heat[n.type])})
            if n.type in heat
            else n
            for n in manifest.nodes
        )
        sync_directory(root / "nodes")
        replace_manifest(root, replace(manifest, nodes=nodes))
        for old in replaced:
            with suppress(OSError):  # the new manifest is on disk, and names others
                (root / old).unlink()


def _check(heat: Mapping[str, np.ndarray], counts: Mapping[str, int], name: str) -> None:
    for ntype, values in heat.items():
        if ntype not in counts:
            raise FormatError(f"no node type {ntype!r} in {name} (has {', '.join(map(repr, counts))})")
        if values.shape != (counts[ntype],):
            raise FormatError(
                f"heat of {ntype!r} is {list(values.shape)}, but {name} has {counts[ntype]} nodes"
            )
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise FormatError(f"heat of {ntype!r} has values that are negative or not finite")


def _write_array(root: Path, nodes: NodesEntry, role: str, values: np.ndarray) -> ArrayEntry:
    # There are two names; take the one that the manifest does not use, so that the old file stays until the
    # rename. A file that a killed process left is removed, not overwritten: a reader may have mapped it.
    stem = f"nodes/{encode_path(nodes.type)}.{role}"
    used = nodes.arrays[role].path if role in nodes.arrays else ""
    name = f"{stem}.1.npy" if used == f"{stem}.npy" else f"{stem}.npy"
    (root / name).unlink(missing_ok=True)
    return write_array(root, name, heat_dtype(role), values.shape, [values])
