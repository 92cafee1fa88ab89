"""DGL graphs, as dgl.save_graphs and the caches of DGLDataset have them. DGL itself opens the file,
through Choices.load_graphs: nothing here imports it.

Takes a DGLGraph apart into features, topology, labels and splits; loads it whole, as DGL does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gids.convert.damage import parsing
from gids.convert.named import LABELS, MASKS
from gids.convert.readers.reader import Choices, Reader
from gids.convert.source import InEdges, Source, TableSource, starts_with
from gids.convert.source_file import check_file
from gids.errors import FormatError
from gids.store.names import Relation
from gids.store.rows import TensorRows

MAGIC = (0xDD2E4FF046B4A13F).to_bytes(8, "little")


def _graph_file(path: Path) -> Path | None:
    """The file itself, or the only one of a cache directory; None when there is none such."""
    if not path.is_dir():
        return path if starts_with(path, MAGIC) else None
    found = [p for p in sorted(path.iterdir()) if starts_with(p, MAGIC)]
    return found[0] if len(found) == 1 else None


def _read(path: Path, scratch: Path, choices: Choices) -> Source:
    file = _graph_file(path)
    if file is None:
        raise FormatError(f"{path} is no file of dgl.save_graphs, nor a directory with one")
    if choices.load_graphs is None:
        raise FormatError(f"{file} is a DGL graph file, which DGL itself must open: use `gids convert`")
    check_file(file)
    with parsing(file, "is damaged, or of another version of DGL"):
        graphs, labels = choices.load_graphs(str(file))
    if len(graphs) != 1:
        raise FormatError(f"{file} holds {len(graphs)} graphs; save the one to convert in a file of its own")
    source = read_dgl_graph(graphs[0])
    source.notes += [f"left out {name!r}: a label of the whole graph" for name in labels]
    return source


def read_dgl_graph(graph: Any) -> Source:
    """What a DGLGraph, homogeneous or not, holds. Its tensors are used in place.

    ndata: `label`, `labels` or `y` with one whole number per node are labels; `train_mask`, `val_mask` and
    `test_mask` are splits; all else is a table. edata: tables, in the order of DGL's edge ids.
    """
    source = Source()
    for ntype in graph.ntypes:
        source.add_nodes(ntype, graph.num_nodes(ntype), "the graph")
        _read_nodes(source, ntype, graph.nodes[ntype].data)
    for relation in graph.canonical_etypes:
        indptr, indices, edge_ids = graph.adj_tensors("csc", etype=relation)
        ids = TensorRows(edge_ids) if len(edge_ids) else None  # DGL leaves them out when they are positions
        source.graphs[relation] = InEdges(TensorRows(indptr), TensorRows(indices), ids)
        _read_edges(source, relation, graph.edges[relation].data)
    return source


def _read_nodes(source: Source, ntype: str, data: Mapping[str, torch.Tensor]) -> None:
    for key, values in data.items():
        is_class = values.dim() == 1 and not values.dtype.is_floating_point and values.dtype != torch.bool
        if key in LABELS and is_class and ntype not in source.labels:
            source.labels[ntype] = TensorRows(values)
        elif key in MASKS:
            source.add_mask(ntype, MASKS[key], TensorRows(values), f"{key!r} of {ntype!r}")
        else:
            source.tables.append(TableSource("node", ntype, key, TensorRows(values)))


def _read_edges(source: Source, relation: Relation, data: Mapping[str, torch.Tensor]) -> None:
    for key, values in data.items():
        source.tables.append(TableSource("edge", relation, key, TensorRows(values)))


_LAYOUT = """\
Needs DGL; the graph is loaded whole. ndata label | labels | y (one whole number per node): labels;
train_mask, val_mask | valid_mask, test_mask: splits; all else: tables. edata: tables of edges."""

READER = Reader(
    "dgl",
    "a file of dgl.save_graphs with one graph, or a DGLDataset's cache directory",
    _LAYOUT,
    lambda path: _graph_file(path) is not None,
    _read,
    may_crash=True,
)
