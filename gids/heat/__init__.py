"""Compute the heat of nodes: how often training is expected to read them. See docs/internals/heat.md."""

from gids.heat.expectation import expected_visits, out_degrees, reverse_pagerank
from gids.heat.hottest import hottest_nodes
from gids.heat.sampled import sample_in_edges, sampled_counts
from gids.heat.seeds import choose_seeds

__all__ = [
    "choose_seeds",
    "expected_visits",
    "hottest_nodes",
    "out_degrees",
    "reverse_pagerank",
    "sample_in_edges",
    "sampled_counts",
]
