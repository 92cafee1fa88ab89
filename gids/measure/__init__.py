"""Measured training: one epoch, through gids or through stock DGL, in a fresh process with bounded memory.

    sides.py         the configuration and the result of a side, how to run it, and a Comparison of sides
    epoch.py         one side in its process; model.py has the model, kept_rows.py checks features
    features.py      the features as stock DGL maps them
    isolation.py     fresh processes with a cold page cache; launcher.py starts them
    memory_group.py  memory control groups
    counters.py      memory, reads and CPU time, as the kernel counts them
    machine.py       the machine and the installed packages

Called by ``gids bench epoch`` and the scripts in bench/.
"""
