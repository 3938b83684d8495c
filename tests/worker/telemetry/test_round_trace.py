"""Traces of a worker's rounds: sums, steps, bytes, and barrier and transfer times apart."""

import json
import types

import pytest

from thinwire.ops.downlink.types import Operation
from thinwire.ops.pacing.esync import Esync
from thinwire.ops.pacing.fixed import Every, Fixed
from thinwire.ops.push_head import PushHead, PushOrigin
from thinwire.ops.types import Kind
from thinwire.runtime.telemetry import round_trace
from thinwire.runtime.telemetry.round_trace import MeasuredBy, unpack
from thinwire.worker.core.messages import PushRequest, ShardReply
from thinwire.worker.telemetry.round_trace import (
    MEASURES,
    NullMeasure,
    RoundMeasure,
    StepMeasure,
    origin_of,
)

ORIGIN = MeasuredBy("alpha", "cpu", 0, "0000002a")


class FakeClock:
    now = 100.0

    def __call__(self):
        return self.now


def outgoing(step=1, samples=64, local_steps=1, loss=0.5):
    return PushRequest(
        PushHead(step, samples, local_steps, loss), [PushOrigin()], Kind.GRADIENT, [()]
    )


def reply(held=0.0, staleness=0, version=1):
    return ShardReply(
        Operation.NONE, (), version, 0, 0.1, 0, False, held_seconds=held, staleness=staleness
    )


def measure(kind=RoundMeasure, pacer=None):
    counters = types.SimpleNamespace(bytes_up=1000, bytes_down=5000)
    clock = FakeClock()
    made = kind(pacer or Every(), counters, clock)
    made.begin(2.5)
    return made, counters, clock


def taken(made, listener="shard"):
    return [each for text in made.batches(ORIGIN, listener) for each in unpack(text)]


def esync_round(made, step=1, local=3):
    for _ in range(local):
        made.begin_step()
        made.record(round_trace.CHECK_READY, 0.001)
        made.record(round_trace.GET_BATCH, 0.002)
        made.record(round_trace.FORWARD_AND_BACKWARD, 0.03)
        made.record(round_trace.LOCAL_UPDATE, 0.004)
    made.begin_step()
    made.record(round_trace.CHECK_READY, 0.002)
    made.record(round_trace.ENCODE, 0.001)
    made.record_exchange(0.75)
    made.end_round(outgoing(step, 64 * local, local), [reply(0.5)], 0, 0.7)


def test_a_round_is_the_sum_of_its_steps():
    made, counters, clock = measure(pacer=Esync())
    clock.now, counters.bytes_up, counters.bytes_down = 101.0, 1800, 5300
    esync_round(made)
    (row,) = taken(made)
    assert row.time == pytest.approx(
        {
            "check ready": 0.005,
            "get_batch": 0.006,
            "forward and backward": 0.09,
            "local update": 0.012,
            "encode": 0.001,
            "global update": 0.75,
        }
    )
    assert (row.num_samples, row.n_local, row.entries) == (192, 3, 4)
    assert (row.bytes_sent, row.bytes_received) == (800, 300)
    assert row.total_time == pytest.approx(3.5)  # a second now, 2.5 in an earlier life
    assert row.global_seconds == pytest.approx(0.75)
    assert row.computing_seconds == pytest.approx(0.102)
    assert row.steps is None


def test_every_round_starts_at_zero():
    made, counters, _ = measure(pacer=Esync())
    esync_round(made)
    counters.bytes_up += 10
    esync_round(made, step=2, local=1)
    first, second = taken(made)
    assert second.time["forward and backward"] == pytest.approx(0.03)
    assert (first.bytes_sent, second.bytes_sent) == (0, 10)


@pytest.mark.parametrize(
    ("held", "expected"), [(0.3, (0.3, 0.7)), (0.0, (0.0, 1.0)), (5.0, (1.0, 0.0)), (-1, (0, 1))]
)
def test_barrier_and_transfer_make_up_the_exchange(held, expected):
    made, _, _ = measure()
    made.end_round(outgoing(), [reply(0.0, staleness=4, version=9), reply(held)], 2, 1.0)
    (row,) = taken(made)
    assert (row.barrier_wait, row.transfer) == pytest.approx(expected)
    assert (row.staleness, row.version, row.epoch) == (4, 9, 2)


def test_a_push_that_was_refused_is_no_round():
    made, _, _ = measure()
    made.end_round(outgoing(), [None], 0, 1.0)
    assert taken(made) == []


@pytest.mark.parametrize(
    ("pacer", "phases"),
    [
        (Every(), "get_batch|forward and backward|encode|global aggregate"),
        (Fixed(1), "get_batch|forward and backward|encode|global aggregate"),
        (Fixed(4), "get_batch|forward and backward|local update|encode|global update"),
        (
            Esync(max_local_steps=1),
            "check ready|get_batch|forward and backward|local update|encode|global update",
        ),
    ],
)
def test_the_pacer_says_which_phases_there_are(pacer, phases):
    made, _, _ = measure(pacer=pacer)
    for phase in (round_trace.CHECK_READY, round_trace.LOCAL_UPDATE):
        made.record(phase, 1.0)
    made.end_round(outgoing(), [reply()], 0, 1.0)
    (row,) = taken(made)
    assert "|".join(row.time) == phases


def test_steps_are_kept_apart_where_asked_for():
    made, _, _ = measure(StepMeasure, Esync())
    esync_round(made, local=2)
    esync_round(made, step=2, local=1)
    first, second = taken(made)
    assert len(first.steps) == first.entries == 3
    assert len(second.steps) == 2
    assert first.steps[0] == {
        "check ready": 0.001,
        "get_batch": 0.002,
        "forward and backward": 0.03,
        "local update": 0.004,
    }
    assert list(first.steps[-1]) == ["check ready", "encode", "global update"]
    for phase, seconds in first.time.items():
        assert sum(step.get(phase, 0.0) for step in first.steps) == pytest.approx(seconds)


def test_nothing_is_noted_where_nothing_is_wanted():
    made, _, _ = measure(NullMeasure)
    made.record(round_trace.GET_BATCH, 1.0)
    made.end_round(outgoing(), [reply()], 0, 1.0)
    assert made.batches(ORIGIN, "shard") == []


def test_every_level_of_the_flag_is_there():
    assert tuple(MEASURES) == round_trace.LEVELS


def test_a_new_listener_hears_the_newest_again():
    made, _, _ = measure()
    made.end_round(outgoing(1), [reply()], 0, 1.0)
    assert [row.num_iters for row in taken(made, "old")] == [1]
    made.end_round(outgoing(2), [reply()], 0, 1.0)
    assert [row.num_iters for row in taken(made, "new")] == [1, 2]
    assert taken(made, "new") == []


def test_a_loss_that_is_no_number_is_not_known():
    made, _, _ = measure()
    made.end_round(outgoing(loss=float("inf")), [reply()], 0, 1.0)
    assert taken(made)[0].loss is None


@pytest.mark.parametrize(
    ("device", "on_gpu", "name"),
    [
        ("auto", False, "cpu"),
        ("auto", True, "gpu0"),
        ("gpu:3", True, "gpu3"),
        ("cpu", False, "cpu"),
    ],
)
def test_devices_are_named_as_in_the_logs_of_esync(device, on_gpu, name):
    origin = origin_of(7, device, on_gpu, 2**40 + 0xAB)
    assert (origin.device, origin.rank, origin.life) == (name, 6, "000000ab")
    assert json.loads(origin.to_json())["host"]
