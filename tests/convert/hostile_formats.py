"""Damages files of one library: torch.save, texts, YAML, Parquet, Arrow and MATLAB.

Called by hostile_runner.py; see hostile_changes.py.
"""

import gzip
import pickle
import random
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import test_reader_graphbolt as graphbolt
import test_reader_matlab as matlab
import test_reader_parquet as parquet
import test_reader_pyg as pyg
import torch
from hostile_changes import (
    NAMES,
    NUMBERS,
    OTHERS,
    Change,
    N,
    Payload,
    anything,
    change_bytes,
    change_npy,
    change_npy_header,
    change_npz,
    change_zip,
    hostile_array,
    rebuild_zip,
    write_zip,
)
from pyarrow import feather

_TORCH_DTYPES = [torch.uint16, torch.uint64, torch.complex64, torch.bfloat16, torch.bool, torch.float8_e4m3fn]
# fmt: off
_KEYS = [  # other keys for the saved object
    *[n for n in OTHERS if not isinstance(n, (list, dict))], ("a", "b"), ("a", "b", "c"), ("a", "b", "a"), 5,
    (1, 2, 3), "edge_index", "num_nodes", "adj_t", "y", "train_mask", "label", "_store", "_node_store_dict",
    "_edge_store_dict", "_global_store", "_mapping",
]
_PICKLES = {
    "empty": b"",
    "stop": b"\x80\x02.",
    "payload": pickle.dumps(Payload(), 2),
    "system": b"cos\nsystem\n(S'mkdir executed'\ntR.",
    "build": b"\x80\x02ctorch.serialization\nload\nX\x05\x00\x00\x00/x.pt\x85R.",
    "getattr": b"\x80\x02c__builtin__\ngetattr\nctorch\nload\nX\x04\x00\x00\x00eval\x86R.",
    "many lists": b"\x80\x02(" + b"]" * 3_000_000 + b"l.",
    "many dictionaries": b"\x80\x02(" + b"}" * 3_000_000 + b"l.",
    "deep tuples": b"\x80\x02)" + b"\x85" * 200_000 + b".",
    "marks": b"\x80\x02" + b"(" * 1_000_000 + b".",
    "memo": b"\x80\x02K\x01" + b"".join(b"r" + struct.pack("<I", i << 20) for i in range(4000)) + b".",
    "huge memo": b"\x80\x02K\x01r\xff\xff\xff\xff.",
    "huge text": b"\x80\x02X\xff\xff\xff\x7f.",
    "huge text of 8": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b".",
    "huge number": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "long number": b"\x80\x02\x8b" + struct.pack("<i", 4_000_000) + b"\x7f" * 4_000_000 + b".",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b".",
    "doubled": b"\x80\x02]" + b"2\x86" * 60 + b".",
    "persistent": b"\x80\x02)Q.",
    "state": b"\x80\x02ccollections\nOrderedDict\n)R" + b"}b" * 10 + b".",
    "self": b"\x80\x02]q\x00h\x00a.",
    "tensor": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NK\x00)))tR.",
    "device": b"\x80\x02ctorch\ndevice\nX\x04\x00\x00\x00cuda\x85R.",
    "deep": b"](" * 5000,
}
_FIELDS = [
    *[str(n).encode() for n in NUMBERS], b"", b" ", b"x", b"\0", b"\xff", b"1_000", b"0x10", b"#", b'"1"',
    b"1,2", b"+5", b"--1", b"1e5", b"1" * 400, b"NaN", b"infinity", b"1j", b"\xc3\xbc", b"1;2", b"\r",
]
_LINES = [b"", b",", b",,,", b"1", b"1,2,3,4,5", b"a,b", b"#", b"1 2", b" \t ", b"1,2,", b"\0"]
_TEXTS = [
    b"", b"\n", b"#\n", b"a,b\n", b"\0" * 1000, b"\n" * 2_000_000, b"1", b"1,2", b",", b"#" * 100,
    b"\r" * 1000, b"1,2\r" * 50, b"\xef\xbb\xbf1,2\n", b"\xff\xfe1\x00", b"# c\n" * 300_000, b"nan,nan\n",
    b"-1,-1\n", b"99999999999,1\n", b"1,2\n" * 300_000,
]
LAUGHS = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
MERGES = "a0: &a0 {k: v}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12)
)
_YAMLS = [
    "", "5", "- 1", LAUGHS, LAUGHS + "graph: *a11\n", LAUGHS + "graph: {nodes: *a11}\n", MERGES,
    "[" * 3000, "{a: " * 800 + "1" + "}" * 800, "- " * 2000, "!!python/object/apply:os.mkdir [executed]",
    "graph: !!int ''", "graph: !!bool q", "graph: 2001-99-99", "graph: !!timestamp x", "graph: " + "9" * 5000,
    "graph: \0", "\tgraph: 1", "? [a, b]\n: 1", "graph: !!set {a, b}", "graph: !!binary '!!'", "a: *a",
    "graph: &a\n  nodes: *a", "&a [*a]", "graph: {nodes: &a [{num: 5, type: *a}]}", "a: " + "x" * 3_000_000,
    "".join(f"k{i}: 1\n" for i in range(100_000)), "graph: {nodes: [{num: .inf}]}",
    "graph: {nodes: [{num: .nan}]}", "graph: !!omap [a: 1, 5]", "graph: !!pairs [a]",
    "graph: {nodes: [{num: 190:20:30}]}", "graph: {nodes: [{num: 5, type: !!binary aGk=}]}", "a: !!float ''",
    "a: 1\n---\nb: 2", "\ufeffgraph: {}",
]
# fmt: on


def change_torch(rng: random.Random, path: Path) -> str:
    """Change a value, a key or all of a saved object."""
    try:
        found = torch.load(path, weights_only=False)
    except Exception:  # damaged classes, which are not imported
        found = pyg.tensors()
    if not isinstance(found, dict) or rng.random() < 0.1:
        found, said = hostile_value(rng, found), "all"
    else:
        place = found
        inner = [value for value in found.values() if isinstance(value, dict)]
        if inner and rng.random() < 0.4:
            place = rng.choice(inner)
        key = rng.choice(list(place))
        said = repr(key)
        if rng.random() < 0.25:
            new = rng.choice(_KEYS)
            place[new] = place.pop(key)
            said += f" renamed to {new!r:.60}"
        else:
            place[key] = hostile_value(rng, place[key])
            said += f" = {place[key]!r:.200}"
    is_legacy = rng.random() < 0.15
    torch.save(found, path, _use_new_zipfile_serialization=not is_legacy)
    return said + " legacy" * is_legacy


def hostile_value(rng: random.Random, value: Any) -> Any:
    """A replacement for a value in a file of torch."""
    kind = rng.choice(["other", "array", "tensor", "tensor", "odd tensor", "payload", "deep"])
    is_plain = isinstance(value, torch.Tensor) and value.layout == torch.strided
    if kind == "payload":
        return Payload()
    if kind == "deep":
        found: Any = 1
        for _ in range(rng.choice([90, 300])):
            found = [found]
        return found
    if kind == "array":
        return hostile_array(rng, np.arange(N))
    if kind == "tensor":
        try:
            return torch.from_numpy(hostile_array(rng, value.numpy() if is_plain else np.arange(N)).copy())
        except (TypeError, ValueError):
            return torch.arange(N).to(rng.choice(_TORCH_DTYPES))
    if kind == "odd tensor":
        return odd_tensor(rng, value if is_plain else torch.arange(N))
    return anything(rng)


def odd_tensor(rng: random.Random, base: torch.Tensor) -> torch.Tensor:
    """A tensor with more elements than bytes, or that is not dense, not on the CPU, or not valid."""
    indptr, indices = torch.tensor([0, 5, 1]), torch.tensor([0, 99, 3, 1, 1])
    ways = [
        lambda: base[..., None].expand(*base.shape, 3),
        lambda: torch.zeros(1).expand(1 << 40),
        lambda: torch.zeros(1, dtype=torch.bool).expand(1 << 36),
        lambda: torch.zeros(1, dtype=torch.int64).expand(2, 1 << 40),
        lambda: base.reshape(-1).to_sparse(),
        lambda: torch.empty(1 << 40, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(N), 0.1, 0, torch.quint8),
        lambda: torch.nn.Parameter(torch.ones(N, 2)),
        lambda: torch.eye(N).to_sparse_csr(),
        lambda: torch.sparse_csr_tensor(indptr, indices, torch.ones(5), (2, 3), check_invariants=False),
        lambda: torch.sparse_coo_tensor(indptr[None, :1], torch.ones(1), (2,), check_invariants=False),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: base.T if base.dim() == 2 else base[::2],
    ]
    return rng.choice(ways)()


def change_pickle(rng: random.Random, path: Path) -> str:
    """Replace the pickle of a file of torch.save by other opcodes."""
    name = rng.choice(list(_PICKLES))
    if not zipfile.is_zipfile(path):
        path.write_bytes(_PICKLES[name])
        return f"{name}, alone"
    with zipfile.ZipFile(path) as archive:
        members = [(m.filename, archive.read(m)) for m in archive.infolist()]
    damaged = [(name_, _PICKLES[name] if name_.endswith("/data.pkl") else data) for name_, data in members]
    write_zip(path, damaged, zipfile.ZIP_STORED)
    return name


def change_text(rng: random.Random, path: Path) -> str:
    """Change a field, a line or all of a table of numbers."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    lines = data.split(b"\n")
    index = rng.randrange(len(lines))
    kind = rng.choice(["field", "field", "field", "line", "all", "long line", "long field", "end"])
    said = ""
    if kind == "field":
        fields = lines[index].split(b",")
        place = rng.randrange(len(fields))
        fields[place] = rng.choice(_FIELDS)
        lines[index], said = b",".join(fields), f"{place} of line {index + 1}: {fields[place][:40]!r}"
    elif kind == "line":
        lines[index] = rng.choice(_LINES)
        said = f"{index + 1}: {lines[index]!r}"
    elif kind == "long field":
        lines[index] = rng.choice([b"1", b"0", b".", b"9", b"-", b"e"]) * rng.choice(
            [1000, 100_000, 3_000_000]
        )
        said = f"{lines[index][:1]!r}, {len(lines[index])} times"
    data = b"\n".join(lines)
    if kind == "all":
        data = rng.choice([*_TEXTS, data * 30])
        said = repr(data[:40])
    elif kind == "long line":
        data += rng.choice([b"1", b"1,", b" ", b"#", b",", b"a", b"\0", b"9 "]) * (70 << 20)
        said = repr(data[-2:])
    elif kind == "end":
        data = data.rstrip(b"\n") + rng.choice([b",", b"\0", b"\n\n\n", b"\n1", b"#", b"\x1a"])
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)
    return f"{kind} {said}"


def change_gzip(rng: random.Random, path: Path) -> str:
    """Change the compression of a text, not its content."""
    data = path.read_bytes()
    kind = rng.choice(["cut", "sum", "twice", "trailing", "not packed", "name", "bomb", "nested"])
    if kind == "cut":
        data = data[: rng.randrange(len(data))]
    elif kind == "sum":
        data = data[:-8] + rng.randbytes(8)
    elif kind == "twice":
        data += data
    elif kind == "trailing":
        data += rng.choice([b"\0" * 1000, b"x" * 10, b"\x1f\x8b"])
    elif kind == "not packed":
        data = gzip.decompress(data)
    elif kind == "name":
        data = data[:3] + b"\x08" + data[4:10] + b"n" * 300_000 + b"\0" + data[10:]
    elif kind == "bomb":
        data = gzip.compress(rng.choice([b"\0", b"1", b"1,", b"\n", b" ", b"1,1\n"]) * (1 << 20), 1) * 60
    else:
        data = gzip.compress(data)
    path.write_bytes(data)
    return kind


def change_yaml(rng: random.Random, path: Path) -> str:
    """Change a value or a key of GraphBolt's metadata.yaml."""
    meta = graphbolt.yaml.safe_load(path.read_text())
    place, key = rng.choice(list(_places(meta)))
    known = [2, -3, [None], [5], ["a"], {"num": -1}, [{"num": 5}] * 2, "edges/e.csv", "a:b:c", "_N:_E:_N"]
    value = rng.choice([anything(rng), anything(rng), rng.choice(known)])
    if isinstance(place, dict) and rng.random() < 0.2:
        new = 5 if isinstance(value, (list, dict)) else value
        place[new] = place.pop(key)
        said = f"{key} renamed to {new!r:.60}"
    elif rng.random() < 0.1:
        del place[key]
        said = f"{key} removed"
    else:
        place[key] = value
        said = f"{key} = {value!r:.60}"
    path.write_text(graphbolt.yaml.dump(meta), encoding="utf-8", errors="surrogatepass")
    return said


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def write_yaml(rng: random.Random, path: Path) -> str:
    """Replace metadata.yaml by another text."""
    text = rng.choice(_YAMLS)
    path.write_text(text, encoding="utf-8")
    return f"{text[:60]!r}"


def change_table(rng: random.Random, path: Path) -> str:
    """Change or rename a column of a Parquet or Arrow table, or write it with other batches."""
    pa, pq = parquet.pa, parquet.pq
    is_parquet = path.suffix == ".parquet"
    table = pq.read_table(path) if is_parquet else feather.read_table(path)
    name = rng.choice(table.column_names)
    kind = rng.choice(["values", "values", "values", "name", "rows"])
    said = ""
    if kind == "name":
        known = ["src", "dst", "id", "label", "y", "train_mask", "x_0", "pos_0", name + "_99999999999"]
        said = rng.choice([*known, *NAMES[:5], NAMES[10]])
        table = table.rename_columns([said if c == name else c for c in table.column_names])
    elif kind == "rows":
        shorter = table.slice(0, table.num_rows - 1)
        table = rng.choice([table.slice(0, 0), shorter, pa.concat_tables([table, table]), table.select([])])
    else:
        columns = hostile_columns(table.num_rows)
        said = rng.choice(list(columns))
        table = table.set_column(table.column_names.index(name), name, columns[said])
    if is_parquet:
        packing, page = rng.choice(["snappy", "gzip", "zstd", "none"]), rng.choice(["1.0", "2.0"])
        rows = rng.choice([7, 130, 1 << 20])
        pq.write_table(table, path, row_group_size=rows, compression=packing, data_page_version=page)
    else:
        packing, rows = rng.choice(["zstd", "lz4", "uncompressed"]), rng.choice([7, 1000])
        feather.write_feather(table, path, compression=packing, chunksize=rows)
    return f"{kind} of {name}: {said[:60]!r}"


def hostile_columns(n: int) -> dict[str, Any]:
    """Columns of n rows that no reader expects."""
    pa = parquet.pa
    whole, floats = pa.int64(), pa.float32()
    return {
        "u64": pa.array(np.full(n, (1 << 64) - 1, np.uint64)),
        "u16": pa.array(np.arange(n, dtype=np.uint16)),
        "decimal": pa.array([1] * n).cast(pa.decimal128(30, 2)),
        "dictionary": pa.array(["a"] * n).dictionary_encode(),
        "numbers in a dictionary": pa.array([5] * n).dictionary_encode(),
        "lists": pa.array([[1, 2]] * n),
        "ragged": pa.array([[1] * (i % 3) for i in range(n)], pa.list_(whole)),
        "empty lists": pa.array([[]] * n, pa.list_(floats)),
        "lists of none": pa.array([[]] * n, pa.list_(floats, 0)),
        "lists of lists": pa.array([[[1]]] * n, pa.list_(pa.list_(whole))),
        "lists with nulls": pa.array([[None, 1.0]] * n, pa.list_(floats)),
        "null lists": pa.array([None] * n, pa.list_(whole)),
        "lists of bool": pa.array([[True, False]] * n, pa.list_(pa.bool_())),
        "large lists": pa.array([[1.0]] * n, pa.large_list(pa.float64())),
        "structs": pa.array([{"a": 1}] * n),
        "maps": pa.array([[("a", 1)]] * n, pa.map_(pa.string(), whole)),
        "nothing": pa.nulls(n),
        "null numbers": pa.nulls(n, whole),
        "null floats": pa.nulls(n, floats),
        "null bool": pa.nulls(n, pa.bool_()),
        "half": pa.array(np.zeros(n, np.float16)),
        "bool": pa.array([True] * n),
        "dates": pa.array([0] * n, pa.timestamp("s")),
        "bytes": pa.array([b"x"] * n),
        "negative": pa.array(np.full(n, -1)),
        "huge": pa.array(np.full(n, (1 << 63) - 1)),
        "nan": pa.array(np.full(n, np.nan)),
        "fractions": pa.array(np.full(n, 0.5)),
    }


def change_matlab(rng: random.Random, path: Path) -> str:
    """Change a variable of a MATLAB file, or its name."""
    try:
        found = {k: v for k, v in matlab.io.loadmat(path).items() if not k.startswith("__")}
        name = rng.choice(list(found))
        if rng.random() < 0.2:
            said = rng.choice(["local_info", "A", "W", "label", "y", "a" * 31])
            found[said] = found.pop(name)
        else:
            variables = hostile_variables(rng)
            said = rng.choice(list(variables))
            found[name] = variables[said]
        matlab.io.savemat(path, found, do_compression=rng.random() < 0.5)
    except (TypeError, ValueError):  # SciPy cannot write it
        return change_bytes(rng, path)
    return f"{said} in place of {name}"


def hostile_variables(rng: random.Random) -> dict[str, Any]:
    """MATLAB variables that no reader expects."""
    sparse, n = matlab.sparse, matlab.N
    return {
        "array": hostile_array(rng, np.arange(float(n))),
        "matrix": hostile_array(rng, np.zeros((n, 4))),
        "text": "x",
        "cell": np.array([1, "a", [2]], object),
        "struct": {"a": 1, "b": {"c": 2}},
        "sparse": sparse.random(n, n, 0.1),
        "oblong": sparse.random(n, n + 1, 0.1),
        "no rows": sparse.csc_matrix((0, 0)),
        "complex": sparse.csc_matrix(np.eye(n) * 1j),
        "bool": sparse.csc_matrix(np.eye(n) > 0),
        "nan": sparse.csc_matrix(np.full((n, n), np.nan)),
        "large": sparse.eye(200_000),
        "scalar": 5,
        "empty": np.zeros((0, 0)),
        "u64": np.full((n, 7), (1 << 64) - 1, np.uint64),
        "negative": np.full((n, 7), -(1 << 63)),
        "nan in a matrix": np.full((n, 7), np.nan),
        **{f"value {index}": value for index, value in enumerate(OTHERS) if isinstance(value, (list, str))},
    }


WAYS: dict[str, list[Change]] = {
    ".npy": [change_npy, change_npy, change_npy_header],
    ".npz": [change_npz, change_npz, change_zip, change_zip, rebuild_zip],
    ".pt": [change_torch, change_torch, change_torch, change_pickle, change_zip, rebuild_zip],
    ".gz": [change_text, change_text, change_gzip],
    ".csv": [change_text, change_text],
    ".tsv": [change_text, change_text],
    ".yaml": [change_yaml, change_yaml, change_yaml, write_yaml],
    ".parquet": [change_table, change_table],
    ".feather": [change_table, change_table],
    ".mat": [change_matlab, change_matlab],
}
