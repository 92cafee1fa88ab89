"""Hostile sources of `gids convert`: each prints one line of error within its memory, and runs no code.

The table below has cases made by hand; hostile_runner.py damages valid sources at random. For more of them:
`python tests/convert/hostile_runner.py --cases 5000 --seed 1`.
"""

import gc
import gzip
import io
import json
import os
import struct
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import save_arrays
from reader_example import harmed

from gids.convert.readers.arrays import directory_arrays
from gids.store.rows import read_range

pa = pytest.importorskip("pyarrow")
feather = pytest.importorskip("pyarrow.feather")
pq = pytest.importorskip("pyarrow.parquet")
matlab = pytest.importorskip("test_reader_matlab", exc_type=ImportError)
graphbolt = pytest.importorskip("test_reader_graphbolt", exc_type=ImportError)

import test_reader_dgl as dgl_graph  # noqa: E402
import test_reader_mag240m as mag240m  # noqa: E402
import test_reader_ogb as ogb  # noqa: E402
import test_reader_pyg as pyg  # noqa: E402

MERGES = "a0: &a0 {k: v}\n"
for i in range(1, 12):
    MERGES += f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n"
RUNNER = Path(__file__).with_name("hostile_runner.py")
FEAT = np.arange(12, dtype=np.float32).reshape(4, 3)
MANY = 200  # more than the runner allows to be open at a time
CONVERTED = ""


class Payload:
    """Unpickling it makes a directory called executed."""

    def __reduce__(self):
        return (os.mkdir, ("executed",))


def npy_of(values):
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def write_zip(path, members, method):
    with zipfile.ZipFile(path, "w", method) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about two members of one name
        for name, data in members:
            archive.writestr(name, data)


def npy(header, data=b"", version=1):
    encoded = header.encode()
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H", len(encoded)) + encoded + data


def shaped(shape, descr="'<f4'"):
    return npy(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n", bytes(64))


def file(name, *pieces, size=None):
    """A function that makes a file of these bytes, cut or extended (by a hole) to a size."""

    def make(root):
        with open(root / name, "wb") as out:
            for piece in pieces:
                out.write(piece)
            if size is not None:
                out.truncate(size)
        return root / name

    return make


def npz(members, method=zipfile.ZIP_STORED):
    def make(root):
        write_zip(root / "s.npz", members, method)
        return root / "s.npz"

    return make


def directory_entry(path, offset, data):
    """Overwrite bytes of the first entry of a zip file's directory."""
    content = bytearray(path.read_bytes())
    at = content.index(b"PK\x01\x02") + offset
    content[at : at + len(data)] = data
    path.write_bytes(content)
    return path


ZIP_ENTRY = struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 0, 0, 33, 0, 0, 0, 1, *[0] * 6) + b"a"


def zip_end(count):
    return struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0, 0, count * len(ZIP_ENTRY), 4, 0)


def encrypted(root):
    return directory_entry(npz([("feat.npy", npy_of(FEAT))])(root), 8, b"\1")


def claims(root):
    """A deflated member with too large a size in its header."""
    member = npy_of(FEAT).replace(b"(4, 3)", b"(8388608, 3)")
    path = npz([("feat.npy", member)], zipfile.ZIP_DEFLATED)(root)
    return directory_entry(path, 24, struct.pack("<I", 200_000_000))


def directory(harm=None, **arrays):
    """A directory of arrays, changed by harm."""

    def make(root):
        save_arrays(root / "s", **({"feat": FEAT} | arrays))
        if harm is not None:
            harm(root / "s")
        return root / "s"

    return make


def put(place, name="label.npy"):
    """A directory of arrays with something that is not a file."""
    return directory(lambda folder: place(folder / name))


def yaml(text=None, **changes):
    """GraphBolt's dataset with another or a changed metadata.yaml."""

    def make(root):
        graphbolt.homogeneous(root / "s", **changes)
        if text is not None:
            (root / "s/metadata.yaml").write_text(text)
        return root / "s"

    return make


def node_type(**entry):
    return yaml(graph={"nodes": [entry], "edges": [], "feature_data": []})


def feature(**entry):
    known = {"domain": "node", "type": None, "name": "other", "format": "numpy", "path": "data/feat.npy"}
    return yaml(feature_data=[known | entry])


def text_of_types(name, text):
    """ogbn-mag with another content of the file that lists its types."""

    def harm(root):
        with gzip.open(root / "raw" / name, "wt") as out:
            out.write(text)

    return harmed(ogb.mag, harm)


def torch_file(saved, **options):
    def make(root):
        torch.save(saved, root / "d.pt", **options)
        return root / "d.pt"

    return make


def packed_torch_file(root):
    torch.save({"x": torch.ones(100, 3)}, root / "d.pt")
    with zipfile.ZipFile(root / "d.pt") as archive:
        members = [(m.filename, archive.read(m)) for m in archive.infolist()]
    write_zip(root / "d.pt", members, zipfile.ZIP_DEFLATED)
    return root / "d.pt"


def large_batch(root):
    """640 MB of zeros in one compressed batch of a few kB."""
    zeros = pa.table({"feat": pa.array(np.zeros(160_000_000, np.float32))})
    feather.write_feather(zeros, root / "t.feather", compression="zstd", chunksize=zeros.num_rows)
    return root / "t.feather"


def bad_offsets(root):
    """Lists with offsets outside their values."""
    offsets = pa.py_buffer(np.array([0, 2, 1 << 30, 4, 8], np.int32).tobytes())
    values = pa.array(np.arange(8, dtype=np.float32))
    lists = pa.ListArray.from_buffers(pa.list_(pa.float32()), 4, [None, offsets], children=[values])
    table = pa.table({"feat": lists})
    with pa.OSFile(str(root / "t.arrow"), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    return root / "t.arrow"


def many_tables(root):
    (root / "s/nodes/a").mkdir(parents=True)
    for index in range(MANY):
        pq.write_table(pa.table({"x": pa.array([float(index)])}), root / f"s/nodes/a/{index:03}.parquet")
    return root / "s"


def matlab_file(root):
    """Rows of an element type that crashes SciPy."""
    matlab.io.savemat(root / "m.mat", {"A": matlab.sparse.csc_matrix(np.eye(8))})
    data = (root / "m.mat").read_bytes().replace(struct.pack("<II", 5, 32), struct.pack("<II", 0, 32), 1)
    (root / "m.mat").write_bytes(data)
    return root / "m.mat"


def dgl_file(root):
    """A name with a huge length, which DGL allocates and aborts."""
    pytest.importorskip("gids.dgl", exc_type=ImportError)
    dgl_graph.save(pytest.importorskip("dgl"), root / "g.bin")
    data = (root / "g.bin").read_bytes()
    at = data.rindex(b"_N") - 8
    (root / "g.bin").write_bytes(data[:at] + struct.pack("<Q", 1 << 61) + data[at + 8 :])
    return root / "g.bin"


def sparse_npz(**changes):
    def make(root):
        matrix = matlab.sparse.csr_matrix(np.eye(4))
        parts = {"indices": matrix.indices, "indptr": matrix.indptr, "data": matrix.data}
        parts |= {"format": np.array("csr"), "shape": np.array([4, 4]), **changes}
        np.savez(root / "m.npz", **parts)
        return root / "m.npz"

    return make


def expanded(count, dtype=torch.float32):
    return torch.zeros(1, dtype=dtype).expand(count)


DEEP = "-" * 5000 + "1"
MEBIBYTE_OF_ONES, MEBIBYTE_OF_LINES = gzip.compress(b"1" * (1 << 20)), gzip.compress(b"   \n" * (1 << 18))

# (make(directory) -> source, message or CONVERTED, arguments of the command)
CASES = [
    (file("e.csv", b"1,2\n", size=6 << 30), "e.csv, line 2: longer than 4194304 characters"),
    (file("e.csv.gz", *[MEBIBYTE_OF_ONES] * 6144), "e.csv.gz, line 1: longer than 4194304 characters"),
    (file("e.csv.gz", *[MEBIBYTE_OF_LINES] * 640), "has no numbers in lines 1 to"),
    (file("nodes.csv.gz", *[MEBIBYTE_OF_ONES] * 6144), "nodes.csv.gz cannot be parsed as CSV"),
    (
        file("nodes.csv.gz", *[MEBIBYTE_OF_LINES] * 6144),
        "nodes.csv.gz has no line with the names of its columns",
    ),
    (file("nodes.csv", b"a," * 1_000_000 + b"\n"), "has 1000001 columns; the limit is 100000"),
    (file("nodes.csv", b"id,x\na," + b"1" * (20 << 20) + b"\n"), "nodes.csv cannot be parsed as CSV"),
    (file("e.csv.gz", gzip.compress(b"1,2\n"), b"xy"), "is damaged or"),
    (file("e.csv", b"1," + b"1" * 1_000_000 + b"\n"), "could not convert '1111"),
    (text_of_types("num-node-dict.csv.gz", "author,institution,paper\n-1,5,50\n"), "gives '-1' nodes"),
    (
        text_of_types("triplet-type-list.csv.gz", "author,/../../../x,paper\n"),
        "cannot be the name of a folder",
    ),
    (
        file("a.npy", b"\x93NUMPY\x02\0" + struct.pack("<I", 3_000_000_000), size=3 << 30),
        "a.npy is not a valid .npy file: it is nested too deeply, or needs too much memory",
    ),
    (file("a.npy", npy(DEEP)), "it is nested too deeply"),
    (file("a.npy", shaped("(-4, 3)")), "a length is not from 0 to"),
    (file("a.npy", shaped(f"(0, {1 << 47}, {1 << 47})")), "larger than any file"),
    (file("a.npy", shaped("(1,)", "'<U1000000000'")), "is not a valid .npy file: descr"),
    (file("a.npy", npy_of(np.array([Payload()], object))), "which need unpickling"),
    (file("a.npy", shaped("(4,)", "__import__('os').mkdir('executed')")), "is not a valid .npy file"),
    (
        lambda root: npz([(f"m{i}.npy", npy_of(FEAT)) for i in range(10_001)])(root),
        "the source has 10001 tables; the limit is 10000",
    ),
    (file("s.npz", b"PK\3\4", ZIP_ENTRY * 500_000, zip_end(500_000)), "needs too much memory"),
    (npz([("feat.npy", npy_of(FEAT))] * 2), "has two members"),
    (npz([("x" * 5000 + ".npy", npy_of(FEAT))]), "is too long or holds a NUL"),
    (
        npz([("feat.npy", npy_of(FEAT))], zipfile.ZIP_BZIP2),
        "another zip compression than deflate (method 12)",
    ),
    (encrypted, "is encrypted or"),
    (claims, "is damaged in its member feat.npy"),
    (
        sparse_npz(indices=np.array([0, 1, 2, 9]), shape=np.array([4, 5])),
        "has column 9; it must be from 0 to 4",
    ),
    (directory(num_nodes=np.array(-1)), "is -1; it must be a whole number from 0 to"),
    (
        directory(edge_index=np.full((2, 5), (1 << 64) - 1, np.uint64)),
        "is 18446744073709551615 near position 0",
    ),
    (directory(indptr=np.zeros((5, 2), int), indices=np.zeros(3, int)), "it must have one dimension"),
    (
        directory(
            lambda folder: file("label.npy", shaped(f"(4, {1 << 28})"), size=(4 << 30) + 200)(folder),
        ),
        "a row may have at most 67108864 bytes",
    ),
    (put(os.mkfifo), "label.npy is a FIFO; it must be a regular file"),
    (put(lambda path: path.symlink_to("/dev/zero")), "label.npy is a device"),
    (put(lambda path: path.symlink_to(path.name)), "label.npy: Too many levels of symbolic"),
    (lambda root: os.mkfifo(root / "a.npy") or root / "a.npy", "is a FIFO"),
    (lambda root: os.mkfifo(root / "d.pt") or root / "d.pt", "is a FIFO"),
    (node_type(num=5, type=7), "is 7; it must be text"),
    (feature(path=7), "path is 7; it must be text"),
    (yaml(MERGES), "gids convert: "),
    (yaml("[" * 3000), "it is nested too deeply"),
    (yaml("# " + "x" * (1 << 20)), "has more than 262144 bytes"),
    (yaml("!!python/object/apply:os.mkdir [executed]"), "is not valid YAML"),
    (torch_file(Payload()), "it asks for posix.mkdir"),
    (
        lambda root: file(
            "d.pt",
            torch_file(pyg.tensors(), _use_new_zipfile_serialization=False)(root).read_bytes(),
            size=400 << 20,
        )(root),
        "was saved by torch before 1.6 and has more than 314572800 bytes",
    ),
    (packed_torch_file, "has compressed members"),
    (
        torch_file(pyg.tensors(x=expanded((1 << 44, 1)), y=None, train_mask=expanded(1 << 44, torch.bool))),
        "not enough room",
    ),
    (torch_file({5: torch.ones(3)}), "has an attribute called 5"),
    (
        harmed(mag240m.write, lambda root: torch.save({"train": [1, 2]}, root / "split_dict.pt")),
        "is a list; it must be a tensor or an array",
    ),
    (large_batch, "needs more than", "--memory", "256MB"),
    (bad_offsets, "is damaged or truncated: In column 0"),
    (many_tables, CONVERTED),
    (
        file("t.parquet", b"PAR1" + bytes(64) + struct.pack("<I", (1 << 32) - 1) + b"PAR1"),
        "t.parquet is damaged or truncated: ",
    ),
    (matlab_file, "crashed (SIGSEGV)"),
    (dgl_file, "crashed (SIGABRT)"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The result of each conversion by the number of its case, and what is printed about sources that are
    changed at random. One process converts all sources."""
    root = tmp_path_factory.mktemp("hostile")
    made = {}
    for number, (make, _, *arguments) in enumerate(CASES):
        folder = root / str(number)
        folder.mkdir()
        try:
            made[number] = (str(make(folder)), arguments)
        except pytest.skip.Exception:
            continue
    (root / "list.json").write_text(json.dumps(list(made.values())))
    command = [sys.executable, "-P", RUNNER, "--listed", root / "list.json", "--cases", "80", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    listed, changed = lines[: len(made)], lines[len(made) :]
    return dict(zip(made, listed, strict=True)) | {"changed": changed}


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=[message or "converted" for _, message, *_ in CASES]
)
def test_hostile_source_prints_one_line_within_its_memory(results, number):
    if number not in results:
        pytest.skip("its library is not installed")
    found, message = results[number], CASES[number][1]
    assert found["faults"] == [], found
    assert found["status"] == (0 if message == CONVERTED else 2), found
    assert message in found["error"]


@pytest.mark.parametrize("form", ["stored", "packed", "files"])
def test_reading_arrays_leaves_no_file_open(tmp_path, form):
    arrays = {f"m{index}": FEAT + index for index in range(MANY)}
    folder = tmp_path / "s"
    folder.mkdir()
    if form == "files":
        save_arrays(folder, **arrays)
    else:
        (np.savez if form == "stored" else np.savez_compressed)(folder / "s.npz", **arrays)
    gc.collect()  # files of earlier tests
    before = os.listdir("/proc/self/fd")
    found = dict(directory_arrays(folder, tmp_path))
    for name, values in arrays.items():
        assert np.array_equal(read_range(found[name].rows, 0, len(values)), values)
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.slow
def test_randomly_changed_sources_fail_in_the_same_way(results):
    *failures, outcomes = results["changed"]
    assert failures == []
    assert outcomes["refused"] > 25
    assert outcomes["converted"] > 5
