"""Arguments of gids.open() and of the loaders that are refused: the call, the error, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from open_loaders import edge_loader, feature_loader, node_loader
from open_options import tuned

import gids
from gids.inference import layerwise
from gids.sampler import Labor, Neighbor, RandomWalk
from gids.store.names import Relation
from gids.write import DatasetWriter, edge_list

PAPERS, AUTHORS, EDGES = 20, 9, 40
CITES: Relation = ("paper", "cites", "paper")
WRITES: Relation = ("author", "writes", "paper")
IDS, PAIRS = torch.arange(9), torch.zeros((2, 4), dtype=torch.int64)


class Datasets(NamedTuple):
    """one: papers that cite each other. two: authors, too. timed: one with times of edges. more: a paper
    fewer, and venues. rows: no edges."""

    one: Path
    two: Path
    timed: Path
    more: Path
    rows: Path


@pytest.fixture(scope="module")
def d(tmp_path_factory: pytest.TempPathFactory) -> Datasets:
    folder = tmp_path_factory.mktemp("refused")
    found = Datasets(*(folder / f"{name}.gids" for name in Datasets._fields))
    ends = torch.arange(EDGES)
    for path in found:
        with DatasetWriter(path) as writer:
            papers = PAPERS - 1 if path == found.more else PAPERS
            writer.write_table("node", "paper", "feat", torch.zeros(papers, 4))
            if path in (found.one, found.two, found.timed):
                writer.write_labels("paper", torch.arange(papers))
                edges = edge_list(ends % PAPERS, ends % 7, num_src=PAPERS, num_dst=PAPERS)
                writer.write_edges(CITES, edges, times=ends if path == found.timed else None)
            if path == found.two:
                edges = edge_list(ends % AUTHORS, ends % PAPERS, num_src=AUTHORS, num_dst=PAPERS)
                writer.write_edges(WRITES, edges)
                writer.write_table("edge", WRITES, "year", torch.zeros(EDGES, 1))
            if path == found.more:
                writer.write_table("node", "venue", "feat", torch.zeros(3, 1))
    return found


def opened(path: Any, **options: Any) -> gids.Source:
    return gids.open(path, **tuned(options))


def features(path: Path, tables: Any = ("paper.feat",), **options: Any) -> gids.FeatureLoader:
    return feature_loader(path, list(tables), **options)


def nodes(path: Path, seeds: Any = IDS, sampler: Any = (3,), **options: Any) -> gids.NodeLoader:
    return node_loader(path, seeds, sampler, **options)


def edges(path: Path, pairs: Any = PAIRS, sampler: Any = (3,), **options: Any) -> gids.EdgeLoader:
    return edge_loader(path, pairs, sampler, **options)


def table_of(path: Path, name: str = "feat") -> Any:
    return gids.FeatureStore(path).table(name)


REVERSE: dict[str, Any] = {"relation": WRITES, "exclude": "reverse"}
WALKS = RandomWalk([3], metapath=[CITES])
CASES: list[tuple[Callable[[Datasets], Any], type[Exception], str]] = [
    # gids.open() and gids.Tuning
    (lambda d: opened(None), TypeError, "dataset is NoneType: give a path, a Feat"),
    (lambda d: opened([]), ValueError, "dataset is an empty list"),
    (lambda d: opened(d.one, memory="16 gigs"), ValueError, "^memory=.* is not a size in bytes: use 4096"),
    (lambda d: opened(d.one, device_memory="8 apples"), ValueError, "^device_memory=.* is not a size"),
    (lambda d: opened(d.one, staging=-1), ValueError, "^staging=-1 is not a size in bytes"),
    (lambda d: opened(d.one, memory=16), ValueError, "did you mean '16GB'"),
    (lambda d: opened(d.one, engine="aio"), ValueError, "engine must be one of auto, uring, threads, mmap"),
    (lambda d: opened(d.one, host_policy="lru"), ValueError, "host_policy must be one of lookahead, static"),
    (lambda d: features(d.one, policy="mru"), ValueError, "policy must be one of lookahead, window-pin"),
    (lambda d: opened(d.one, io_threads=1025), ValueError, r"io_threads must be 1 to 1024 \(got 1025\)"),
    (lambda d: opened(d.one, queue_depth=16385), ValueError, r"queue_depth must be 1 to 16384 \(got 16385\)"),
    (lambda d: opened(d.one, queue_depth=2.5), TypeError, "queue_depth=2.5: give a whole number"),
    (lambda d: opened(d.one, window=True), TypeError, "window=True: give a whole number"),
    (lambda d: features(d.one, window=-1), ValueError, r"window must be 0 or more \(got -1\)"),
    (lambda d: features(d.one, window=24), ValueError, "window must be at most 23"),
    (lambda d: features(d.one, window=23, planned=2), ValueError, r"at most 24 \(got 23 \+ 2\): lower one"),
    (lambda d: features(d.one, planned=9), ValueError, r"planned must be 1 to 8 \(got 9\)"),
    (lambda d: features(d.one, threads=0), ValueError, r"threads must be 1 or more \(got 0\)"),
    (lambda d: features(d.one, heat="pagerank"), ValueError, "heat must be one of auto, .*got 'pagerank'"),
    (lambda d: features(d.one, heat="sampled"), KeyError, r"gids heat .*one.gids --method sampled`"),
    (lambda d: gids.open(d.one, polcy="lru"), TypeError, "no argument 'polcy'; did you mean 'policy' of"),
    (lambda d: gids.Tuning(queue_deph=1), TypeError, "gids.Tuning has .*did you mean 'queue_depth'"),
    (lambda d: gids.Tuning(window=1), TypeError, r"Give gids.open\(PATH, window=\.\.\.\)"),
    # every loader
    (lambda d: gids.NodeLoader(d.one, IDS, [3], window=4), TypeError, "'window': it is an option of gids"),
    (lambda d: layerwise([], d.one, window=4), TypeError, "'window': it is an option of gids"),
    (lambda d: nodes(d.one, bach_size=1), TypeError, "did you mean 'batch_size'"),
    (lambda d: nodes(d.one, windw=1), TypeError, r"did you mean 'window' of gids.open"),
    (lambda d: nodes(d.one, workers=1), TypeError, r"no argument 'workers' \(it has source, seeds, sampler"),
    (lambda d: gids.NodeLoader(gids.open(d.one), IDS, [2], memory="1GB"), TypeError, "a source has its own"),
    (lambda d: features(d.one, ["venue.feat"]), KeyError, r"venue.feat.*paper.feat"),
    (lambda d: features(d.one, device="mps"), ValueError, "'cpu' or 'cuda'"),
    (lambda d: features(d.one, device="cuda", policy="lru"), ValueError, "'lru' works on device='cpu'"),
    (lambda d: features(d.one, dtype=torch.int8), ValueError, "torch.float32, torch.float16, torch.bfloat16"),
    (lambda d: features(d.one, minibatch_rows=-1), ValueError, "minibatch_rows=-1: .* must be 0 or more"),
    (lambda d: features(d.one, minibatch_rows=2.5), TypeError, "give a number of rows"),
    (lambda d: features(d.one, minibatch_rows={"x": 9}), KeyError, "names 'x', and the tables are"),
    (lambda d: nodes(d.one, device="cuda:0", pin_memory=True), ValueError, "in the memory of the GPU"),
    # seeds, samplers, tables
    (lambda d: gids.NodeLoader(d.one, [9, 9], "train"), TypeError, r"NodeLoader\(source, seeds, fanouts\)"),
    (lambda d: gids.NodeLoader(d.one, [9, 9], IDS), TypeError, r"fanouts such as \[10, 10\]: a Tensor"),
    (lambda d: gids.EdgeLoader(d.one, [5], IDS), TypeError, r"EdgeLoader\(source, edges, fanouts\)"),
    (lambda d: nodes(d.one, sampler=10), TypeError, "sampler=10: give fanouts, such as"),
    (lambda d: nodes(d.one, sampler=[]), ValueError, r"fanouts=\[\]: give one number per layer"),
    (lambda d: nodes(d.one, {1, 2}), TypeError, r"are set: give a tensor, int64\[n\] or bool\[20\]"),
    (lambda d: nodes(d.one, torch.zeros(9, dtype=torch.bool)), TypeError, "a mask of all nodes"),
    (lambda d: nodes(d.one, torch.tensor([3, -1])), IndexError, "run from -1 to 3; ids run from 0 to 19"),
    (lambda d: nodes(d.one, torch.arange(4.0)), TypeError, r"are torch\.float32\[4\]: give int64"),
    (lambda d: nodes(d.one, ["ann", "bob"]), TypeError, "seeds are texts: .*store.ids"),
    (lambda d: nodes(d.two), TypeError, "2 relations: give seeds by node type"),
    (lambda d: nodes(d.two, {"venue": IDS}), KeyError, "no relation has it"),
    (lambda d: nodes(d.rows), gids.FormatError, "no topology"),
    (lambda d: nodes(d.one, seed=-1), ValueError, r"seed=-1 must be from 0 to 2\^64 - 1"),
    (lambda d: nodes(d.one, seed=True), TypeError, "seed=True: give a whole number"),
    (lambda d: nodes(d.one, batch_size=0), ValueError, "batch_size=0 must be 1 or more"),
    (lambda d: nodes(d.one, batch_size=1.5), TypeError, "batch_size=1.5: give a whole number"),
    (lambda d: nodes(d.one, dtype="float16"), ValueError, r"torch.float16, .* \(got 'float16'\)"),
    (lambda d: nodes(d.one, labels="all"), ValueError, "labels='all' must be True, False or"),
    (lambda d: nodes(d.one, tables=["x"]), KeyError, "no table 'x'"),
    (lambda d: nodes(d.one, tables="paper.feat"), TypeError, r"give a list, \['paper\.feat'\]"),
    (lambda d: nodes(d.one, tables={"a": "paper.none"}), KeyError, r"no table 'paper\.none' in one\.gids"),
    (lambda d: nodes(d.one, tables=[gids.FeatureStore(d.one)]), TypeError, "a FeatureStore: give names"),
    (lambda d: nodes(d.one, tables=["feat", table_of(d.rows)]), ValueError, "two tables are called 'paper"),
    (lambda d: nodes(d.one, tables=[table_of(d.more, "paper.feat")]), ValueError, "has 19 rows, and one"),
    (lambda d: nodes(d.one, tables=[table_of(d.more, "venue.feat")]), ValueError, "no relation has nodes"),
    (
        lambda d: nodes(d.two, {"paper": IDS}, WALKS, tables=["author.writes.paper.year"]),
        ValueError,
        "RandomWalk are not in the dataset",
    ),
    # ranks
    (lambda d: nodes(d.one, world_size=2), ValueError, "rank=None, world_size=2: give both, or neither"),
    (lambda d: nodes(d.one, rank=2, world_size=2), ValueError, "rank must be 0 to world_size - 1"),
    (lambda d: nodes(d.one, rank="0", world_size=2), TypeError, "rank='0' must be a whole number"),
    (lambda d: gids.NodeLoader(d.one, IDS, [3], rank=1, world_size=2), ValueError, "give all ranks the same"),
    # edges
    (lambda d: edges(d.two), KeyError, "relation is not given: .* has 'paper.cites.paper', "),
    (lambda d: edges(d.two, relation=("item", "x", "user")), KeyError, "no topology of"),
    (lambda d: edges(d.two, (WRITES, PAIRS), relation=CITES), ValueError, "relation=.*: give one"),
    (lambda d: edges(d.one, PAIRS[0]), TypeError, r"edges is torch.int64\[4\]: give"),
    (lambda d: edges(d.one, PAIRS.int()), TypeError, r"edges is torch.int32\[2, 4\]: give"),
    (lambda d: edges(d.one, [[0], [1]]), TypeError, r"edges is list: give int64\[2, n\]"),
    (lambda d: edges(d.one, PAIRS + PAPERS), IndexError, "ids run from 0 to 19"),
    (lambda d: edges(d.two, PAIRS + AUTHORS, relation=WRITES), IndexError, "'author' nodes from 9 to 9"),
    (lambda d: edges(d.one, negatives=-1), ValueError, "negatives=-1 must be a whole number, 0 or"),
    (lambda d: edges(d.one, exclude="both"), ValueError, "exclude='both' must be None, 'self' or"),
    (lambda d: edges(d.two, **REVERSE), ValueError, "reverse=None; .* from 'paper' to 'author'"),
    (lambda d: edges(d.two, **REVERSE, reverse=CITES), ValueError, "from 'paper' to 'author'"),
    (lambda d: list(edges(d.one, None, RandomWalk([3]), exclude="self")), TypeError, "use exclude=None"),
    # times
    (lambda d: nodes(d.timed, time=IDS[:8]), ValueError, "time has 8 values for 9 'paper' seeds"),
    (lambda d: nodes(d.timed, time=IDS.int()), TypeError, r"time of 'paper' are torch\.int32\[9\]"),
    (lambda d: nodes(d.timed, strategy="last"), ValueError, "needs times of the seeds: give time="),
    (lambda d: nodes(d.timed, sampler=Labor([3]), time=IDS), ValueError, "time= needs a temporal sampler"),
    (lambda d: nodes(d.one, time=IDS), ValueError, r"needs times of edges or nodes, and one\.gids has none"),
    (lambda d: edges(d.timed, None, time=IDS), ValueError, r"give int64\[40\], one for each edge"),
    (lambda d: edges(d.timed, None, time=7), TypeError, "time is int: give int64"),
    (lambda d: edges(d.timed, None, time=False, strategy="last"), ValueError, "needs times of the edges"),
    (
        lambda d: edges(d.timed, None, Neighbor([3], temporal="edges"), strategy="last"),
        ValueError,
        "strategy='last' is for fanouts: give it to the sampler",
    ),
    (
        lambda d: edges(d.timed, None, Neighbor([3], temporal="edges"), time=False),
        ValueError,
        "time=False: .* samples by time: leave temporal= out",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), CASES, ids=[text for _, _, text in CASES])
def test_arguments_are_refused(
    d: Datasets, call: Callable[[Datasets], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call(d)
