"""The software cache: page words, lines, policies, memory budget."""

from gids.cache.budget import HostBudget, MemoryPlan, Sizes
from gids.cache.feature_cache import POLICIES, FeatureCache, page_heat

__all__ = [
    "POLICIES",
    "FeatureCache",
    "HostBudget",
    "MemoryPlan",
    "Sizes",
    "page_heat",
]
