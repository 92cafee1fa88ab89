"""The comparison that ``gids quickstart`` makes.

    comparison.py  runs the sides one after the other, in bounded time
    steps.py       prints the progress
    report.py      the table and the verdict

gids.measure runs one side. ``gids.cli.quickstart`` makes the data and calls all of these.
"""
