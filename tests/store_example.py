"""A small heterogeneous dataset with one of everything."""

import torch

from gids.write import DatasetWriter, edge_list

WRITES = ("author", "writes", "paper")
CITES = ("paper", "cites", "paper")


def write_dataset(path, **options):
    """3 authors, 20 papers; tables author.feat, paper.feat, paper.year, author.writes.paper.weight."""
    generator = torch.Generator().manual_seed(1)
    with DatasetWriter(path, page_bytes=512, **options) as writer:
        writer.write_table("node", "paper", "feat", torch.randn(20, 50, generator=generator))
        writer.write_table(
            "node", "author", "feat", torch.randn(3, 300, generator=generator).to(torch.bfloat16)
        )
        writer.write_table("node", "paper", "year", torch.arange(2000, 2020))
        writer.write_edges(
            WRITES,
            edge_list(torch.tensor([2, 0, 2, 1]), torch.tensor([5, 5, 1, 0]), num_src=3, num_dst=20),
        )
        writer.write_table("edge", WRITES, "weight", torch.tensor([0.1, 0.2, 0.3, 0.4]))
        edges = torch.randint(20, (2, 100), generator=generator)
        writer.write_edges(CITES, edge_list(edges[0], edges[1], num_src=20, num_dst=20), index_dtype="int32")
        writer.write_labels("paper", torch.arange(20, dtype=torch.int8) % 4)
        writer.write_split("paper", "train", torch.arange(10))
        writer.write_split("paper", "test", torch.arange(15, 20))
    return path
