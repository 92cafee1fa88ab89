"""The comparison that ``gids quickstart`` makes, in parts that benchmarks share.

    comparison.py  all sides in turn, in bounded time; steps.py tells how far they are
    sides.py       what one side is asked and what it measured; how it is run
    isolation.py   fresh processes with a cold page cache; launcher.py begins them
    memory_group.py  memory control groups: how much a process may use, and how much it does
    epoch.py       one side in its process: an epoch of training through gids, or through stock DGL
    model.py, counters.py   what epoch.py trains, and what the kernel counts meanwhile
    kept_rows.py   rows that a side handed over, to be compared with the source
    report.py      the table and the verdict

``gids.cli.quickstart`` composes them; ``bench/epoch.py`` repeats them at a larger size.
"""
