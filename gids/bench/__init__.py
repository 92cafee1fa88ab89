"""The measurements of ``gids bench``: a module per question, called by ``gids.cli.bench``.

The module of a question has ``HELP``, ``add_arguments(parser)``, ``measure(args, session, report)`` and
``columns(report)``. The others:

    arguments.py, session.py       shared options; time limit and progress
    report.py, text.py, plot.py    the result; the table; the plot
    minibatches.py                 minibatches as training samples them
    case.py                        a trace, recorded or sampled, compared with Belady's MIN
    advise.py                      the smallest cache that is large enough
    probe.py, aggregation.py       the disk's ceiling; one run of reading and gathering
"""
