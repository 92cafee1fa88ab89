"""The software cache: page words, lines, policies, memory budget."""

from gids.cache.budget import MemoryPlan, share_memory
from gids.cache.device_budget import check_device_memory, share_device_memory
from gids.cache.device_cache import DeviceFeatureCache
from gids.cache.device_state import DEVICE_POLICIES
from gids.cache.feature_cache import POLICIES, FeatureCache
from gids.cache.heat import page_heat

__all__ = [
    "DEVICE_POLICIES",
    "POLICIES",
    "DeviceFeatureCache",
    "FeatureCache",
    "MemoryPlan",
    "check_device_memory",
    "page_heat",
    "share_device_memory",
    "share_memory",
]
