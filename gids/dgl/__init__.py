"""DGL with features on disk: ``DataLoader(graph, ids, sampler, …, gids="x.gids")``.

Import it before DGL. It puts a finder into ``sys.meta_path`` (gids.dgl_finder), so that PyPI's DGL (1.1.3,
2.1.0) imports beside a current torch; ``import gids`` alone does not. It composes gids.store and gids.loader,
and decides nothing about caching.
"""

from gids.dgl_finder import import_dgl

import_dgl()

from gids.dgl.dataloader import DataLoader, enable  # noqa: E402  (need DGL)
from gids.dgl.topology import graph  # noqa: E402

__all__ = ["DataLoader", "enable", "graph"]
