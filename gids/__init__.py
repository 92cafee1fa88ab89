"""Out-of-core feature loading for graph neural networks."""
