"""Sampling on a GPU: kernels that read a topology pinned in host memory (UVA)."""

from gids.sampler.device.pinned_graph import PinnedGraph

__all__ = ["PinnedGraph"]
