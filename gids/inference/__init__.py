"""Inference over whole graphs whose features do not fit in memory. See docs/inference.md."""

from gids.inference.layerwise import LayerwiseResult, layerwise

__all__ = ["LayerwiseResult", "layerwise"]
