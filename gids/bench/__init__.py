"""The measurements of ``gids bench``: a module per question, called by ``gids.cli.bench``.

The module of a question has ``measure(session)``, and SETTINGS and COLUMNS, the columns of its table;
gids.cli.bench has its options. The others:

    arguments.py                   checks of arguments
    report.py, text.py, plot.py    the result; the table; the plot
    trace.py                       the pages of sampled minibatches, replays, Belady's MIN
"""
