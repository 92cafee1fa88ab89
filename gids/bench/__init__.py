"""The measurements of ``gids bench``.

    bandwidth.py, hit_ratio.py, sampling.py, epoch.py   one command each
    arguments.py, cache_sizes.py   shared options; cache sizes
    report.py, session.py          the result of a command; its time limit
    text.py, plot.py               the table; `--plot`
    minibatches.py, sampled.py     minibatches as training samples them; a trace of them
    trace_source.py, row_orders.py the traces of hit-ratio: recorded or sampled, in an order of rows
    case.py, advise.py             a trace beside Belady's MIN; the smallest cache that is large enough
    probe.py, aggregation.py       the disk's ceiling; one run of reading and gathering
    limited.py                     bandwidth in a process with bounded memory
    epoch_source.py                a dataset as the files that an epoch is trained from

``gids.cli.bench`` calls them. The module of a command has ``HELP``, ``add_arguments(parser)``,
``measure(args, session, report)`` and ``columns(report)``.
"""
