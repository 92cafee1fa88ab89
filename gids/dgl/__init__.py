"""DGL with features on disk: ``DataLoader(graph, ids, sampler, …, gids="x.gids")``.

It composes gids.store and gids.loader, and decides nothing about caching. gids.dgl_finder makes PyPI's DGL
(1.1.3, 2.1.0) importable beside a current torch.
"""

from gids.dgl_finder import import_dgl

import_dgl()

from gids.dgl.dataloader import DataLoader  # noqa: E402  (needs DGL)
from gids.dgl.patch import disable, enable  # noqa: E402
from gids.dgl.topology import graph  # noqa: E402

__all__ = ["DataLoader", "disable", "enable", "graph"]
