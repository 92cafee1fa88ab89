"""Options of `gids bench` with values that make no sense are refused with the reason."""

from __future__ import annotations

import pytest

from gids.cli import main

Cases = dict[str, list[tuple[list[str], str]]]
"""By question: options, and what is printed."""

SMALL = {
    "epoch": ("--batch-size", 8, "--fanouts", "3,3", "--batches", 3),
    "hit-ratio": ("--batch-size", 8, "--fanouts", "3,3", "--batches", 40),
}
REFUSED: Cases = {
    "epoch": [
        (
            ["--memory-limit", "1MB"],
            "--memory-limit 1.0 MB is too small for the minibatches in flight: give 101 MB or more",
        ),
    ],
    "hit-ratio": [
        (["--policies", "lookahead,belady"], "(got 'belady'); MIN is always measured"),
        (["--cache", "5apples"], "--cache 5apples is not a cache size: use 2% (of the pages), 4GB or 5x"),
        (["--table", "nothing"], "no table 'nothing' in graph.gids (has '_N.feat')"),
        (
            ["--sampler", "pinsage"],
            "--sampler must be one of neighbor, labor, labor-1, labor-star, ladies, ladies-poisson, ",
        ),
        (
            ["--order", "trace:rows"],
            "--order must be one of stored, original, degree, community (got 'trace:rows')",
        ),
        (["--fanouts", "3,0"], "fanouts"),
        (["--seeds", "test"], "is in a test split"),
        (["--sampler", "walk", "--kappa", "2"], "sampler 'walk' takes no kappa"),
    ],
}
UNREADABLE: Cases = {
    "epoch": [
        (["--window", "23"], "--window: '23' is not a whole number from 0 to 22"),
        (["--seconds", "-1"], "--seconds: '-1' is not a number of seconds of 0 or more (0: no limit)"),
        (["--seconds", "nan"], "--seconds: 'nan' is not a number of seconds"),
    ],
    "hit-ratio": [
        (["--seed", "-1"], "--seed: '-1' is not a whole number of 0 or more"),
        (["--windows", "3,23"], "--windows: '3,23' is not a list of numbers from 0 to 22, such as 4,8,16"),
        (["--cache", ","], "--cache: ',' is not a list such as a,b,c"),
        *(
            (["--kappa", kappa], "is not a whole number of 1 or more, or inf")
            for kappa in ("0", "1.5", "1,2")
        ),
    ],
}


def each(cases):
    return [(question, *case) for question in cases for case in cases[question]]


@pytest.mark.parametrize(("question", "args", "said"), each(REFUSED))
def test_bad_options_are_refused_with_the_reason(dataset, bench, question, args, said):
    if question == "epoch":
        pytest.importorskip("gids.dgl", exc_type=ImportError)
    text, report = bench(question, dataset, *SMALL[question], *args, status=2)
    assert said in text.replace("\n  ", " ")
    assert not report


@pytest.mark.parametrize(("question", "args", "said"), each(UNREADABLE))
def test_unreadable_options_print_the_usage(dataset, capsys, question, args, said):
    with pytest.raises(SystemExit):
        main(["bench", question, str(dataset), *args])
    assert said in capsys.readouterr().err
