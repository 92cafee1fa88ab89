"""The software cache: page words, lines, policies, memory budget."""

from gids.cache.budget import HostBudget
from gids.cache.feature_cache import POLICIES, FeatureCache
from gids.cache.heat import page_heat
from gids.cache.live_batches import MemoryPlan, Sizes

__all__ = [
    "POLICIES",
    "FeatureCache",
    "HostBudget",
    "MemoryPlan",
    "Sizes",
    "page_heat",
]
