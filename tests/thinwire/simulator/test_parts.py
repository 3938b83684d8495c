"""The parts of a simulation: step times, failures, pipes, flags."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.command_line import given as given_flags
from thinwire.flags.run import read_run
from thinwire.ops.types import ConfigurationError, Link
from thinwire.proto.emulation.link import LinkModel
from thinwire.simulator import devices
from thinwire.simulator import flags as simulator_flags
from thinwire.simulator.clock import Clock
from thinwire.simulator.links import Pipe, carry


def drawn(step_time, count, seed=1):
    draw = step_time.sampler([seed])
    return np.array([draw() for _ in range(count)])


def test_one_value_or_one_per_worker():
    assert [each.values for each in devices.parse_speeds("0.2", 3)] == [(0.2,)] * 3
    assert [each.values for each in devices.parse_speeds("0.1,0.2,0.4", 3)] == [
        (0.1,),
        (0.2,),
        (0.4,),
    ]
    mixed = devices.parse_speeds("lognormal:0.2,0.3; 0.5; uniform:1,2", 3)
    assert [each.shape for each in mixed] == ["lognormal", "constant", "uniform"]


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [
        ("lognormal:0.2,0.3", 0.2, 0.2 * np.sqrt(np.exp(0.09) - 1)),
        ("exponential:0.5", 0.5, 0.5),
        ("uniform:1,3", 2.0, 2 / np.sqrt(12)),
        ("constant:0.7", 0.7, 0.0),
    ],
)
def test_distributions_have_the_moments_they_name(text, mean, deviation):
    values = drawn(devices.parse_speeds(text, 1)[0], 20_000)
    assert values.mean() == pytest.approx(mean, rel=0.02)
    assert values.std() == pytest.approx(deviation, rel=0.03, abs=1e-12)
    assert values.min() > 0


def test_draws_follow_from_the_seed():
    step_time = devices.parse_speeds("lognormal:0.2,0.3", 1)[0]
    np.testing.assert_array_equal(drawn(step_time, 50), drawn(step_time, 50))
    assert (drawn(step_time, 50) != drawn(step_time, 50, seed=2)).all()


def test_a_trace_is_repeated(tmp_path):
    path = tmp_path / "steps.txt"
    path.write_text("# seconds\n0.1\n0.2 # two\n\n0.3\n0.4\n")
    first, second = devices.parse_speeds(f"trace:{path}", 2)
    assert drawn(first, 5).tolist() == [0.1, 0.2, 0.3, 0.4, 0.1]
    assert drawn(second, 5).tolist() == [0.3, 0.4, 0.1, 0.2, 0.3]  # not in step with the first
    path.write_text("0.1 1\n0.2 2\n")
    first, second = devices.parse_speeds(f"trace:{path}", 2)
    assert drawn(first, 3).tolist() == [0.1, 0.2, 0.1]
    assert drawn(second, 3).tolist() == [1, 2, 1]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("fast", "'fast': expected seconds"),
        ("0.1,0.2", "has 2 values; expected one value, or one value for each of the 3 workers"),
        ("0", "seconds is 0"),
        ("-1", "seconds is -1"),
        ("nan", "seconds is nan"),
        ("1e9", "seconds is 1e\\+09"),
        ("normal:1,2", "expected one of constant, uniform, exponential, lognormal or trace"),
        ("lognormal:1", "expected lognormal:mean,sigma"),
        ("lognormal:1,9", "sigma is 9"),
        ("uniform:2,1", "LOW <= HIGH"),
        ("lognormal:1,1;0.2", "has 2 values"),
        ("trace:/no/such/file", "No such file"),
    ],
)
def test_bad_step_times_are_refused(text, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        devices.parse_speeds(text, 3)


@pytest.mark.parametrize("lines", ["", "1 2\n", "1 1 1\n1\n", "1 1 0\n", "1 1 x\n"])
def test_bad_traces_are_refused(tmp_path, lines):
    path = tmp_path / "steps.txt"
    path.write_text(lines)
    with pytest.raises(ConfigurationError, match="sim_step_seconds"):
        devices.parse_speeds(f"trace:{path}", 3)


def test_failures_are_read():
    assert devices.parse_outages("", 2) == ()
    assert devices.parse_outages("2@30-60, 1@4.5", 2) == (
        devices.Outage(2, 30.0, 60.0),
        devices.Outage(1, 4.5, None),
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("2", "'2' is not WORKER@SECONDS-SECONDS"),
        ("2@", "is not WORKER"),
        ("2@1.2.3", "is not WORKER"),
        ("x@1-2", "is not WORKER"),
        ("3@1-2", "worker in 1..2"),
        ("0@1-2", "worker in 1..2"),
        ("1@5-5", "return time after the failure"),
        ("1@5,1@7-8", "worker 1 dies again at second 7, before its return"),
        ("1@5-9,1@7-8", "worker 1 dies again at second 7"),
    ],
)
def test_bad_failures_are_refused(text, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        devices.parse_outages(text, 2)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 3000)), max_size=20), st.integers(0, 99))
def test_a_pipe_is_the_emulated_channels_link(messages, seed):
    link = Link(0.1, 20, 0.2)
    pipe, model = Pipe(link, seed), LinkModel(link, seed)
    num_bytes = 0
    for when, size in sorted(messages):
        delivery = model.send(when, size)
        assert pipe.send(when, size, counted=True) == delivery.delivered_at
        num_bytes += delivery.bytes_on_wire
    assert pipe.num_bytes == num_bytes


def test_frames_pass_a_second_hop_as_they_come():
    """1,000 bytes take 1 s on the first hop and 0.5 s on the second; a message has three frames."""
    clock, arrived = Clock(), []
    hops = [Pipe(Link(0.008)), Pipe(Link(0.016))]
    carry(clock, hops, [1000, 1000, 1000], True, lambda: arrived.append(clock.now))
    while clock.advance():
        pass
    assert arrived == [pytest.approx(3.5)]
    assert [hop.num_bytes for hop in hops] == [3000, 3000]


def test_uncounted_messages_take_their_time_only():
    clock, arrived = Clock(), []
    pipe = Pipe(Link(0.008, 100))
    carry(clock, [pipe], [1000], False, lambda: arrived.append(clock.now))
    carry(clock, [pipe], [], False, lambda: arrived.append(clock.now))
    while clock.advance():
        pass
    assert arrived == [pytest.approx(1.1)] * 2
    assert pipe.num_bytes == 0


def test_the_clock_never_goes_back():
    clock, seen = Clock(), []
    clock.at(2.0, lambda: clock.at(1.0, lambda: seen.append(clock.now)))
    while clock.advance():
        pass
    assert seen == [2.0]


def test_a_journal_that_nobody_would_read_is_refused():
    complaint = pytest.raises(ConfigurationError, match="--journal=on: a simulated PS never dies")
    with given_flags("--type_node=Simulator", "--journal=on"), complaint:
        simulator_flags.check(read_run())
    with given_flags("--type_node=Simulator"):
        simulator_flags.check(read_run())
