"""`gids quickstart`: compares training with gids and without it on a synthetic graph, in two minutes.

It runs two commands: `gids generate` and `gids bench epoch`.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from gids.cli.arguments import (
    READS,
    add_framework,
    adder,
    natural,
    numbers,
    positive,
    seconds,
    window,
)

EXAMPLES = {
    "dgl": """\
import gids.dgl, dgl  # gids before dgl
source = gids.open({path!r})  # memory="16GB", window=16, ...
graph = gids.dgl.graph(source)
sampler = dgl.dataloading.NeighborSampler({fanouts}, prefetch_node_feats=["feat"], prefetch_labels=["label"])
loader = gids.dgl.DataLoader(graph, source.split("train"), sampler, gids=source, batch_size={batch_size})
for input_nodes, output_nodes, blocks in loader: ...  # blocks[0].srcdata["feat"], blocks[-1].dstdata["label"]
""",
    "pyg": """\
import gids.pyg
data = gids.open({path!r})  # memory="16GB", window=16, ...
loader = gids.pyg.NeighborLoader(data, {fanouts}, "train", batch_size={batch_size}, shuffle=True)
for batch in loader: ...  # batch.x, batch.edge_index, batch.y[: batch.batch_size]
""",
    "torch": """\
import gids
source = gids.open({path!r})  # memory="16GB", window=16, ...
loader = gids.NodeLoader(source, "train", {fanouts}, batch_size={batch_size}, shuffle=True)
for minibatch in loader: ...  # minibatch.blocks, minibatch.features["feat"], minibatch.labels
""",
}
"""The first epoch with each framework."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "quickstart",
        help="compare training with gids and without it on a synthetic graph",
        description="Make a synthetic graph, and train an epoch of GraphSAGE with gids, and with the "
        "framework's own loader on a memory-mapped array. Each runs in a new process with a cold page cache. "
        "Print the time by stage.",
    )
    option = adder(parser)
    add_framework(parser)
    option("--nodes", positive, "number of nodes", 300_000, "N")
    option("--dim", positive, "float32 features per node", 1024, "D")
    option("--batch-size", positive, "seeds per minibatch", 64, "N")
    option("--batches", positive, "minibatches", 120, "N")
    option("--fanouts", numbers(1), "fanout per layer", [3, 3, 3], "N,…")
    option("--window", window, "minibatches that gids samples ahead, 0 to 22", 16, "N")
    option("--reads", READS, "how gids reads, as reads= of gids.open()", "auto")
    text = "memory for features of each side (default: a quarter of the features)"
    option("--memory", None, text, metavar="BYTES")
    text = "stop training after about S seconds in all, and compare rows/s (default: 150; 0: no limit)"
    option("--seconds", seconds, text, 150, "S")
    option("--seed", natural, "random seed", 0)
    option("--dir", Path, "directory for the files (default: the temporary directory)", metavar="DIR")
    option("--keep", True, "keep the files")
    option("--json", True, "print JSON instead of the table")


def run(args: argparse.Namespace) -> int:
    from gids.bench.sides import installed_framework
    from gids.cli import main

    framework = args.framework or installed_framework()
    import_module(f"gids.bench.{framework}_side")  # raises at once if the framework is not installed
    with _directory(args.dir or _default_parent(), keep=args.keep) as directory:
        dataset, results = directory / "graph.gids", directory / "results.json"
        training = {
            "--with": framework,
            "--batches": args.batches,
            "--batch-size": args.batch_size,
            "--fanouts": ",".join(map(str, args.fanouts)),
            "--window": args.window,
            "--reads": args.reads,
            "--memory-limit": args.memory,
            "--seconds": args.seconds,
            "--json": results if args.json else None,
        }
        options = [word for pair in training.items() if pair[1] is not None for word in pair]
        quiet = ["--quiet"] if args.json else []
        for command in (
            ["generate", dataset, "--nodes", args.nodes, "--dim", args.dim, "--seed", args.seed, "--quiet"],
            ["bench", "epoch", dataset, *options, "--seed", args.seed, *quiet],
        ):
            words = list(map(str, command))
            print(f"$ gids {shlex.join(words)}", file=sys.stderr, flush=True)
            if status := main(words):  # which prints its errors
                return status
        if args.json:
            print(results.read_text(), end="")
        else:
            print("\nWith your own data: gids convert SOURCE mine.gids, and then\n")
            fanouts = args.fanouts[::-1] if framework == "pyg" else args.fanouts  # PyG begins with the seeds
            code = EXAMPLES[framework].format(path="mine.gids", fanouts=fanouts, batch_size=args.batch_size)
            print(textwrap.indent(code, "    "))
    return 0


@contextmanager
def _directory(parent: Path, *, keep: bool) -> Iterator[Path]:
    """Make a directory. Removes it at the end, and on Ctrl-C or SIGTERM, unless it is kept."""
    parent.mkdir(parents=True, exist_ok=True)
    if _in_memory(parent):
        print(
            f"{parent} is in memory, so nothing is read from a disk: give a --dir on a disk", file=sys.stderr
        )
    with ExitStack() as stack:
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        stack.callback(signal.signal, signal.SIGTERM, before)
        directory = Path(tempfile.mkdtemp(prefix="gids-quickstart-", dir=parent))
        if keep:
            stack.callback(print, f"files kept in {directory}", file=sys.stderr)
        else:
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
        yield directory


def _default_parent() -> Path:
    temporary = Path(tempfile.gettempdir())
    return Path.cwd() if _in_memory(temporary) else temporary


def _in_memory(path: Path) -> bool:
    from gids.io import probe

    with tempfile.NamedTemporaryFile(dir=path) as file:
        return str(probe(file.name)["file_system"]) in ("tmpfs", "ramfs")
