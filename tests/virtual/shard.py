"""A shard's core, and the events that tests send to the core."""

import numpy as np

from tests.pushes import push_event
from tests.virtual.toy import KERNELS
from thinwire.ops.aggregation.outliers import Guards
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ops.types import Update
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.members import CoreConfig
from thinwire.ps.core.membership import Coordinator, FollowerMembership

#: Values of an outlier.
HUGE = [1e6] * 4


def core_of(chosen, size=4, iter_max=100, lease=10.0, **config):
    """Shard 0, not begun, with weights of 0 and a rate of 0.1."""
    nb_workers = sum(len(group) for group in chosen.sync.groups)
    settings = CoreConfig(Budget(iter_max), Schedule(0.1), nb_workers, **config)
    member = Coordinator(nb_workers, lease)
    return PsCore(settings, chosen, np.zeros(size, np.float32), KERNELS, member)


def join(core, worker, now=0.0, incarnation=None):
    """Send Hello and pull; return the core's actions."""
    incarnation = incarnation or worker
    actions = core.handle(events.Join(worker, incarnation, False, f"peer{worker}"), now)
    return actions + core.handle(events.Pull(worker, incarnation, None, 0), now)


def push(core, worker, step, base, indices=None, values=None, now=0.0, generation=0, samples=1):
    """Push a worker's update, by default ones; return the core's actions."""
    values = (
        np.ones(len(core.model.theta) if indices is None else len(indices), np.float32)
        if values is None
        else np.asarray(values, np.float32)
    )
    update = Update(None if indices is None else np.asarray(indices, np.int64), values)
    epoch = core.membership.epoch
    event = push_event(worker, worker, step, base, generation, epoch, update, samples, 1, 1.0)
    return core.handle(event, now)


def of(kind, actions):
    """Return the actions of one kind."""
    return [action for action in actions if isinstance(action, kind)]


def guarded(chosen, leads=True, **guards):
    """A shard with guards, which never releases a worker."""
    nb_workers = sum(len(group) for group in chosen.sync.groups)
    settings = CoreConfig(
        Budget(1000),
        Schedule(0.1),
        nb_workers,
        snapshot_interval_seconds=1e9,
        guards=Guards(**guards),
    )
    member = Coordinator(nb_workers, 1e6) if leads else FollowerMembership(nb_workers)
    return PsCore(settings, chosen, np.zeros(4, np.float32), KERNELS, member)


def joined(core):
    for worker in range(1, core.config.nb_workers + 1):
        join(core, worker)
    return core


def pull(core, worker, now=0.0):
    return core.handle(events.Pull(worker, worker, None, 0), now)


def reasons(actions):
    return [each.reason for each in of(events.Reject, actions)]
