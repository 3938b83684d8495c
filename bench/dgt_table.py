"""Tables of the DGT bench."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.dgt_arms import ARMS, LINKS, MODELS, Case, case

#: What `bench.dgt_play` found.
Entry = Mapping[str, Any]
Results = Mapping[Case, Entry]

_SMOOTHED = 3  # evaluations, of whose mean the target is asked: one alone jumps by a point or two
_HEAD = (
    "arm",
    "k",
    "s to target",
    "reliable / it",
    "step p50, s",
    "p99",
    "fresh",
    "fill",
    "MB a push",
    "accuracy",
    "beside reliable, points",
    "by seed",
)


def tables(found: Results) -> str:
    """Return one Markdown table for each model and link that has results."""
    parts = []
    for model, link in itertools.product(MODELS, LINKS):
        rows = list(_rows(found, model, link))
        if rows:
            title = f"{model}, {link}; target {MODELS[model].target:g}"
            parts.append("\n".join([f"**{title}**", "", _line(_HEAD), "|---" * len(_HEAD) + "|"]))
            parts[-1] += "\n" + "\n".join(map(_line, rows)) + "\n"
    return "\n".join(parts)


def _rows(found: Results, model: str, link: str) -> Iterator[list[str]]:
    for arm, k in [(name, k) for name, one in ARMS.items() for k in one.ks]:
        here = [
            one
            for one in sorted(found)
            if (one.model, one.link, one.arm, one.k) == (model, link, arm, k)
        ]
        if here:
            yield _row(found, here)


def _row(found: Results, here: Sequence[Case]) -> list[str]:
    """Return the cells of one arm, of all its seeds; ratios and differences are seed by seed."""
    beside = [case(one.model, one.link, "reliable", "", one.seed) for one in here]
    reached, other = ([to_target(found, one) for one in ones] for ones in (here, beside))
    ratios = [b / a for a, b in zip(reached, other, strict=True) if a and b]
    finals, others = ([_final(found, one) for one in ones] for ones in (here, beside))
    known = [final for final in finals if final is not None]
    points = [100 * (a - b) for a, b in zip(finals, others, strict=True) if a and b]
    steps = sorted(step for one in here for step in step_seconds(found[one]))
    return [
        here[0].arm,
        here[0].k or "-",
        "not reached" if None in reached else _mean(reached, ".1f"),
        _mean(ratios, ".2f"),
        f"{quantile(steps, 0.5):.3f}",
        f"{quantile(steps, 0.99):.3f}",
        *(_mean([found[one][name] for one in here], ".2f") for name in ("fresh", "fill")),
        _mean([found[one]["push_bytes"] / 1e6 for one in here], ".2f"),
        _mean(known, ".4f"),
        _mean(points, "+.1f"),
        ", ".join(f"{final:.4f}" for final in known) if len(known) > 1 else "",
    ]


def to_target(found: Results, one: Case) -> float | None:
    """Return the virtual seconds after which a run is at its target; None: never, or not played.

    Interpolated between evaluations, of which the mean of three counts.
    """
    learned = _learned(found, one)
    if one not in found or learned is None:
        return None
    version = crossing(learned["evaluations"], MODELS[one.model].target)
    if version is None:
        return None
    times = [0.0, *found[one]["times"]]
    whole = min(int(version), len(times) - 2)
    return float(times[whole] + (version - whole) * (times[whole + 1] - times[whole]))


def crossing(evaluations: Sequence[Sequence[float]], target: float) -> float | None:
    """Return the update at which the mean of the last evaluations comes to a target.

    Args:
        evaluations: (version, accuracy, ...), versions ascending.
        target: 0 to 1.

    >>> crossing([(10, 0.2), (20, 0.4), (30, 0.6), (40, 0.8)], 0.5)
    35.0
    """
    means = [
        (window[-1][0], statistics.mean(each[1] for each in window))
        for window in (evaluations[at : at + _SMOOTHED] for at in range(len(evaluations)))
        if len(window) == _SMOOTHED
    ]
    before: tuple[float, float] | None = None
    for version, accuracy in means:
        if accuracy >= target:
            if before is None:
                return float(version)
            share = (target - before[1]) / (accuracy - before[1])
            return float(before[0] + share * (version - before[0]))
        before = version, accuracy
    return None


def step_seconds(entry: Entry) -> list[float]:
    """Return how long each step but the first took."""
    return [after - before for before, after in itertools.pairwise(entry["times"])]


def quantile(ascending: Sequence[float], share: float) -> float:
    """Return the value below which this share lies, to the nearest rank."""
    return ascending[min(len(ascending) - 1, round(share * (len(ascending) - 1)))]


def _learned(found: Results, one: Case) -> Entry | None:
    """Return the entry that says what a run learns: its own, or that on the free link."""
    entry = found.get(one)
    if entry is None or one.learns:
        return entry
    alike = ARMS[one.arm].learns_alike
    return found.get(case(one.model, "free", alike, one.k if alike == one.arm else "", one.seed))


def _final(found: Results, one: Case) -> float | None:
    """Return the accuracy at the end on all test images."""
    learned = _learned(found, one)
    return float(learned["final"][0]) if learned else None


def _mean(values: Sequence[float | None], layout: str) -> str:
    known = [value for value in values if value is not None]
    return format(statistics.mean(known), layout) if known else "-"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
