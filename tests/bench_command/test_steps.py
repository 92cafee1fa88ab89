"""Progress of steps: a file gets lines at the start, at intervals and at the end; a terminal one line."""

import re
import sys
import threading

import pytest

from gids.bench import session as steps
from gids.bench.session import Step


@pytest.fixture
def wait_for_lines(monkeypatch):
    """Wait until a Step has written so many times."""
    written = threading.Semaphore(0)
    write = Step._write

    def counted(self, text, *, last):
        write(self, text, last=last)
        written.release()

    monkeypatch.setattr(Step, "_write", counted)

    def wait(count):
        for _ in range(count):
            assert written.acquire(timeout=60)

    return wait


def test_a_file_gets_lines_at_the_start_at_intervals_and_at_the_end(capsys, monkeypatch, wait_for_lines):
    monkeypatch.setattr(steps, "_LINE_S", 0.02)
    with Step("working") as step:
        assert capsys.readouterr().err == "working ...\n"
        step.show(0.25, "hard")
        wait_for_lines(3)
        step.say("it went well")
        step.say("")
        assert re.match(r"(working \.\.\. hard 25% after 0 s\n){2}", capsys.readouterr().err)
    assert re.search(r"working \.\.\. \d+\.\d s\n  it went well\n$", capsys.readouterr().err)


def test_a_short_step_has_two_lines(capsys):
    with Step("working") as step:
        step.show(0.5)
    assert re.fullmatch(r"working \.\.\.\nworking \.\.\. \d+\.\d s\n", capsys.readouterr().err)


def test_a_terminal_gets_one_line_that_is_updated(capsys, monkeypatch, wait_for_lines):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(steps, "_REFRESH_S", 0.02)
    with Step("working") as step:
        step.show(0.5)
        wait_for_lines(2)
    text = capsys.readouterr().err
    assert "\rworking ... 50% after 0 s\x1b[K" in text
    assert text.count("\n") == 1
    assert re.search(r"\rworking \.\.\. \d+\.\d s\x1b\[K\n$", text)


def test_a_step_that_fails_says_so(capsys):
    with pytest.raises(KeyError), Step("working"):
        raise KeyError
    assert re.search(r"^working \.\.\. failed after \d+\.\d s$", capsys.readouterr().err, re.M)
