"""The tables of `gids scale`, its plot and its advice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from gids.bench.plot import Curve, plot_curves
from gids.bench.text import aligned, count, seconds
from gids.scale.curves import Curves
from gids.scale.model import MODES, Prediction, Rates
from gids.sizes import format_bytes

_WORTH = 1.5  # twice the ranks must be this much faster


def rates_line(rates: Rates, measured: str) -> str:
    return (
        f"storage {format_bytes(int(rates.storage))}/s, {rates.reads_per_s:,.0f} reads/s{measured}; "
        f"network {format_bytes(int(rates.network))}/s, {seconds(rates.latency_s)} per message; "
        f"memory {format_bytes(int(rates.memory))}/s; {rates.flops / 1e12:g} Tflop/s"
    )


def curves_table(curves: Curves) -> str:
    """A line per batch size."""
    layers = len(curves.setting.fanouts)
    titles = ["seeds", *(f"nodes {i + 1}" for i in range(layers)), *(f"edges {i + 1}" for i in range(layers))]
    titles += ["rows/seed", "pages"]
    rows = [
        [
            count(p.batch_size),
            *(count(n) for n in p.nodes[1:]),
            *(count(e) for e in p.edges),
            f"{p.nodes[-1] / p.batch_size:.1f}",
            count(sum(p.pages.values())),
        ]
        for p in curves.points
    ]
    return aligned([titles, *rows])


def prediction_tables(predictions: Sequence[Prediction]) -> list[tuple[str, str]]:
    """(title, table) of seconds, bytes and memory."""
    return [
        ("seconds per epoch, and the bottleneck", _by_mode(predictions, _time)),
        ("read from storage / sent, by all ranks per epoch", _by_mode(predictions, _volume)),
        ("memory per rank", _by_mode(predictions, _memory)),
    ]


def plot(path: Path, title: str, predictions: Sequence[Prediction]) -> None:
    """Draw seconds and bytes of an epoch by the number of ranks, as PNG."""
    values: dict[str, Callable[[Prediction], float]] = {
        "time of an epoch: seconds": lambda p: p.seconds,
        "read from storage per epoch: GB": lambda p: p.storage_bytes / 1e9,
        "sent per epoch: GB": lambda p: p.network_bytes / 1e9,
    }
    panels: dict[str, list[Curve]] = {}
    for name, value in values.items():
        for mode in MODES:
            line = {p.ranks: value(p) for p in predictions if p.mode == mode and value(p)}
            if line:
                panels.setdefault(name, []).append((mode, list(line), list(line.values())))
    plot_curves(path, title, panels, ("ranks", ""), log_x=True, log_y=True)


def recommend(predictions: Sequence[Prediction]) -> str:
    """One sentence: how many ranks, and which mode."""
    fitting = [p for p in predictions if p.fits]
    if not fitting:
        least = min(predictions, key=lambda p: p.rank_bytes)
        return (
            f"No mode fits: the smallest, {least.mode} on {least.ranks} ranks, needs "
            f"{format_bytes(int(least.rank_bytes))} per rank."
        )
    by_ranks: dict[int, Prediction] = {}  # the fastest of each
    for p in sorted(fitting, key=lambda p: (p.ranks, p.seconds)):
        by_ranks.setdefault(p.ranks, p)
    chosen, *larger = by_ranks.values()
    for p in larger:
        if chosen.seconds < _WORTH * p.seconds:
            break
        chosen = p
    way = f"{chosen.mode} training" + (f" with {chosen.copies} copies" if chosen.copies > 1 else "")
    text = f"Take {way} on {chosen.ranks} ranks: {seconds(chosen.seconds)} per epoch"
    alone = next((p for p in fitting if p.ranks == chosen.ranks and p.mode == MODES[0]), None)
    if alone is not None and alone is not chosen:
        text += f", {alone.seconds / chosen.seconds:,.1f} times as fast as independent training"
    if chosen.ranks == 1:
        text = f"Train on 1 rank: {seconds(chosen.seconds)} per epoch"
    more = "; more ranks gain little" if chosen.ranks < max(by_ranks) else ""
    return f"{text}; the bottleneck is {chosen.bottleneck}{more}."


def _by_mode(predictions: Sequence[Prediction], show: Callable[[Prediction], str]) -> str:
    by_key = {(p.ranks, p.mode): p for p in predictions}
    ranks = sorted({p.ranks for p in predictions})
    rows = [[str(n), *(show(by_key[n, m]) if (n, m) in by_key else "-" for m in MODES)] for n in ranks]
    return aligned([["ranks", *MODES], *rows])


def _time(p: Prediction) -> str:
    copies = f" c={p.copies}" if p.copies > 1 else ""
    return f"{seconds(p.seconds)} {p.bottleneck}{copies}{'' if p.fits else ' (too large)'}{_mark(p)}"


def _volume(p: Prediction) -> str:
    return f"{format_bytes(int(p.storage_bytes))} / {format_bytes(int(p.network_bytes))}{_mark(p)}"


def _memory(p: Prediction) -> str:
    return format_bytes(int(p.rank_bytes)) + _mark(p)


def _mark(p: Prediction) -> str:
    return " ~" if p.extrapolated else ""
