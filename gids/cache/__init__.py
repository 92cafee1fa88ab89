"""The software cache: page words, lines, policies, memory budget."""

from gids.cache.budget import MemoryPlan, share_memory
from gids.cache.feature_cache import POLICIES, FeatureCache
from gids.cache.heat import page_heat

__all__ = [
    "POLICIES",
    "FeatureCache",
    "MemoryPlan",
    "page_heat",
    "share_memory",
]
