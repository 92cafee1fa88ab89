"""Options of `gids bench` with values that make no sense are refused with the reason."""

from __future__ import annotations

import pytest

from gids.cli import main

Cases = dict[str, list[tuple[list[str], str]]]
"""By question: options, and what is printed."""

SMALL = {
    "bandwidth": ("--batch-size", 8, "--fanouts", "3,3", "--iterations", 24),
    "epoch": ("--batch-size", 8, "--fanouts", "3,3", "--batches", 3),
    "hit-ratio": ("--batch-size", 8, "--fanouts", "3,3", "--batches", 40),
    "sampling": ("--batch-size", "8,16", "--fanouts", "3,3", "--batches", 5),
}
REFUSED: Cases = {
    "bandwidth": [
        (["--engines", "spdk"], "--engines must be one of uring, threads, mmap (got 'spdk')"),
        (["--cache", "5x"], "--cache 5x is not a cache size: use 2% (of the pages) or 4GB"),
        (["--cache", "900TB"], "more than half of the available memory"),
        (["--window", "24"], "window must be at most 23 (got 24)"),
        (["--rows", "9"], "samples nothing: remove --fanouts, --batch-size"),
    ],
    "epoch": [
        (["--sides", "pyg"], "--sides must be one of gids, stock-random, stock (got 'pyg')"),
        (
            ["--memory-limit", "1MB"],
            "--memory-limit 1.0 MB is too small for the minibatches in flight: give 101 MB or more",
        ),
    ],
    "hit-ratio": [
        (["--policies", "lookahead,belady"], "(got 'belady'); MIN is always measured"),
        (["--cache", "5apples"], "--cache 5apples is not a cache size: use 2% (of the pages), 4GB or 5x"),
        (["--advise", "soon"], "--advise soon is not a goal: use a hit ratio such as 60%"),
        (["--table", "nothing"], "no table 'nothing' in graph.gids (has '_N.feat')"),
        (
            ["--sampler", "labor,pinsage"],
            "--sampler must be one of neighbor, labor, labor-1, labor-star, ladies, ladies-poisson, ",
        ),
        (["--advise", "60%", "--cache", "5%"], "for lookahead: remove --cache"),
        (["--advise", "60%", "--kappa", "1,2"], "--advise takes one trace: give one --sampler"),
        (["--advise", "60%", "--order", "degree,original"], "one --sampler, one --kappa and one --order"),
        (
            ["--order", "trace:rows"],
            "--order must be one of stored, original, degree, community (got 'trace:rows')",
        ),
        (["--pages-per-s", "100"], "--pages-per-s works only with --advise"),
    ],
    "sampling": [
        (["--sampler", "magic"], "--sampler must be one of neighbor"),
        (["--device", "cuda", "--threads", "2"], "--threads works only on the CPU"),
        (["--fanouts", "3,0"], "fanouts"),
        (["--seeds", "test"], "is in a test split"),
    ],
}
UNREADABLE: Cases = {
    "epoch": [
        (["--window", "23"], "--window: '23' is not a whole number from 0 to 22"),
        (["--seconds", "-1"], "--seconds: '-1' is not a number of seconds of 0 or more (0: no limit)"),
        (["--seconds", "nan"], "--seconds: 'nan' is not a number of seconds"),
    ],
    "hit-ratio": [
        (["--repeat", "0"], "--repeat: '0' is not a whole number of 1 or more"),
        (["--seed", "-1"], "--seed: '-1' is not a whole number of 0 or more"),
        (["--pages-per-s", "0"], "--pages-per-s: '0' is not a number greater than 0"),
        (["--windows", "3,23"], "--windows: '3,23' is not a list of numbers from 0 to 22, such as 4,8,16"),
        (["--cache", ","], "--cache: ',' is not a list such as a,b,c"),
        *(
            (["--kappa", kappa], "is not a list of numbers of 1 or more, or inf, such as 1,16,inf")
            for kappa in ("0", "1.5", "many", "1,-inf")
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
