"""What ``gids bench`` measures, in parts that scripts may use too.

    report.py, session.py          what a command answers; its bounds on time, its progress
    text.py, plot.py, machine.py   tables, PNG files, what the numbers were measured on
    arguments.py, places.py        options that several questions take; cache sizes
    trace.py, trace_writer.py      a file of the pages that minibatches read
    recording.py, sampled.py       where traces come from: a training run, or sampling alone
    minibatches.py                 what training would sample
    optimum.py, replay.py, case.py what a trace would hit: at best (Belady's MIN), and in a cache of ours
    probe.py, fio.py               what the disk can do
    aggregation.py                 one run of reading and gathering
    device_extents.py              extents into device memory, by kvikio and by pinned staging
    epoch_source.py                a dataset as the files that an epoch is trained from
    hit_ratio.py, advise.py, bandwidth.py, sampling.py, epoch.py, …_plot.py   one question each

``gids.cli.bench`` composes them. A question's module has ``HELP``, ``add_arguments(parser)`` and
``measure(args, session, report)``, and imports what is slow inside.
"""
