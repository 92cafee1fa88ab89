"""Checks the order of the calls by which a dataset was published: what is synced when.

A dataset is published by the rename that gives it its name, or its new manifest the name manifest.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from disk import Call, Disk, Node

_REMOVES = ("unlink", "rmdir", "rename", "exchange", "write", "truncate")


def order_faults(
    disk: Disk,
    trace: Sequence[Call],
    *,
    dataset: str,
    new_files: Sequence[str],
    old_files: set[str],
    sets_aside: bool,
) -> Iterator[str]:
    """One line for each rule that a trace breaks.

    1. Before a dataset is published, all of its files (new_files, where they are in the end) were synced
       after their last write, and so were the directories that name them.
    2. Until then nothing changes old_files. sets_aside: the dataset may get another name.
    3. Before anything is removed or changed after that, the new name was synced.
    4. At the end it is synced.

    disk: what was there before the trace.
    """
    published: dict[str, Node | None] = {}
    for number, call in enumerate(trace, 1):
        where = f"call {number} ({call.name} {call.path})"
        is_publishing = call.name in ("rename", "exchange") and call.second in (
            dataset,
            f"{dataset}/manifest.json",
        )
        if is_publishing:
            for lost in _not_synced(disk, call, dataset, new_files):
                yield f"{where} publishes before {lost} is synced"
        elif call.name in _REMOVES:
            for name, node in published.items():
                if disk.at(name) is node and not disk.survives(name):
                    yield f"{where} comes before the new name {name} is synced"
            is_aside = sets_aside and call.name == "rename" and call.path == dataset
            if {call.path, call.second} & old_files and not published and not is_aside:
                yield f"{where} changes old data before the new is published"
        disk.apply(call)
        if is_publishing:
            published[call.second] = disk.at(call.second)
    if not published:
        yield "nothing was published"
    for name in published:
        if not disk.survives(name):
            yield f"the name {name} was never synced"


def _not_synced(disk: Disk, call: Call, dataset: str, new_files: Sequence[str]) -> Iterator[str]:
    """What a loss of power would take from the dataset that a call publishes."""
    for lost in disk.not_synced(call.path):
        if lost != f"the name {call.path}":  # it is about to have another
            yield lost
    for path in new_files:
        if not path.startswith(f"{dataset}/") or (
            call.path.startswith(f"{dataset}/") and path != call.second
        ):
            yield from disk.not_synced(path)
