"""Makes hostile sources of every format: a valid one with something in it that nobody should believe.

Called by hostile_runner.py. `write_all` writes one valid source per reader; `spoil` changes one of them at
random. What a change is, it says in a few words, so that a failure can be made again by hand.
"""

import gzip
import io
import os
import pickle
import random
import shutil
import socket
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.feather
import test_reader_dgl as dgl_graph
import test_reader_edges as edges
import test_reader_graphbolt as graphbolt
import test_reader_igb as igb
import test_reader_mag240m as mag240m
import test_reader_matlab as matlab
import test_reader_ogb as ogb
import test_reader_parquet as parquet
import test_reader_pyg as pyg
import torch
from reader_example import save

N, E = 40, 90
BIG_FILE_BYTES = 3 << 30  # sparse; more than a conversion may hold
NUMBERS = [
    *(-1, 0, 1, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 53) + 1, 1 << 62),
    *((1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 31), -(1 << 63), -(1 << 64), 10**40, 1e300, 0.5, -0.0),
    *(float("nan"), float("inf"), -float("inf")),
]
NAMES = [
    "../x",
    "/etc/passwd",
    "a\0b",
    "a\nb",
    "x" * 5000,
    "",
    ".",
    "..",
    "%2E%2E%2Fx",
    "\ud800",
    "ü" * 100,
    "a/b",
]
OTHERS = [None, True, "x", "nan", "1e400", b"\xff", [], {}, (), [1, [2, [3]]], {"a": 1}, {5: 6}, 3j, *NAMES]


class Payload:
    """What unpickling would run: it leaves a file called executed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("executed",))


def write_all(root: Path) -> dict[str, tuple[str, ...]]:
    """One valid source per reader (and form of it) in root: name -> arguments of `gids convert`."""
    rng = np.random.default_rng(1)
    pairs = rng.integers(0, N, (2, E))
    arrays = {
        "feat": rng.standard_normal((N, 6), np.float32),
        "label": np.arange(N) % 5,
        "train_idx": np.arange(9),
        "val_mask": np.arange(N) > 30,
        "edge_index": pairs,
        "edge_w": np.arange(E) / 8,
    }
    order = np.argsort(pairs[1], kind="stable")
    in_edges = {
        "indptr": np.concatenate([[0], np.cumsum(np.bincount(pairs[1], minlength=N))]),
        "indices": pairs[0, order],
        "edge_ids": order,
        "num_nodes": np.array(N),
    }
    root.mkdir(parents=True, exist_ok=True)
    np.save(root / "one.npy", arrays["feat"])
    arrays["feat"].tofile(root / "raw.data")
    np.savez(root / "stored.npz", **arrays)
    np.savez_compressed(root / "packed.npz", **arrays, order=np.asfortranarray(arrays["feat"]))
    for form, square in (("adj", True), ("attr", False)):
        matrix = matlab.sparse.random(N, N if square else 7, 0.2, "csr", random_state=1)
        matlab.sparse.save_npz(root / f"{form}.npz", matrix, compressed=square)
    save(root / "arrays", **arrays)
    save(root / "in-edges", **in_edges)
    save(root / "types/nodes/paper", feat=arrays["feat"], label=arrays["label"])
    save(root / "types/nodes/author", num_nodes=np.array(N))
    save(root / "types/edges/author.writes.paper", edge_index=pairs, w=arrays["edge_w"])
    edges.text(root / "pairs.csv", values=pairs.T)
    edges.text(root / "weights.txt.gz", delimiter=" ", values=[(*p, 0.5) for p in pairs.T.tolist()])
    save(root / "beside", feat=arrays["feat"])
    edges.text(root / "beside/edges.tsv", header="# SNAP\nsrc\tdst\n", delimiter="\t", values=pairs.T)
    np.save(root / "pairs.npy", pairs)
    ogb.papers100m(root / "ogb-binary")
    ogb.arxiv(root / "ogb-text")
    ogb.mag(root / "ogb-types")
    mag240m.write(root / "mag240m")
    igb.write(root / "igb", {("paper", "cites", "paper"): 50})
    igb.write(root / "igb-raw", {("paper", "cites", "paper"): 50}, headers=False)
    graphbolt.homogeneous(root / "graphbolt")
    parquet.write(root / "parquet", parquet.nodes(), parquet.edges())
    (root / "arrow").mkdir()
    for name, table in (("nodes", parquet.nodes()), ("edges", parquet.edges())):
        parquet.pa.feather.write_feather(
            table, root / f"arrow/{name}.feather", compression="zstd" if name == "nodes" else "uncompressed"
        )
    parquet.pq.write_table(parquet.nodes(), root / "alone.parquet", compression="gzip")
    matlab.facebook(root / "facebook.mat")
    matlab.io.savemat(
        root / "packed.mat",
        {"A": matlab.A, "label": np.arange(matlab.N), "x": np.ones((matlab.N, 3)), "t": "text"},
        do_compression=True,
    )
    torch.save(pyg.tensors(num_nodes=pyg.N), root / "dict.pt")
    torch.save(pyg.tensors(), root / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(
        {"a": pyg.tensors(), ("a", "to", "a"): {"edge_index": torch.from_numpy(pyg.EDGES)}},
        root / "hetero.pt",
    )
    save_with_classes(root / "data.pt")
    try:
        import gids.dgl  # noqa: F401
        import dgl

        dgl_graph.save(dgl, root / "graph.bin")
    except ImportError:
        pass
    given = {"raw.data": ("--dtype", "float32", "--shape=-1,6"), "pairs.npy": ("--from", "edges")}
    readers = {
        "ogb": "ogb",
        "mag240m": "mag240m",
        "igb": "igb",
        "graphbolt": "graphbolt",
        "parquet": "parquet",
    }
    found = {}
    for path in sorted(root.iterdir()):
        prefix = readers.get(path.name.partition("-")[0])
        found[path.name] = given.get(path.name, ("--from", prefix) if prefix else ())
    return found


def save_with_classes(path: Path) -> None:
    """A file of torch.save with PyG's Data, by way of stand-ins for its classes."""
    import sys
    import types

    before = dict(sys.modules)
    try:
        found = types.SimpleNamespace()
        for module, names in pyg.CLASSES.items():
            for number in range(1, module.count(".") + 2):
                parent = ".".join(module.split(".")[:number])
                sys.modules[parent] = types.ModuleType(parent)
            for name in names:
                made = type(name, (), {"__module__": module})
                setattr(found, name, made)
        for module, names in pyg.CLASSES.items():
            for name in names:
                setattr(sys.modules[module], name, getattr(found, name))
        torch.save(pyg.data(found, pyg.tensors()), path)
    finally:
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] in ("torch_geometric", "torch_sparse"):
                del sys.modules[name]
        sys.modules.update(
            {n: m for n, m in before.items() if n.partition(".")[0] in ("torch_geometric", "torch_sparse")}
        )


def spoil(rng: random.Random, source: Path) -> str:
    """Change a source (a file or a directory) at random. What was done."""
    files = sorted(p for p in source.rglob("*") if p.is_file()) if source.is_dir() else [source]
    if source.is_dir() and rng.random() < 0.08:
        return add_to_directory(rng, source)
    file = rng.choice(files)
    by_suffix = {
        ".npy": [change_npy, change_npy, change_npy_header],
        ".npz": [change_npz, change_npz, change_zip, change_zip, rebuild_zip],
        ".pt": [change_torch, change_torch, change_torch, change_pickle, change_zip, rebuild_zip],
        ".gz": [change_text, change_text, change_gzip],
        ".csv": [change_text],
        ".tsv": [change_text],
        ".yaml": [change_yaml, change_yaml, change_yaml, write_yaml],
        ".parquet": [change_parquet, change_parquet],
        ".feather": [change_parquet, change_parquet],
        ".mat": [change_matlab, change_matlab],
    }
    ways: list[Callable[[random.Random, Path], str]] = [
        *by_suffix.get(file.suffix, []),
        change_bytes,
        change_bytes,
    ]
    if rng.random() < 0.1:
        ways = [change_file]
    way = rng.choice(ways)
    said = way(rng, file)
    return f"{file.relative_to(source.parent)}: {way.__name__}: {said}"


def number(rng: random.Random) -> Any:
    return rng.choice(NUMBERS)


def anything(rng: random.Random) -> Any:
    return rng.choice([*NUMBERS, *OTHERS])


# Files as a whole


def change_file(rng: random.Random, path: Path) -> str:
    """Put something else in a file's place."""
    kind = rng.choice(
        [
            "fifo",
            "socket",
            "directory",
            "link to itself",
            "link to nothing",
            "link to a device",
            "link outside",
            "big",
            "big text",
            "removed",
            "empty",
            "link to the parent",
        ]
    )
    if kind == "big":
        os.truncate(path, BIG_FILE_BYTES)
        return "grown to 3 GB of zeros"
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as found:
            here = os.getcwd()
            os.chdir(path.parent)  # the names of sockets are short
            try:
                found.bind(path.name[-90:])
            finally:
                os.chdir(here)
    elif kind == "directory":
        path.mkdir()
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind == "link to nothing":
        path.symlink_to("nothing")
    elif kind == "link to a device":
        path.symlink_to(rng.choice(["/dev/zero", "/dev/full", "/dev/tty"]))
    elif kind == "link outside":
        path.symlink_to("/etc/passwd")
    elif kind == "link to the parent":
        path.symlink_to("..")
    elif kind == "empty":
        path.touch()
    elif kind == "big text":
        with open(path, "wb") as file:
            file.write(b"1" * (1 << 20))
            file.truncate(1 << 30)
    return kind


def add_to_directory(rng: random.Random, source: Path) -> str:
    """Add a file with a hostile name or content to one of a source's directories."""
    folder = rng.choice([source, *sorted(p for p in source.rglob("*") if p.is_dir())])
    names = [
        "nodes",
        "edges",
        "raw",
        "split",
        "processed",
        "label",
        "y",
        "num_nodes",
        "a\nb",
        "%2e%2e%2fx",
        "%00",
        "x" * 240,
        "ü",
        "edge_index",
        "train_idx",
        "train_mask",
        "adj",
        "x.y.z",
        "a__b__c",
        "a___b___c",
        "node_label_19",
        "indptr",
        "adj_data",
        "attr_shape",
        "edge_",
        "feat",
    ]
    path = folder / (
        rng.choice(names) + rng.choice(["", ".npy", ".npz", ".bin", ".csv", ".csv.gz", ".pt", ".parquet"])
    )
    if len(path.name) > 250 or path.exists():
        return "nothing"
    kind = rng.choice(["empty", "directory", "array", "fifo", "link"])
    if kind == "empty":
        path.touch()
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(folder)
    else:
        np.save(path, hostile_array(rng, np.arange(N)))
        if path.suffix != ".npy":
            path.with_name(path.name + ".npy").rename(path)
    return f"{kind} {path.relative_to(source.parent)!s:.100} added"


def change_bytes(rng: random.Random, path: Path) -> str:
    """Cut, flip, insert, or write a hostile number over some bytes."""
    data = bytearray(path.read_bytes())
    kind = rng.choice(
        [
            "cut",
            "flip",
            "flip the start",
            "flip the end",
            "insert",
            "number",
            "number",
            "number at the start",
            "number at the end",
            "repeat",
        ]
    )
    if not data:
        return "nothing"
    first, last = (
        (0, min(len(data), 300))
        if "start" in kind
        else (max(0, len(data) - 300), len(data))
        if "end" in kind
        else (0, len(data))
    )
    at = rng.randrange(first, last)
    if kind == "cut":
        del data[at:]
    elif kind.startswith("flip"):
        for _ in range(rng.choice([1, 1, 3, 20])):
            data[rng.randrange(first, last)] = rng.randrange(256)
    elif kind == "insert":
        data[at:at] = rng.choice([rng.randbytes(8), b"\0" * 100, b"-", b"\n", b"1e999"])
    elif kind == "repeat":
        data[at:at] = data[at : at + rng.choice([10, 1000])] * rng.choice([1, 50])
    else:
        size = rng.choice([1, 2, 4, 8])
        value = rng.choice([n for n in NUMBERS if isinstance(n, int)]) % (1 << 8 * size)
        at -= at % size
        data[at : at + size] = value.to_bytes(size, rng.choice(["little", "little", "big"]))
        kind += f" {value} of {size} bytes"
    path.write_bytes(data)
    return f"{kind} at {at}"


# Arrays


def hostile_array(rng: random.Random, values: np.ndarray) -> np.ndarray:
    """An array in place of one: of another type, of another shape, or with other values."""
    kind = rng.choice(["type", "shape", "value", "value", "big"])
    with np.errstate(all="ignore"):
        if kind == "type":
            name = rng.choice(
                [
                    "u8",
                    "u4",
                    "u2",
                    "i2",
                    "i1",
                    ">i8",
                    ">f4",
                    "f2",
                    "f8",
                    "c16",
                    "S3",
                    "U3",
                    "O",
                    "M8[s]",
                    "m8",
                    "?",
                    "V4",
                    "g",
                    "rec",
                    "payload",
                    "f4,f4",
                ]
            )
            if name == "payload":
                return np.array([Payload()], object)
            if name == "rec":
                return np.zeros(values.shape, [("src", "i8"), ("dst", "i8")])
            try:
                return values.astype(name)
            except (ValueError, TypeError):
                return np.zeros(values.shape, name)
        if kind == "shape":
            shape = rng.choice(
                [
                    (),
                    (0,),
                    (0, 3),
                    (3, 0),
                    (0, 0),
                    (1,),
                    (2,),
                    (1, 1),
                    (2, 2),
                    (2, 0),
                    (5, 2),
                    (2, 5, 2),
                    (1,) * 12,
                    (N, 1),
                    (1, N),
                    (N - 1,),
                    (N, 2),
                    (N + 1,),
                    values.shape[::-1],
                    (*values.shape, 1),
                    values.shape[:-1],
                ]
            )
            found: np.ndarray = np.resize(values, shape).astype(values.dtype)
            return np.asfortranarray(found) if rng.random() < 0.2 else found
        if kind == "big":
            return np.zeros(rng.choice([(70_000,), (1, 70_000), (70_000, 1)]), values.dtype)
        value = number(rng)
        dtype = values.dtype
        if isinstance(value, float) and dtype.kind in "iub":
            dtype = np.dtype(rng.choice(["f8", "f4"]))
        elif isinstance(value, int) and dtype.kind in "iu":
            dtype = np.dtype("u8" if value >= 1 << 63 else "i8")
            value = max(-(1 << 63), min(value, (1 << 64) - 1))
        found = values.astype(dtype)
        if dtype.kind in "iufb":
            flat = found.reshape(-1)
            where = rng.choice([slice(None), slice(0, 1), slice(-1, None), slice(None, None, 2)])
            flat[where] = value if dtype.kind != "b" else bool(value)
            found = flat.reshape(values.shape)
        return found


def change_npy(rng: random.Random, path: Path) -> str:
    try:
        values = np.load(path)
    except ValueError:  # IGB's without a header
        values = np.zeros(N, np.float32)
    found = hostile_array(rng, values)
    np.save(path, found)
    return f"{found.dtype}{list(found.shape)} in place of {values.dtype}{list(values.shape)}"


def npy_bytes(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """The bytes of a .npy file, or of one whose header lies."""
    length = int.from_bytes(data[8:10], "little")
    text, rest = data[10 : 10 + length].decode("latin1"), data[10 + length :]
    kind = rng.choice(
        [
            "length",
            "long",
            "very long",
            "deep",
            "shape",
            "shape",
            "shape",
            "descr",
            "version",
            "text",
            "order",
        ]
    )
    version = b"\x01\x00"
    if kind == "length":
        size = number(rng)
        size = int(size) % (1 << 32) if size == size and abs(size) < 1e30 else 5
        if rng.random() < 0.5:
            return data[:8] + (size % 65536).to_bytes(2, "little") + data[10:], f"header of {size % 65536}"
        return data[:6] + b"\x02\x00" + size.to_bytes(4, "little") + data[10:], f"header of {size}"
    if kind == "very long":
        return data[:6] + b"\x02\x00" + (1 << 26).to_bytes(4, "little") + b" " * (1 << 26), "header of 64 MiB"
    if kind == "long":
        text = text.rstrip() + " " * rng.choice([9_000, 30_000, 65_000]) + "\n"
    elif kind == "deep":
        deep = rng.choice(
            [
                "(" * 3000,
                "[" * 150 + "]" * 150,
                "-" * 5000 + "1",
                "1+" * 3000 + "1",
                "{1:" * 150,
                "~" * 9000,
                "9" * 6000,
                "not " * 2000,
            ]
        )
        text = rng.choice([deep, text.replace("'shape': (", f"'shape': ({deep}, ")])
    elif kind == "shape":
        ways = [str(number(rng)) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 40]))]
        ways += [rng.choice(["0", "1", "-1", "True", "None", "'a'", "1.5", "9" * 30, "10L", "-2", "()"])]
        rng.shuffle(ways)
        start = text.index("'shape': (") + len("'shape': (")
        inner = ", ".join(ways).replace("nan", "0").replace("inf", "1")
        text = text[:start] + inner + "," + text[text.index(")", start) :]
    elif kind == "descr":
        start = text.index("'descr': ") + len("'descr': ")
        descr = rng.choice(
            [
                "'|O'",
                "'<U1000000000'",
                "'|V99999999999'",
                "'f4,' * 5",
                "[('a', '<f4')]",
                "'<f4,<f4'",
                "5",
                "None",
                "[]",
                "'<M8[s]'",
                "('<f4', (2, 2))",
                "'<f3'",
                "'(100000,100000)f8'",
                "'<f16'",
                "''",
                "'O8'",
                "[('a', [('b', [('c', '<f4')])])]",
                "__import__('os').mkdir('executed')",
            ]
        )
        text = text[:start] + descr + text[text.index(", 'fortran") :]
    elif kind == "version":
        version = bytes([rng.randrange(256), rng.randrange(3)])
    elif kind == "order":
        text = text.replace("False", rng.choice(["True", "2", "None", "'x'", "True"]))
    else:
        text = rng.choice(
            [
                "",
                "{}",
                "None",
                "\0",
                "{'descr': 1",
                "[1]",
                "'" * 100,
                "lambda: 0",
                "ü",
                text + text,
                text.replace("'shape'", "'shapes'"),
                "# -*- coding: x -*-\n" + text,
                "\\\n" * 90,
            ]
        )
    encoded = text.encode("latin1", "replace")
    if len(encoded) > 65535:
        return data[:6] + b"\x02\x00" + len(encoded).to_bytes(4, "little") + encoded + rest, kind
    return data[:6] + version + len(encoded).to_bytes(
        2, "little"
    ) + encoded + rest, f"{kind} {text.strip()[:90]!r}"


def change_npy_header(rng: random.Random, path: Path) -> str:
    data = path.read_bytes()
    if not data.startswith(b"\x93NUMPY"):
        buffer = io.BytesIO()
        np.save(buffer, np.zeros((N, 3), np.float32))
        data = buffer.getvalue()
    data, said = npy_bytes(rng, data)
    path.write_bytes(data)
    return said


# Zip files


def change_npz(rng: random.Random, path: Path) -> str:
    """Change one array of a .npz file, or its name."""
    with np.load(path) as file:
        arrays = dict(file)
    name = rng.choice(sorted(arrays))
    kind = rng.choice(["array", "array", "header", "name", "twice", "removed", "object"])
    packed = rng.random() < 0.5
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        for key, values in arrays.items():
            said, data = "", npy_of(values)
            if key == name:
                if kind == "removed":
                    continue
                if kind == "array":
                    values = hostile_array(rng, values)
                    said, data = f"{values.dtype}{list(values.shape)}", npy_of(values)
                elif kind == "header":
                    data, said = npy_bytes(rng, data)
                elif kind == "name":
                    key = rng.choice(
                        [n for n in NAMES if "\ud800" not in n]
                        + ["label", "y", "indptr", "num_nodes", "format", "shape"]
                    )[:60000]
                elif kind == "object":
                    data = npy_of(np.array([Payload()], object))
                elif kind == "twice":
                    import warnings

                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        archive.writestr(f"{key}.npy", data)
                result = said
            archive.writestr(f"{key}.npy", data)
    return f"{kind} of {name} {result if kind in ('array', 'header') else ''}{' packed' * packed}"


def npy_of(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


_ZIP_FIELDS = {
    b"PK\x03\x04": [(4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)],
    b"PK\x01\x02": [(6, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (42, 4)],
    b"PK\x05\x06": [(4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)],
}


def change_zip(rng: random.Random, path: Path) -> str:
    """Write a hostile number into one field of a zip file's headers."""
    data = bytearray(path.read_bytes())
    magic = rng.choice(list(_ZIP_FIELDS))
    places = [i for i in range(len(data)) if data.startswith(magic, i)]
    if not places:
        return change_bytes(rng, path)
    at = rng.choice(places)
    offset, size = rng.choice(_ZIP_FIELDS[magic])
    old = int.from_bytes(data[at + offset : at + offset + size], "little")
    value = rng.choice(
        [0, 1, 8, 12, 14, 99, old + 1, max(0, old - 1), old * 2, (1 << 31) - 1, (1 << 32) - 1, 1 << 30]
    ) % (1 << 8 * size)
    data[at + offset : at + offset + size] = value.to_bytes(size, "little")
    path.write_bytes(data)
    return f"field at {offset} of {magic!r}: {value} in place of {old}"


def rebuild_zip(rng: random.Random, path: Path) -> str:
    """The same members, packed in another way, with others beside them, or with a comment."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {m.filename: archive.read(m) for m in archive.infolist()}
    except zipfile.BadZipFile:
        return change_bytes(rng, path)
    method = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    extra = rng.choice([0, 0, 3, 3000])
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.comment = b"c" * rng.choice([0, 10, 65535])
        for name, data in members.items():
            archive.writestr(name, data)
        for index in range(extra):
            archive.writestr(f"m{index}.npy", npy_of(np.zeros(3)))
    return f"packed by method {method}, {extra} more members"


# Files of torch.save


def change_torch(rng: random.Random, path: Path) -> str:
    """Change a value, a key or all of what torch.save was given."""
    try:
        found = torch.load(path, weights_only=False)
    except Exception:
        found = pyg.tensors()
    said = "all"
    if isinstance(found, dict) and rng.random() < 0.9:
        place, said = found, ""
        keys = list(place)
        if keys and rng.random() < 0.4 and isinstance(place[keys[0]], dict):
            place = place[rng.choice(keys)]
        key = rng.choice(list(place))
        said = repr(key)
        if rng.random() < 0.25:
            new = rng.choice(
                [
                    *OTHERS,
                    ("a", "b"),
                    ("a", "b", "c", "d"),
                    (1, 2, 3),
                    ("a", 5, "a"),
                    5,
                    "edge_index",
                    "num_nodes",
                    "adj_t",
                    "y",
                    "train_mask",
                    "label",
                    "_store",
                    "_node_store_dict",
                    "_global_store",
                ]
            )
            try:
                hash(new)
            except TypeError:
                new = 5
            place[new] = place.pop(key)
            said += f" renamed to {new!r:.60}"
        else:
            place[key] = hostile_value(rng, place[key])
            said += f" = {place[key]!r:.200}"
    else:
        found = hostile_value(rng, found)
        said += f" = {found!r:.200}"
    legacy = rng.random() < 0.15
    torch.save(found, path, _use_new_zipfile_serialization=not legacy)
    return said + " legacy" * legacy


def hostile_value(rng: random.Random, value: Any) -> Any:
    """Something in place of a value of a file of torch."""
    kind = rng.choice(["other", "array", "tensor", "tensor", "odd tensor", "payload", "deep"])
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
        values = (
            value.numpy()
            if isinstance(value, torch.Tensor) and value.layout == torch.strided
            else np.arange(N)
        )
        try:
            return torch.from_numpy(hostile_array(rng, values).copy())
        except (TypeError, ValueError):
            return torch.arange(N).to(
                rng.choice(
                    [
                        torch.uint16,
                        torch.uint64,
                        torch.complex64,
                        torch.bfloat16,
                        torch.bool,
                        torch.float8_e4m3fn,
                    ]
                )
            )
    if kind == "odd tensor":
        base = value if isinstance(value, torch.Tensor) and value.layout == torch.strided else torch.arange(N)
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
            lambda: torch.sparse_csr_tensor(
                torch.tensor([0, 5, 1]),
                torch.tensor([0, 99, 3, 1, 1]),
                torch.ones(5),
                (2, 3),
                check_invariants=False,
            ),
            lambda: torch.sparse_coo_tensor(
                torch.tensor([[0], [9]]), torch.ones(1), (2, 3), check_invariants=False
            ),
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            lambda: base.T if base.dim() == 2 else base[::2],
        ]
        return rng.choice(ways)()
    return anything(rng)


def change_pickle(rng: random.Random, path: Path) -> str:
    """Put other opcodes in the place of the pickle of a file of torch.save."""
    deep = b"]" + b"]q\x00" * 0 + b"(" * 5000
    streams = {
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
        "huge text 8": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b".",
        "huge long": b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "long": b"\x80\x02\x8b" + struct.pack("<i", 4_000_000) + b"\x7f" * 4_000_000 + b".",
        "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b".",
        "laughs": b"\x80\x02]" + b"".join(b"2\x86" for _ in range(60)) + b".",
        "persistent": b"\x80\x02)Q.",
        "ordered": b"\x80\x02ccollections\nOrderedDict\n)R" + b"}b" * 10 + b".",
        "self": b"\x80\x02]q\x00h\x00a.",
        "bytes": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + b"(NK\x00)))tR.",
        "device": b"\x80\x02ctorch\ndevice\nX\x04\x00\x00\x00cuda\x85R.",
        "deep": deep,
    }
    name = rng.choice(list(streams))
    if not zipfile.is_zipfile(path):
        path.write_bytes(streams[name])
        return f"{name}, alone"
    with zipfile.ZipFile(path) as archive:
        members = [(m.filename, archive.read(m)) for m in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members:
            archive.writestr(member, streams[name] if member.endswith("/data.pkl") else data)
    return name


# Text


def text_of(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def put_text(path: Path, data: bytes) -> None:
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)


def change_text(rng: random.Random, path: Path) -> str:
    """Change a field, a line or all of a table of numbers."""
    data = text_of(path)
    lines = data.split(b"\n")
    index = rng.randrange(len(lines))
    kind = rng.choice(["field", "field", "field", "line", "all", "long line", "long field", "end"])
    fields: list[bytes] = [str(n).encode() for n in NUMBERS]
    fields += [
        b"",
        b" ",
        b"x",
        b"\0",
        b"\xff",
        b"1_000",
        b"0x10",
        b"#",
        b'"1"',
        b"1,2",
        b"+5",
        b"--1",
        b"1e5",
        b"1" * 400,
        b"NaN",
        b"infinity",
        b"1j",
        b"\xc3\xbc",
        b"1;2",
        b"\r",
        b"\x0b",
        b"\x1c",
        b"\x85",
    ]
    said = ""
    if kind == "field":
        found = lines[index].split(b",")
        place, value = rng.randrange(len(found)), rng.choice(fields)
        found[place] = value
        lines[index], said = b",".join(found), f"field {place} of line {index + 1}: {value[:40]!r}"
        data = b"\n".join(lines)
    elif kind == "line":
        lines[index] = rng.choice(
            [
                b"",
                b",",
                b",,,",
                b"1",
                b"1,2,3,4,5",
                b"a,b",
                b"#",
                b"1 2",
                b" \t ",
                b"1,2,",
                b"\0",
                lines[0] * 3,
            ]
        )
        data, said = b"\n".join(lines), f"line {index + 1}: {lines[index][:40]!r}"
    elif kind == "all":
        data = rng.choice(
            [
                b"",
                b"\n",
                b"#\n",
                b"a,b\n",
                b"\0" * 1000,
                b"\n" * 2_000_000,
                b"1",
                b"1,2",
                b",",
                b"#" * 100,
                b"\r" * 1000,
                b"1,2\r" * 50,
                b"\xef\xbb\xbf1,2\n",
                b"\xff\xfe1\x00",
                b"# c\n" * 300_000,
                b"nan,nan\n",
                b"-1,-1\n",
                b"99999999999,1\n",
                b"1,2\n" * 300_000,
                data * 30,
            ]
        )
        said = repr(data[:40])
    elif kind == "long line":
        data = data + rng.choice([b"1", b"1,", b" ", b"#", b",", b"a", b"\0", b"9 "]) * (70 << 20)
        said = repr(data[-10:])
    elif kind == "long field":
        lines[index] = rng.choice([b"1", b"0", b".", b"9", b"-", b"e"]) * rng.choice(
            [1000, 100_000, 3_000_000]
        )
        data, said = b"\n".join(lines), f"line {index + 1}: {lines[index][:10]!r} {len(lines[index])}"
    else:
        data = data.rstrip(b"\n") + rng.choice([b",", b"\0", b"\n\n\n", b"\n1", b"#", b"\x1a"])
    put_text(path, data)
    return f"{kind} {said}"


def change_gzip(rng: random.Random, path: Path) -> str:
    """Change how a text is packed, not what it says."""
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
        data = gzip.compress(rng.choice([b"\0", b"1", b"1,", b"\n", b" ", b"1,1\n"]) * (30 << 20), 1) * 2
    else:
        data = gzip.compress(data)
    path.write_bytes(data)
    return kind


# YAML


def change_yaml(rng: random.Random, path: Path) -> str:
    """Change a value or a key of GraphBolt's metadata.yaml."""
    meta = graphbolt.yaml.safe_load(path.read_text())
    places: list[tuple[Any, Any]] = list(_places(meta))
    place, key = rng.choice(places)
    value = rng.choice(
        [
            anything(rng),
            anything(rng),
            2,
            -3,
            [None],
            [5],
            ["a"],
            {"num": -1},
            [{"num": 5}] * 2,
            "edges/e.csv",
            "data/feat.npy",
            "a:b:c",
            "_N:_E:_N",
        ]
    )
    if isinstance(place, dict) and rng.random() < 0.2:
        new = value if isinstance(value, (str, int, float, bool, type(None), tuple)) else 5
        place[new] = place.pop(key)
        said = f"{key} renamed to {new!r:.60}"
    elif rng.random() < 0.1:
        del place[key]
        said = f"{key} removed"
    else:
        place[key] = value
        said = f"{key} = {value!r:.60}"
    try:
        text = graphbolt.yaml.safe_dump(meta)
    except graphbolt.yaml.YAMLError:
        text = graphbolt.yaml.dump(meta)
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return said


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def write_yaml(rng: random.Random, path: Path) -> str:
    """Put another text in the place of metadata.yaml."""
    laughs = "a0: &a0 [x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
    )
    merges = "a0: &a0 {k: v}\n" + "".join(
        f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 9)
    )
    texts = {
        "empty": "",
        "number": "5",
        "list": "- 1",
        "laughs": laughs,
        "laughing graph": laughs + "graph: *a11\n",
        "laughing list": laughs + "graph: {nodes: *a11}\n",
        "merges": merges,
        "deep": "[" * 3000,
        "deep map": "{a: " * 800 + "1" + "}" * 800,
        "deep lists": "- " * 2000,
        "python": "!!python/object/apply:os.mkdir [executed]",
        "int": "graph: !!int ''",
        "bool": "graph: !!bool q",
        "time": "graph: 2001-99-99",
        "timestamp": "graph: !!timestamp x",
        "digits": "graph: " + "9" * 5000,
        "null": "graph: \0",
        "tab": "\tgraph: 1",
        "key": "? [a, b]\n: 1",
        "set": "graph: !!set {a, b}",
        "binary": "graph: !!binary '!!'",
        "alias": "graph: *a",
        "self": "graph: &a\n  nodes: *a",
        "self list": "&a [*a]",
        "self nodes": "graph: {nodes: &a [{num: 5, type: *a}]}",
        "long": "a: " + "x" * 3_000_000,
        "many": "".join(f"k{i}: 1\n" for i in range(100_000)),
        "float": "graph: {nodes: [{num: .inf}]}",
        "nan": "graph: {nodes: [{num: .nan}]}",
        "omap": "graph: !!omap [a: 1, 5]",
        "pairs": "graph: !!pairs [a]",
        "sexagesimal": "graph: {nodes: [{num: 190:20:30}]}",
        "bytes": "graph: {nodes: [{num: 5, type: !!binary aGk=}]}",
        "float tag": "a: !!float ''",
        "docs": "a: 1\n---\nb: 2",
        "bom": "\ufeffgraph: {}",
    }
    name = rng.choice(list(texts))
    path.write_text(texts[name], encoding="utf-8")
    return name


# Parquet, Arrow, MATLAB


def change_parquet(rng: random.Random, path: Path) -> str:
    """Change or rename a column of a table of Parquet or Arrow."""
    pa, pq = parquet.pa, parquet.pq
    feather = pa.feather
    table = pq.read_table(path) if path.suffix == ".parquet" else feather.read_table(path)
    name = rng.choice(table.column_names)
    index = table.column_names.index(name)
    n = table.num_rows
    kind = rng.choice(["type", "name", "values", "nulls", "rows", "schema"])
    said = ""
    if kind == "name":
        new = rng.choice(
            [
                "src",
                "dst",
                "id",
                "label",
                "y",
                "train_mask",
                "x_0",
                "x_1",
                "pos_0",
                *NAMES[:5],
                NAMES[10],
                name + "_99999999999",
            ]
        )
        table = table.rename_columns([new if c == name else c for c in table.column_names])
        said = repr(new)[:60]
    elif kind == "rows":
        table = rng.choice(
            [table.slice(0, 0), table.slice(0, n - 1), pa.concat_tables([table, table]), table.select([])]
        )
    else:
        ways = {
            "u64": lambda: pa.array(np.full(n, (1 << 64) - 1, np.uint64)),
            "u16": lambda: pa.array(np.arange(n, dtype=np.uint16)),
            "decimal": lambda: pa.array([1] * n).cast(pa.decimal128(30, 2)),
            "dictionary": lambda: pa.array(["a"] * n).dictionary_encode(),
            "numbers in a dictionary": lambda: pa.array([5] * n).dictionary_encode(),
            "list": lambda: pa.array([[1, 2]] * n),
            "ragged": lambda: pa.array([[1] * (i % 3) for i in range(n)]),
            "empty lists": lambda: pa.array([[]] * n, pa.list_(pa.float32())),
            "list of lists": lambda: pa.array([[[1]]] * n),
            "list with nulls": lambda: pa.array([[None, 1.0]] * n),
            "null lists": lambda: pa.array([None] * n, pa.list_(pa.int64())),
            "wide": lambda: (
                pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(0, np.float32)), 0)
                if n == 0
                else pa.array([[0.0] * 0] * n, pa.list_(pa.float32(), 0))
            ),
            "struct": lambda: pa.array([{"a": 1}] * n),
            "nothing": lambda: pa.nulls(n),
            "null numbers": lambda: pa.nulls(n, pa.int64()),
            "null floats": lambda: pa.nulls(n, pa.float32()),
            "half": lambda: pa.array(np.zeros(n, np.float16)),
            "bool": lambda: pa.array([True] * n),
            "null bool": lambda: pa.array([None] * n, pa.bool_()),
            "list of bool": lambda: pa.array([[True, False]] * n),
            "date": lambda: pa.array([0] * n, pa.timestamp("s")),
            "large list": lambda: pa.array([[1.0]] * n, pa.large_list(pa.float64())),
            "negative": lambda: pa.array(np.full(n, -1)),
            "huge": lambda: pa.array(np.full(n, (1 << 63) - 1)),
            "nan": lambda: pa.array(np.full(n, np.nan)),
            "float ids": lambda: pa.array(np.full(n, 0.5)),
            "binary": lambda: pa.array([b"x"] * n),
            "map": lambda: pa.array([[("a", 1)]] * n, pa.map_(pa.string(), pa.int64())),
        }
        said = rng.choice(list(ways))
        table = table.set_column(index, name, ways[said]())
    if path.suffix == ".parquet":
        pq.write_table(
            table,
            path,
            row_group_size=rng.choice([7, 130, 1 << 20]),
            compression=rng.choice(["snappy", "gzip", "zstd", "none"]),
            data_page_version=rng.choice(["1.0", "2.0"]),
        )
    else:
        feather.write_feather(
            table,
            path,
            compression=rng.choice(["zstd", "lz4", "uncompressed"]),
            chunksize=rng.choice([7, 1000]),
        )
    return f"{kind} of {name} {said}"


def change_matlab(rng: random.Random, path: Path) -> str:
    """Change a variable of a MATLAB file."""
    found = {k: v for k, v in matlab.io.loadmat(path).items() if not k.startswith("__")}
    name = rng.choice(list(found))
    sp = matlab.sparse
    ways = {
        "array": lambda: hostile_array(rng, np.arange(80.0)),
        "matrix": lambda: hostile_array(rng, np.zeros((80, 4))),
        "text": lambda: "x",
        "cell": lambda: np.array([1, "a", [2]], object),
        "struct": lambda: {"a": 1, "b": {"c": 2}},
        "sparse": lambda: sp.random(80, 80, 0.1),
        "oblong": lambda: sp.random(80, 81, 0.1),
        "no rows": lambda: sp.csc_matrix((0, 0)),
        "complex": lambda: sp.csc_matrix(np.eye(80) * 1j),
        "bool": lambda: sp.csc_matrix(np.eye(80) > 0),
        "nan": lambda: sp.csc_matrix(np.full((80, 80), np.nan)),
        "scalar": lambda: 5,
        "empty": lambda: np.zeros((0, 0)),
        "u64": lambda: np.full((80, 7), (1 << 64) - 1, np.uint64),
        "negative info": lambda: np.full((80, 7), -(1 << 63)),
        "info with nan": lambda: np.full((80, 7), np.nan),
        "big": lambda: (
            sp.csc_matrix(([1.0], ([0], [0])), (1 << 30, 1 << 30)) if rng.random() < 0.02 else sp.eye(200_000)
        ),
    }
    kind = rng.choice(list(ways))
    if rng.random() < 0.2:
        found[rng.choice(["local_info", "A", "W", "label", "y", "a" * 31])] = found.pop(name)
        kind = "renamed"
    else:
        found[name] = ways[kind]()
    try:
        matlab.io.savemat(path, found, do_compression=rng.random() < 0.5)
    except (TypeError, ValueError):
        return change_bytes(rng, path)
    return f"{kind} for {name}"


def copy(source: Path, target: Path) -> Path:
    (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    return target
