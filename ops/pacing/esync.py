"""ESync's pacer: fast workers take extra local steps while the slowest finishes its one.

The worker queries before every local step but the first; the state server's records live in shard
0's core. Times are moments of shard 0's own clock and durations of the worker's: no two clocks are
compared.

Source: Li, Zhou et al., "ESync: Accelerating Intra-Domain Federated Learning in Heterogeneous Data
Centers", IEEE TSC 15(4); docs/methods/esync.md.
Differences: no worker is released before every live member has reported a step; step times are
smoothed; the margin may follow the measured times; a slowest that is long overdue does not stop the
others.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import ClassVar

from thinwire.ops.pacing.base import PaceReport
from thinwire.ops.types import ConfigurationError, Kind, State

#: The parts of --esync_eps=auto: seconds, shares of the fastest step, multiples of the query.
_EPS_FLOOR_SECONDS, _EPS_OF_FASTEST, _EPS_OF_QUERY = 0.005, 0.1, 2.0
#: A margin beyond this share of the slowest step would turn ESync into SSGD.
_EPS_OF_SLOWEST = 0.2
#: A worker that has trained for this long, and for this many steps of the slowest known, pushes
#: although another has not reported, or the slowest has not begun its round: that one may be
#: waiting for just this push, at a shard that is a round behind since the membership changed or
#: shard 0 restarted. Exchanges are meant to be faster. Shards stay a round apart, so from then on
#: it waits for one step of the slowest, until it finds that one in its round again.
_STUCK_SECONDS, _STUCK_STEPS = 30.0, 20.0
#: Beyond this share of its own step the slowest is overdue, and no reason to stop.
_OVERDUE = 0.5
_QUERY_TIMES_KEPT = 100


@dataclasses.dataclass(frozen=True)
class Esync:
    """Push when the slowest live worker of the group is about to be done.

    Attributes:
        eps: Safety margin in seconds, or "auto".
        query: Wait for the answer before each local step ("blocking"), or go on training and take
            the answer when it comes ("delayed").
        smoothing: Of step times: "ema:A" (weight A of the newest), "max:M" (of the last M), "none".
        max_local_steps: Most local steps of a round; 0 is no limit.
    """

    summary_name: ClassVar[str] = "esync"  # of the block in summary.json
    queries: ClassVar[bool] = True
    local_epochs: ClassVar[int] = 0
    eps: str = "auto"
    query: str = "blocking"
    smoothing: str = "ema:0.5"
    max_local_steps: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be read."""
        if self.eps != "auto" and not _is_positive_number(self.eps):
            raise ConfigurationError(
                f"--esync_eps={self.eps}: expected auto or a number of seconds above 0."
            )
        if self.query not in ("blocking", "delayed"):
            raise ConfigurationError(f"--esync_query={self.query}: expected blocking or delayed.")
        if self.max_local_steps < 0:
            raise ConfigurationError(
                f"--max_local_steps={self.max_local_steps}: expected 0 (no limit) or more."
            )
        _parse_smoothing(self.smoothing)

    @property
    def kind(self) -> Kind:
        """Changes of weights travel, however many steps they took."""
        return Kind.DELTA

    @property
    def waits_for_answer(self) -> bool:
        """Whether it stands still until the answer has come."""
        return self.query == "blocking"

    @property
    def longest_round(self) -> int:
        """Return the most local steps of a round; 0 is no limit."""
        return self.max_local_steps

    def push_now(self, local_steps: int) -> bool:
        """Return whether the worker's own count alone ends the round."""
        return 0 < self.max_local_steps <= local_steps

    # -- the state server's half ------------------------------------------------------------

    def init(self) -> State:
        """Return the records of an empty cluster; soft state, rebuilt from reports."""
        return {"records": {}, "query_seconds": []}

    def record(self, report: PaceReport, state: State) -> State:
        """Record what a worker reports of itself."""
        record = _record_of(report.worker, state)
        record["begun"] = True
        if report.local_steps == 0:  # also after a push that was refused, and never released
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
        """Return whether a worker that has reported is to push now.

        A worker that is not live itself trains on: no round waits for its push yet, as after a
        restart of the shard, before the group has begun. It becomes live at the latest when the
        start's deadline passes, and queries again after its next step.

        Args:
            worker: Whose query it is; its report is recorded.
            members: Live workers of its group, ascending; none, or without this one, while it
                waits to become live.
            now: By the clock of `PaceReport.finished_at`.
            state: The records.
        """
        record = state["records"][worker]
        if record["local_steps"] == 0 or worker not in members:  # a round has a step at least
            return False, state
        record["ready"] = record["ready"] or self._is_time(worker, members, now, state)
        return bool(record["ready"]), state

    def pushed(self, worker: int, state: State) -> State:
        """Record a push; the worker may have had no answer, if it had lost its connection."""
        _record_of(worker, state).update(begun=True, ready=True)
        return state

    def released(self, workers: Sequence[int], state: State) -> State:
        """Begin a new round for these: their records wait for the first report of it."""
        for worker in workers:
            if worker in state["records"]:
                state["records"][worker].update(begun=False, ready=False, local_steps=0)
        return state

    def left(self, worker: int, state: State) -> State:
        """Forget a worker."""
        state["records"].pop(worker, None)
        return state

    def summary(self, state: State) -> State:
        """Return the state server's block of the run's summary."""
        known = {w: self._step_seconds(r) for w, r in state["records"].items() if r["times"]}
        return {
            "eps_seconds": self.margin(known.values(), state) if known else None,
            "query_seconds_p95": _percentile95(state["query_seconds"]),
            "step_seconds": {str(worker): seconds for worker, seconds in known.items()},
        }

    def margin(self, step_seconds: Iterable[float], state: State) -> float:
        """Return eps in seconds: given or auto, at most a fifth of the slowest step.

        It is 0 where no step has been measured.
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
            else:  # one that has not reported may be slower than all that have
                all_known = all_known and record is not None and record["ready"]
        slowest = max(seconds, key=lambda member: (seconds[member], -member))
        if not (all_known and records[slowest]["begun"]):  # one is in its last exchange, perhaps
            record, patience = records[worker], seconds[slowest]
            if not record["stuck"]:
                patience = _STUCK_SECONDS + _STUCK_STEPS * seconds[slowest]
            is_over = bool(record["local_steps"] * seconds[worker] > patience)
            record["stuck"] = record["stuck"] or is_over
            return is_over
        if worker == slowest or records[slowest]["ready"]:
            return True
        records[worker]["stuck"] = False
        rest = seconds[slowest] - (now - records[slowest]["finished_at"])
        if rest < -_OVERDUE * seconds[slowest]:
            return False
        return bool(seconds[worker] + self.margin(seconds.values(), state) > rest)

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
    """Return what is known of a worker, in place."""
    fresh = {"times": [], "begun": False, "ready": False, "local_steps": 0, "finished_at": 0.0}
    record: State = state["records"].setdefault(worker, fresh | {"stuck": False})
    return record


def _parse_smoothing(text: str) -> tuple[str, float]:
    """Return ("ema", weight of the newest) or ("max", how many)."""
    if text == "none":
        return "ema", 1.0
    found = re.fullmatch(r"(?:ema:(0?\.\d+|1(?:\.0)?)|max:([1-9]|[12]\d|3[01]))", text)
    if found is None or (found[1] is not None and float(found[1]) == 0):
        raise ConfigurationError(
            f"--esync_smoothing={text}: expected ema:A with 0 < A <= 1, max:M with M from 1 to 31, "
            "or none."
        )
    return ("ema", float(found[1])) if found[1] else ("max", float(found[2]))


def _percentile95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))] if values else 0.0


def _is_positive_number(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False
