"""Damages a valid source at random: whole files, bytes, arrays, and zip files.

Called by hostile_runner.py. Each change says in a few words what it did, so that a failure can be made again
by hand. What only one library writes is in hostile_formats.py.
"""

import io
import os
import random
import shutil
import socket
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

N = 40  # rows of most arrays
BIG_FILE_BYTES = 3 << 30  # sparse; more than the memory of a conversion
# fmt: off
NUMBERS = [
    -1, 0, 1, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 53) + 1, 1 << 62,
    (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 31), -(1 << 63), -(1 << 64), 10**40, 1e300, 0.5, -0.0,
    float("nan"), float("inf"), -float("inf"),
]
NAMES = [
    "../x", "/etc/passwd", "a\0b", "a\nb", "x" * 5000, "", ".", "..", "%2E%2E%2Fx", "\ud800", "ü" * 100,
    "a/b",
]
OTHERS = [None, True, "x", "nan", "1e400", b"\xff", [], {}, (), [1, [2, [3]]], {"a": 1}, {5: 6}, 3j, *NAMES]
_IN_PLACE = [
    "fifo", "socket", "directory", "link to itself", "link to nothing", "link to a device", "link outside",
    "link to the parent", "big", "big text", "removed", "empty", "another file",
]
_NEW_NAMES = [
    "nodes", "edges", "raw", "split", "processed", "label", "y", "num_nodes", "a\nb", "%2e%2e%2fx", "%00",
    "x" * 240, "ü", "edge_index", "train_idx", "train_mask", "adj", "x.y.z", "a__b__c", "a___b___c",
    "node_label_19", "indptr", "adj_data", "attr_shape", "edge_", "feat",
]
_SUFFIXES = ["", ".npy", ".npz", ".bin", ".csv", ".csv.gz", ".pt", ".parquet"]
_DTYPES = [
    "u8", "u4", "u2", "i2", "i1", ">i8", ">f4", "f2", "f8", "c16", "S3", "U3", "O", "M8[s]", "m8", "?", "V4",
    "g", "f4,f4", "payload",
]
_SHAPES = [
    (), (0,), (0, 3), (3, 0), (0, 0), (1,), (2,), (1, 1), (2, 2), (2, 0), (5, 2), (2, 5, 2), (1,) * 12,
    (N, 1), (1, N), (N - 1,), (N, 2), (N + 1,),
]
_DEEP = [
    "(" * 3000, "[" * 150 + "]" * 150, "-" * 5000 + "1", "1+" * 3000 + "1", "{1:" * 150, "~" * 9000,
    "9" * 6000, "not " * 2000,
]
_DESCRS = [
    "'|O'", "'<U1000000000'", "'|V99999999999'", "'f4,' * 5", "[('a', '<f4')]", "'<f4,<f4'", "5", "None",
    "[]",     "'<M8[s]'", "('<f4', (2, 2))", "'<f3'", "'(100000,100000)f8'", "'<f16'", "''", "'O8'",
    "[('a', [('b', [('c', '<f4')])])]", "__import__('os').mkdir('executed')",
]
_LENGTHS = ["0", "1", "-1", "True", "None", "'a'", "1.5", "9" * 30, "10L", "-2", "()"]
_HEADERS = ["", "{}", "None", "\0", "{'descr': 1", "[1]", "'" * 100, "lambda: 0", "ü", "\\\n" * 90]
_ZIP_FIELDS = {  # (offset, bytes) of fields of a member, of its directory entry, and of the directory
    b"PK\x03\x04": [(4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)],
    b"PK\x01\x02": [(6, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (42, 4)],
    b"PK\x05\x06": [(4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)],
}
# fmt: on
Change = Callable[[random.Random, Path], str]


class Payload:
    """Unpickling it makes a directory called executed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("executed",))


def copy(source: Path, target: Path) -> Path:
    (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    return target


def spoil(rng: random.Random, source: Path, ways: dict[str, list[Change]]) -> str:
    """Change a source (a file or a directory) at random. Returns what was done. ways: by suffix of a file."""
    files = sorted(p for p in source.rglob("*") if p.is_file()) if source.is_dir() else [source]
    if source.is_dir() and rng.random() < 0.08:
        return add_file(rng, source)
    file = rng.choice(files)
    way = rng.choice([*ways.get(file.suffix, []), change_bytes, change_bytes])
    if rng.random() < 0.1:
        way = change_file
    return f"{file.relative_to(source.parent)}: {way.__name__}: {way(rng, file)}"


def number(rng: random.Random) -> Any:
    return rng.choice(NUMBERS)


def anything(rng: random.Random) -> Any:
    return rng.choice([*NUMBERS, *OTHERS])


def change_file(rng: random.Random, path: Path) -> str:
    """Replace a file by something else."""
    kind = rng.choice(_IN_PLACE)
    if kind == "big":
        os.truncate(path, BIG_FILE_BYTES)
        return "grown to 3 GB of zeros"
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        bind(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "link to a device":
        path.symlink_to(rng.choice(["/dev/zero", "/dev/full", "/dev/tty"]))
    elif kind.startswith("link"):
        ends = {"link to itself": path.name, "link outside": "/etc/passwd", "link to the parent": ".."}
        path.symlink_to(ends.get(kind, "nothing"))
    elif kind == "empty":
        path.touch()
    elif kind == "another file" and (others := sorted(p for p in path.parent.iterdir() if p.is_file())):
        shutil.copy(rng.choice(others), path)
    elif kind == "big text":
        with open(path, "wb") as file:
            file.write(b"1" * (1 << 20))
            file.truncate(1 << 30)
    return kind


def bind(path: Path) -> None:
    """Make a socket. Its path may be too long for bind()."""
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as found:
            found.bind(path.name)
    finally:
        os.chdir(here)


def add_file(rng: random.Random, source: Path) -> str:
    """Add a file with a hostile name or content to one of a source's directories."""
    folder = rng.choice([source, *sorted(p for p in source.rglob("*") if p.is_dir())])
    path = folder / (rng.choice(_NEW_NAMES) + rng.choice(_SUFFIXES))
    if path.exists():
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
        path.write_bytes(npy_of(hostile_array(rng, np.arange(N))))
    return f"{kind} {path.relative_to(source.parent)!s:.100} added"


def change_bytes(rng: random.Random, path: Path) -> str:
    """Cut, flip, insert or repeat bytes, or overwrite some with a hostile number."""
    data = bytearray(path.read_bytes())
    kind = rng.choice(["cut", "flip", "flip", "flip", "insert", "repeat", "number", "number", "number"])
    where = rng.choice(["anywhere", "at the start", "at the end"])
    first = max(0, len(data) - 300) if where == "at the end" else 0
    last = min(len(data), 300) if where == "at the start" else len(data)
    if first == last:
        return "nothing"
    at = rng.randrange(first, last)
    if kind == "cut":
        del data[at:]
    elif kind == "flip":
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
    return f"{kind} {where}, {at}"


def hostile_array(rng: random.Random, values: np.ndarray) -> np.ndarray:
    """A replacement for an array: another type, shape or values."""
    kind = rng.choice(["type", "shape", "value", "value", "big"])
    with np.errstate(all="ignore"):
        if kind == "type":
            return _cast(values, rng.choice(_DTYPES))
        if kind == "shape":
            shape = rng.choice([*_SHAPES, values.shape[::-1], (*values.shape, 1), values.shape[:-1]])
            found: np.ndarray = np.resize(values, shape).astype(values.dtype)
            return np.asfortranarray(found) if rng.random() < 0.2 else found
        if kind == "big":
            return np.zeros(rng.choice([(70_000,), (1, 70_000), (70_000, 1)]), values.dtype)
        return _with_value(rng, values, number(rng))


def _cast(values: np.ndarray, name: str) -> np.ndarray:
    if name == "payload":
        return np.array([Payload()], object)
    try:
        return values.astype(name)
    except (ValueError, TypeError):
        return np.zeros(values.shape, name)


def _with_value(rng: random.Random, values: np.ndarray, value: Any) -> np.ndarray:
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


def npy_of(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def change_npy(rng: random.Random, path: Path) -> str:
    try:
        values = np.load(path)
    except ValueError:  # files of IGB have no header
        values = np.zeros(N, np.float32)
    found = hostile_array(rng, values)
    path.write_bytes(npy_of(found))
    return f"{found.dtype}{list(found.shape)} in place of {values.dtype}{list(values.shape)}"


def change_npy_header(rng: random.Random, path: Path) -> str:
    data = path.read_bytes()
    if not data.startswith(b"\x93NUMPY"):
        data = npy_of(np.zeros((N, 3), np.float32))
    data, said = with_hostile_header(rng, data)
    path.write_bytes(data)
    return said


def with_hostile_header(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """The bytes of a .npy file with a false header, and a description."""
    length = int.from_bytes(data[8:10], "little")
    text, rest = data[10 : 10 + length].decode("latin1"), data[10 + length :]
    kind = rng.choice(
        ["length", "long", "deep", "shape", "shape", "shape", "descr", "version", "text", "order"]
    )
    version = b"\x01\x00"
    if kind == "length":
        size = rng.choice([n for n in NUMBERS if isinstance(n, int) and 0 <= n < 1 << 32])
        return data[:6] + b"\x02\x00" + size.to_bytes(4, "little") + data[10:], f"header of {size} bytes"
    if kind == "long":
        text = text.rstrip() + " " * rng.choice([9_000, 30_000, 1 << 26]) + "\n"
    elif kind == "deep":
        deep = rng.choice(_DEEP)
        text = rng.choice([deep, text.replace("'shape': (", f"'shape': ({deep}, ")])
    elif kind == "shape":
        ways = [str(number(rng)) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 40]))] + [rng.choice(_LENGTHS)]
        rng.shuffle(ways)
        start = text.index("'shape': (") + len("'shape': (")
        inner = ", ".join(ways).replace("nan", "0").replace("inf", "1")
        text = text[:start] + inner + "," + text[text.index(")", start) :]
    elif kind == "descr":
        start = text.index("'descr': ") + len("'descr': ")
        text = text[:start] + rng.choice(_DESCRS) + text[text.index(", 'fortran") :]
    elif kind == "version":
        version = bytes([rng.randrange(256), rng.randrange(3)])
    elif kind == "order":
        text = text.replace("False", rng.choice(["True", "2", "None", "'x'", "True"]))
    else:
        text = rng.choice([*_HEADERS, text + text, text.replace("'shape'", "'shapes'"), "# comment\n" + text])
    encoded = text.encode("latin1", "replace")
    said = f"{kind} {text.strip()[:90]!r}"
    if len(encoded) > 65535:
        return data[:6] + b"\x02\x00" + len(encoded).to_bytes(4, "little") + encoded + rest, said
    return data[:6] + version + len(encoded).to_bytes(2, "little") + encoded + rest, said


def change_npz(rng: random.Random, path: Path) -> str:
    """Change one array of a .npz file, or its name."""
    with np.load(path) as file:
        arrays = dict(file)
    name = rng.choice(sorted(arrays))
    kind = rng.choice(["array", "array", "header", "name", "twice", "removed", "object"])
    method = rng.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
    members = [(key, npy_of(values)) for key, values in arrays.items() if key != name]
    data, said = npy_of(arrays[name]), ""
    if kind == "array":
        found = hostile_array(rng, arrays[name])
        data, said = npy_of(found), f"{found.dtype}{list(found.shape)}"
    elif kind == "header":
        data, said = with_hostile_header(rng, data)
    elif kind == "object":
        data = npy_of(np.array([Payload()], object))
    known = [n for n in NAMES if n.isprintable() or n.isascii()]
    new = rng.choice([*known, "label", "indptr", "num_nodes", "format", "shape"]) if kind == "name" else name
    if kind != "removed":
        members += [(new, data)] * (2 if kind == "twice" else 1)
    write_zip(path, [(f"{key}.npy", data) for key, data in members], method)
    return f"{kind} of {name} {said} by method {method}"


def write_zip(path: Path, members: list[tuple[str, bytes]], method: int, comment: bytes = b"") -> None:
    with zipfile.ZipFile(path, "w", method) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about two members of one name
        archive.comment = comment
        for name, data in members:
            archive.writestr(name, data)


def change_zip(rng: random.Random, path: Path) -> str:
    """Write a hostile number into one field of a zip file's headers."""
    data = bytearray(path.read_bytes())
    magic = rng.choice(list(_ZIP_FIELDS))
    places = [i for i in range(len(data)) if data.startswith(magic, i)]
    if not places:
        return change_bytes(rng, path)
    offset, size = rng.choice(_ZIP_FIELDS[magic])
    at = rng.choice(places) + offset
    old = int.from_bytes(data[at : at + size], "little")
    known = [0, 1, 8, 12, 14, 99, (1 << 31) - 1, (1 << 32) - 1, 1 << 30]
    value = rng.choice([*known, old + 1, max(0, old - 1), old * 2]) % (1 << 8 * size)
    data[at : at + size] = value.to_bytes(size, "little")
    path.write_bytes(data)
    return f"field at {offset} of {magic!r}: {value} in place of {old}"


def rebuild_zip(rng: random.Random, path: Path) -> str:
    """Write the members with another compression, with additional members, or with a comment."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [(m.filename, archive.read(m)) for m in archive.infolist()]
    except zipfile.BadZipFile:
        return change_bytes(rng, path)
    methods = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
    method, extra = rng.choice(methods), rng.choice([0, 0, 3, 11_000])
    members += [(f"m{index}.npy", npy_of(np.zeros(3))) for index in range(extra)]
    write_zip(path, members, method, b"c" * rng.choice([0, 10, 65535]))
    return f"packed by method {method}, {extra} more members"
