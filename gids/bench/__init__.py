"""Comparisons and measurements: what `gids bench` and `gids quickstart` run.

bandwidth.py, epoch.py and hit_ratio.py each answer one question of `gids bench`: ``measure(session)`` fills a
Report, with SETTINGS and COLUMNS for its table. The others:

    report.py                      the result as JSON and text
    sampling.py                    arguments that questions share; samplers by name, and minibatches
    trace.py                       the pages of sampled minibatches, replays, Belady's MIN
    sides.py, training.py          the sides of an epoch's comparison; one side, in its process
    dgl_side.py, pyg_side.py,
    torch_side.py, sage.py         the loaders of a side, by framework; the model
    features.py, isolation.py      features as stock loaders map them; fresh processes with bounded memory
    machine.py                     the machine and the installed packages
"""
