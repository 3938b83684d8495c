"""Replay in the test's process of the files that a killed shard left on disk.

A snapshot of a living shard must equal the previous snapshot plus the journal between the two,
bit for bit. The state of a restarted shard must equal the newest snapshot plus the remaining
journal. No state of the restarted shard is used.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import shutil
from typing import Any

import numpy as np

from tests.checkpoint_files import entries, load
from tests.command_line import given
from tests.ps.journaled_run import assert_same
from thinwire.flags.run import read_run
from thinwire.ops.kernels import load_kernels
from thinwire.ops.types import ModelSpec, ShardLayout, State, TensorSpec
from thinwire.ps.core.averages import WorkerAverages
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.members import CoreConfig
from thinwire.ps.core.membership import Coordinator, FollowerMembership
from thinwire.ps.persistence import journal, journal_format
from thinwire.ps.persistence.journal_format import EventCoder
from thinwire.ps.persistence.replay import Replayed, ReplaySettings, replay
from thinwire.runtime.run.directory import checkpoints_of


def _count_relays_as_deltas(core: State) -> None:
    """Add the number of relayed replies to that of delta replies, in the state of a core.

    A snapshot does not hold the coded updates of recent rounds. A replay from the snapshot thus
    replies to some workers with new weights where the living shard relayed the updates; the
    workers' weights are equal after both.
    """
    counts = core["model"]["down_counts"]
    counts["delta"] += counts.pop("relay")


@dataclasses.dataclass
class Found:
    """The result of a replay."""

    core: PsCore
    replayed: Replayed


class Witness:
    """Replays what shard `number` of a run left behind.

    Args:
        run_dir: Directory of the run; the flags are read from the shard's file in it.
        number: Number of the shard.
    """

    def __init__(self, run_dir: pathlib.Path, number: int) -> None:
        self.number, self.name = number, f"ps-{number}"
        self.folder = checkpoints_of(run_dir, self.name)
        with given() as known:  # an imported library may have flags too
            ours = tuple(f"{dash}{name}" for name in known for dash in ("--", "--no"))
        kept = (run_dir / f"flags-{self.name}.txt").read_text().splitlines()
        with given(*(line for line in kept if line.partition("=")[0] in ours)):
            self.run = read_run()
        self._kernels = load_kernels(self.run.kernels)
        self.num_events = 0  # replayed so far

    def copy(self, to: pathlib.Path) -> pathlib.Path:
        """Copy the shard's files; return the copy."""
        shutil.copytree(self.folder, to, ignore=shutil.ignore_patterns(".tmp-*"))
        return to

    def check_living(self, copy: pathlib.Path) -> int:
        """Compare a living shard's snapshots with its journal; return the number of comparisons.

        Raises:
            AssertionError: They differ.
        """
        compared = 0
        saved = entries(copy)[-2:]
        for older, newer in itertools.pairwise(saved):
            before, after = load(older)[1], load(newer)[1]
            if before["core"]["generation"] != after["core"]["generation"]:
                continue  # the first of a life: `check_return` is about it
            if not journal.path_of(copy, before["journal"]).exists():
                continue
            found = self.replay(self._without(copy, after["journal"]), older)
            assert found.replayed.damage is None, found.replayed.damage
            replayed = found.core.state_dict()
            for state in (after["core"], replayed):
                _count_relays_as_deltas(state)
            assert_same(after["core"], replayed, f"{newer.name}: core")
            assert_same(after["soft"], found.core.state_dict(soft=True), f"{newer.name}: soft")
            compared += 1
        return compared

    def replay(self, folder: pathlib.Path, snapshot: pathlib.Path | None = None) -> Found:
        """Replay a folder's journal over the snapshot of a log entry, by default the newest."""
        state = load(snapshot or entries(folder)[-1])[1]
        cores: list[PsCore] = []

        def make(config: CoreConfig, lease_seconds: float) -> PsCore:
            cores.append(self._core(state, config, lease_seconds))
            return cores[-1]

        coder = EventCoder(self._layout(state), self.run.method, self._kernels, _aux_of(state).size)
        come = replay(folder, state["core"], state["soft"], state["journal"], make, coder)
        self.num_events += come.num_records
        return Found(cores[-1], come)

    def check_return(self, found: Found, first: State, lost: int = 0) -> None:
        """Compare a restarted shard's first snapshot with a replay.

        Args:
            found: By the replay.
            first: The snapshot.
            lost: Updates that damage to the journal has undone; a shard may know of them.

        Raises:
            AssertionError: They differ.
        """
        head = journal.contents(journal.path_of(self.folder, first["journal"]))
        _, body = next(journal_format.bodies(head))
        settings = ReplaySettings.of(journal_format.content_of_head(body)["settings"])
        expected = self._core(first, settings.config, settings.lease_seconds)
        expected.load_state_dict(found.core.state_dict())
        assert settings.config.generation > found.core.config.generation
        counters, replayed = first["core"]["counters"], expected.state_dict()
        known = counters["lost_updates"] - replayed["counters"]["lost_updates"]
        assert 0 <= known <= lost, f"counts {known} updates as lost; {lost} are"
        replayed["counters"]["lost_updates"] += known
        assert_same(first["core"], replayed, "what it came back with")

    def _without(self, copy: pathlib.Path, number: int) -> pathlib.Path:
        """Return a folder with the copied files from before a journal's file."""
        folder = copy.with_name(copy.name + "-before")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for each in journal.numbers(copy):
            if each < number:
                os.link(journal.path_of(copy, each), journal.path_of(folder, each))
        return folder

    def _layout(self, state: State) -> ShardLayout:
        tensors = (TensorSpec(path, tuple(shape), dtype) for path, shape, dtype in state["model"])
        method, nb_ps = self.run.method, self.run.nb_ps
        return method.place(ModelSpec(tuple(tensors)), nb_ps)[self.number]

    def _core(self, state: State, config: CoreConfig, lease_seconds: float) -> PsCore:
        method, layout = self.run.method, self._layout(state)
        member = (
            FollowerMembership(config.nb_workers)
            if self.number
            else Coordinator(config.nb_workers, lease_seconds)
        )
        theta = np.zeros(layout.size, np.float32)
        return PsCore(config, method, theta, self._kernels, member, _aux_of(state))


def _aux_of(state: State) -> WorkerAverages:
    return WorkerAverages(num_slots=len(state["core"]["averages"]["mean"]))


def tear(folder: pathlib.Path, dice: Any, cut: bool) -> str:
    """Leave the newest journal as a kill within an append would, or damage it.

    Returns a description of the damage; an empty text if the journal holds only a head.

    Args:
        folder: Folder of the shard's checkpoints.
        dice: random.Random.
        cut: Whether to cut the last record short instead of beginning another.
    """
    newest = journal.path_of(folder, journal.numbers(folder)[-1])
    data = newest.read_bytes()
    try:
        ends = [0, *(end for end, _ in journal_format.bodies(journal.contents(newest)))]
    except journal_format.DamagedRecord:
        return "by the kill itself"
    if len(ends) < 3:
        return ""
    size = ends[-1] - ends[-2]
    kept = dice.randrange(1, size)
    if cut:
        os.truncate(newest, len(data) - size + kept)
        return f"the last record cut to {kept} of {size} bytes"
    with open(newest, "ab") as file:
        file.write(data[len(data) - size :][:kept])
    return f"{kept} of {size} bytes of another record"
