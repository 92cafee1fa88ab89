"""Wrong arguments of samplers: the error says what is wrong with which one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sampling_model import citations, make_graph, mixed_degrees, with_times

from gids.cuda import Device
from gids.sampler import Labor, Ladies, LocalityBias, Neighbor, RandomWalk, TimedSeeds, Topology, sort_by_time
from gids.sampler.device import PinnedGraph
from gids.store import Graph

PLAIN = make_graph([3, 4, 0, 2, 9, 1])
EDGES = PLAIN.num_edges
TIMED = with_times(make_graph(mixed_degrees(50)))
SEVERAL = citations()
NUMBERS: dict[Any, int] = {graph.relation: 2 for graph in SEVERAL}
IDS, PAPERS = torch.arange(5), {"paper": torch.arange(5)}
HELD = np.array([True, False, False, True, False, False])
ONE_BY_ONE = np.ones(EDGES)
FEW_PAPERS = make_graph([1], relation=("paper", "x", "paper"))
HUGE = Graph(("a", "b", "c"), 1 << 33, 0, np.zeros(1, np.int64), np.zeros(0, np.int64), None)
TIMED_IDS = TimedSeeds(IDS, IDS)
ANY: Any = Neighbor


def sample(sampler: Any, graphs: Any = PLAIN, seeds: Any = IDS, **numbers: int) -> object:
    return sampler.sample(graphs, seeds, **{"seed": 0} | numbers)


def of_several(sampler: Any) -> object:
    return sampler.sample(SEVERAL, PAPERS, seed=0)


def biased(mask: Any, **options: Any) -> Neighbor:
    return Neighbor([2], locality=LocalityBias(mask, 4), **options)


Case = tuple[type[Exception], str, Callable[[], object]]
CASES: list[Case] = [
    # numbers per layer
    (ValueError, r"fanouts=\[\]: give one number per layer", lambda: Neighbor([])),
    (ValueError, r"fanouts=\[3, -2\]: give one .*, -1 for all", lambda: Neighbor([3, -2])),
    (ValueError, r"fanouts=\[0\]: .*; leave it out", lambda: Neighbor([0])),
    (ValueError, r"fanouts=\[True\]: give one number", lambda: ANY([True])),
    (ValueError, r"fanouts=\[2147483648\]: give one number", lambda: Labor([1 << 31])),
    (ValueError, r"fanouts=.*: -3}\]: give .* \(0: leave the", lambda: Neighbor([{("a", "b", "a"): -3}])),
    (ValueError, r"sizes=\[2\.5\]: give one number per layer", lambda: Ladies([2.5])),
    (ValueError, r"num_neighbors=\[-1\]: .*, 1 or more, or a dict", lambda: RandomWalk([-1])),
    (ValueError, "per layer, not by relation", lambda: RandomWalk([{("a", "b", "a"): 1}])),
    (ValueError, "threads must be 1 or more", lambda: Neighbor([2], threads=0)),
    (ValueError, r"lacks 'author\.writes", lambda: of_several(Neighbor([{SEVERAL[0].relation: 2}]))),
    (ValueError, "no graph has that", lambda: of_several(Neighbor([{**NUMBERS, ("a", "b", "c"): 1}]))),
    # options
    (ValueError, "batch_dependency=0: ", lambda: Labor([2], batch_dependency=0)),
    (ValueError, r"batch_dependency=1\.5: ", lambda: Labor([2], batch_dependency=1.5)),
    (ValueError, "batch_dependency=nan: ", lambda: Neighbor([2], batch_dependency=float("nan"))),
    (ValueError, "batch_dependency=True: ", lambda: Neighbor([2], batch_dependency=True)),
    (ValueError, "nested=True needs batch_dependency", lambda: Neighbor([2], nested=True)),
    (ValueError, "importance_sampling must be .*got -2", lambda: Labor([2], importance_sampling=-2)),
    (ValueError, "importance_sampling must be .*got 1.0", lambda: Labor([2], importance_sampling=1.0)),
    (
        ValueError,
        "use importance_sampling=0",
        lambda: Labor([3], importance_sampling=1, batch_dependency=4, nested=True),
    ),
    (ValueError, "law='zou' must be one of 'degree', 'count'", lambda: Ladies([3], law="zou")),
    (ValueError, "poisson=True draws no source twice", lambda: Ladies([3], poisson=True, replace=False)),
    (ValueError, "0 or more and below 1", lambda: RandomWalk([3], restart=1)),
    (ValueError, "0 or more and below 1", lambda: RandomWalk([3], restart=float("nan"))),
    (ValueError, r"num_walks must be 1 or more \(got 0\)", lambda: RandomWalk([3], num_walks=0)),
    (ValueError, r"walk_length must be 1 or more \(got 2\.5\)", lambda: RandomWalk([3], walk_length=2.5)),
    (ValueError, r"fewer than 2\^31", lambda: RandomWalk([3], num_walks=1 << 20, walk_length=1 << 10)),
    (ValueError, r"metapath=\[\]", lambda: RandomWalk([3], metapath=[])),
    (ValueError, "there are several relations", lambda: of_several(RandomWalk([3]))),
    (ValueError, "metapath names", lambda: of_several(RandomWalk([3], metapath=[("a", "b", "c")]))),
    (
        ValueError,
        "must lead back",
        lambda: of_several(RandomWalk([3], metapath=[SEVERAL[1].relation])),
    ),
    # weights
    (ValueError, "must be 0 or more .*weight 1 is -2", lambda: Neighbor([2], weights=np.array([1.0, -2, 0]))),
    (ValueError, "weight 2 is nan", lambda: Neighbor([2], weights=np.array([1, 2, np.nan]))),
    (TypeError, r"must be float\[num_edges\]", lambda: Neighbor([2], weights=np.arange(7))),
    (TypeError, r"must be float\[num_edges\]", lambda: Neighbor([2], weights=torch.ones(7, 1))),
    (ValueError, r"must have 19 values.*\(got 6\)", lambda: sample(Neighbor([2], weights=np.ones(6)))),
    (ValueError, "a dictionary by rel", lambda: of_several(Neighbor([2], weights=ONE_BY_ONE))),
    (ValueError, "weights names", lambda: sample(Neighbor([2], weights={("a", "b", "c"): np.ones(6)}))),
    # locality
    (ValueError, r"factor must be 1 \(no bias\) or more", lambda: LocalityBias(HELD, 0.5)),
    (ValueError, r"factor must be 1 \(no bias\) or more", lambda: LocalityBias(HELD, float("inf"))),
    (ValueError, r"factor must be 1 \(no bias\) or more", lambda: LocalityBias(HELD, True)),
    (TypeError, r"must be bool\[num_nodes\]", lambda: LocalityBias(HELD.astype(np.uint8), 2)),
    (TypeError, r"mask of 'a' must be .*got bool\[6, 1\]", lambda: LocalityBias({"a": HELD[:, None]}, 2)),
    (ValueError, "nodes is an empty list", lambda: LocalityBias([], 2)),
    (ValueError, r"rank 1 must be of .*got 4, and 6", lambda: LocalityBias([HELD, HELD[:4]], 2)),
    (ValueError, r"got {'b': 6}, and {'a': 6}", lambda: LocalityBias([{"a": HELD}, {"b": HELD}], 2)),
    (TypeError, r"must be a gids\.sampler\.LocalityBias \(got ndarray", lambda: ANY([2], locality=HELD)),
    (ValueError, "exceed float32: scale them down", lambda: biased(HELD, weights=np.full(9, 1e38))),
    (ValueError, r"must have 6 entries \(got 5\)", lambda: sample(biased(HELD[:5]))),
    (ValueError, "'venues', but the graphs have 'paper'", lambda: of_several(biased({"venues": HELD}))),
    (ValueError, "a dictionary by node type", lambda: of_several(biased(HELD))),
    (ValueError, r"masks for 2 ranks: sample by a loader", lambda: sample(biased([HELD, ~HELD]))),
    # times and subgraphs
    (ValueError, "temporal='time' must be one of None, 'edges', 'nodes'", lambda: ANY([3], temporal="time")),
    (ValueError, "strategy='last' needs times", lambda: Neighbor([3], strategy="last")),
    (ValueError, "one of 'uniform', 'last'", lambda: ANY([3], temporal="edges", strategy="first")),
    (ValueError, "subgraph='both' must be one of", lambda: ANY([3], subgraph="both")),
    (ValueError, "has times of edges", lambda: sample(Neighbor([3], temporal="edges"), seeds=TIMED_IDS)),
    (ValueError, "times of nodes: use dataclasses.replace", lambda: sort_by_time(PLAIN, "nodes")),
    (ValueError, "the sampler is not disjoint", lambda: Neighbor([3]).trees(PLAIN, IDS)),
    (ValueError, "is not temporal", lambda: sample(Neighbor([3], disjoint=True), TIMED, TIMED_IDS)),
    (TypeError, "takes no TimedSeeds", lambda: sample(Labor([3]), TIMED, TIMED_IDS)),
    (ValueError, "--reverse-edges", lambda: sample(ANY([3], subgraph="bidirectional"), SEVERAL[1:2], PAPERS)),
    # seeds and numbers
    (TypeError, r"are torch\.int32\[5\]: give int64", lambda: sample(Neighbor([2]), seeds=IDS.int())),
    (TypeError, r"int64\[2, 2\]: give int64\[n\]", lambda: sample(Neighbor([2]), seeds=IDS[:4].view(2, 2))),
    (TypeError, "give a tensor", lambda: sample(Neighbor([2]), seeds=[1, 2])),
    (TypeError, "is a dictionary: with one graph", lambda: sample(Neighbor([2]), seeds={"_N": IDS})),
    (TypeError, "must be a dictionary", lambda: sample(Neighbor([2]), [PLAIN])),
    (KeyError, "seeds of type 'paper': no relation has it", lambda: sample(Neighbor([2]), [PLAIN], PAPERS)),
    (ValueError, r"must be 0 to 2\^64 - 1 .*step=-1", lambda: sample(Neighbor([2]), step=-1)),
    (ValueError, "must be 0 to 2.64 - 1", lambda: sample(Neighbor([2]), epoch=1 << 64)),
    (
        ValueError,
        "must be 0 to 2.64 - 1",
        lambda: Neighbor([2]).sample_bulk(PLAIN, [IDS, IDS], first_step=(1 << 64) - 1),
    ),
    # graphs
    (ValueError, r"pass \[graph\]", lambda: sample(Neighbor([2]), SEVERAL[1])),
    (TypeError, "one or more", lambda: sample(Neighbor([2]), [])),
    (ValueError, "given twice", lambda: Topology([PLAIN, PLAIN])),
    (ValueError, "another relation has 400", lambda: Topology([SEVERAL[0], FEW_PAPERS])),
    (ValueError, r"it needs indptr\[7\]", lambda: Topology(replace(PLAIN, indptr=np.zeros(2, int)))),
    (TypeError, "indices float64", lambda: Topology(replace(PLAIN, indices=PLAIN.indices.astype(float)))),
    (ValueError, "at most 4294967295", lambda: Topology([HUGE])),
]


@pytest.mark.parametrize(("error", "text", "call"), CASES, ids=[text for _, text, _ in CASES])
def test_wrong_arguments_are_refused(error: type[Exception], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(error, match=text):
        call()


def test_wrong_times_are_refused() -> None:
    by_edges = Neighbor([3], temporal="edges")
    for error, text, graph, seeds in (
        (ValueError, "'_N' nodes have no times, so the seeds need", replace(TIMED, src_times=None), IDS),
        (ValueError, "has 4 values for 5 '_N'", TIMED, TimedSeeds(IDS, IDS[:4])),
        (TypeError, r"are torch\.int32", TIMED, TimedSeeds(IDS, IDS.int())),
        (TypeError, r"int32 or int64\[\d+\] \(got float64", replace(TIMED, edge_times=np.zeros(9)), IDS),
        (IndexError, "seed 99 is not a '_N' node", TIMED, torch.tensor([99])),
    ):
        with pytest.raises(error, match=text):
            sample(by_edges, graph, seeds)


def test_graphs_of_different_places_are_refused(device: Device) -> None:
    pinned = PinnedGraph(PLAIN, device)
    with pytest.raises(ValueError, match="pin all for one device, or none"):
        Topology([pinned, SEVERAL[1]])
    pinned.close()
    with pytest.raises(ValueError, match="closed"):
        sample(Neighbor([2]), pinned)
