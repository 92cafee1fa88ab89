"""Compute the heat of nodes: how often training is expected to read them. See docs/internals/cache.md."""

from gids.heat.expectation import expected_visits, reverse_pagerank
from gids.heat.hottest import hottest_nodes
from gids.heat.sampled import choose_seeds, sampled_counts

__all__ = [
    "choose_seeds",
    "expected_visits",
    "hottest_nodes",
    "reverse_pagerank",
    "sampled_counts",
]
