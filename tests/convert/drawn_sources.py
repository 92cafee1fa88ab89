"""Random sources for every reader, and what the datasets made from them must hold.

`draw` is the one place that draws arrays. READERS has a function for each form of source: it writes a draw,
and returns the tables and edges that the dataset must have. `stored` is the model of a conversion of values.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import scipy.sparse
import torch
from datasets import save_arrays
from safetensors.torch import save_file

WHOLE = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
TARGETS = (None, *FLOATS, *WHOLE, "bool")
HOMOGENEOUS = ("_N", "_E", "_N")
NEAR = (0.0, -0.0, 65504, 65520, 3.3e38, 1e39, 1e-40, 6e-8, 2.0**24 + 1, -1, np.nan, np.inf, -np.inf)
_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}  # of a significand
_LARGEST = {name: torch.finfo(getattr(torch, name)).max for name in FLOATS}


@dataclass(frozen=True)
class Values:
    """An array and its type. NumPy has no bfloat16: such values are in a float32 array."""

    array: np.ndarray
    dtype: str

    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(np.array(self.array, order="C")).to(getattr(torch, self.dtype))


@dataclass(frozen=True)
class Draw:
    """feat has a row per node and weight a number per edge; edges: sources and destinations."""

    seed: int
    feat: Values
    weight: Values
    labels: np.ndarray
    edges: np.ndarray
    target: str | None

    @property
    def node_count(self) -> int:
        return len(self.feat.array)


@dataclass
class Written:
    """A source, its options, and what the dataset holds: tables by name, and edges in the order of ids."""

    path: Path
    options: tuple[str, ...]
    tables: dict[str, Values | None]  # None: the source itself is refused, with this name
    edges: dict[tuple[str, str, str], np.ndarray] = field(default_factory=dict)
    labels: dict[str, np.ndarray] = field(default_factory=dict)


def numbers(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random values of a type: small ones, all of its range, the limits of other types, or 0 and 1."""
    kind = rng.choice(["small", "range", "limits", "bits"], p=[0.4, 0.2, 0.3, 0.1])
    if dtype == "bool" or kind == "bits":
        return rng.integers(0, 2, shape).astype("float32" if dtype == "bfloat16" else dtype)
    if dtype in WHOLE:
        limits = np.iinfo(dtype)
        low, high = (max(limits.min, -100), 100) if kind == "small" else (limits.min, limits.max)
        if kind != "limits":
            return rng.integers(low, high, shape, dtype, endpoint=True)
        near = [
            s * (1 << b) + d
            for b in (0, 7, 8, 11, 15, 16, 24, 31, 32, 53, 63)
            for d in (-1, 0, 1)
            for s in (1, -1)
        ]
        return rng.choice(np.array([v for v in near if limits.min <= v <= limits.max], dtype), shape)
    with np.errstate(over="ignore"):
        values = rng.standard_normal(shape)
        if kind == "range":
            values = values * 2.0 ** rng.integers(-140, 127, shape)
        if kind == "limits":
            values = rng.choice(NEAR[: int(rng.integers(1, len(NEAR) + 1))], shape)
        if dtype == "bfloat16":
            return torch.from_numpy(np.asarray(values)).to(torch.bfloat16).to(torch.float32).numpy()
        return np.asarray(values).astype(dtype)


def draw(seed: int, name: str) -> Draw:
    """A source for the reader of this name."""
    rng = np.random.default_rng([seed, *name.encode()])
    node_count = int(rng.integers(2, 12))
    shape = [(), (1,), (3,), (5,), (2, 2), (0,)][rng.choice(6, p=[0.2, 0.15, 0.25, 0.2, 0.15, 0.05])]
    dtype = str(rng.choice(READERS[name][1]))
    # As one --dtype is for both tables, they are of one kind, else most draws would be refused.
    weight = str(rng.choice(["float32", "float64"] if dtype in FLOATS else ["int64", "uint8"]))
    feat = numbers(rng, dtype, (node_count, *shape))
    # No pair is there twice, because matrices in memory add them up.
    pairs = rng.permutation(node_count * node_count - 1)[: rng.integers(1, 20)]
    edges = np.stack(np.divmod(np.append(pairs, node_count * node_count - 1), node_count))
    return Draw(
        seed=seed,
        feat=Values(np.asarray(feat, order=str(rng.choice(["C", "F"]))), dtype),
        weight=Values(numbers(rng, weight, edges.shape[1:]), weight),
        labels=rng.integers(0, 5, (node_count, 1)[: rng.integers(1, 3)]).astype(rng.choice(WHOLE)),
        edges=edges.astype(rng.choice(["int32", "int64", "uint8", "uint16"])),
        target=None if rng.random() < 0.2 else TARGETS[rng.integers(len(TARGETS))],
    )


def stored(values: Values | None, target: str | None) -> torch.Tensor | str | None:
    """The rows that a table has, "scaled" for int8 with a scale, or None if the conversion is refused."""
    if values is None or not np.prod(values.array.shape[1:], dtype=int):
        return None
    source, target = values.dtype, target or values.dtype
    if target not in TARGETS:
        return None
    wanted = getattr(torch, target)
    tensor = values.tensor()
    if source in FLOATS:
        if target == "int8":
            return "scaled" if bool(torch.isfinite(tensor.to(torch.float32)).all()) else None
        if target not in FLOATS:
            return None
        result = tensor.to(wanted)
        return None if bool((torch.isinf(result) & ~torch.isinf(tensor)).any()) else result
    whole = [int(v) for v in values.array.reshape(-1)]
    if not all(_holds(target, v) for v in whole):
        return None
    exact = np.array(whole, "float64" if target in FLOATS else target)
    return torch.from_numpy(exact).to(wanted).view(tensor.shape)


def _holds(dtype: str, value: int) -> bool:
    """Whether a type has this whole number."""
    if dtype == "bool":
        return value in (0, 1)
    if dtype in FLOATS:
        odd = abs(value) // max(1, abs(value) & -abs(value))
        return odd < 1 << _BITS[dtype] and abs(value) <= _LARGEST[dtype]
    return bool(np.iinfo(dtype).min <= value <= np.iinfo(dtype).max)


def _homogeneous(
    path: Path, draw: Draw, *options: str, weight_key: str = "weight", **changes: Values | None
) -> Written:
    """changes: other tables, by key; weight_key: that of the table of weights, "": none."""
    tables = {"_N.feat": draw.feat} | ({f"_N._E._N.{weight_key}": draw.weight} if weight_key else {})
    tables |= {f"_N._E._N.{key}" if key != "feat" else "_N.feat": values for key, values in changes.items()}
    return Written(path, options, tables, {HOMOGENEOUS: draw.edges}, {"_N": draw.labels})


# ---- one function for each form of source ----


def npy(root: Path, draw: Draw) -> Written:
    np.save(root / "feat.npy", draw.feat.array)
    return Written(root / "feat.npy", (), {"_N.feat": draw.feat})


def _arrays(draw: Draw) -> dict[str, np.ndarray]:
    return {
        "feat": draw.feat.array,
        "edge_weight": draw.weight.array,
        "edge_index": draw.edges,
        "y": draw.labels,
    }


def _tensors(draw: Draw) -> dict[str, torch.Tensor]:
    made = {name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in _arrays(draw).items()}
    return made | {"feat": draw.feat.tensor(), "edge_weight": draw.weight.tensor()}


def npz(root: Path, draw: Draw) -> Written:
    save = np.savez_compressed if draw.seed % 2 else np.savez
    save(root / "a.npz", **_arrays(draw))
    return _homogeneous(root / "a.npz", draw)


def directory(root: Path, draw: Draw) -> Written:
    save_arrays(root / "s", **_arrays(draw))
    return _homogeneous(root / "s", draw)


def hdf5(root: Path, draw: Draw) -> Written:
    with h5py.File(root / "a.h5", "w") as file:
        for name, values in _arrays(draw).items():
            chunks = True if draw.seed % 2 and values.size else None
            file.create_dataset(name, data=values, chunks=chunks, compression="gzip" if chunks else None)
    return _homogeneous(root / "a.h5", draw)


def safetensors(root: Path, draw: Draw) -> Written:
    save_file(_tensors(draw), root / "a.safetensors")
    return _homogeneous(root / "a.safetensors", draw)


def torch_files(root: Path, draw: Draw) -> Written:
    """A plain tensor in each file of a directory."""
    (root / "s").mkdir()
    for name, values in _tensors(draw).items():
        torch.save(values, root / f"s/{name}.pt")
    return _homogeneous(root / "s", draw)


def sparse_npz(root: Path, draw: Draw) -> Written:
    """SciPy's CSR matrices: rows of adj list destinations, attr is dense in the dataset. The values of adj
    are no table if all are 1."""
    order = np.lexsort((draw.edges[1], draw.edges[0]))
    weight, edges = Values(draw.weight.array[order], draw.weight.dtype), draw.edges[:, order]
    draw = replace(draw, weight=weight, edges=edges)
    save_arrays(root / "s", y=draw.labels)
    feat = draw.feat.array
    if feat.ndim == 2 and feat.shape[1]:
        scipy.sparse.save_npz(root / "s/attr.npz", scipy.sparse.csr_matrix(feat))
    else:
        np.save(root / "s/feat.npy", feat)
    shape = (draw.node_count, draw.node_count)
    pointers = np.searchsorted(edges[0], np.arange(draw.node_count + 1))
    ends = (edges[1].astype(np.int64), pointers)
    scipy.sparse.save_npz(root / "s/adj.npz", scipy.sparse.csr_matrix((weight.array, *ends), shape))
    return _homogeneous(root / "s", draw, weight_key="" if (weight.array == 1).all() else "weight")


def pyg(root: Path, draw: Draw) -> Written:
    """Each attribute is a tensor, an array of NumPy, lists, a memory map, or sparse."""
    rng = np.random.default_rng(draw.seed)
    saved: dict[str, Any] = {}
    for name, values in _tensors(draw).items():
        kinds = ["tensor"] if values.dtype == torch.bfloat16 else ["tensor", "array", "memory map"]
        kinds += ["lists"] if values.dtype in (torch.int64, torch.float64) and values.numel() else []
        if name in ("feat", "y") and values.dim() == 2 and values.dtype in (torch.float32, torch.int64):
            kinds += [] if bool(torch.signbit(values[values == 0]).any()) else ["coo", "csr", "csc"]
        kind = rng.choice(kinds)
        if kind == "memory map":
            np.save(root / f"{name}.npy", values.numpy())
            saved[name] = np.load(root / f"{name}.npy", mmap_mode="r" if values.numel() else None)
        elif kind in ("coo", "csr", "csc"):
            saved[name] = values.to_sparse(layout=getattr(torch, f"sparse_{kind}"))
        else:
            saved[name] = {"array": values.numpy, "lists": values.tolist}.get(kind, lambda v=values: v)()
    torch.save(saved, root / "d.pt")
    return _homogeneous(root / "d.pt", draw, weight_key="edge_weight")


def _cells(values: np.ndarray) -> list[str]:
    """The text of numbers, so that they can be read back."""
    return [repr(v.item()) for v in values]


def _as_text(values: Values, floats: str) -> Values | None:
    """Numbers that were read from text: int64 if all are whole, else floating. None: refused."""
    if values.dtype in WHOLE:
        return Values(values.array.astype(np.int64), "int64") if (values.array < 1 << 63).all() else None
    with np.errstate(over="ignore"):
        read = values.array.astype(floats)
    return None if (np.isinf(read) & ~np.isinf(values.array)).any() else Values(read, floats)


def csv_edges(root: Path, draw: Draw) -> Written:
    """An edge list beside features: with and without names, in any order, quoted, with a byte order mark."""
    rng = np.random.default_rng(draw.seed)
    header = str(rng.choice(["none", "names", "quoted names", "comment"]))
    columns = {"src": _cells(draw.edges[0]), "dst": _cells(draw.edges[1]), "w": _cells(draw.weight.array)}
    names = ["src", "dst", "w"]
    if header != "none":
        columns["eid"] = _cells(np.arange(len(draw.weight.array)))
        names = rng.permutation([*names, "eid"]).tolist()
    if rng.random() < 0.3:
        columns = {name: [f'"{cell}"' for cell in cells] for name, cells in columns.items()}
    delimiter = str(rng.choice([",", "\t", ", "]))
    line = delimiter.join(f'"{n.upper()}"' if header == "quoted names" else n for n in names)
    text = "" if header == "none" else f"# {line}\n" if header == "comment" else f"{line}\n"
    text += "".join(delimiter.join(cells) + "\n" for cells in zip(*(columns[n] for n in names), strict=True))
    (root / "s").mkdir()
    content = text.encode("utf-8-sig" if rng.random() < 0.3 else "utf-8")
    (root / "s/edges.csv.gz").write_bytes(gzip.compress(content))
    save_arrays(root / "s", feat=draw.feat.array, y=draw.labels)
    weight = _as_text(draw.weight, "float64")
    more: dict[str, Values | None] = {"weight": weight}
    if header != "none":
        ids = Values(np.arange(len(draw.weight.array)), "int64")
        upper = str.upper if header == "quoted names" else str
        more = {upper("w"): weight, upper("eid"): ids}
    return _homogeneous(root / "s", draw, "--from", "edges", weight_key="", **more)


def _column(values: Values) -> Any:
    native = values.array
    if native.ndim == 1:
        return pa.array(native)
    if not native.shape[1]:
        return pa.array([[]] * len(native), pa.list_(pa.from_numpy_dtype(native.dtype)))
    return pa.FixedSizeListArray.from_arrays(pa.array(native.reshape(-1)), native.shape[1])


def parquet(root: Path, draw: Draw) -> Written:
    (root / "s").mkdir()
    feat, name = draw.feat, "feat"
    if feat.array.ndim > 2:
        feat = Values(feat.array.reshape(draw.node_count, -1), feat.dtype)
    ids = np.arange(draw.node_count).astype(["int64", "uint8"][draw.seed % 2])
    draw = replace(draw, labels=draw.labels.reshape(-1))
    columns = {"id": pa.array(ids), "y": pa.array(draw.labels)}
    if feat.array.ndim == 2 and feat.array.shape[1] > 1 and draw.seed % 2:
        columns |= {f"{name}_{i}": _column(Values(c, feat.dtype)) for i, c in enumerate(feat.array.T)}
    elif feat.array.ndim > 1:
        columns[name] = _column(feat)
    else:
        columns["age"], name = _column(feat), "age"
    pq.write_table(pa.table(columns), root / "s/nodes.parquet", row_group_size=5)
    ends = {
        "dst": draw.edges[1].astype("uint16"),
        "src": draw.edges[0].astype("int32"),
        "w": _column(draw.weight),
    }
    pq.write_table(pa.table(ends), root / "s/edges.parquet", row_group_size=5)
    written = _homogeneous(root / "s", draw, weight_key="w", feat=feat)
    written.tables[f"_N.{name}"] = written.tables.pop("_N.feat")
    return written


def ogb_text(root: Path, draw: Draw) -> Written:
    """Text with fractions is read as float32, as OGB's own loader does."""

    def write(name: str, rows: Any) -> None:
        text = "".join(",".join(_cells(np.atleast_1d(row))) + "\n" for row in rows)
        (root / "s/raw" / f"{name}.csv.gz").write_bytes(gzip.compress(text.encode()))

    (root / "s/raw").mkdir(parents=True)
    feat = Values(draw.feat.array.reshape(draw.node_count, -1), draw.feat.dtype)
    if not feat.array.shape[1]:
        feat = Values(np.zeros((draw.node_count, 1), feat.array.dtype), feat.dtype)
    write("node-feat", feat.array)
    write("edge", draw.edges.T)
    write("num-node-list", [draw.node_count])
    write("num-edge-list", [draw.edges.shape[1]])
    write("node-label", draw.labels)
    draw = replace(draw, labels=draw.labels.reshape(-1, 1))  # a column for each task
    return _homogeneous(root / "s", draw, weight_key="", feat=_as_text(feat, "float32"))


ALL = ("bool", *WHOLE, *FLOATS)
NUMPY = tuple(name for name in ALL if name != "bfloat16")
READERS: dict[str, tuple[Callable[[Path, Draw], Written], tuple[str, ...]]] = {
    "npy": (npy, NUMPY),
    "npz": (npz, NUMPY),
    "directory": (directory, NUMPY),
    "hdf5": (hdf5, NUMPY),
    "safetensors": (safetensors, ALL),
    "torch files": (torch_files, ALL),
    "sparse npz": (sparse_npz, tuple(name for name in NUMPY if name != "float16")),
    "pyg": (pyg, ALL),
    "csv": (csv_edges, NUMPY),
    "parquet": (parquet, NUMPY),
    "ogb text": (ogb_text, (*WHOLE, "float32", "float64")),
}
"""How each form of source is written, and the types of features that it can have."""
