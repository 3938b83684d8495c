"""ESync's pacer: fast workers take extra local steps while the slowest worker finishes one step.

With ESync, a worker queries the state server before every local step except the first step of a
round. ESync's state server, which records the workers' step times, runs in shard server 0. In the
workers' reports to ESync, points in time come from shard 0's clock, durations from the worker's
clock. The pacer ESync never compares points in time from two clocks.

Source: Li, Zhou et al., "ESync: Accelerating Intra-Domain Federated Learning in Heterogeneous Data
Centers", IEEE TSC 15(4); docs/methods/esync.md.
Differences: no worker is released before every live member has reported a step; step times are
smoothed; the margin may follow the measured times; if the slowest worker is long overdue, the other
workers continue with local steps.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import ClassVar

from thinwire.ops.options import choice, integer, words
from thinwire.ops.pacing.base import PaceReport, QueryingPacer
from thinwire.ops.policy import setting
from thinwire.ops.types import ConfigurationError, State

#: With --esync_eps=auto, ESync's margin (the time by which workers push before the slowest worker's
#: step end) is the largest of three terms: a number of seconds, a fraction of the fastest worker's
#: step time, and a multiple of the query's round-trip time.
_EPS_FLOOR_SECONDS, _EPS_OF_FASTEST, _EPS_OF_QUERY = 0.005, 0.1, 2.0
#: Largest margin of ESync (the time by which workers push before the slowest worker's step end), as
#: a fraction of the slowest worker's step time. With a larger margin, workers would hardly take
#: extra local steps, as in synchronous SGD.
_EPS_OF_SLOWEST = 0.2
#: A worker pushes if it has trained longer than _STUCK_SECONDS plus _STUCK_STEPS steps of the
#: slowest known worker, although a member of its group has not reported or the slowest has not
#: begun its round. After a membership change or a restart of shard 0, a shard server may be one
#: round behind, and the missing member may be waiting at that server for this worker's push:
#: without a limit, the two workers would wait forever. An exchange should take less time than the
#: limit. The shard servers stay one round apart, so later rounds use one step of the slowest worker
#: as the limit, until the slowest worker is seen in its round again.
_STUCK_SECONDS, _STUCK_STEPS = 30.0, 20.0
#: The slowest worker is overdue if its step exceeds the expected end by this fraction of its step
#: time. The other workers then take more local steps instead of pushing.
_OVERDUE = 0.5
#: Number of recent query round-trip times from which the pacer ESync computes the 95th percentile.
_QUERY_TIMES_KEPT = 100


@dataclasses.dataclass(frozen=True)
class Esync(QueryingPacer):
    """ESync's pacer: push when the slowest live worker of the group is about to finish its step.

    Attributes:
        summary_name: Key of ESync's results in the run's summary.json.
        eps: Margin of ESync in seconds, or "auto": workers push this much earlier than the slowest
            worker is expected to finish its step.
        query: Mode of a worker's queries to the state server. "blocking": the worker waits for the
            answer before each local step. "delayed": the worker trains until the answer arrives.
        smoothing: Smoothing of measured step times: "ema:A" (moving average, weight A of the newest
            time), "max:M" (maximum of the last M times), or "none".
        max_local_steps: Largest number of local steps that a worker takes between two pushes; 0: no
            limit.
    """

    summary_name: ClassVar[str] = "esync"
    queries: ClassVar[bool] = True
    eps: str = setting(
        words(
            "esync_eps",
            "auto",
            "Safety margin in seconds with which --pacer=esync decides whether a worker has time "
            "for another local step in the round.",
            "seconds, or auto",
        )
    )
    query: str = setting(
        choice(
            "esync_query",
            "blocking",
            "With --pacer=esync: wait for the state server's answer, or continue training "
            "meanwhile.",
            ("blocking", "delayed"),
        )
    )
    smoothing: str = setting(
        words(
            "esync_smoothing",
            "ema:0.5",
            "Smoothing of step times by --pacer=esync: moving average, maximum of the last M, "
            "none.",
            "ema:A|max:M|none",
        )
    )
    max_local_steps: int = setting(
        integer(
            "max_local_steps",
            0,
            "Largest number of local steps in a round of --pacer=esync; 0: no limit.",
            "steps",
            low=0,
        )
    )

    def __post_init__(self) -> None:
        """Raise an error if settings of the pacer ESync are malformed or out of range."""
        super().__post_init__()
        if self.eps != "auto" and not _is_positive_number(self.eps):
            raise ConfigurationError(
                f"--esync_eps={self.eps}: expected auto or a number of seconds above 0."
            )
        _parse_smoothing(self.smoothing)

    @property
    def waits_for_answer(self) -> bool:
        """True if a worker stops computing until the state server has answered its query."""
        return self.query == "blocking"

    @property
    def longest_round(self) -> int:
        """Largest number of local steps that a worker takes between two pushes; 0: no limit."""
        return self.max_local_steps

    def push_now(self, local_steps: int) -> bool:
        """Return True if the worker has done `max_local_steps` and pushes without a query."""
        return 0 < self.max_local_steps <= local_steps

    # -- the state server's half ------------------------------------------------------------

    def init(self) -> State:
        """Return empty records; after a restart, the workers' reports rebuild the records."""
        return {"records": {}, "query_seconds": []}

    def record(self, report: PaceReport, state: State) -> State:
        """Record a worker's report (its step times and local steps) in the worker's record."""
        record = _record_of(report.worker, state)
        record["begun"] = True
        # A worker begins a round after a rejected push, too. `released` never runs for a rejected
        # push, so `record` must clear the earlier decision to push.
        if report.local_steps == 0:
            record["ready"] = False
        record["local_steps"], record["finished_at"] = report.local_steps, report.finished_at
        if report.step_seconds > 0:
            record["times"] = [*record["times"][-31:], report.step_seconds]
        if report.query_seconds > 0:
            state["query_seconds"].append(report.query_seconds)
            del state["query_seconds"][:-_QUERY_TIMES_KEPT]
        return state

    def answer(
        self, worker: int, members: Sequence[int], now: float, state: State
    ) -> tuple[bool, State]:
        """Return True if the querying worker must push now, and the state server's new records.

        A worker that is not yet live (a member of its group) continues to train, because no round
        waits for the worker's push. After a restart of the shard server, a worker is not live (no
        round waits for its push) until the worker's group has begun a round. A worker that is not
        yet live becomes live at the start deadline at the latest, and it queries again after its
        next step.

        Args:
            worker: Number of the querying worker, whose report is already recorded.
            members: Ids of the live workers (workers for which rounds wait) of the querying
                worker's group, ascending. While the querying worker waits to become live, `members`
                is empty or lacks its id.
            now: Current time in seconds, by the same clock as `PaceReport.finished_at`.
            state: The state server's records of the workers.
        """
        record = state["records"][worker]
        # The worker must not push yet, because a round needs at least one local step.
        if record["local_steps"] == 0 or worker not in members:
            return False, state
        record["ready"] = record["ready"] or self._is_time(worker, members, now, state)
        return bool(record["ready"]), state

    def pushed(self, worker: int, state: State) -> State:
        """Record a worker's push; without a connection to shard 0, it pushes without an answer."""
        _record_of(worker, state).update(begun=True, ready=True)
        return state

    def released(self, workers: Sequence[int], state: State) -> State:
        """Begin a new round of local steps for `workers`, who have not reported in it yet."""
        for worker in workers:
            if worker in state["records"]:
                state["records"][worker].update(begun=False, ready=False, local_steps=0)
        return state

    def left(self, worker: int, state: State) -> State:
        """Delete the state server's record of a worker that left the run."""
        state["records"].pop(worker, None)
        return state

    def summary(self, state: State) -> State:
        """Return ESync's results for summary.json: margin, query times and step times."""
        known = {w: self._step_seconds(r) for w, r in state["records"].items() if r["times"]}
        return {
            "eps_seconds": self.margin(known.values(), state) if known else None,
            "query_seconds_p95": _percentile95(state["query_seconds"]),
            "step_seconds": {str(worker): seconds for worker, seconds in known.items()},
        }

    def margin(self, step_seconds: Iterable[float], state: State) -> float:
        """Return ESync's margin eps in seconds: at most a fifth of the slowest step time.

        Args:
            step_seconds: Smoothed step times of the workers, in seconds. ESync's margin is 0 if
                there are no step times.
            state: The state server's records of the workers.
        """
        seconds = list(step_seconds)
        if not seconds:
            return 0.0
        if self.eps == "auto":
            margin = max(
                _EPS_FLOOR_SECONDS,
                _EPS_OF_FASTEST * min(seconds),
                _EPS_OF_QUERY * _percentile95(state["query_seconds"]),
            )
        else:
            margin = float(self.eps)
        return min(margin, _EPS_OF_SLOWEST * max(seconds))

    def _is_time(self, worker: int, members: Sequence[int], now: float, state: State) -> bool:
        records = state["records"]
        seconds, all_known = {}, True
        for member in members:
            record = records.get(member)
            if record is not None and record["times"]:
                seconds[member] = self._step_seconds(record)
            elif member == worker:
                return False
            else:  # a member without a step time may be slower than all members with a step time
                all_known = all_known and record is not None and record["ready"]
        slowest = max(seconds, key=lambda member: (seconds[member], -member))
        # A member without a step time, or a slowest worker that has not begun its round, may still
        # be in the previous exchange. The querying worker waits for this member, but not forever:
        # _STUCK_SECONDS limits the wait.
        if not (all_known and records[slowest]["begun"]):
            record, patience = records[worker], seconds[slowest]
            if not record["stuck"]:
                patience = _STUCK_SECONDS + _STUCK_STEPS * seconds[slowest]
            is_over = bool(record["local_steps"] * seconds[worker] > patience)
            record["stuck"] = record["stuck"] or is_over
            return is_over
        if worker == slowest or records[slowest]["ready"]:
            return True
        records[worker]["stuck"] = False
        remaining = seconds[slowest] - (now - records[slowest]["finished_at"])
        if remaining < -_OVERDUE * seconds[slowest]:
            return False
        return bool(seconds[worker] + self.margin(seconds.values(), state) > remaining)

    def _step_seconds(self, record: State) -> float:
        name, amount = _parse_smoothing(self.smoothing)
        times: list[float] = record["times"]
        if name == "max":
            return max(times[-int(amount) :])
        smooth = times[0]
        for seconds in times[1:]:
            smooth += amount * (seconds - smooth)
        return smooth


def _record_of(worker: int, state: State) -> State:
    """Return a worker's record in `state` (not a copy); create the record if it is missing."""
    fresh = {"times": [], "begun": False, "ready": False, "local_steps": 0, "finished_at": 0.0}
    record: State = state["records"].setdefault(worker, fresh | {"stuck": False})
    return record


def _parse_smoothing(text: str) -> tuple[str, float]:
    """Parse a smoothing of step times: ("ema", weight of the newest) or ("max", how many times)."""
    if text == "none":
        return "ema", 1.0
    match = re.fullmatch(r"(?:ema:(0?\.\d+|1(?:\.0)?)|max:([1-9]|[12]\d|3[01]))", text)
    if match is None or (match[1] is not None and float(match[1]) == 0):
        raise ConfigurationError(
            f"--esync_smoothing={text}: expected ema:A with 0 < A <= 1, max:M with M from 1 to 31, "
            "or none."
        )
    return ("ema", float(match[1])) if match[1] else ("max", float(match[2]))


def _percentile95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))] if values else 0.0


def _is_positive_number(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False
