"""`gids info PATH`: print what a dataset contains; `--system`: describe this machine."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gids.cli.arguments import add_allow_dir, add_path, adder, escaped
from gids.sizes import format_bytes

if TYPE_CHECKING:
    from gids.store import FeatureStore
    from gids.store.manifest import NodesEntry, RelationEntry


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "info",
        help="print what a dataset contains, or what this machine can do",
        description="Print what a dataset contains. With --system, print what this machine can do, and how "
        "to make it faster.",
    )
    option = adder(parser)
    add_path(parser, "PATH", "a dataset; with --system, any path (default: .)", nargs="?")
    option("--system", True, "describe this machine and the file system of PATH")
    option("--json", True, "print one JSON object")
    add_allow_dir(parser)


def run(args: argparse.Namespace) -> int:
    if args.system:
        from gids.cli.system import as_table, describe_system

        items = describe_system(args.path or Path())
        print(json.dumps([asdict(i) for i in items], indent=2) if args.json else "\n".join(as_table(items)))
        return 0
    if args.path is None:
        raise ValueError("PATH is missing: give a dataset, or --system")
    from gids.store import FeatureStore

    contents = describe(FeatureStore(args.path, allow_dirs=args.allow_dir))
    print(json.dumps(contents, indent=2) if args.json else "\n".join(map(escaped, _lines(contents))))
    return 0


def describe(store: FeatureStore) -> dict[str, Any]:
    """Describe a dataset, as JSON; sizes in bytes. Reads the manifest and the headers of files."""
    from gids.convert.layout import explain_pages

    manifest = store.manifest
    return {
        "path": str(store.path),
        **({} if store.part is None else {"part": asdict(store.part)}),
        "tables": [
            {
                "name": t.name,
                "kind": t.kind,
                "rows": t.row_count,
                **({} if store.part is None else {"ids": t.id_count}),
                "shape": list(t.shape),
                **({} if t.columns is None else {"columns": list(t.columns)}),
                "dtype": str(t.stored_dtype).removeprefix("torch."),
                "scale": t.scale,
                "row_bytes": t.row_bytes,
                "page_bytes": t.page_bytes,
                "rows_per_page": t.rows_per_page,
                "page_size": explain_pages(t),
                "pages": t.page_count,
                "bytes": t.page_count * t.page_bytes,
                "unused_bytes": t.page_count * t.page_bytes - t.row_count * t.row_bytes,
                "ordered": t.order is not None,
                "shards": [str(p) for p in t.shard_paths],
                "shard_bytes": [
                    t.shard_page_count(shard) * t.page_bytes for shard in range(len(t.shard_paths))
                ],
            }
            for t in store.tables.values()
        ],
        "nodes": [_nodes(n) for n in manifest.nodes],
        "relations": [
            {"type": list(r.type), "edges": r.count, **_held(r), "topology": _topology(r)}
            for r in manifest.relations
        ],
    }


def _nodes(nodes: NodesEntry) -> dict[str, Any]:
    from gids.store.names import HEAT_ROLES, SPLITS

    labels = nodes.arrays.get("label")
    return {
        "type": nodes.type,
        "count": nodes.count,
        **_held(nodes),
        "labels": None if labels is None else labels.describe(),
        "splits": {s: nodes.arrays[f"{s}_idx"].shape[0] for s in SPLITS if f"{s}_idx" in nodes.arrays},
        "times": nodes.arrays["time"].dtype if "time" in nodes.arrays else None,
        "ids": None if "id" not in nodes.arrays else "text" if "id_offset" in nodes.arrays else "int64",
        "heat": [method for method, role in HEAT_ROLES.items() if role in nodes.arrays],
    }


def _held(entry: NodesEntry | RelationEntry) -> dict[str, int]:
    """In a part of a dataset, the number of nodes or edges that it holds."""
    return {} if entry.held is None else {"held": entry.held}


def _topology(relation: RelationEntry) -> dict[str, Any] | None:
    if not relation.arrays:
        return None
    return {
        "index_dtype": relation.arrays["indices"].dtype,
        "edge_ids": "edge_ids" in relation.arrays,
        "times": relation.arrays["time"].dtype if "time" in relation.arrays else None,
        "sorted_by": relation.sorted_by,
    }


def _lines(contents: dict[str, Any]) -> list[str]:
    lines = [contents["path"], "tables"]
    if "part" in contents:
        part = "part {index} of {count}, by {method}, of the dataset {of}".format(**contents["part"])
        lines.insert(1, f"{part}: it holds some of the rows and edges; ids are those of the whole dataset")
    for t in contents["tables"]:
        shape = " x ".join(map(str, [t["rows"], *t["shape"]]))
        pages = f"{t['pages']} page{'s' * (t['pages'] != 1)} of {t['page_bytes']} B"
        rows = f"{t['rows_per_page']} row{'s' * (t['rows_per_page'] > 1)} each"
        rows += ", reordered" * t["ordered"]
        gap = 1 - t["rows_per_page"] * t["row_bytes"] / t["page_bytes"]
        unused = f", {gap:.0%} of a page unused" * (gap >= 0.05)
        dtype = f"{t['dtype']} with a scale per {t['scale']}," if t["scale"] else t["dtype"]
        lines.append(f"  {t['name']}  {dtype} {shape}  {pages}, {rows}  {format_bytes(t['bytes'])}{unused}")
        lines.append(f"    {t['page_size']}")
        lines += [f"    columns: {', '.join(t['columns'])}"] if "columns" in t else []
        for path, size in zip(t["shards"], t["shard_bytes"], strict=True):
            share = f"  {format_bytes(size)}, {size / max(1, t['bytes']):.1%}" * (len(t["shards"]) > 1)
            lines.append(f"    {path}{share}")
    lines.append("nodes")
    for n in contents["nodes"]:
        splits = ", ".join(f"{split} {count}" for split, count in n["splits"].items())
        heat = f"heat {', '.join(n['heat'])}" if n["heat"] else ""
        times = f"times {n['times']}" if n["times"] else ""
        held = f", {n['held']} held" if "held" in n else ""
        labels = f"labels {n['labels']}" if n["labels"] else ""
        ids = f"ids {n['ids']}" if n["ids"] else ""
        parts = [f"{n['count']}{held}", ids, labels, splits, times, heat]
        lines.append(f"  {n['type']}  " + "  ".join(p for p in parts if p))
    lines.append("relations" if contents["relations"] else "relations: none")
    for r in contents["relations"]:
        graph = r["topology"]
        held = f", {r['held']} held" if "held" in r else ""
        kind = "no topology" if graph is None else f"{graph['index_dtype']} in-edges"
        ids = ", edge ids" if graph and graph["edge_ids"] else ""
        times = f", times {graph['times']}" if graph and graph["times"] else ""
        order = f", sorted by the times of {graph['sorted_by']}" if graph and graph["sorted_by"] else ""
        lines.append(f"  {'.'.join(r['type'])}  {r['edges']} edges{held}  {kind}{ids}{times}{order}")
    return lines
