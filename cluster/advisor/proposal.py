"""Which composition to take, and how it is told."""

from __future__ import annotations

import pathlib
import shlex
from collections.abc import Iterator, Sequence

from ops.advice import Advice, Predicted, WorkerLink

#: How much slower than the fastest a truer composition may be where none is fast enough.
_ALIKE = 0.1


def ideal_samples_per_second(links: Sequence[WorkerLink], batch_size: int) -> float:
    """Return what the workers would compute if nothing had to be exchanged."""
    return sum(batch_size / link.step_seconds for link in links)


def propose(predicted: Sequence[Predicted], ideal: float, rate: float) -> tuple[int, bool]:
    """Choose a composition.

    Args:
        predicted: From true to lossy, at least one.
        ideal: Samples a second of workers that exchange nothing.
        rate: Share of it that is enough.

    Returns:
        Index of the first that is fast enough, and True; if none is, of the first that is at most
        a tenth slower than the fastest, and False.
    """
    rates = [row.prediction.samples_per_second for row in predicted]
    enough = [number for number, each in enumerate(rates) if each >= rate * ideal]
    if enough:
        return enough[0], True
    fastest = [number for number, each in enumerate(rates) if each >= (1 - _ALIKE) * max(rates)]
    return fastest[0], False


def command_of(advice: Advice, path: pathlib.Path) -> str:
    """Return the command line that is proposed; the run will compare itself with `path`."""
    flags = [*advice.given, *advice.predicted[advice.proposal].flags, f"--advice={path}"]
    return shlex.join(["python", "main.py", "--type_node=Cluster", *flags])


def told(advice: Advice, path: pathlib.Path) -> str:
    """Return the whole advice as text; it is kept at `path`."""
    return "\n".join([*_lines(advice), "", *_verdict(advice), command_of(advice, path)]) + "\n"


def _lines(advice: Advice) -> Iterator[str]:
    yield "worker  step ms  up Mbit/s  down Mbit/s  round trip ms  rounds"
    for link in advice.links:
        yield (
            f"{link.worker:6d} {1e3 * link.step_seconds:8.1f} {_rate(link.up_mbps):>10} "
            f"{_rate(link.down_mbps):>12} {1e3 * link.round_trip_seconds:14.1f} {link.rounds:7d}"
        )
    ideal = advice.ideal_samples_per_second
    yield ""
    yield f"Without exchanges the workers would compute {ideal:.1f} samples/s."
    yield ""
    yield "  samples/s  of that  updates/s  kB up/push  kB down/pull  coding ms  composition"
    for number, row in enumerate(advice.predicted):
        made = row.prediction
        yield (
            f"{'*' if number == advice.proposal else ' '} {made.samples_per_second:9.1f} "
            f"{made.samples_per_second / ideal:7.0%} {made.updates_per_second:10.2f} "
            f"{made.bytes_up_per_push / 1e3:11.1f} {made.bytes_down_per_pull / 1e3:13.1f} "
            f"{1e3 * row.coding_seconds:10.1f}  {' '.join(row.flags)}"
        )
    for out in advice.left_out:
        yield f"  not predicted: {' '.join(out.flags)}: {out.why}"


def _verdict(advice: Advice) -> Iterator[str]:
    if advice.reached:
        yield (
            f"Proposed (*): the first in this list, which goes from true to lossy, that reaches "
            f"{advice.rate:.0%} of that (--advise_rate)."
        )
    else:
        yield (
            f"Proposed (*): none reaches {advice.rate:.0%} of that (--advise_rate); this is the "
            "first in the list, which goes from true to lossy, that is at most a tenth slower than "
            "the fastest."
        )


def _rate(mbps: float) -> str:
    return f"{mbps:.1f}" if mbps else "no limit"
