"""The comparison that ``gids quickstart`` makes, in parts that benchmarks share.

    isolation.py   fresh processes, cold page cache, a bounded share of memory
    epoch.py       one epoch of training in this process, through gids or through stock DGL
    report.py      what both sides measured, as a table

``gids.cli.quickstart`` composes them; ``bench/epoch.py`` repeats them at a larger size.
"""
