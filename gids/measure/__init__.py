"""Measured training: one epoch, through gids or through stock DGL, in a fresh process with bounded memory.

    sides.py      the configuration and the result of a side, how to run it, and a Comparison of sides
    epoch.py      one side in its process, and the model that it trains
    features.py   the features as stock DGL maps them, and a check of the rows that a side got
    isolation.py  fresh processes with a cold page cache and bounded memory, and what they use
    machine.py    the machine and the installed packages, and what they can do for gids

Called by ``gids bench epoch``, ``gids info --system`` and the scripts in bench/.
"""
