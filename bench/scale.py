"""What does an epoch read, send and take on 1 to 1024 ranks, for four ways of training?

    python bench/scale.py papers.gids --batch-size 1024 --fanouts 10,10,10 --network-gb-s 25 --plot scale.png

Samples minibatches of a dataset in one process (curves.py), and predicts seconds and bytes of an epoch on 1,
2, 4 ... ranks for independent, partitioned, 1.5D and cooperative training. docs/papers.md has the formulas,
after Balin, LaSalle and Catalyurek, "Cooperative Minibatching in Graph Neural Networks", 2023, Table 5,
extended by the pages that caches miss and by the disk's reads per second.

Give the rates of one rank. If several ranks share a disk or a network card, give the share of one. Without
--storage-gb-s and --reads-per-s the dataset's disk is measured, in a few seconds. Counts are within 5 %
of real runs; seconds are estimates.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from curves import Curves, Point, Setting, measure

from gids.bench.bandwidth import random_reads
from gids.bench.plot import Curve, check_plotting, plot_curves
from gids.bench.report import aligned, check_writable, seconds
from gids.bench.sampling import SAMPLERS, parse_cache_size
from gids.cli import arguments
from gids.io.engine import direct_works
from gids.packs.predict import measure_rates
from gids.packs.scratch import Scratch
from gids.sizes import format_bytes, parse_bytes
from gids.store import FeatureStore, Table
from gids.store.part import refuse_part

MODES = ("independent", "partitioned", "1.5D", "cooperative")
_RATE = arguments.checked(float, lambda n: 0 < n < math.inf, "a number greater than 0")
BULK = 4  # minibatches that ranks sample in one go, as gids.distributed.open()
WINDOW = 16  # minibatches sampled ahead, as gids.open()
_ID = 8  # bytes
_EDGE = 16  # bytes of an edge that an owner sends: source and edge id
_DEGREE, _WEIGHT = 4, 4
_FLOAT = 4
_LINE = 64  # bytes that a random access moves
_OUTPUTS = 3  # minibatches whose rows are in memory
_RANDOM_S = 0.5  # for which random reads are measured
_SCRATCH_BYTES = 64 << 20


@dataclass(frozen=True)
class Rates:
    """Of each rank, in bytes per second unless the name says otherwise.

    network: sent, while as much comes in. latency_s: of a message. memory: reads and writes together.
    flops: multiplications and additions per second.
    """

    storage: float = 6e9
    reads_per_s: float = 1e6
    network: float = 12.5e9
    latency_s: float = 10e-6
    memory: float = 100e9
    flops: float = 20e12

    def with_storage_of(self, tables: Sequence[Table]) -> Rates:
        """The same with the rates of the disks of these tables, measured in a few seconds."""
        paths = [path for table in tables for path in table.shard_paths]
        page_bytes = max(t.page_bytes for t in tables)
        scratch = Scratch([Path(tempfile.gettempdir())], _SCRATCH_BYTES)
        rates = measure_rates(
            paths, scratch, direct=direct_works(paths), engine="auto", memory_bytes=_SCRATCH_BYTES
        )
        reads = random_reads(paths, page_bytes=page_bytes, seconds=_RANDOM_S)
        return replace(self, storage=rates.read, reads_per_s=reads.reads_per_s)


@dataclass(frozen=True)
class Model:
    """The network that is trained: a GraphSAGE with `hidden` wide layers.

    Two matrices per layer, of a node's own row and of its neighbors' mean.
    """

    hidden: int = 256
    classes: int = 64

    def widths(self, inputs: int, layers: int) -> list[int]:
        """Of the rows of each layer, the input first."""
        return [inputs, *[self.hidden] * (layers - 1), self.classes]


@dataclass(frozen=True)
class Plan:
    """cache_bytes: of each rank. memory_bytes: what a rank has, None: enough."""

    cache_bytes: float
    memory_bytes: float | None = None


@dataclass(frozen=True)
class Work:
    """Of one rank in one step, the mean over ranks.

    rows: input nodes whose rows it reads, or has its cache give. pages, storage_bytes: that it reads from
    storage. ids_received, nodes_asked, edges_received, rows_received: from other ranks. network_bytes:
    received. activation_bytes, activation_messages: those of network_bytes and messages that are in the
    middle of training. memory_bytes: moved in memory. operations: of floating point.
    """

    seeds: float = 0
    nodes: float = 0
    edges: float = 0
    rows: float = 0
    pages: float = 0
    storage_bytes: float = 0
    nodes_asked: float = 0
    edges_received: float = 0
    ids_received: float = 0
    rows_received: float = 0
    network_bytes: float = 0
    activation_bytes: float = 0
    messages: float = 0
    activation_messages: float = 0
    memory_bytes: float = 0
    operations: float = 0


@dataclass(frozen=True)
class Prediction:
    """An epoch on `ranks` ranks. copies: ranks that hold each part; of 1.5D.

    seconds: of an epoch. parts_s: of a step, by resource. bottleneck: the resource that a step waits for.
    storage_bytes, network_bytes: of all ranks in an epoch. rank_bytes: memory of a rank. disk_bytes: of it.
    fits: rank_bytes is not over the limit. extrapolated: some minibatch is larger than those measured.
    """

    mode: str
    ranks: int
    copies: int
    steps: int
    work: Work
    parts_s: Mapping[str, float]
    bottleneck: str
    seconds: float
    storage_bytes: float
    network_bytes: float
    rank_bytes: float
    disk_bytes: float
    fits: bool
    extrapolated: bool


def predict_all(
    curves: Curves, rates: Rates, plan: Plan, model: Model, ranks: Sequence[int]
) -> list[Prediction]:
    """Every mode on each number of ranks; of 1.5D the number of copies that takes least time."""
    predictions = []
    for count in ranks:
        copies = [1 << i for i in range(1, count.bit_length()) if count % (1 << i) == 0 and 1 << i < count]
        for mode in MODES:
            if mode != "1.5D":
                predictions.append(predict(curves, rates, plan, model, mode, count))
            elif copies:
                tried = [predict(curves, rates, plan, model, mode, count, c) for c in copies]
                predictions.append(min(tried, key=lambda p: (not p.fits, p.seconds)))
    return predictions


def predict(
    curves: Curves, rates: Rates, plan: Plan, model: Model, mode: str, ranks: int, copies: int = 1
) -> Prediction:
    """An epoch in one mode. Raises ValueError unless copies divides ranks."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)} (got {mode!r})")
    if ranks < 1 or ranks % copies:
        raise ValueError(f"copies must divide the number of ranks (got {copies} copies and {ranks} ranks)")
    parts = 1 if mode == "independent" else ranks // copies
    seeds = min(ranks * curves.setting.batch_size, curves.epoch_seeds)
    steps = -(-curves.epoch_seeds // seeds)
    work = step_work(curves, plan, model, mode, ranks, copies)
    storage = max(work.storage_bytes / rates.storage, work.pages / rates.reads_per_s)
    network = work.network_bytes / rates.network + work.messages * rates.latency_s
    memory = work.memory_bytes / rates.memory
    compute = work.operations / rates.flops
    exchange = work.activation_bytes / rates.network + work.activation_messages * rates.latency_s
    # Reading, sampling and sending rows overlap with training; activations and gradients do not.
    times = {"storage": storage, "network": network, "memory": memory, "compute": compute}
    step = max(*times.values(), compute + exchange)
    bottleneck = max(times, key=lambda name: times[name])
    held = _memory(curves, plan, mode, parts, seeds, ranks)
    per_epoch = curves.epoch_seeds / seeds  # the last step may be smaller
    return Prediction(
        mode,
        ranks,
        copies,
        steps,
        work,
        times,
        bottleneck,
        per_epoch * step,
        per_epoch * ranks * work.storage_bytes,
        per_epoch * ranks * work.network_bytes,
        held,
        sum(t.page_count * t.page_bytes for t in curves.tables.values()) / parts,
        plan.memory_bytes is None or held <= plan.memory_bytes,
        seeds / ranks * (ranks if mode == "cooperative" else parts) > curves.largest,
    )


def step_work(curves: Curves, plan: Plan, model: Model, mode: str, ranks: int, copies: int = 1) -> Work:
    """The counts of one rank in one step.

    In cooperative training all ranks work on one minibatch; each node belongs to one of them. Else each rank
    samples its own seeds, and of `parts` ranks, each reads its part of the rows for all.
    """
    seeds, layers = min(ranks * curves.setting.batch_size, curves.epoch_seeds), len(curves.setting.fanouts)
    cooperative = mode == "cooperative"
    parts = 1 if mode == "independent" else ranks if cooperative else ranks // copies
    size, share = (seeds, 1 / ranks) if cooperative else (seeds / ranks, 1)  # of a minibatch; a rank's part
    column = seeds if cooperative else size * parts  # seeds of the ranks that exchange with each other
    pages, storage = _reads(curves, plan, column, parts)
    nodes, edges = ([share * x for x in values] for values in _layers(curves, size))
    rows = {t: share * _input_nodes(curves, size, t) for t in curves.node_counts}
    asked = drawn = activations = 0.0  # nodes and edges of others; bytes of hidden layers
    sampling = exchanges = 0.0  # rounds
    if cooperative:
        by_layer = [received(curves, seeds, ranks, layer) for layer in range(layers)]
        came, ids = by_layer[-1], sum(sum(of_layer.values()) for of_layer in by_layer)
        widths = model.widths(_input_width(curves), layers)[::-1]
        # Rows of the layer next to the seeds come last. Forward and backward; features need no gradient.
        activations = sum(
            2 * _FLOAT * widths[layer + 1] * sum(by_layer[layer].values()) for layer in range(layers - 1)
        )
        network = _ID * ids
        if ranks > 1:
            sampling, exchanges = layers / BULK, 2 * layers - 1
    else:
        away = 1 - 1 / parts
        came = {t: n * away for t, n in rows.items()}
        ids, asked, drawn = sum(came.values()), sum(nodes[:-1]) * away, sum(edges) * away
        # A rank receives as many bytes as it sends: others' ids, and the answers to its own.
        edge_bytes = _EDGE + (0 if curves.setting.sampler == "neighbor" else _WEIGHT)
        network = _ID * asked + _DEGREE * asked + edge_bytes * drawn
        network += _ID * sum(came[str(t.type)] for t in curves.tables.values())
        if parts > 1:
            sampling = 2 * layers / BULK + 2
    features = _row_bytes(curves, came)
    gradients, gradient_messages = _gradients(curves, model, ranks)
    in_training = (features if cooperative else 0) + activations + gradients
    inner, operations = _training(curves, model, nodes, edges)
    moved = 2 * (_row_bytes(curves, rows) + features + activations) + _LINE * (sum(nodes) + sum(edges))
    return Work(
        seeds=share * size,
        nodes=sum(nodes),
        edges=sum(edges),
        rows=sum(_input_nodes(curves, column, t) for t in curves.node_counts) / parts,
        pages=pages,
        storage_bytes=storage,
        nodes_asked=asked,
        edges_received=drawn,
        ids_received=ids,
        rows_received=sum(came.values()),
        network_bytes=network + features + activations + gradients,
        activation_bytes=in_training,
        messages=(sampling + exchanges) * (parts - 1) + gradient_messages,
        activation_messages=exchanges * (parts - 1) + gradient_messages,
        memory_bytes=moved + inner,
        operations=operations,
    )


def received(curves: Curves, seeds: float, ranks: int, layer: int) -> dict[str, float]:
    """Sources of a layer, counted from the seeds, that a rank gets from others, by node type."""
    if ranks == 1:
        return dict.fromkeys(curves.node_counts, 0.0)
    return {
        ntype: curves.at(
            seeds,
            lambda p, ntype=ntype: p.users[layer][ntype].received(ranks),  # type: ignore[misc]
            count * (ranks - 1),
        )
        / ranks
        for ntype, count in curves.node_counts.items()
    }


def _layers(curves: Curves, size: float) -> tuple[list[float], list[float]]:
    """(nodes, edges) of a minibatch, by layer from the seeds on; the input nodes last."""
    layers = len(curves.setting.fanouts)
    most = float(sum(curves.node_counts.values()))
    nodes = [curves.at(size, lambda p, i=i: float(p.nodes[i]), most) for i in range(layers + 1)]  # type: ignore[misc]
    edges = float(sum(curves.relations.values()))
    return nodes, [curves.at(size, lambda p, i=i: float(p.edges[i]), edges) for i in range(layers)]  # type: ignore[misc]


def _input_nodes(curves: Curves, size: float, ntype: str) -> float:
    return curves.at(size, lambda p: p.input_nodes[ntype], curves.node_counts[ntype])


def _reads(curves: Curves, plan: Plan, size: float, parts: int) -> tuple[float, float]:
    """(pages, bytes) that a rank reads for a minibatch of `size` seeds that `parts` ranks read together.

    Each of them caches rows of its own part, so together their caches are one of so many times the size.
    """
    whole = sum(t.page_count * t.page_bytes for t in curves.tables.values())
    share = min(1.0, plan.cache_bytes * parts / whole) if whole else 1.0
    pages = read = 0.0
    for name, table in curves.tables.items():

        def missed(point: Point, name: str = name) -> float:
            return point.misses[name].at(share)

        count = curves.at(size, missed, table.page_count * (1 - share)) / parts
        pages += count
        read += count * table.page_bytes
    return pages, read


def _row_bytes(curves: Curves, rows: Mapping[str, float]) -> float:
    """Bytes of the features of these nodes, as they are stored."""
    return float(sum(rows[str(t.type)] * t.row_bytes for t in curves.tables.values()))


def _input_width(curves: Curves) -> int:
    return max((math.prod(t.shape) for t in curves.tables.values()), default=1)


def _gradients(curves: Curves, model: Model, ranks: int) -> tuple[float, float]:
    """(bytes, messages) of summing the gradients of all ranks, which a rank receives."""
    if ranks == 1:
        return 0.0, 0.0
    widths = model.widths(_input_width(curves), len(curves.setting.fanouts))
    count = sum(2 * a * b for a, b in pairwise(widths))
    return 2 * _FLOAT * count * (ranks - 1) / ranks, 2 * math.log2(ranks)


def _training(
    curves: Curves, model: Model, nodes: Sequence[float], edges: Sequence[float]
) -> tuple[float, float]:
    """(bytes moved in memory, operations) forwards and backwards. By layer from the seeds on."""
    layers = len(edges)
    widths = model.widths(_input_width(curves), layers)[::-1]
    moved = operations = 0.0
    for layer, count in enumerate(edges):
        out, into, destinations = widths[layer], widths[layer + 1], nodes[layer]
        moved += 3 * _FLOAT * (count * into + destinations * (into + out))
        operations += 3 * (2 * count * into + 2 * 2 * destinations * into * out)
    return moved, operations


def _memory(curves: Curves, plan: Plan, mode: str, parts: int, seeds: float, ranks: int) -> float:
    """Topology, cache, page words and minibatches of a rank: bytes."""
    topology = sum(4 * n for n in curves.relations.values()) + sum(
        8 * curves.node_counts[relation[2]] for relation in curves.relations
    )
    pages = sum(t.page_count for t in curves.tables.values())
    whole = sum(t.page_count * t.page_bytes for t in curves.tables.values())
    size, split = (seeds, ranks) if mode == "cooperative" else (seeds / ranks, 1)
    nodes, edges = _layers(curves, size)
    rows = {t: _input_nodes(curves, size, t) for t in curves.node_counts}
    minibatches = (
        WINDOW * (_ID * sum(nodes) + _EDGE * sum(edges)) + _OUTPUTS * _row_bytes(curves, rows)
    ) / split
    owners = 2 * sum(curves.node_counts.values()) if parts > 1 else 0
    return topology / parts + owners + min(plan.cache_bytes, whole / parts) + 8 * pages / parts + minibatches


_WORTH = 1.5  # twice the ranks must be this much faster


def rates_line(rates: Rates, measured: str) -> str:
    return (
        f"storage {format_bytes(int(rates.storage))}/s, {rates.reads_per_s:,.0f} reads/s{measured}; "
        f"network {format_bytes(int(rates.network))}/s, {seconds(rates.latency_s)} per message; "
        f"memory {format_bytes(int(rates.memory))}/s; {rates.flops / 1e12:g} Tflop/s"
    )


def curves_table(curves: Curves) -> str:
    """A line per batch size."""
    layers = len(curves.setting.fanouts)
    titles = ["seeds", *(f"nodes {i + 1}" for i in range(layers)), *(f"edges {i + 1}" for i in range(layers))]
    titles += ["rows/seed", "pages"]
    rows = [
        [
            f"{p.batch_size:,}",
            *(f"{n:,.0f}" for n in p.nodes[1:]),
            *(f"{e:,.0f}" for e in p.edges),
            f"{p.nodes[-1] / p.batch_size:.1f}",
            f"{sum(p.pages.values()):,.0f}",
        ]
        for p in curves.points
    ]
    return aligned([titles, *rows])


def prediction_tables(predictions: Sequence[Prediction]) -> list[tuple[str, str]]:
    """(title, table) of seconds, bytes and memory."""
    return [
        ("seconds per epoch, and the bottleneck", _by_mode(predictions, _time)),
        ("read from storage / sent, by all ranks per epoch", _by_mode(predictions, _volume)),
        ("memory per rank", _by_mode(predictions, _held)),
    ]


def plot(path: Path, title: str, predictions: Sequence[Prediction]) -> None:
    """Draw seconds and bytes of an epoch by the number of ranks, as PNG."""
    values: dict[str, Callable[[Prediction], float]] = {
        "time of an epoch: seconds": lambda p: p.seconds,
        "read from storage per epoch: GB": lambda p: p.storage_bytes / 1e9,
        "sent per epoch: GB": lambda p: p.network_bytes / 1e9,
    }
    panels: dict[str, list[Curve]] = {}
    for name, value in values.items():
        for mode in MODES:
            line = {p.ranks: value(p) for p in predictions if p.mode == mode and value(p)}
            if line:
                panels.setdefault(name, []).append((mode, list(line), list(line.values())))
    plot_curves(path, title, panels, ("ranks", ""), log_x=True, log_y=True)


def recommend(predictions: Sequence[Prediction]) -> str:
    """One sentence: how many ranks, and which mode."""
    fitting = [p for p in predictions if p.fits]
    if not fitting:
        least = min(predictions, key=lambda p: p.rank_bytes)
        return (
            f"No mode fits: the smallest, {least.mode} on {least.ranks} ranks, needs "
            f"{format_bytes(int(least.rank_bytes))} per rank."
        )
    by_ranks: dict[int, Prediction] = {}  # the fastest of each
    for p in sorted(fitting, key=lambda p: (p.ranks, p.seconds)):
        by_ranks.setdefault(p.ranks, p)
    chosen, *larger = by_ranks.values()
    for p in larger:
        if chosen.seconds < _WORTH * p.seconds:
            break
        chosen = p
    way = f"{chosen.mode} training" + (f" with {chosen.copies} copies" if chosen.copies > 1 else "")
    text = f"Take {way} on {chosen.ranks} ranks: {seconds(chosen.seconds)} per epoch"
    alone = next((p for p in fitting if p.ranks == chosen.ranks and p.mode == MODES[0]), None)
    if alone is not None and alone is not chosen:
        text += f", {alone.seconds / chosen.seconds:,.1f} times as fast as independent training"
    if chosen.ranks == 1:
        text = f"Train on 1 rank: {seconds(chosen.seconds)} per epoch"
    more = "; more ranks gain little" if chosen.ranks < max(by_ranks) else ""
    return f"{text}; the bottleneck is {chosen.bottleneck}{more}."


def _by_mode(predictions: Sequence[Prediction], show: Callable[[Prediction], str]) -> str:
    by_key = {(p.ranks, p.mode): p for p in predictions}
    ranks = sorted({p.ranks for p in predictions})
    rows = [[str(n), *(show(by_key[n, m]) if (n, m) in by_key else "-" for m in MODES)] for n in ranks]
    return aligned([["ranks", *MODES], *rows])


def _time(p: Prediction) -> str:
    copies = f" c={p.copies}" if p.copies > 1 else ""
    return f"{seconds(p.seconds)} {p.bottleneck}{copies}{'' if p.fits else ' (too large)'}{_mark(p)}"


def _volume(p: Prediction) -> str:
    return f"{format_bytes(int(p.storage_bytes))} / {format_bytes(int(p.network_bytes))}{_mark(p)}"


def _held(p: Prediction) -> str:
    return format_bytes(int(p.rank_bytes)) + _mark(p)


def _mark(p: Prediction) -> str:
    return " ~" if p.extrapolated else ""


_RATES = {
    "storage_gb_s": ("storage", 1e9, "GB/s that a rank reads from storage (default: measured)"),
    "reads_per_s": ("reads_per_s", 1.0, "random reads per second of a rank (default: measured)"),
    "network_gb_s": ("network", 1e9, "GB/s that a rank sends while it receives as much (default: 12.5)"),
    "latency_us": ("latency_s", 1e-6, "microseconds of a message between ranks (default: 10)"),
    "memory_gb_s": ("memory", 1e9, "GB/s of a rank's memory, reads and writes together (default: 100)"),
    "flops": ("flops", 1.0, "floating-point operations per second that training reaches (default: 2e13)"),
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    option = arguments.adder(parser)
    arguments.add_path(parser, "DATASET", "a dataset with topology and features")
    option("--sampler", SAMPLERS, f"{', '.join(SAMPLERS)} (default: neighbor)", "neighbor", "NAME")
    arguments.add_minibatches(parser)
    text = "minibatches over which draws stay correlated; matters with --policy lru"
    option("--kappa", arguments.positive, text, 1, "N")
    option("--seeds", arguments.SEEDS, "seeds", "train")
    option("--ranks", arguments.positive, "largest number of ranks", 1024, "N")
    option("--cache", None, "feature cache of a rank: 10%% of the pages, or 4GB", "10%", "SIZE")
    text = "cache policy: keep the pages with the most heat, or those used last"
    option("--policy", ["static", "lru"], text, "static")
    option("--hidden", arguments.positive, "width of the hidden layers", 256, "N")
    text = "memory of a rank; larger modes are not recommended (default: no limit)"
    option("--memory", parse_bytes, text, metavar="BYTES")
    for name, (_, _, text) in _RATES.items():
        option(f"--{name.replace('_', '-')}", _RATE, text, metavar="N")
    text = "time for sampling, about; larger minibatches are extrapolated (default: 20)"
    option("--seconds", _RATE, text, 20.0, "S")
    option("--seed", arguments.natural, "random seed", 0, "N")
    option("--json", Path, "write curves and predictions to FILE", metavar="FILE")
    option("--plot", Path, "draw the predictions to FILE, as PNG", metavar="FILE")
    arguments.add_allow_dir(parser)
    arguments.add_quiet(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    if args.plot is not None:
        check_plotting()
    for path in (args.json, args.plot):
        if path is not None:
            check_writable(path)
    store = FeatureStore(args.path, allow_dirs=args.allow_dir)
    refuse_part(store, "bench/scale.py", "measure with the whole dataset")
    tables = [t for t in store.tables.values() if isinstance(t.type, str)]
    if not tables:
        raise ValueError(f"{store.name} has no table of nodes")
    if args.cache.endswith("x"):
        raise ValueError(f"--cache {args.cache} is not a cache size: use 2% (of the pages) or 4GB")
    _, unit, cache_bytes = parse_cache_size(args.cache)
    whole = sum(t.page_count * t.page_bytes for t in tables)
    cache_bytes = min(whole, cache_bytes * whole if unit == "%" else cache_bytes)
    rates, where = _rates(args, tables)
    setting = Setting(
        tuple(args.fanouts),
        args.batch_size,
        args.sampler,
        args.kappa,
        args.seeds,
        args.policy,
        args.seed,
        args.seconds,
    )
    ranks = [1 << i for i in range(args.ranks.bit_length())]
    curves = measure(store, setting, ranks[-1] * args.batch_size)
    plan, model = Plan(cache_bytes, args.memory), Model(args.hidden, _classes(store))
    predictions = predict_all(curves, rates, plan, model, ranks)
    advice = recommend(predictions)
    if args.json is not None:
        contents = {
            "dataset": str(args.path),
            "setting": vars(setting),
            "epoch_seeds": curves.epoch_seeds,
            "rates": vars(rates),
            "cache_bytes": cache_bytes,
            "curves": [
                {name: value for name, value in asdict(point).items() if name != "users"}
                for point in curves.points
            ],
            "predictions": [asdict(prediction) for prediction in predictions],
            "recommendation": advice,
        }
        text = json.dumps(contents, indent=2, default=lambda array: array.tolist())
        args.json.write_text(text + "\n")
    if args.plot is not None:
        title = f"{store.name}: {args.sampler}, batch {args.batch_size} per rank"
        plot(args.plot, title, predictions)
    if args.quiet:
        return
    print(f"{store.name}: {curves.epoch_seeds:,} seeds, batch {args.batch_size} per rank, {args.sampler}")
    print(f"cache of a rank: {format_bytes(int(cache_bytes))}, {args.policy}; {rates_line(rates, where)}")
    print(f"\nminibatches by size; nodes and edges by layer, from the seeds on\n\n{curves_table(curves)}")
    for title, table in prediction_tables(predictions):
        print(f"\n{title}\n\n{table}")
    if any(p.extrapolated for p in predictions):
        print(f"\n~: extrapolated from minibatches of at most {curves.largest:,} seeds")
    print(f"\n{advice}")


def _rates(args: argparse.Namespace, tables: Sequence[Table]) -> tuple[Rates, str]:
    """The rates, and what of storage was measured."""
    rates_given = {
        field: getattr(args, name) * unit
        for name, (field, unit, _) in _RATES.items()
        if getattr(args, name) is not None
    }
    rates, of_storage = Rates(), {"storage", "reads_per_s"} & rates_given.keys()
    if len(of_storage) < 2:
        rates = rates.with_storage_of(tables)
    where = {0: " (measured)", 1: " (partly measured)", 2: ""}[len(of_storage)]
    return replace(rates, **rates_given), where


def _classes(store: FeatureStore) -> int:
    classes = [v for v in store.labels.values() if v.numel() and not v.is_floating_point()]
    return max((1 + int(labels.max()) for labels in classes), default=64)


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        run(args)
    except (ImportError, KeyError, OSError, ValueError) as error:
        print(f"bench/scale.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
