"""Make and change datasets. See docs/internals/format.md."""

from gids.write.dataset_writer import DatasetWriter
from gids.write.edges import edge_list
from gids.write.restriping import restripe
from gids.write.table_writer import TableWriter, create_table, temporary_table

__all__ = ["DatasetWriter", "TableWriter", "create_table", "edge_list", "restripe", "temporary_table"]
