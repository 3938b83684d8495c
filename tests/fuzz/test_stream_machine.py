"""Messages of clients to a shard in any order: a hypothesis state machine."""

import random

from absl import logging
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.fuzz.stream_targets import Abuse
from tests.fuzz.world import METHODS, world
from tests.ps.streams import HONEST, frame
from thinwire.proto import thinwire_pb2 as pb

WHO = st.integers(0, 3)
EDGES = st.sampled_from([0, 1, 2, 63, 2**31, 2**32 - 1, 2**53, 2**63, 2**64 - 1])
SHORT = st.integers(0, 2**32 - 1)


class Conversations(RuleBasedStateMachine):
    """Several clients and a shard; the honest worker must come through all of it."""

    @initialize(name=st.sampled_from(sorted(METHODS)))
    def open(self, name):
        self.before = logging.get_verbosity()
        logging.set_verbosity(logging.FATAL)
        self.opened = world(name)
        self.abuse = Abuse(self.opened.__enter__())
        self.world = self.abuse.world

    @rule(who=WHO, life=st.sampled_from([0, 5, 6]))
    def say_hello(self, who, life):
        self.abuse.hello(who, incarnation=life)

    @rule(who=WHO, number=st.sampled_from([0, 3, HONEST, 2**32 - 1]))
    def say_hello_as_another(self, who, number):
        self.abuse.hello(who, id=number, incarnation=5)

    @rule(who=WHO, step=st.integers(1, 40))
    def push(self, who, step):
        self.abuse.push(who, None, step=step)

    @rule(who=WHO, life=st.sampled_from([5, 6, 2**64 - 1]), step=st.integers(1, 40))
    def push_of_another_life(self, who, life, step):
        before, honest = self.world.picture(), life != self.world.life
        self.abuse.push(who, life, step=step)
        if honest and not self.abuse.held:
            assert self.world.picture() == before

    @rule(who=WHO, step=EDGES, base=EDGES, epoch=SHORT, generation=SHORT)
    def push_of_another_time(self, who, step, base, epoch, generation):
        self.abuse.push(who, None, step=step, base_version=base, epoch=epoch, generation=generation)

    @rule(who=WHO, announced=EDGES, pieces=st.lists(st.binary(max_size=60), max_size=3))
    def push_in_chunks(self, who, announced, pieces):
        self.abuse.chunked(who, announced % 2**32, pieces)

    @rule(who=WHO, base=EDGES, known=st.booleans())
    def pull(self, who, base, known):
        self.abuse.say(who, frame(pull=pb.Pull(base_version=base, has_base=known)))

    @rule(who=WHO, step=EDGES, seconds=st.floats())
    def ask(self, who, step, seconds):
        life = self.world.life
        query = pb.Query(incarnation=life, step=step, step_seconds=seconds, local_steps=1)
        self.abuse.say(who, frame(query=query))

    @rule(who=WHO, text=st.text(max_size=40))
    def report(self, who, text):
        self.abuse.say(who, frame(report=pb.Report(document=text)))

    @rule(who=WHO, cause=st.sampled_from(["done", "diverged"]))
    def leave(self, who, cause):
        self.abuse.say(who, frame(leave=pb.Leave(cause=cause)))

    @rule(who=WHO, data=st.binary(max_size=60))
    def babble(self, who, data):
        self.abuse.say(who, data)

    @rule(who=WHO, seed=st.integers(0, 2**16))
    def repeat_with_a_change(self, who, seed):
        self.abuse.spoilt(who, random.Random(seed))

    @rule(who=WHO, number=st.integers(0, 7))
    def repeat(self, who, number):
        self.abuse.again(who, number)

    @rule()
    def connect(self):
        self.abuse.connect()

    @rule(who=WHO)
    def break_off(self, who):
        self.abuse.break_off(who)

    @precondition(lambda self: not self.abuse.held)
    @rule()
    def hold_the_writer(self):
        self.abuse.held = True

    @precondition(lambda self: self.abuse.held)
    @rule()
    def let_the_writer_go_on(self):
        self.abuse.release()

    @rule(seconds=st.floats(0.0, 7.0))
    def wait(self, seconds):
        self.abuse.wait(seconds)

    @precondition(lambda self: not self.abuse.held)
    @rule()
    def exchange_honestly(self):
        self.world.honest.exchange()

    @invariant()
    def nothing_else_moved_the_model(self):
        if hasattr(self, "world"):
            assert self.world.core.version == len(self.world.applied)

    def teardown(self):
        if hasattr(self, "world"):
            try:
                self.abuse.end()
            finally:
                self.opened.__exit__(None, None, None)
                logging.set_verbosity(self.before)


TestConversations = Conversations.TestCase
TestConversations.settings = settings(max_examples=25, stateful_step_count=30)
