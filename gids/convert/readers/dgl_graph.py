"""Reads DGL graphs: files of dgl.save_graphs and caches of DGLDataset.

DGL loads the whole graph.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gids.convert.source import Choices, InEdges, Reader, Source
from gids.convert.source_files import reading, starts_with
from gids.dgl_finder import import_dgl
from gids.errors import FormatError
from gids.store.rows import TensorRows

MAGIC = (0xDD2E4FF046B4A13F).to_bytes(8, "little")


def _graph_file(path: Path) -> Path | None:
    """The file itself, or the only graph file of a cache directory, or None."""
    if not path.is_dir():
        return path if starts_with(path, MAGIC) else None
    files = [p for p in path.iterdir() if starts_with(p, MAGIC)]
    return files[0] if len(files) == 1 else None


def _read(path: Path, scratch: Path, choices: Choices) -> Source:
    file = _graph_file(path)
    if file is None:
        raise FormatError(f"{path} is not a file of dgl.save_graphs or a directory with one such file")
    graphs, labels = load_graphs(file)
    if len(graphs) != 1:
        raise FormatError(f"{file} holds {len(graphs)} graphs; save one graph per file")
    source = read_dgl_graph(graphs[0], choices.skip)
    source.used.add(file)
    for name, values in labels.items():
        if not source.skips(name):  # DGL's labels are of graphs; people keep masks of nodes there, too
            why = "a label of the whole graph, not in ndata or edata"
            source.leave_out(repr(name), why, name if values.numel() > 1 else "")
    return source


def load_graphs(path: Path) -> Any:
    """dgl.load_graphs."""
    try:
        dgl = import_dgl()
    except ImportError as error:
        raise ImportError(f"{path} is a DGL graph file: install DGL to read it ({error})") from None
    with reading(path), open(path, "rb") as file:  # by number, because DGL takes only paths that are UTF-8
        return dgl.load_graphs(f"/proc/self/fd/{file.fileno()}")


def read_dgl_graph(graph: Any, skip: tuple[str, ...] = ()) -> Source:
    """The Source of a DGLGraph, homogeneous or not. Uses its tensors in place.

    In ndata, `label`, `labels` or `y` are labels, and `train_mask`, `val_mask` and `test_mask` are splits;
    the rest are tables. edata are tables, in the order of DGL's edge ids. skip: columns to leave out.
    """
    source = Source(skip=skip)
    graph = graph.formats(["coo", "csr", "csc"])  # it may have been saved with one of the others only
    for ntype in graph.ntypes:
        source.add_nodes(ntype, graph.num_nodes(ntype), "the graph")
        for key, values in graph.nodes[ntype].data.items():
            if not source.skips(key):
                source.add_node_array(ntype, key, TensorRows(values), f"{key!r} of {ntype!r}")
    for relation in graph.canonical_etypes:
        indptr, indices, edge_ids = graph.adj_tensors("csc", etype=relation)
        ids = TensorRows(edge_ids) if len(edge_ids) else None  # DGL leaves them out if they are positions
        source.graphs[relation] = InEdges(TensorRows(indptr), TensorRows(indices), ids)
        for key, values in graph.edges[relation].data.items():
            if not source.skips(key):
                source.add_edge_table(relation, key, TensorRows(values))
    return source


_LAYOUT = """\
Needs DGL, which loads the whole graph into memory. ndata label | labels | y: labels; train_mask,
val_mask | valid_mask, test_mask: splits; other ndata: tables. edata: tables of edges."""

READER = Reader(
    "dgl",
    "a file of dgl.save_graphs with one graph, or a DGLDataset's cache directory",
    _LAYOUT,
    lambda path: _graph_file(path) is not None,
    _read,
    takes=("--skip",),
    aside=("*info*.pkl", "ind.*"),
)
