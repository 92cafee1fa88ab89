"""The comparison that ``gids quickstart`` makes, in parts that benchmarks share.

    sides.py       what one side is asked and what it measured; how it is run
    isolation.py   fresh processes, cold page cache, bounded memory
    epoch.py       one side in its process: an epoch of training through gids, or through stock DGL
    model.py, counters.py   what epoch.py trains, and what the kernel counts meanwhile
    report.py      the table

``gids.cli.quickstart`` composes them; ``bench/epoch.py`` repeats them at a larger size.
"""
