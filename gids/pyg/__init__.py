"""PyG with features on disk: ``NeighborLoader(store, num_neighbors, …)``, and PyG's store interfaces.

The user's entry; it composes gids.loader and gids.sampler and decides nothing about caching. It needs
neither pyg-lib nor torch-sparse.
"""

try:
    import torch_geometric  # noqa: F401
except ImportError as error:
    raise ImportError(f"gids.pyg needs PyG: pip install torch_geometric ({error})") from error

from gids.pyg.loaders import LinkNeighborLoader, NeighborLoader
from gids.pyg.stores import MappedFeatures, MappedGraph

__all__ = ["LinkNeighborLoader", "MappedFeatures", "MappedGraph", "NeighborLoader"]
