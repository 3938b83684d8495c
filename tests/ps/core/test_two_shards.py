"""Rounds of two shards with workers that come and go: in the end everybody proceeds."""

import collections
import random

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.harness import KERNELS, method
from tests.ps.cores import core_of, of
from thinwire.ops.types import Update
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.membership import FollowerMembership
from thinwire.worker.client import protocol
from thinwire.worker.core.messages import PushRequest

SHARDS = (0, 1)


class Part(PushRequest):
    """A push of which only the step matters."""

    def __init__(self, step):
        object.__setattr__(self, "step", step)


class Worker:
    """Pushes to both shards, and again when both have replied."""

    def __init__(self, number):
        epochs = protocol.NewestEpoch()
        self.number, self.step, self.num_rounds, self.welcome_epoch = number, 0, 0, 0
        self.parts = [protocol.ShardProtocol(shard, epochs, number) for shard in SHARDS]
        self.versions = [None, None]


class Run:
    """Two cores and their workers; every stream keeps its order, and chance which goes first."""

    def __init__(self, nb_workers):
        chosen = method("bsp", nb_workers=nb_workers)
        leader = core_of(chosen, iter_max=10**9, lease=1e9)
        follower = PsCore(
            leader.config,
            chosen,
            np.zeros(4, np.float32),
            KERNELS,
            FollowerMembership(nb_workers, 1e9),
            chosen.sync.without_bound(),
        )
        self.cores = [leader, follower]
        self.workers = [Worker(number) for number in range(1, nb_workers + 1)]
        #: What is under way: (worker, shard, "up" or "down"), or "epochs" -> messages.
        self.streams = collections.defaultdict(collections.deque)
        for worker in self.workers:
            for shard, part in enumerate(worker.parts):
                self.perform(worker, shard, part.pull())

    # -- what is under way ----------------------------------------------------------------

    def deliver(self, name):
        """Let the oldest message of a stream arrive."""
        message = self.streams[name].popleft()
        if name == "epochs":
            self.handle(1, message)
            return
        number, shard, way = name
        worker = self.workers[number - 1]
        if way == "up":
            self.handle(shard, message)
            return
        if message.HasField("welcome") and shard == 0:
            worker.welcome_epoch = message.welcome.epoch
        if message.HasField("reply"):
            worker.versions[shard] = message.reply.version
        self.perform(worker, shard, worker.parts[shard].receive(message, 0.0))

    def under_way(self):
        return [name for name, messages in self.streams.items() if messages]

    def handle(self, shard, event):
        actions = self.cores[shard].handle(event, 0.0)
        if not shard:
            self.streams["epochs"] += [each.epoch for each in of(events.NewEpoch, actions)]
        for each in actions:
            if (message := message_of(each)) is not None:
                self.streams[each.worker, shard, "down"].append(message)

    def expel(self, number):
        """Let shard 0 hear that another shard misses a worker."""
        member = events.WorkerIncarnation(number, number)
        self.handle(0, events.WorkerUnreachable(member))

    # -- a worker -------------------------------------------------------------------------

    def perform(self, worker, shard, actions):
        for each in actions:
            match each:
                case protocol.Send():
                    event = self.event_of(worker, shard, each)
                    self.streams[worker.number, shard, "up"].append(event)
                case protocol.Rejoin():
                    self.rejoin(worker, shard, each.after)
                case protocol.Replied():
                    self.begin_round(worker)
                case _:
                    raise AssertionError(each)

    def begin_round(self, worker):
        if any(part.is_requesting for part in worker.parts):
            return
        worker.step, worker.num_rounds = worker.step + 1, worker.num_rounds + 1
        for shard, part in enumerate(worker.parts):
            self.perform(worker, shard, part.push(Part(worker.step)))

    def rejoin(self, worker, shard, after):
        """Do as `Exchange` and `ShardClient` do."""
        gives_up = after is protocol.Trigger.EXPEL and not all(
            part.is_requesting for part in worker.parts
        )
        self.streams[worker.number, shard, "up"].clear()
        self.streams[worker.number, shard, "down"].clear()
        number, part = worker.number, worker.parts[shard]
        part.join()
        hello = events.Join(number, number, True, f"{number}", worker.welcome_epoch)
        self.streams[number, shard, "up"].append(hello)
        if gives_up:
            for other, each in enumerate(worker.parts):
                self.perform(worker, other, each.abandon_push())

    def event_of(self, worker, shard, sending):
        base, number = worker.versions[shard], worker.number
        if isinstance(sending.request, pb.Pull):
            return events.Pull(number, number, base, 0)
        update = Update(None, np.ones(4, np.float32))
        return events.Push(
            number, number, sending.request.step, base, 0, sending.epoch, update, 1, 1, 1.0
        )


def message_of(action):
    match action:
        case events.Welcome():
            welcome = pb.Welcome(incarnation=action.incarnation, epoch=action.epoch)
            return pb.ToClient(welcome=welcome)
        case events.Reply():
            reply = pb.Reply(step=action.step, epoch=action.epoch, version=action.version)
            return pb.ToClient(reply=reply)
        case events.Reject():
            reason = f"REASON_{action.reason}"
            refusal = pb.Refusal(reason=reason, step=action.step, epoch=action.epoch)
            return pb.ToClient(refusal=refusal)
    return None


def go_on(run, dice, deliveries):
    for _ in range(deliveries):
        if not (names := run.under_way()):
            return
        run.deliver(dice.choice(names))


@settings(max_examples=100)
@example(3, [25, 8], 804)  # each shard let a joiner in at a round's end of its own
@example(3, [10, 12], 794)  # a pull behind a push that was refused for its epoch
@given(st.integers(2, 4), st.lists(st.integers(1, 40), max_size=12), st.integers(0, 2**32))
def test_nobody_waits_for_ever(nb_workers, pauses, seed):
    run, dice = Run(nb_workers), random.Random(seed)
    go_on(run, dice, 400)
    for pause in pauses:
        run.expel(dice.randint(1, nb_workers))
        go_on(run, dice, pause)
    go_on(run, dice, 400)
    before = [worker.num_rounds for worker in run.workers]
    go_on(run, dice, 400)
    more = [worker.num_rounds - then for worker, then in zip(run.workers, before, strict=True)]
    assert min(more) >= 3, more
    assert run.cores[1].live_workers() == tuple(range(1, nb_workers + 1))
