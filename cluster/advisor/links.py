"""What the rounds of two short runs say of each worker's device and link.

The *dense* run pushes and pulls the whole model. The *sparse* run pushes little; most of its
replies are small, every few are the whole model. So three kinds of rounds differ in what went up
and what went down, and in what coding it took, which is known from this machine:

    t = step + coding + bytes up / rate up + bytes down / rate down + round trip
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

from ops.advice import WorkerLink
from ops.rounds import FORWARD_AND_BACKWARD, GET_BATCH, Round
from ops.types import ConfigurationError

#: A message of more than this share of the dense one is the whole model.
_WHOLE = 0.5
_BITS = 8e-6  # megabit of a byte
_FASTEST_MBPS = 1e6  # what was measured above is the clock, not a link


@dataclasses.dataclass(frozen=True)
class Coding:
    """Seconds that coding, decoding and applying take of an exchange of the two runs."""

    dense: float
    sparse: float


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Medians of the rounds of one kind."""

    exchange_seconds: float  # all of a round but its step and the wait for others
    bytes_up: float
    bytes_down: float


def worker_link(
    worker: int, dense: Sequence[Round], sparse: Sequence[Round], coding: Coding
) -> WorkerLink:
    """Return what one worker's device and link do.

    Args:
        worker: Its id.
        dense: Its rounds of the dense run.
        sparse: Its rounds of the sparse run.
        coding: Of an exchange of either.

    Raises:
        ConfigurationError: Some kind of round is missing.
    """
    dense, sparse = _warm(dense), _warm(sparse)
    size = max((each.bytes_received for each in dense), default=0)
    both = _kind(worker, "whole model both ways", dense)
    whole = [each for each in sparse if each.bytes_received > _WHOLE * size]
    down = _kind(worker, "whole model down", whole)
    small = [each for each in sparse if each.bytes_received <= _WHOLE * size]
    little = _kind(worker, "sparse update", small)
    more_down = down.bytes_down - little.bytes_down
    down_seconds = max(0.0, down.exchange_seconds - little.exchange_seconds)
    both_seconds = (both.exchange_seconds - coding.dense) - (
        little.exchange_seconds - coding.sparse
    )
    share = (both.bytes_down - little.bytes_down) / more_down
    down_seconds = min(down_seconds, max(0.0, both_seconds) / share)
    up_seconds = max(0.0, both_seconds - down_seconds * share)
    up_mbps = _mbps(both.bytes_up - little.bytes_up, up_seconds)
    down_mbps = _mbps(more_down, down_seconds)
    on_the_way = _seconds(little.bytes_up, up_mbps) + _seconds(little.bytes_down, down_mbps)
    return WorkerLink(
        worker=worker,
        step_seconds=_median(_step_seconds, small),
        up_mbps=up_mbps,
        down_mbps=down_mbps,
        round_trip_seconds=max(0.0, little.exchange_seconds - coding.sparse - on_the_way),
        rounds=len(dense) + len(sparse),
    )


def _warm(rounds: Sequence[Round]) -> list[Round]:
    """Leave out a life's first round: it opens windows and compiles."""
    return [each for each in rounds if each.num_iters > 1]


def _kind(worker: int, what: str, rounds: Sequence[Round]) -> _Kind:
    if not rounds:
        raise ConfigurationError(
            f"worker {worker} finished no second exchange of the kind '{what}' while its link was "
            "measured; raise --probe_seconds."
        )
    return _Kind(
        exchange_seconds=_median(_exchange_seconds, rounds),
        bytes_up=_median(lambda each: each.bytes_sent, rounds),
        bytes_down=_median(lambda each: each.bytes_received, rounds),
    )


def _median(value: Callable[[Round], float], rounds: Sequence[Round]) -> float:
    return float(statistics.median(value(each) for each in rounds))


def _step_seconds(each: Round) -> float:
    return each.time.get(GET_BATCH, 0.0) + each.time.get(FORWARD_AND_BACKWARD, 0.0)


def _exchange_seconds(each: Round) -> float:
    return sum(each.time.values()) - each.barrier_wait - _step_seconds(each)


def _mbps(num_bytes: float, seconds: float) -> float:
    """Return a rate; 0, which is no limit, where the bytes took next to no time."""
    slow_enough = seconds > 0 and _BITS * num_bytes / seconds < _FASTEST_MBPS
    return _BITS * num_bytes / seconds if slow_enough else 0.0


def _seconds(num_bytes: float, mbps: float) -> float:
    return _BITS * num_bytes / mbps if mbps else 0.0
