"""Minutes of faults on real processes: ``python -m tests.chaos.soak --minutes 30``.

A run of 2 shards, 3 workers and a Supervisor meets a fault every few seconds. The run must end
with every exit code 0, no update lost, no resource leaked, and the accuracy of an undisturbed run.
The script writes a report; exit code 1: one of these conditions does not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import random
import shutil
import signal
import sys
import threading
import time
from typing import Any

from tests.chaos import soak_report
from tests.chaos.process_cast import Awake, Cast
from tests.chaos.process_trial import Trial
from tests.chaos.soak_churn import Churn
from tests.chaos.soak_samples import Growth, Sample, growth, sample
from thinwire.supervisor.metrics_log import evaluations_in, read_lines

_NB_WORKERS, _NB_PS = 3, 2
#: A step takes so long, that many minutes do not make too many updates for the run in peace.
_STEP_SECONDS = 0.1
_GAP_SECONDS = (1.5, 5.0)  # between two faults
_SAMPLE_SECONDS, _STATUS_SECONDS = 1.0, 5.0
#: Evaluations of the last part of a run are averaged.
_LAST_PART = 0.2
#: Whom faults do not kill: in the first half of the time, and in the second.
_SPARED = ({"ps-0", "worker-1", "worker-3"}, {"ps-1", "worker-2", "supervisor"})


@dataclasses.dataclass
class Outcome:
    """The result of a soak."""

    minutes: float
    seed: int
    flags: tuple[str, ...]
    counts: dict[str, int]
    failures: list[str]
    growths: list[Growth]
    longest_pause_seconds: float  # longest time without a new version
    summary: dict[str, Any] = dataclasses.field(default_factory=dict)
    codes: dict[str, int] = dataclasses.field(default_factory=dict)
    accuracy: float = 0.0
    quiet_accuracy: float | None = None
    kills: int = 0  # checked kills of shards
    compared: int = 0  # snapshots that equal a replay


class _CastWatch(threading.Thread):
    """Asks shard 0 for its version, again and again."""

    def __init__(self, cast: Cast) -> None:
        super().__init__(name="watch", daemon=True)
        self._cast, self._over = cast, threading.Event()
        self.longest_pause_seconds = 0.0

    def run(self) -> None:
        """Note the longest time without an update."""
        version, awake = -1, Awake(3 * _STATUS_SECONDS)
        since = 0.0
        while not self._over.wait(_STATUS_SECONDS):
            try:
                now = self._cast.status(_STATUS_SECONDS).version
            except AssertionError:
                now = version
            pause = awake() - since
            if now != version:
                version, since = now, awake()
            self.longest_pause_seconds = max(self.longest_pause_seconds, pause)

    def end(self) -> None:
        """Watch no more."""
        self._over.set()
        if self.is_alive():
            self.join()


class Soak:
    """One soak.

    Args:
        given: The command line.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self._given, self._out = given, given.out
        self._flags = (
            f"--method={given.method}",
            "--dataset=fashion_mnist_sample",
            "--journal=on",
            "--reconnect_timeout_seconds=120",
        )
        self._samples: dict[tuple[str, int], list[Sample]] = {}

    def run(self) -> Outcome:
        """Churn, then train in peace."""
        outcome = self._churned()
        if outcome.summary:
            outcome.accuracy = _accuracy(self._out / "churn" / "run")
            outcome.quiet_accuracy = self._in_peace(outcome)
        return outcome

    # -- churn ----------------------------------------------------------------------------------

    def _churned(self) -> Outcome:
        given = self._given
        flags = (*self._flags, f"--step_seconds={_STEP_SECONDS}")
        cast = Cast(self._out / "churn", flags, _NB_WORKERS, _NB_PS, given.seed, given.protected)
        trial = Trial(cast, given.seed)
        churn, watch = Churn(trial, given.seed), _CastWatch(cast)
        outcome = Outcome(given.minutes, given.seed, flags, {}, churn.failures, [], 0.0)
        try:
            trial.begin(supervisor=True)
            watch.start()
            self._strike(churn)
            churn.heal(120)
            trial.progress(5)
            watch.end()
            outcome.summary = trial.end()
        except AssertionError as error:
            churn.failures.append(str(error))
        finally:
            watch.end()
            cast.close()
        outcome.counts, outcome.codes = dict(churn.counts), trial.codes
        outcome.longest_pause_seconds = watch.longest_pause_seconds
        outcome.kills = len(trial.kills)
        outcome.compared = sum(kill.compared for kill in trial.kills)
        run_seconds = 60 * given.minutes
        found = (growth(name, lived, run_seconds) for (name, _), lived in self._samples.items())
        outcome.growths = [each for each in found if each is not None]
        return outcome

    def _strike(self, churn: Churn) -> None:
        """Apply faults, repair them and take samples until the time is over."""
        dice = random.Random(self._given.seed)
        seconds = 60 * self._given.minutes
        next_strike, next_sample, awake = 0.0, 0.0, Awake(30.0)
        while (elapsed := awake()) < seconds:
            churn.spared = _SPARED[elapsed >= seconds / 2]
            if elapsed >= next_strike:
                what = churn.strike()
                sys.stdout.write(f"{elapsed:7.1f} s  {what}\n")
                sys.stdout.flush()
                next_strike = awake() + dice.uniform(*_GAP_SECONDS)
            if elapsed >= next_sample:
                self._look(churn.cast, elapsed)
                next_sample = elapsed + _SAMPLE_SECONDS
            churn.mend()
            time.sleep(0.05)

    def _look(self, cast: Cast, elapsed: float) -> None:
        for name, process in list(cast.nodes.processes.items()):
            seen = sample(process.pid, elapsed) if process.poll() is None else None
            if seen is not None:
                self._samples.setdefault((name, process.pid), []).append(seen)

    # -- peace ----------------------------------------------------------------------------------

    def _in_peace(self, outcome: Outcome) -> float:
        """Return the accuracy of the same seed and budget when nothing is wrong."""
        updates = outcome.summary["updates"]
        flags = (*self._flags, f"--iter_max={updates}")
        cast = Cast(self._out / "quiet", flags, _NB_WORKERS, _NB_PS, self._given.seed)
        try:
            cast.start_all()
            codes = cast.wait(cast.names, 600 + updates / 10)
        except AssertionError as error:
            outcome.failures.append(f"the run in peace: {error}")
            return float("nan")
        finally:
            cast.close()
        if set(codes.values()) != {0}:
            outcome.failures.append(f"the run in peace ended with {codes}")
        return _accuracy(self._out / "quiet" / "run")


def _accuracy(run_dir: pathlib.Path) -> float:
    """Return the mean accuracy over the last part of a run."""
    evaluations = evaluations_in(read_lines(run_dir / "metrics.jsonl")[0])
    least = (1 - _LAST_PART) * evaluations[-1].version
    last = [each.metrics["accuracy"] for each in evaluations if each.version >= least]
    return float(sum(last) / len(last))


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--method", default="adacomp")
    parser.add_argument("--protected", action="store_true", help="certificates and a token")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/soak"))
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and reap
    for part in ("churn", "quiet"):
        shutil.rmtree(given.out / part, ignore_errors=True)
    given.out = given.out.resolve()
    outcome = Soak(given).run()
    report, wrong = soak_report.write(outcome)
    (given.out / "report.md").write_text(report)
    sys.stdout.write(f"{report}\n{given.out / 'report.md'}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
