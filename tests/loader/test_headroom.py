"""A window of minibatches from workers must not exhaust file descriptors or shared memory."""

import os
import resource
from types import SimpleNamespace

import pytest

from gids.loader import framework_epoch as headroom


@pytest.fixture
def free(monkeypatch):
    """What is free of each resource, settable."""
    amounts = {"descriptors": 1000, "bytes": 1 << 30}

    def limits(_):
        limit = amounts["descriptors"] + len(os.listdir("/proc/self/fd"))
        return limit, limit

    monkeypatch.setattr(resource, "getrlimit", limits)
    monkeypatch.setattr(
        os, "statvfs", lambda _: SimpleNamespace(f_bavail=amounts["bytes"] >> 12, f_frsize=4096)
    )
    return amounts


def test_nothing_is_limited_while_half_of_what_was_free_is_left(free):
    watched = headroom.Headroom()
    free["descriptors"], free["bytes"] = 500, 1 << 29
    assert watched.window_limit(12) is None


def test_the_window_is_half_of_what_used_half(free):
    watched = headroom.Headroom()
    free["descriptors"] = 400
    limit, reason = watched.window_limit(12)
    assert limit == 6
    assert reason == (
        "12 minibatches from worker processes left 400 of 1000 file descriptors; raise `ulimit -n`"
    )
    assert watched.window_limit(3)[0] == 0
    free["descriptors"], free["bytes"] = 1000, 1 << 20
    assert "/dev/shm" in watched.window_limit(12)[1]
