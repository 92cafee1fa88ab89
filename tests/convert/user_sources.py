"""What users have: a function for each form writes a small source, and returns what the dataset must hold."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import save_arrays

from gids.store.names import RELATION, Relation

N, E = 60, 300
RNG = np.random.default_rng(3)
EDGES = RNG.integers(0, N, (2, E))
FEAT = RNG.standard_normal((N, 6), np.float32)
WEIGHT = RNG.standard_normal((E, 2))
YEAR = RNG.integers(1990, 2020, (N, 1))
CLASSES = RNG.integers(0, 9, N)
GAPS = np.where(RNG.random(N) < 0.3, np.nan, CLASSES).astype(np.float32)  # labels; NaN: none
KNOWN = np.nan_to_num(GAPS, nan=-1).astype(np.int64)
SPLITS = {"train": [5, 3, 9], "val": [11, 2], "test": [7, 8, 0, 4]}
OGB_SPLITS = {"valid" if name == "val" else name: np.array(ids) for name, ids in SPLITS.items()}
MAG240M = "mag240m_kddcup2021"


@dataclass
class Expected:
    """What a dataset must hold: tables by name, edges (2, E), labels, splits, and numbers of nodes of types
    without tables. said: lines that the conversion prints."""

    tables: dict[str, Any]
    edges: dict[Relation, np.ndarray]
    labels: dict[str, np.ndarray] = field(default_factory=dict)
    splits: dict[str, Any] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)
    said: tuple[str, ...] = ()


def random_edges(counts: dict[str, int], sizes: dict[Relation, int]) -> dict[Relation, np.ndarray]:
    """Edges of relations between types of these numbers of nodes."""
    return {r: RNG.integers(0, [[counts[r[0]]], [counts[r[2]]]], (2, size)) for r, size in sizes.items()}


def csv(path: Path, values: Any) -> None:
    """Write a gzipped text without a header, as pandas does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(",".join(str(v) for v in np.atleast_1d(row)) + "\n" for row in values)
    path.with_name(path.name + ".csv.gz").write_bytes(gzip.compress(text.encode()))


# ---- OGB ----


def papers100m(root: Path) -> Expected:
    """Compressed .npz files."""
    (root / "raw").mkdir(parents=True)
    arrays = {"edge_index": EDGES, "node_feat": FEAT, "node_year": YEAR, "edge_attr": WEIGHT}
    np.savez_compressed(root / "raw/data.npz", **arrays, num_nodes_list=[N], num_edges_list=[E])
    np.savez_compressed(root / "raw/node-label.npz", node_label=GAPS[:, None])
    for part, ids in OGB_SPLITS.items():
        csv(root / f"split/time/{part}", ids)
    tables = {"_N.feat": FEAT, "_N.year": YEAR, "_N._E._N.attr": WEIGHT}
    return Expected(tables, {RELATION: EDGES}, {"_N": KNOWN[:, None]}, {"_N": SPLITS})


def products(root: Path) -> Expected:
    """Text, and the split in a file of torch."""
    texts = {"edge": EDGES.T, "node-feat": FEAT, "node-label": CLASSES}
    for name, values in {**texts, "num-node-list": [N], "num-edge-list": [E]}.items():
        csv(root / "raw" / name, values)
    (root / "split/sales").mkdir(parents=True)
    torch.save({k: torch.from_numpy(v) for k, v in OGB_SPLITS.items()}, root / "split/sales/split_dict.pt")
    said = ("has one direction of each edge; --reverse-edges",)
    return Expected({"_N.feat": FEAT}, {RELATION: EDGES}, {"_N": CLASSES[:, None]}, {"_N": SPLITS}, said=said)


def mag(root: Path) -> Expected:
    """Several types; only papers have features, labels and splits."""
    counts = {"author": 30, "institution": 5, "paper": N}
    edges = random_edges(
        counts,
        {
            ("author", "affiliated_with", "institution"): 40,
            ("author", "writes", "paper"): 200,
            ("paper", "cites", "paper"): 90,
        },
    )
    raw, tables = root / "raw", {"paper.feat": FEAT, "paper.year": YEAR}
    csv(raw / "num-node-dict", [list(counts), list(counts.values())])
    csv(raw / "triplet-type-list", list(edges))
    csv(raw / "nodetype-has-feat", [list(counts), ["False", "False", "True"]])
    for relation, pairs in edges.items():
        folder, types = raw / "relations" / "___".join(relation), np.full((pairs.shape[1], 1), 2)
        csv(folder / "edge", pairs.T)
        csv(folder / "num-edge-list", [pairs.shape[1]])
        csv(folder / "edge_reltype", types)
        tables[".".join([*relation, "reltype"])] = types
    csv(raw / "node-feat/paper/node-feat", FEAT)
    csv(raw / "node-feat/paper/node_year", YEAR)
    csv(raw / "node-label/paper/node-label", CLASSES)
    for part, ids in OGB_SPLITS.items():
        csv(root / f"split/time/paper/{part}", ids)
    labels = {"paper": CLASSES[:, None]}
    return Expected(tables, edges, labels, {"paper": SPLITS}, {"author": 30, "institution": 5})


def mag240m(root: Path) -> Expected:
    counts, folder = {"paper": N, "author": 80, "institution": 11}, root / MAG240M
    edges = random_edges(
        counts,
        {
            ("author", "affiliated_with", "institution"): 100,
            ("author", "writes", "paper"): 200,
            ("paper", "cites", "paper"): 150,
        },
    )
    for relation, pairs in edges.items():
        save_arrays(folder / "processed" / "___".join(relation), edge_index=pairs)
    feat, year = FEAT.astype(np.float16), YEAR[:, 0]
    save_arrays(folder / "processed/paper", node_feat=feat, node_label=GAPS, node_year=year)
    torch.save({**counts, "num_classes": 153}, folder / "meta.pt")
    torch.save(OGB_SPLITS, folder / "split_dict.pt")
    (folder / "RELEASE_v1.txt").touch()
    tables, nodes = {"paper.feat": feat, "paper.year": year}, {"author": 80, "institution": 11}
    return Expected(tables, edges, {"paper": KNOWN}, {"paper": SPLITS}, nodes)


# ---- IGB ----


def igbh(root: Path) -> Expected:
    """Papers have files without a header, as in the full size; the number of fos is that of the edges."""
    feat = {
        "paper": RNG.standard_normal((N, 1024), np.float32),
        "author": RNG.standard_normal((80, 4), np.float32),
        "institute": FEAT[:7],
    }
    edges = random_edges(
        {ntype: len(rows) for ntype, rows in feat.items()} | {"fos": 30},
        {
            ("paper", "cites", "paper"): 200,
            ("author", "affiliated_to", "institute"): 100,
            ("paper", "topic", "fos"): 90,
        },
    )
    for relation, pairs in edges.items():
        save_arrays(root / "processed" / "__".join(relation), edge_index=pairs.T)
    for ntype, rows in feat.items():
        save_arrays(root / "processed" / ntype, node_feat=rows)
    paper = root / "processed/paper"
    save_arrays(paper, node_label_2K=CLASSES + 100.0)
    feat["paper"].tofile(paper / "node_feat.npy")
    CLASSES.astype(np.float32).tofile(paper / "node_label_19.npy")
    np.save(paper / "paper_id_index_mapping.npy", {7: 0}, allow_pickle=True)
    count = int(edges["paper", "topic", "fos"][1].max()) + 1
    return Expected(
        {f"{ntype}.feat": rows for ntype, rows in feat.items()},
        edges,
        {"paper": CLASSES},
        {"paper": {"train": range(36), "val": range(36, 48), "test": range(48, N)}},
        {"fos": count},
        (
            f"'fos' nodes have no features and no count: assuming {count} nodes",
            "left out node_label_2K.npy",
            "use --self-loops",
        ),
    )


# ---- GraphBolt ----


def entry(path: str, kind: str = "numpy", **more: Any) -> dict[str, Any]:
    return {"path": path, "format": kind, "in_memory": False, **more}


def _write_yaml(root: Path, meta: dict[str, Any], ntype: str | None, seeds: str) -> None:
    """Write metadata.yaml with a task, and the task's files."""
    yaml = pytest.importorskip("yaml")
    task: dict[str, Any] = {"name": "node_classification", "num_classes": 10}
    for split, ids in SPLITS.items():
        part = "validation" if split == "val" else split
        save_arrays(root / "set", **{f"{part}_seeds": np.array(ids), f"{part}_labels": CLASSES[ids]})
        names = {"seeds": seeds, "labels": "labels"}
        data = [entry(f"set/{part}_{file}.npy", name=name) for file, name in names.items()]
        task[f"{part}_set"] = [{"data": data, **({"type": ntype} if ntype else {})}]
    (root / "metadata.yaml").write_text(yaml.safe_dump({**meta, "tasks": [task]}))


def _placed() -> np.ndarray:
    """The labels of all nodes, of which only those of a split have one."""
    ids = np.concatenate(list(SPLITS.values()))
    labels = np.full(N, -1)
    labels[ids] = CLASSES[ids]
    return labels


def graphbolt(root: Path) -> Expected:
    """The homogeneous example of its documentation. The features of the sampler are listed twice."""
    (root / "edges").mkdir(parents=True)
    np.savetxt(root / "edges/e.csv", EDGES.T, fmt="%d", delimiter=",")
    save_arrays(root / "data", feat=FEAT)
    torch.save(torch.from_numpy(WEIGHT), root / "data/weight.pt")
    feature = entry("data/feat.npy", domain="node", name="feat", type=None)
    graph = {"nodes": [{"num": N}], "edges": [{"format": "csv", "path": "edges/e.csv"}]}
    weight = entry("data/weight.pt", "torch", domain="edge", name="weight")
    meta = {"graph": {**graph, "feature_data": [feature]}, "feature_data": [feature, weight]}
    _write_yaml(root, meta, None, "seeds")
    tables = {"_N.feat": FEAT, "_N._E._N.weight": WEIGHT}
    return Expected(tables, {RELATION: EDGES}, {"_N": _placed()}, {"_N": SPLITS})


def graphbolt_types(root: Path) -> Expected:
    """Several types, and the older name of seeds."""
    likes, feat = RNG.integers(0, [[30], [N]], (2, 90)), {"user": FEAT[:30].astype(np.float16), "item": FEAT}
    save_arrays(root / "edges", likes=likes, also=EDGES)
    save_arrays(root / "data", **feat)
    nodes = [{"type": "user", "num": 30}, {"type": "item", "num": N}]
    edges = [{"type": "user:like:item", **entry("edges/likes.npy")}]
    edges += [{"type": "item:also:item", **entry("edges/also.npy")}]
    features = [entry(f"data/{ntype}.npy", domain="node", type=ntype, name="feat") for ntype in feat]
    meta = {"graph": {"nodes": nodes, "edges": edges}, "feature_data": features}
    _write_yaml(root, meta, "item", "seed_nodes")
    return Expected(
        {f"{ntype}.feat": rows for ntype, rows in feat.items()},
        {("user", "like", "item"): likes, ("item", "also", "item"): EDGES},
        {"item": _placed()},
        {"item": SPLITS},
    )


# ---- MATLAB ----


def _matrix() -> Any:
    """A sparse matrix without repeats, and its edges in the order of its columns."""
    sparse = pytest.importorskip("scipy.sparse")
    matrix = sparse.random(N, N, 0.1, "csc", random_state=1)
    matrix.sort_indices()
    coo = matrix.tocoo()
    order = np.lexsort((coo.row, coo.col))
    return matrix, np.stack([coo.row[order], coo.col[order]])


def facebook(path: Path) -> Expected:
    """Facebook100: gender is the label, every other attribute is one-hot, as in PyG's LINKXDataset."""
    io = pytest.importorskip("scipy.io")
    (matrix, edges), info = _matrix(), RNG.integers(0, 4, (N, 7)).astype(np.uint16)
    io.savemat(path, {"A": (matrix != 0).astype(float), "local_info": info}, do_compression=True)
    one_hot = [info[:, i, None] == np.unique(info[:, i]) for i in range(7) if i != 1]
    feat = np.concatenate(one_hot, axis=1).astype(np.float32)
    return Expected({"_N.feat": feat}, {RELATION: edges}, {"_N": info[:, 1].astype(np.int64) - 1})


def matlab(path: Path) -> Expected:
    """Other names, weights, sparse features."""
    io = pytest.importorskip("scipy.io")
    (matrix, edges), dense = _matrix(), np.arange(N * 2.0).reshape(N, 2)
    arrays = {"Network": matrix, "Attributes": matrix[:, :9], "Label": CLASSES[:, None], "Class": ["x"]}
    io.savemat(path, {**arrays, "dense": dense})
    tables = {"_N.Attributes": matrix[:, :9].toarray(), "_N.dense": dense, "_N._E._N.weight": matrix.data}
    return Expected(tables, {RELATION: edges}, {"_N": CLASSES}, said=("left out 'Class'",))


# ---- tables and arrays ----


def tables(root: Path, suffix: str = ".parquet") -> Expected:
    """nodes and edges in Parquet or Arrow files."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    feat = pa.FixedSizeListArray.from_arrays(pa.array(FEAT.reshape(-1)), 6)
    if suffix == ".arrow":
        feat = pa.array(list(FEAT), pa.list_(pa.float32()))
    nodes = {
        "id": np.arange(N),
        "feat": feat,
        "year": np.arange(N, dtype=np.int32),
        "label": pa.array([None if np.isnan(label) else label for label in GAPS.tolist()]),
        "train_mask": np.arange(N) < 40,
        "title": ["x"] * N,
        **{f"pos_{i}": FEAT[:, i].astype(np.float64) for i in range(3)},
    }
    edges = pa.table({"src": EDGES[0], "dst": EDGES[1], "w": np.arange(E, dtype=np.float32)})
    root.mkdir()
    for name, table in (("nodes", pa.table(nodes)), ("edges", edges)):
        if suffix == ".parquet":
            pq.write_table(table, root / f"{name}.parquet", row_group_size=17)
            continue
        with pa.OSFile(str(root / f"{name}.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
            out.write_table(table, max_chunksize=17)
    expected = {
        "_N.feat": FEAT,
        "_N.year": np.arange(N, dtype=np.int32),
        "_N.pos": FEAT[:, :3].astype(np.float64),
        "_N._E._N.w": np.arange(E, dtype=np.float32),
    }
    said = ("left out columns of '_N': 'title': of type string",)
    return Expected(expected, {RELATION: EDGES}, {"_N": KNOWN}, {"_N": {"train": range(40)}}, said=said)


def arrow(root: Path) -> Expected:
    return tables(root, ".arrow")


def directory(root: Path) -> Expected:
    """Arrays of several types. Authors have no features, and a name has a slash."""
    writes, order = RNG.integers(0, [[80], [N]], (2, 99)), np.argsort(EDGES[1], kind="stable")
    arrays = {
        "nodes/paper/feat": FEAT,
        "nodes/paper/label": CLASSES,
        "nodes/paper/train_idx": np.array(SPLITS["train"], np.int32),
        "nodes/paper/test_mask": np.arange(N) > 50,
        "nodes/author/num_nodes": np.array(80),
        "nodes/a%2Fb/feat": FEAT[:5],
        "edges/author.writes.paper/edge_index": writes,
        "edges/author.writes.paper/weight": WEIGHT[:99],
        "edges/paper.cites.paper/indptr": np.searchsorted(EDGES[1, order], np.arange(N + 1)),
        "edges/paper.cites.paper/indices": EDGES[0, order],
        "edges/paper.cites.paper/edge_ids": order,
    }
    save_arrays(root, **arrays)
    (root / "README.txt").write_text("hello")
    return Expected(
        {"paper.feat": FEAT, "a/b.feat": FEAT[:5], "author.writes.paper.weight": WEIGHT[:99]},
        {("author", "writes", "paper"): writes, ("paper", "cites", "paper"): EDGES},
        {"paper": CLASSES},
        {"paper": {"train": SPLITS["train"], "test": range(51, N)}},
        {"author": 80},
    )


SOURCES: dict[str, Callable[[Path], Expected]] = {
    "ogbn_papers100M": papers100m,
    "ogbn_products": products,
    "ogbn_mag": mag,
    "mag240m": mag240m,
    "igbh": igbh,
    "graphbolt": graphbolt,
    "graphbolt of several types": graphbolt_types,
    "reed.mat": facebook,
    "other.mat": matlab,
    "parquet": tables,
    "arrow": arrow,
    "directory": directory,
}
"""By the name of their file or directory."""
