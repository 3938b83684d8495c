"""Every number that a worker sends, at its extremes, from the wire into a real core."""

import itertools
import math

import numpy as np
import pytest
from absl import logging
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ps.streams import HONEST, ROGUE, Shard, Stream, frame, push_frame
from tests.virtual.toy import method
from thinwire.ops.types import Block, CodedValues
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.wire import reports
from thinwire.ps.wire.claims import ClaimBounds

WHOLE = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1)
REAL = (0.0, 1.0, -1.0, 1e-300, 1e7, 1e308, math.nan, math.inf, -math.inf)
#: Method -> settings of a shard with two workers; the honest one must not wait for the rogue.
METHODS = {
    "adacomp": {"compression_rate": 0.25},
    "bsp": {},
    "esync": {},
    "ssp": {"staleness_bound": 3},
    "dgs": {"compression_rate": 0.25},
    "asgd": {"overlap": True},
}
WHOLE_OF_PUSH = (
    *("step", "base_version", "generation", "epoch", "samples", "local_steps", "lag"),
    "batch_parts",
)
WHOLE_OF_QUERY = ("step", "local_steps")
REAL_OF_QUERY = ("step_seconds", "age_seconds", "query_seconds")
LIFE = {HONEST: 11, ROGUE: 12}


@pytest.fixture(autouse=True)
def quiet():
    before = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    yield
    logging.set_verbosity(before)


def cut(field, value, message=pb.Push):
    """The value as the field's type holds it."""
    kind = message.DESCRIPTOR.fields_by_name[field].type
    return value % 2**32 if kind in (13, 7) else value  # uint32, fixed32


class Talk:
    """Two workers that were let in, with a round or two done; every frame is answered at once."""

    def __init__(self, name):
        self.shard = Shard(name, **METHODS[name])
        self.streams, self.steps = {}, dict.fromkeys(LIFE, 0)
        for worker in LIFE:
            self.join(worker)
        for _ in range(3):
            for worker in LIFE:
                self.push(worker)

    @property
    def core(self):
        return self.shard.core

    def join(self, worker):
        stream = self.streams[worker] = Stream(self.shard.server)
        reader = self.shard_reader(stream)
        self.say(worker, frame(hello=self.shard.hello(id=worker, incarnation=LIFE[worker])))
        self.say(worker, frame(pull=pb.Pull()))
        return reader

    def shard_reader(self, stream):
        stream.reader = self.shard.server.reader_of(stream)
        return stream.reader

    def say(self, worker, data):
        stream = self.streams[worker]
        if not stream.reader.receive(data):
            stream.reader.forget()
        self.shard.server.run_until(self.shard.server.queue.empty)

    def push(self, worker, **wrong):
        self.steps[worker] = max(self.steps[worker], self.core._members[worker].last_step) + 1
        right = {
            "incarnation": LIFE[worker],
            "kind": self.shard.kind,
            "step": self.steps[worker],
            "base_version": self.core.version,
            "epoch": self.core.membership.epoch,
        }
        self.say(worker, push_frame(**right | wrong))

    def query(self, worker, **wrong):
        right = {
            "incarnation": LIFE[worker],
            "step": self.steps[worker] + 1,
            "local_steps": 1,
            "step_seconds": 0.1,
            "age_seconds": 0.0,
            "query_seconds": 0.01,
        }
        self.say(worker, frame(query=pb.Query(**right | wrong)))

    def check(self):
        """Check that all workers are in, or rejoin, and that the honest worker makes progress."""
        core = self.core
        assert np.isfinite(core.model.theta).all()
        assert "fault" not in core.counters.rejected
        assert core.stop_reason is None
        for worker in LIFE:
            self.join(worker)
        before = core.version
        for _ in range(2):
            for worker in LIFE:
                self.push(worker)
        assert core.version > before
        assert self.streams[HONEST].last("reply")[0] is not None
        assert core.samples <= 2**40
        assert isinstance(self.shard.board.document(), str)
        core.state_dict()


def refusals(stream):
    return [one.refusal for one, _ in stream.received if one.WhichOneof("body") == "refusal"]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_push_at_its_extremes_is_refused_or_harmless(name):
    for field, value in itertools.product(WHOLE_OF_PUSH, WHOLE):
        talk = Talk(name)
        talk.push(ROGUE, **{field: cut(field, value)})
        talk.check()


@pytest.mark.parametrize("name", sorted(METHODS))
def test_reals_of_a_push_at_their_extremes_are_refused_or_harmless(name):
    for field, value in itertools.product(("loss", "learning_rate"), REAL):
        talk = Talk(name)
        talk.push(ROGUE, **{field: value})
        talk.check()


@pytest.mark.parametrize("name", ["adacomp", "esync"])
def test_a_query_at_its_extremes_is_refused_or_harmless(name):
    for field, value in itertools.product(WHOLE_OF_QUERY, WHOLE):
        talk = Talk(name)
        talk.query(ROGUE, **{field: cut(field, value, pb.Query)})
        talk.query(HONEST)
        talk.check()
    for field, value in itertools.product(REAL_OF_QUERY, REAL):
        talk = Talk(name)
        talk.query(ROGUE, **{field: value})
        talk.query(HONEST)
        talk.check()


@pytest.mark.parametrize("name", ["adacomp", "bsp", "dgs"])
def test_pulls_hellos_and_reports_at_their_extremes_are_refused_or_harmless(name):
    for value in WHOLE:
        talk = Talk(name)
        small = value % 2**32
        talk.say(ROGUE, frame(pull=pb.Pull(base_version=value, has_base=True, generation=small)))
        talk.say(ROGUE, frame(report=pb.Report(document=f'{{"id": 2, "bytes_up": {value}}}')))
        stream = Stream(talk.shard.server)
        talk.shard_reader(stream)
        stream.reader.receive(
            frame(hello=talk.shard.hello(id=ROGUE, incarnation=value, epoch=small, shard=small))
        )
        stream.reader.forget()
        talk.check()


_whole = st.sampled_from(WHOLE) | st.integers(0, 2**64 - 1)
_real = st.sampled_from(REAL) | st.floats(width=32)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(sorted(METHODS)),
    pushes=st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                **dict.fromkeys(WHOLE_OF_PUSH, _whole),
                "loss": _real,
                "learning_rate": _real,
            },
        ),
        max_size=4,
    ),
    queries=st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                **dict.fromkeys(WHOLE_OF_QUERY, _whole),
                **dict.fromkeys(REAL_OF_QUERY, _real),
            },
        ),
        max_size=4,
    ),
)
def test_whatever_a_worker_claims_the_others_go_on(name, pushes, queries):
    talk = Talk(name)
    for push, query in itertools.zip_longest(pushes, queries, fillvalue={}):
        talk.push(ROGUE, **{field: cut(field, value) for field, value in push.items()})
        talk.query(ROGUE, **{field: cut(field, value, pb.Query) for field, value in query.items()})
        talk.query(HONEST)
    talk.check()


def test_one_push_with_the_largest_lag_does_not_end_the_default_method():
    talk = Talk("adacomp")
    talk.push(ROGUE, lag=2**32 - 1)
    [refusal] = refusals(talk.streams[ROGUE])
    assert refusal.reason == pb.REASON_MALFORMED
    assert "lag 4294967295: expected 0 to 0" in refusal.message
    assert talk.core.counters.rejected == {"malformed": 1}
    talk.check()


def test_a_refusal_names_field_value_and_bound():
    talk = Talk("asgd")
    base = talk.core.version
    wrong = {
        "lag": (base + 1, f"lag {base + 1}: expected 0 to {base}"),
        "local_steps": (2, "local_steps 2: expected 1 to 1"),
        "samples": (2**31 - 1, "samples 2147483647: expected 0 to 16777216"),
        "learning_rate": (math.nan, "learning_rate nan"),
    }
    for field, (value, words) in wrong.items():
        talk.push(ROGUE, **{field: value})
        assert words in refusals(talk.streams[ROGUE])[-1].message
    assert talk.core.counters.rejected == {"malformed": len(wrong)}


def test_a_loss_that_is_not_finite_still_is_told_as_that():
    talk = Talk("asgd")
    for loss in (math.nan, math.inf):
        talk.push(ROGUE, loss=loss)
        assert refusals(talk.streams[ROGUE])[-1].reason == pb.REASON_NON_FINITE
    assert talk.core.counters.rejected == {"non_finite": 2}


def _sparse():
    block = Block(0, 24, np.array([2, 3]), CodedValues("float32", np.float32([0.1, 0.2])))
    message = pb.ToServer()
    pieces = messages.blocks_to_message([IndexChooser().encode(block)], message.push.blocks)
    return message.push.blocks, b"".join(pieces)


@pytest.mark.parametrize("samples", [0, 1, 2**31 - 1])
def test_a_part_of_a_round_among_the_workers_is_refused_or_harmless(samples):
    """An invalid copy of the model, in a run where workers step locally."""
    shard = Shard("bsp", collective="ring")
    blocks, values = _sparse()
    push = push_frame(
        blocks,
        values,
        incarnation=12,
        kind=pb.UPDATE_KIND_VALUES,
        samples=samples,
        local_steps=min(samples, 1),
    )
    shard.say(push, incarnation=12, id=ROGUE)
    assert shard.say(incarnation=11, id=HONEST).last("welcome")[0] is not None
    assert "fault" not in shard.core.counters.rejected


@pytest.mark.parametrize(
    ("name", "choices", "num_train", "fits", "too_many"),
    [
        ("adacomp", {}, 500, (1, 500), (1, 501)),
        ("adacomp", {}, None, (1, 1 << 24), (1, (1 << 24) + 1)),
        ("bsp", {"overrides": {"pacer": "fixed"}, "local_steps": 20}, 500, (20, 10_000), (20, 0)),
        ("esync", {"max_local_steps": 7}, 500, (7, 3500), (7, 3501)),
        ("esync", {}, 60_000, (1 << 20, 1 << 30), (1 << 20, 1 << 31)),
    ],
)
def test_samples_are_bounded_by_what_the_steps_can_have_seen(
    name, choices, num_train, fits, too_many
):
    bounds = ClaimBounds.of(method(name, **choices), num_train)
    for steps, samples in ((1, 1), fits):
        bounds.check_push(pb.Push(step=1, local_steps=steps, samples=samples))
    with pytest.raises(Malformed, match="expected"):
        bounds.check_push(pb.Push(step=1, local_steps=too_many[0], samples=too_many[1]))


def test_no_push_stands_for_many_batches_of_the_script():
    """A push with this claim would bring a schedule of all workers to its end."""
    for steps, most in ((0, 808), (1, 808), (20, 960)):
        bounds = ClaimBounds(20, takes_changes=False, nb_workers=4)
        bounds.check_push(pb.Push(step=1, samples=steps, local_steps=steps or 1, batch_parts=most))
        with pytest.raises(Malformed, match=f"batch_parts {most + 1}: expected 0 to {most}"):
            bounds.check_push(pb.Push(step=1, local_steps=steps, batch_parts=most + 1))
    assert ClaimBounds.of(method("bsp"), nb_workers=4).nb_workers == 4


def test_a_round_without_an_example_brings_nothing():
    bounds = ClaimBounds.of(method("fedavg"), 500)
    bounds.check_push(pb.Push(step=1, kind=pb.UPDATE_KIND_DELTA))
    with pytest.raises(Malformed, match="step 1: .*expected no blocks"):
        bounds.check_push(pb.Push(step=1, kind=pb.UPDATE_KIND_DELTA, blocks=[pb.Block()]))
    for samples, steps in ((0, 20), (1, 0)):
        with pytest.raises(Malformed, match="expected"):
            bounds.check_push(
                pb.Push(step=1, kind=pb.UPDATE_KIND_DELTA, samples=samples, local_steps=steps)
            )


def test_a_report_that_no_worker_can_have_counted_is_none():
    """The sum over all workers has to stay a count that the Supervisor reads."""
    assert reports.own_counters('{"id": 2, "bytes_up": 9007199254740992}')["bytes_up"] == 2**53
    for wrong in (
        '"bytes_up": 9007199254740993',
        '"wait_seconds": -0.5',
        '"compute_seconds": 1e300',
        '"labels": {"3": 9223372036854775807}',
    ):
        assert reports.own_counters(f'{{"id": 2, {wrong}}}') == {}


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**127])
def test_a_loss_scale_is_taken_in_a_run_that_scales_the_loss(scale):
    push = pb.Push(step=1, samples=1, local_steps=1, loss_scale=scale)
    ClaimBounds(scales_loss=True).check_push(push)
    with pytest.raises(Malformed, match="loss_scale .*expected 0 to 0 .*LossScaleOptimizer"):
        ClaimBounds(scales_loss=False).check_push(push)


@pytest.mark.parametrize("scale", [-1.0, 2.0**-127, 2.0**128, math.nan, math.inf])
def test_a_loss_scale_that_no_script_has_is_refused(scale):
    with pytest.raises(Malformed, match="loss_scale"):
        ClaimBounds().check_push(pb.Push(step=1, samples=1, local_steps=1, loss_scale=scale))
    with pytest.raises(Malformed, match="loss_scale 0"):
        ClaimBounds().check_push(pb.Push(step=1, samples=1, local_steps=1, overflow=True))


LIMITS = (((0.0, 1e6), (0.0, math.nextafter(1.0, 0.0))),)


@pytest.mark.parametrize(
    "settings, without, is_legal",
    [
        ((), (), True),
        ((0.1, 0.9), (0, 3), True),
        ((0.1, 1.0), (), False),
        ((0.1, math.nan), (), False),
        ((-0.1, 0.9), (), False),
        ((0.1,), (), False),
        ((0.1, 0.9, 0.5), (), False),
        ((0.1, 0.9), (8192,), False),
        ((0.1, 0.9), range(8193), False),
    ],
)
def test_the_numbers_of_a_torch_optimizer_are_bounded_by_position(settings, without, is_legal):
    """A beta of 1 would divide by zero within the shard's step."""
    push = pb.Push(step=1, samples=1, local_steps=1, settings=settings, without_gradient=without)
    bounds = ClaimBounds(setting_limits=LIMITS)
    if is_legal:
        bounds.check_push(push)
    else:
        with pytest.raises(Malformed):
            bounds.check_push(push)
    if settings:
        with pytest.raises(Malformed):  # an optimizer of Keras has no such numbers
            ClaimBounds().check_push(push)
