"""A simulated day with many workers and frequent faults: the run ends and nothing grows.

    python -m tests.chaos.simulated_day --hours 24 --workers 200 --minutes 3 --seed 0

plays the day quietly and with faults, and prints memory, open files and updates by the hour, then
both accuracies. Faults of all simulated kinds alternate, at random moments.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging as python_logging
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import logging

from tests.chaos.faults import plans
from tests.chaos.simulated import say
from tests.chaos.simulated_disk import FaultyDisk
from tests.chaos.simulated_faults import SIMULATED, Striker
from tests.thinwire.simulator.toy import IDEAL, ToyTrainer, dataset, run_of
from tests.virtual.toy import KERNELS, Softmax, method
from thinwire.ops.sharding.split import shard_positions
from thinwire.ops.types import Link
from thinwire.simulator import devices
from thinwire.simulator.flags import SimulatorFlags
from thinwire.simulator.simulation import Simulation
from thinwire.simulator.storage import StorageSetup
from thinwire.worker.flags import EmulatedDevice

_HOUR = 3600.0
_LEASE_SECONDS = 600.0
_SNAPSHOT_SECONDS = 600.0
_RESTART_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Hour:
    """Samples at the end of an hour."""

    hour: int
    version: int
    resident_mib: float
    open_files: int
    faults: int


class Day(Simulation):
    """A long run with adacomp and saved state; has the interface that Striker uses."""

    def __init__(self, given: argparse.Namespace, folder: pathlib.Path) -> None:
        chosen = method("adacomp", given.workers, compression_rate=0.3)
        self.seconds = given.hours * _HOUR
        run = run_of(
            chosen,
            given.workers,
            nb_ps=given.shards,
            iter_max=1 << 40,
            run_dir=folder,
            seed=given.seed + 1,
            lease_seconds=_LEASE_SECONDS,
            checkpoint_interval_seconds=_SNAPSHOT_SECONDS,
            keep_checkpoints=2,
        )
        own = SimulatorFlags(
            devices=(EmulatedDevice(Link(1.0, 20.0), 1.0, 0.0),) * given.workers,
            step_times=devices.parse_speeds(f"lognormal:{given.step_seconds:g},0.3", given.workers),
            outages=devices.parse_outages("", given.workers),
            servers=(IDEAL,) * given.shards,
            threads=1,
            clip_norm=0.0,
            measure="off",
            start_timeout_seconds=600.0,
            settings={},
        )
        self.disks = tuple(FaultyDisk() for _ in range(given.shards))
        trainer: Any = ToyTrainer(run.seed)
        trainer.problem = self.problem = Softmax(examples=20 * given.workers)
        examples = dataset(20 * given.workers)
        super().__init__(run, own, trainer, examples, KERNELS, StorageSetup("on", self.disks))
        self.run, self.blind_until = run, 0.0
        self.keeps_journal = True
        self.num_restarts = self.num_revived = 0
        self.hours: list[Hour] = []
        self.strikers: list[Striker] = []
        for shard in self.shards:
            shard.on_begin = self._note_life
            if shard.number:
                shard.on_end = lambda reason: None
        for worker in self.workers:
            for name in ("on_unreachable", "on_refused"):
                setattr(worker, name, self._reviving(worker, getattr(worker, name)))

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be done."""
        return self.end is not None

    def revive(self, worker: Any) -> None:
        """Start a worker's process unless it runs."""
        if not worker.alive and not self.is_over:
            self.num_revived += 1
            worker.start()

    def _reviving(self, worker: Any, end: Any) -> Any:
        def ended() -> None:
            end()
            self.clock.at(self.clock.now + _RESTART_SECONDS, lambda: self.revive(worker))

        return ended

    def _note_life(self, shard: Any) -> None:
        self.num_restarts += shard.core.config.generation > 0

    def strike(self, seed: int, minutes: float) -> None:
        """Plan a fault every given number of minutes; a full disk ends a run and is left out."""
        pairs = [pair for pair in SIMULATED if pair[0].value != "disk full"]
        pairs = [pair for pair in pairs if len(self.shards) > 1 or pair[1].value != "another shard"]
        count = int(self.seconds / (60.0 * minutes))
        for number, plan in enumerate(plans(seed, count, pairs)):
            start = 60.0 * minutes * number
            later = dataclasses.replace(plan, instant=start + plan.instant * 60.0 * minutes)
            self.strikers.append(Striker(self, later, 1.0))  # type: ignore[arg-type]

    def play_day(self) -> str:
        """Play to the end; sample the process's resources every hour."""
        self._schedule()
        # By virtual time: what --max_seconds counts is the shard's own clock, which may jump.
        self.clock.at(self.seconds, self._stop)
        latest = 1.2 * self.seconds
        while self.end is None and self.clock.now < latest and self.clock.advance():
            if self.clock.now >= len(self.hours) * _HOUR:
                self._read()
        self._read()
        reason = str(self.end)
        for shard in self.shards:
            shard.finish()
        return reason

    def _stop(self) -> None:
        """End the run, as soon as shard 0 can receive the request."""
        if self.shards[0].listens:
            self.stop("max_seconds")
        else:
            self.clock.at(self.clock.now + _RESTART_SECONDS, self._stop)

    def _read(self) -> None:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        hour = Hour(
            len(self.hours),
            self.shards[0].core.version,
            pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            len(os.listdir("/proc/self/fd")),
            sum(striker.struck for striker in self.strikers),
        )
        self.hours.append(hour)
        say(
            f"hour {hour.hour:2}: version {hour.version:7}, {hour.resident_mib:7.1f} MiB, "
            f"{hour.open_files:3} files, {hour.faults:4} faults, {self.num_restarts} restarts"
        )

    @property
    def accuracy(self) -> float:
        """Accuracy of the shards' model over all examples, in percent."""
        flat = np.empty(self.spec.num_parameters, np.float32)
        for shard in self.shards:
            edges = shard.layout.offsets
            for slot, where in enumerate(shard_positions(self.spec, shard.layout)):
                flat[where] = shard.core.model.theta[edges[slot] : edges[slot + 1]]
        return 100.0 * self.problem.accuracy(flat)


def main(arguments: Sequence[str] | None = None) -> int:
    """Play both days; return 1 if a check fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=3.0, help="between two faults")
    parser.add_argument("--step_seconds", type=float, default=600.0, help="of a mini-batch")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    logging.set_verbosity(logging.FATAL)
    python_logging.disable(python_logging.CRITICAL)
    quiet, faulty = (_day(given, strikes) for strikes in (False, True))
    near = abs(quiet.accuracy - faulty.accuracy) <= 1.0
    say(
        f"accuracy: {quiet.accuracy:.2f} % quiet, {faulty.accuracy:.2f} % with faults; "
        f"{faulty.num_restarts} restarts of shards, {faulty.num_revived} of workers"
    )
    settled = faulty.hours[len(faulty.hours) // 4 :]
    growth = settled[-1].resident_mib - settled[0].resident_mib
    files = settled[-1].open_files - settled[0].open_files
    say(f"from a quarter of the day on: {growth:+.1f} MiB, {files:+} open files")
    return int(not near or quiet.end != "max_seconds" or faulty.end != "max_seconds")


def _day(given: argparse.Namespace, strikes: bool) -> Day:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="day-", dir=_memory()))
    begun = time.process_time()
    try:
        day = Day(given, folder)
        if strikes:
            day.strike(given.seed, given.minutes)
        reason = day.play_day()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = time.process_time() - begun
    what = "with faults" if strikes else "quiet"
    say(f"{what}: ended by {reason} at {day.clock.now:.0f} s, {seconds:.1f} s of the CPU")
    return day


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    sys.exit(main())
