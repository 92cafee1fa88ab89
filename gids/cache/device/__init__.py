"""The feature cache in GPU memory: kernels keep the same page words and policies."""

from gids.cache.device.budget import DeviceBudget, check_device_memory
from gids.cache.device.feature_cache import DeviceFeatureCache
from gids.cache.device.state import DEVICE_POLICIES

__all__ = ["DEVICE_POLICIES", "DeviceBudget", "DeviceFeatureCache", "check_device_memory"]
