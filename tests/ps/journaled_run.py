"""A whole run in one process with journals on its shards, and the replay after a crash."""

import dataclasses

import numpy as np

from tests.pushes import with_numbers
from tests.virtual.run import MiniRun
from tests.virtual.toy import KERNELS
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.ps.persistence.journal import Journal
from thinwire.ps.persistence.journal_format import EventCoder
from thinwire.ps.persistence.replay import ReplaySettings, replay
from thinwire.runtime.persistence.checkpoint import Checkpoints


class JournaledRun(MiniRun):
    """Every event of a shard is written down before it is handled."""

    def __init__(self, folder, chosen, **choices):
        self.folder, self.chosen = folder, chosen
        self.journals = []
        super().__init__(chosen, **choices)
        self.coders = [
            EventCoder(layout, chosen, KERNELS, core.averages.size)
            for layout, core in zip(self.layouts, self.shards, strict=True)
        ]
        self.journals = [
            Journal(folder / str(shard), coder, 4 * layout.size)
            for shard, (coder, layout) in enumerate(zip(self.coders, self.layouts, strict=True))
        ]
        self.save()

    def save(self):
        """Every shard writes a snapshot."""
        for shard, (core, journal) in enumerate(zip(self.shards, self.journals, strict=True)):
            number = journal.begin(ReplaySettings(core.config, 10.0).to_plain())
            state = {
                "core": core.state_dict(),
                "soft": core.state_dict(soft=True),
                "journal": number,
            }
            Checkpoints(self.folder / str(shard), keep=99).save(core.version, state)

    def feed(self, shard, event):
        if isinstance(event, events.Push):  # the wire has it in float32
            event = with_numbers(event, loss=float(np.float32(event.head.loss)))
        self.journals[shard].append(event, self.now)
        return super().feed(shard, event)

    def fresh(self, shard, config, lease_seconds):
        """Return a core without any events."""
        core = self._shard(shard, np.zeros(28, np.float32))
        again = type(core)(
            *(config, self.chosen, core.model.theta, KERNELS, core.membership),
            core.averages,
        )
        if hasattr(again.membership, "lease_seconds"):
            again.membership.lease_seconds = lease_seconds
        return again

    def come_back(self, shard=0, folder=None):
        """Return (result of a replay, the core at its end); the journal is in `folder`."""
        _, found = Checkpoints(self.folder / str(shard), keep=99).load_latest()
        folder, cores = folder or self.folder / str(shard), []

        def make(config, lease_seconds):
            cores.append(self.fresh(shard, config, lease_seconds))
            return cores[-1]

        come = replay(
            folder, found["core"], found["soft"], found["journal"], make, self.coders[shard]
        )
        return come, cores[-1] if cores else None

    def restart(self, shard=0):
        """Kill a shard and restart it; its workers must send Hello again."""
        come, core = self.come_back(shard)
        life = dataclasses.replace(core.config, generation=come.generation + 1)
        self.shards[shard] = self.fresh(shard, life, 10.0)
        self.shards[shard].load_state_dict(come.core)
        coder, size = self.coders[shard], 4 * self.layouts[shard].size
        self.journals[shard] = Journal(self.folder / str(shard), coder, size, come.place)
        self.save()
        for worker in self.workers.values():
            worker.join()


def everything(core):
    """Return all that a core knows; nothing of it is shared with the core."""
    return core.state_dict(), core.state_dict(soft=True)


def watched(core):
    """Return a list that receives the core's full state now, and after each of its events."""
    states = [everything(core)]

    class Watched(PsCore):
        def handle(self, event, now):
            actions = super().handle(event, now)
            states.append(everything(self))
            return actions

    core.__class__ = Watched
    return states


def assert_same(one, other, where="state"):
    """Compare plain data, bit for bit."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}[{number}]")
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype and one.tobytes() == other.tobytes(), where
    else:
        assert one == other, where
