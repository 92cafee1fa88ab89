"""Small datasets and graphs that tests share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gids import _core
from gids.convert.readers import Choices, find_reader, open_source
from gids.convert.source import Source
from gids.store.ids import number_keys, text_keys
from gids.store.rows import file_crc32c
from gids.write import DatasetWriter, edge_list

WRITES = ("author", "writes", "paper")
CITES = ("paper", "cites", "paper")


def has_open(path: Path) -> bool:
    """Whether this process has the dataset's directory open."""
    descriptors = Path("/proc/self/fd").iterdir()
    return any(os.path.lexists(fd) and os.readlink(fd) == str(path) for fd in descriptors)


def read_source(path: Path, scratch: Path) -> Source:
    """Read a source as `gids convert` does without options."""
    return open_source(find_reader(path), path, scratch, Choices())


def in_edges(
    degrees: Sequence[int] | np.ndarray, num_src: int, rng: np.random.Generator | int, *, power: float = 2
) -> tuple[np.ndarray, np.ndarray]:
    """(indptr, indices) of a graph whose node v has degrees[v] in-edges, which may repeat.

    num_src: number of sources. The greater the power, the more edges begin at sources with small ids.
    """
    rng = np.random.default_rng(rng)
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    return indptr, (num_src * rng.random(indptr[-1]) ** power).astype(np.int64)


def random_in_edges(num_src: int, num_dst: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """In-edges of nodes with 0 to 24 of them each."""
    rng = np.random.default_rng(seed)
    return in_edges(rng.integers(0, 25, num_dst), num_src, rng)


def sorted_edges(
    sources: np.ndarray,
    destinations: np.ndarray,
    num_dst: int,
    *,
    by_source: bool = False,
    dedup: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(indptr, indices, edge ids) of a list of edges, the obvious way.

    by_source: order the in-edges of a node by source, not by edge id. dedup: keep one of equal edges.
    """
    order = np.lexsort((sources, destinations) if by_source else (destinations,))
    sources, destinations = sources[order], destinations[order]
    if dedup:
        first = np.ones(len(sources), bool)
        first[1:] = (np.diff(sources) != 0) | (np.diff(destinations) != 0)
        sources, destinations, order = sources[first], destinations[first], order[first]
    indptr = np.concatenate([[0], np.cumsum(np.bincount(destinations, minlength=num_dst))])
    return indptr, sources, order


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits, NaNs included."""
    a, b = (t.cpu().clone(memory_format=torch.contiguous_format) for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def int8_with_a_scale(values: np.ndarray, scale: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, scales) as which values[n, width] are stored, as docs/internals/format.md defines.

    Reading gives steps * scales. scale: "row" (scales are [n, 1]) or "column" ([1, width]).
    """
    largest = np.abs(values).max(1 if scale == "row" else 0, keepdims=True, initial=0)
    scales = (largest / np.float32(127)).astype(np.float32)
    scales[(largest > 0) & (scales < np.finfo(np.float32).tiny)] = np.finfo(np.float32).tiny
    with np.errstate(invalid="ignore", divide="ignore"):
        steps = np.where(scales > 0, np.rint(values / scales), 0)
    return np.clip(steps, -127, 127).astype(np.int8), scales


def damage(file: Path, data: bytes, offset: int = 0) -> None:
    """Write bytes to a file as a failing disk changes them: its times stay. offset: below 0 from the end."""
    times = os.stat(file)
    with open(file, "r+b") as opened:
        opened.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        opened.write(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def sign(path: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> None:
    """Write the manifest anew: with the checksums that arrays have now, changed, whatever it says then."""
    manifest = path / "manifest.json"
    fields = json.loads(manifest.read_bytes())
    del fields["checksum"]
    entries: list[Any] = [fields]
    while entries:
        entry = entries.pop()
        if isinstance(entry, dict) and "crc32c" in entry:
            entry["crc32c"] = file_crc32c(path / entry["path"])
        elif isinstance(entry, dict | list):
            entries += entry.values() if isinstance(entry, dict) else entry
    change(fields)
    text = json.dumps(fields | {"checksum": "crc32c:00000000"}, indent=1) + "\n"
    crc = _core.crc32c_extend(0, np.frombuffer(text.encode(), np.uint8))
    manifest.write_text(text.replace("crc32c:00000000", f"crc32c:{crc:08x}"))


def contents(path: Path) -> dict[str, bytes]:
    """The bytes of all files below a directory, by their relative paths."""
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


needs_unsigned = pytest.mark.skipif(
    not hasattr(torch, "uint64"), reason="torch before 2.3 has no uint16, uint32 and uint64"
)


def save_arrays(folder: Path, **arrays: np.ndarray) -> None:
    """Write each array to folder/NAME.npy. A name may have "/"; directories are created."""
    for name, values in arrays.items():
        path = folder / f"{name}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, values)


def write_ids(writer: DatasetWriter, ntype: str, ids: np.ndarray) -> None:
    """Give the nodes of a type ids, int64[n] or str[n], as `gids convert` stores them."""
    if ids.dtype.kind == "i":
        arrays, keys = {"id": ids}, number_keys(ids)
    else:
        texts = [text.encode() for text in ids.tolist()]
        offsets = np.cumsum([0, *map(len, texts)])
        arrays = {"id": np.frombuffer(b"".join(texts), np.uint8), "id_offset": offsets}
        keys = text_keys(arrays["id"], offsets)
    order = np.argsort(keys, kind="stable")
    for role, values in {**arrays, "id_key": keys[order], "id_node": order.astype(np.int32)}.items():
        writer.copy_node_array(ntype, role, values)


def write_dataset(path: Path, **options: Any) -> Path:
    """A small dataset with one of everything: 3 authors and 20 papers, two relations, labels and splits.

    Its tables: author.feat, paper.feat, paper.year, author.writes.paper.weight.
    """
    generator = torch.Generator().manual_seed(1)
    with DatasetWriter(path, page_bytes=512, **options) as writer:
        writer.write_table("node", "paper", "feat", torch.randn(20, 50, generator=generator))
        authors = torch.randn(3, 300, generator=generator).to(torch.bfloat16)
        writer.write_table("node", "author", "feat", authors)
        writer.write_table("node", "paper", "year", torch.arange(2000, 2020))
        writer.write_edges(
            WRITES,
            edge_list(torch.tensor([2, 0, 2, 1]), torch.tensor([5, 5, 1, 0]), num_src=3, num_dst=20),
        )
        writer.write_table("edge", WRITES, "weight", torch.tensor([0.1, 0.2, 0.3, 0.4]))
        edges = torch.randint(20, (2, 100), generator=generator)
        writer.write_edges(CITES, edge_list(edges[0], edges[1], num_src=20, num_dst=20), index_dtype="int32")
        writer.write_labels("paper", torch.arange(20, dtype=torch.int8) % 4)
        writer.write_split("paper", "train", torch.arange(10))
        writer.write_split("paper", "test", torch.arange(15, 20))
    return path
