"""Make datasets. See docs/internals/format.md."""

from gids.write.dataset_writer import DatasetWriter
from gids.write.edges import edge_list
from gids.write.table_writer import TableWriter

__all__ = ["DatasetWriter", "TableWriter", "edge_list"]
