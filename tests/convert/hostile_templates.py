"""Writes one valid source per reader and form, which hostile_changes.py damages."""

import sys
import types
from pathlib import Path

import numpy as np
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
from pyarrow import feather
from reader_example import save

N, E = 40, 90
_GIVEN = {"raw.data": ("--dtype", "float32", "--shape=-1,6"), "pairs.npy": ("--from", "edges")}
_DIRECTORIES = ("ogb", "mag240m", "igb", "graphbolt", "parquet")  # need --from if a file is removed


def write_all(root: Path) -> dict[str, tuple[str, ...]]:
    """Write the sources to root. Returns name -> arguments of `gids convert`."""
    root.mkdir(parents=True)
    _write_arrays(root)
    _write_datasets(root)
    _write_tables(root)
    _write_torch(root)
    try:
        import dgl

        import gids.dgl  # noqa: F401
    except ImportError:
        pass
    else:
        dgl_graph.save(dgl, root / "graph.bin")
    found = {}
    for path in sorted(root.iterdir()):
        reader = path.name.partition("-")[0]
        found[path.name] = _GIVEN.get(path.name, ("--from", reader) if reader in _DIRECTORIES else ())
    return found


def _write_arrays(root: Path) -> None:
    rng = np.random.default_rng(1)
    pairs = rng.integers(0, N, (2, E))
    feat, weight, label = rng.standard_normal((N, 6), np.float32), np.arange(E) / 8, np.arange(N) % 5
    arrays = {"feat": feat, "label": label, "train_idx": np.arange(9), "val_mask": np.arange(N) > 30}
    arrays |= {"edge_index": pairs, "edge_w": weight}
    order = np.argsort(pairs[1], kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(pairs[1], minlength=N))])
    np.save(root / "one.npy", feat)
    feat.tofile(root / "raw.data")
    np.savez(root / "stored.npz", **arrays)
    np.savez_compressed(root / "packed.npz", **arrays, order=np.asfortranarray(feat))
    for form, width in (("adj", N), ("attr", 7)):
        matrix = matlab.sparse.random(N, width, 0.2, "csr", random_state=1)
        matlab.sparse.save_npz(root / f"{form}.npz", matrix, compressed=form == "adj")
    save(root / "arrays", **arrays)
    save(root / "in-edges", indptr=indptr, indices=pairs[0, order], edge_ids=order, num_nodes=np.array(N))
    save(root / "types/nodes/paper", feat=feat, label=label)
    save(root / "types/nodes/author", num_nodes=np.array(N))
    save(root / "types/edges/author.writes.paper", edge_index=pairs, w=weight)
    edges.text(root / "pairs.csv", values=pairs.T)
    edges.text(root / "weights.txt.gz", delimiter=" ", values=[(*p, 0.5) for p in pairs.T.tolist()])
    save(root / "beside", feat=feat)
    edges.text(root / "beside/edges.tsv", header="# SNAP\nsrc\tdst\n", delimiter="\t", values=pairs.T)
    np.save(root / "pairs.npy", pairs)


def _write_datasets(root: Path) -> None:
    cites = {("paper", "cites", "paper"): 50}
    ogb.papers100m(root / "ogb-binary")
    ogb.arxiv(root / "ogb-text")
    ogb.mag(root / "ogb-types")
    mag240m.write(root / "mag240m")
    igb.write(root / "igb", cites)
    igb.write(root / "igb-raw", cites, headers=False)
    graphbolt.homogeneous(root / "graphbolt")


def _write_tables(root: Path) -> None:
    nodes, pairs = parquet.nodes(), parquet.edges()
    parquet.write(root / "parquet", nodes, pairs)
    parquet.pq.write_table(nodes, root / "alone.parquet", compression="gzip")
    (root / "arrow").mkdir()
    feather.write_feather(nodes, root / "arrow/nodes.feather", compression="zstd")
    feather.write_feather(pairs, root / "arrow/edges.feather", compression="uncompressed")
    matlab.facebook(root / "facebook.mat")
    variables = {"A": matlab.A, "label": np.arange(matlab.N), "x": np.ones((matlab.N, 3)), "t": "text"}
    matlab.io.savemat(root / "packed.mat", variables, do_compression=True)


def _write_torch(root: Path) -> None:
    relation = {("a", "to", "a"): {"edge_index": torch.from_numpy(pyg.EDGES)}}
    torch.save(pyg.tensors(num_nodes=pyg.N), root / "dict.pt")
    torch.save(pyg.tensors(), root / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save({"a": pyg.tensors(), **relation}, root / "hetero.pt")
    _save_with_classes(root / "data.pt")


def _save_with_classes(path: Path) -> None:
    """A file of torch.save with PyG's Data, made with stand-ins for its classes."""
    kept = dict(sys.modules)
    found = types.SimpleNamespace()
    try:
        for module, names in pyg.CLASSES.items():
            for number in range(1, module.count(".") + 2):
                parent = ".".join(module.split(".")[:number])
                sys.modules[parent] = types.ModuleType(parent)
            for name in names:
                setattr(found, name, type(name, (), {"__module__": module}))
                setattr(sys.modules[module], name, getattr(found, name))
        torch.save(pyg.data(found, pyg.tensors()), path)
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] in ("torch_geometric", "torch_sparse")]:
            del sys.modules[name]
        sys.modules.update(kept)
