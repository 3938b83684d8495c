"""Rounds of two shards with joining and leaving workers and shards: all workers proceed."""

import collections
import dataclasses
import random

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.pushes import push_event
from tests.virtual.shard import core_of, of
from tests.virtual.toy import KERNELS, method
from thinwire.ops.push_head import PushHead, PushOrigin
from thinwire.ops.types import Kind, Update
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.membership import Coordinator, FollowerMembership
from thinwire.worker.client import protocol
from thinwire.worker.core.messages import PushRequest

SHARDS, LEASE = (0, 1), 10.0


def part_of(step):
    """Return a push of which only the step matters."""
    return PushRequest(PushHead(step), [PushOrigin()] * len(SHARDS), Kind.GRADIENT, [])


class Worker:
    """Pushes to both shards, and again when both have replied."""

    def __init__(self, number):
        epochs = protocol.NewestEpoch()
        self.number, self.step, self.num_rounds, self.welcome_epoch = number, 0, 0, 0
        self.parts = [protocol.ShardProtocol(shard, epochs, number) for shard in SHARDS]
        self.versions, self.generations = [None, None], [-1, -1]


class Run:
    """Two cores and their workers; each stream is ordered, the order of streams is random."""

    def __init__(self, nb_workers):
        self.method, self.nb_workers = method("bsp", nb_workers=nb_workers), nb_workers
        self.now = 0.0
        self.config = core_of(self.method, iter_max=10**9).config
        self.cores = [self.core(shard, 0) for shard in SHARDS]
        self.workers = [Worker(number) for number in range(1, nb_workers + 1)]
        #: Messages under way: (worker, shard, "up" or "down"), or "epochs" -> messages.
        self.streams = collections.defaultdict(collections.deque)
        for worker in self.workers:
            for shard, part in enumerate(worker.parts):
                self.perform(worker, shard, part.pull())

    def core(self, shard, generation):
        member = FollowerMembership if shard else Coordinator
        return PsCore(
            dataclasses.replace(self.config, generation=generation),
            self.method,
            np.zeros(4, np.float32),
            KERNELS,
            member(self.nb_workers, LEASE),
        )

    # -- messages under way ---------------------------------------------------------------

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
            worker.generations[shard] = message.reply.generation
        self.perform(worker, shard, worker.parts[shard].receive(message, self.now))

    def under_way(self):
        return [name for name, messages in self.streams.items() if messages]

    def handle(self, shard, event):
        core = self.cores[shard]
        actions = core.handle(event, self.now)
        if not shard:
            self.streams["epochs"] += [each.epoch for each in of(events.NewEpoch, actions)]
        for each in actions:
            if (message := message_of(each, core.config.generation)) is not None:
                self.streams[each.worker, shard, "down"].append(message)

    def expel(self, number):
        """Notify shard 0 that another shard misses a worker."""
        member = events.WorkerIncarnation(number, number)
        self.handle(0, events.WorkerUnreachable(member))

    def restart(self, shard):
        """Restart a shard with its state, but without the knowledge of its old process."""
        before = self.cores[shard]
        self.cores[shard] = core = self.core(shard, before.config.generation + 1)
        core.load_state_dict(before.state_dict())
        self.streams["epochs"].clear()
        if shard:  # shard 0 repeats its last epoch to a following shard
            leader = self.cores[0]
            self.streams["epochs"].append(leader._epoch_of(leader.membership.epoch))
        for worker in self.workers:
            part = worker.parts[shard]
            self.cut(worker, shard)
            actions = part.lost()
            self.perform(worker, shard, actions)
            if not actions:
                self.hello(worker, shard)

    def wait(self):
        """Let more than a lease pass, in which nodes receive only heartbeats."""
        for _ in range(3):
            self.now += LEASE / 2
            for shard in SHARDS:
                for worker in self.workers:
                    if self.cores[shard].membership.state_of(worker.number) != "left":
                        self.handle(shard, events.WorkerAlive(worker.number))

    # -- a worker -------------------------------------------------------------------------

    def cut(self, worker, shard):
        self.streams[worker.number, shard, "up"].clear()
        self.streams[worker.number, shard, "down"].clear()

    def hello(self, worker, shard):
        number = worker.number
        worker.parts[shard].join()
        hello = events.Join(number, number, True, f"{number}", worker.welcome_epoch)
        self.streams[number, shard, "up"].append(hello)

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
            self.perform(worker, shard, part.push(part_of(worker.step)))

    def rejoin(self, worker, shard, after):
        """Do as `Exchange` and `ShardClient` do."""
        gives_up = after is protocol.Trigger.EXPEL and not all(
            part.is_requesting for part in worker.parts
        )
        self.cut(worker, shard)
        self.hello(worker, shard)
        if gives_up:
            for other, each in enumerate(worker.parts):
                self.perform(worker, other, each.abandon_push())

    def event_of(self, worker, shard, sending):
        base, generation = worker.versions[shard], worker.generations[shard]
        number = worker.number
        if isinstance(sending.request, pb.Pull):
            return events.Pull(number, number, base, generation)
        update, step = Update(None, np.ones(4, np.float32)), sending.request.head.step
        return push_event(number, number, step, base, generation, sending.epoch, update)


def message_of(action, generation):
    match action:
        case events.Welcome():
            welcome = pb.Welcome(incarnation=action.incarnation, epoch=action.epoch)
            return pb.ToClient(welcome=welcome)
        case events.Reply():
            reply = pb.Reply(step=action.step, epoch=action.epoch, version=action.version)
            reply.generation = generation
            return pb.ToClient(reply=reply)
        case events.Reject():
            reason = f"REASON_{action.reason}"
            refusal = pb.Refusal(reason=reason, step=action.step, epoch=action.epoch)
            return pb.ToClient(refusal=refusal)
    return None


def go_on(run, dice, deliveries):
    for _ in range(deliveries):
        if names := run.under_way():
            run.deliver(dice.choice(names))
        else:
            run.wait()


FAULTS = st.sampled_from(["expel", "expel", "restart 0", "restart 1"])


@settings(max_examples=30)
@example(3, [("expel", 25), ("expel", 8)], 804)  # joiners entered at a round's end of each shard
@example(3, [("expel", 10), ("expel", 12)], 794)  # a pull behind a push that was refused
@given(
    st.integers(2, 4),
    st.lists(st.tuples(FAULTS, st.integers(1, 40)), max_size=12),
    st.integers(0, 2**32),
)
def test_nobody_waits_for_ever(nb_workers, faults, seed):
    run, dice = Run(nb_workers), random.Random(seed)
    go_on(run, dice, 400)
    for fault, deliveries in faults:
        if fault == "expel":
            run.expel(dice.randint(1, nb_workers))
        else:
            run.restart(int(fault[-1]))
        go_on(run, dice, deliveries)
    go_on(run, dice, 400)
    before = [worker.num_rounds for worker in run.workers]
    go_on(run, dice, 400)
    more = [worker.num_rounds - then for worker, then in zip(run.workers, before, strict=True)]
    assert min(more) >= 3, more
    assert run.cores[1].rounds.live() == tuple(range(1, nb_workers + 1))
