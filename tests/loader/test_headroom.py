"""A window of minibatches from workers must not exhaust file descriptors or shared memory."""

import os
import resource
from types import SimpleNamespace

from gids.loader.framework_epoch import Headroom


def test_the_window_is_half_of_what_used_half(monkeypatch):
    free = {"descriptors": 1000, "bytes": 1 << 30}

    def limits(_):
        limit = free["descriptors"] + len(os.listdir("/proc/self/fd"))
        return limit, limit

    monkeypatch.setattr(resource, "getrlimit", limits)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free["bytes"] >> 12, f_frsize=4096))
    watched = Headroom()
    free.update(descriptors=500, bytes=1 << 29)
    assert watched.window_limit(12) is None
    free.update(descriptors=400)
    limit, reason = watched.window_limit(12)
    assert limit == 6
    assert reason == (
        "12 minibatches from worker processes left 400 of 1000 file descriptors; raise `ulimit -n`"
    )
    assert watched.window_limit(3)[0] == 0
    free.update(descriptors=1000, bytes=1 << 20)
    assert "/dev/shm" in watched.window_limit(12)[1]
