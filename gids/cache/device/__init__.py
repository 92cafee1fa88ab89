"""The feature cache in GPU memory: kernels keep the same page words and policies."""

from gids.cache.device.feature_cache import DeviceFeatureCache
from gids.cache.device.state import DEVICE_POLICIES, DeviceBudget, check_device_memory

__all__ = ["DEVICE_POLICIES", "DeviceBudget", "DeviceFeatureCache", "check_device_memory"]
