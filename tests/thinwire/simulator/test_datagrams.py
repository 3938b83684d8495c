"""DGT end to end on the virtual clock: the real router, seals, link, receivers and cores."""

import functools

import numpy as np
import pytest

from tests.thinwire.simulator.toy import played, simulated
from thinwire.ops.codecs.registry import CODECS
from thinwire.ops.routing.base import Transport
from thinwire.ops.types import Link

SMALL = {"dgt_block_size": 8, "dgt_k": 0.4}  # two entries a block: the toy's tensors have some
PATIENT = {"dgt_wait_ms": 60_000.0}
LINK = Link(1.0, 10)
UPDATES = 25
STEPS = "0.1,0.15,0.3"


def weights(simulation):
    assert simulation.end == "iter_max"
    return np.concatenate([shard.core.model.theta for shard in simulation.shards])


def counters(simulation):
    return [each for shard in simulation.shards for _, each in shard.datagrams.receiver.counters()]


def total(simulation, name):
    found = [getattr(each, name) for each in counters(simulation)]
    return sum(sum(each) if isinstance(each, list) else each for each in found)


def dgt(nb_ps=1, links=(LINK,), transport=None, iter_max=UPDATES, **choices):
    settings = {} if transport is None else {"transport": transport}
    return played(
        "dgt",
        3,
        steps=STEPS,
        links=links,
        nb_ps=nb_ps,
        iter_max=iter_max,
        choices=SMALL | choices,
        **settings,
    )


def reliable(nb_ps=1, links=(LINK,), iter_max=UPDATES, **choices):
    return played(
        "bsp", 3, steps=STEPS, links=links, nb_ps=nb_ps, iter_max=iter_max, choices=choices
    )


@functools.cache
def of_reliable(nb_ps=1):
    """Return the weights of the run that many tests compare with; callers must not change them."""
    return weights(reliable(nb_ps))


@pytest.mark.parametrize("nb_ps", [1, 3])
@pytest.mark.parametrize("choices", [{"dgt_k": 1.0}, {"dgt_channels": 0}])
def test_all_reliable_is_the_reliable_router(nb_ps, choices):
    np.testing.assert_array_equal(weights(dgt(nb_ps=nb_ps, **choices)), of_reliable(nb_ps))


@pytest.mark.parametrize(
    ("nb_ps", "k", "marker"),
    [(1, 0.0, "step"), (1, 0.8, "step"), (3, 0.4, "tensor")],
)
def test_no_loss_and_a_long_wait_is_the_reliable_router(nb_ps, k, marker):
    simulation = dgt(nb_ps=nb_ps, dgt_k=k, dgt_marker=marker, **PATIENT)
    np.testing.assert_array_equal(weights(simulation), of_reliable(nb_ps))
    assert total(simulation, "num_announced") == total(simulation, "num_arrived") > 0


@pytest.mark.parametrize(
    ("codec", "value_dtype"),
    [
        ("topk", "float32"),
        *((codec, "float32" if codec == "powersgd" else "int8") for codec in CODECS),
    ],
)
def test_with_every_codec_a_long_wait_is_the_reliable_router(codec, value_dtype):
    choices = {"value_dtype": value_dtype, "compression_rate": 0.5, "overrides": {"codec": codec}}
    if codec == "powersgd":
        choices["powersgd_rank"] = 1
    simulation = dgt(iter_max=15, **PATIENT, **choices)
    np.testing.assert_array_equal(weights(simulation), weights(reliable(iter_max=15, **choices)))
    assert total(simulation, "num_announced") > 0 or codec == "powersgd"


def test_duplicates_and_a_mixed_up_order_change_nothing():
    hurt = Link(1.0, 10, reorder=0.3, duplicate=0.3)
    simulation = dgt(links=(hurt,), **PATIENT)
    np.testing.assert_array_equal(weights(simulation), of_reliable())
    assert total(simulation, "num_announced") == total(simulation, "num_arrived")
    assert sum(each.dropped["duplicate"] for each in counters(simulation)) > 10


def test_in_the_stream_nothing_is_lost_and_nothing_late_with_a_wait():
    hurt, through = Link(1.0, 10, 0.3), Transport(dgt_transport="grpc")
    simulation = dgt(links=(hurt,), transport=through, **PATIENT)
    np.testing.assert_array_equal(weights(simulation), of_reliable())


@pytest.mark.parametrize("reception", ["diff", "drop"])
def test_nothing_arrives_and_training_ends(reception):
    deaf = Transport(dgt_drop_rate=1.0, dgt_fallback_steps=0)
    simulation = dgt(transport=deaf, dgt_k=0.0, dgt_reception=reception)
    assert np.isfinite(weights(simulation)).all()
    assert total(simulation, "num_arrived") == 0 < total(simulation, "num_announced")
    moved = weights(simulation) != simulation._trainer.weights
    assert 0 < moved.sum() < moved.size  # the last blocks alone are reliable


@pytest.mark.parametrize("nb_ps", [1, 2])
@pytest.mark.parametrize("marker", ["step", "tensor"])
def test_what_senders_throw_away_is_zero_at_the_shards(nb_ps, marker):
    control = dgt(nb_ps=nb_ps, dgt_send_drop=True, dgt_marker=marker)
    deaf = Transport(dgt_drop_rate=1.0, dgt_fallback_steps=0)
    np.testing.assert_array_equal(
        weights(control), weights(dgt(nb_ps=nb_ps, dgt_marker=marker, transport=deaf))
    )
    assert total(control, "num_announced") == total(control, "num_datagrams") == 0
    assert total(control, "blocks_dropped") > 0


def test_where_nothing_arrives_datagrams_go_in_the_stream():
    deaf = Link(1.0, 10, 0.0, queue_kb=0.0)
    blocked = Transport(dgt_drop_rate=0.999, dgt_fallback_steps=5)
    simulation = dgt(links=(deaf,), transport=blocked, dgt_k=0.0)
    channels = [channel for worker in simulation.workers for channel in worker._exchange.channels]
    assert all(channel.fell_back for channel in channels)
    steps_in_stream = UPDATES - blocked.dgt_fallback_steps - 1
    assert total(simulation, "num_arrived") >= steps_in_stream * 3  # of three workers, none lost


def test_what_comes_late_and_is_dropped_has_come():
    """A short wait is no firewall."""
    simulation = dgt(dgt_k=0.0, dgt_reception="drop", transport=Transport(dgt_fallback_steps=5))
    channels = [channel for worker in simulation.workers for channel in worker._exchange.channels]
    assert total(simulation, "num_arrived") == 0 < total(simulation, "num_late")
    assert not any(channel.fell_back for channel in channels)


def test_a_lossy_link_loses_what_the_counters_show():
    simulation = dgt(links=(Link(1.0, 10, 0.2),), dgt_wait_ms=500.0, iter_max=70)
    announced, arrived = total(simulation, "num_announced"), total(simulation, "num_arrived")
    assert 0.7 < arrived / announced < 0.9
    assert np.isfinite(weights(simulation)).all()


def test_losses_are_fed_back():
    """Lost values are sent with a later gradient: the run ends nearer to the lossless one."""
    lossy = (Link(1.0, 10, 0.5),)
    drop = {"dgt_reception": "drop", "dgt_wait_ms": 500.0, "dgt_k": 0.0}
    goal = weights(reliable(iter_max=80))
    lost = weights(dgt(links=lossy, iter_max=80, **drop))
    fed_back = weights(dgt(links=lossy, iter_max=80, dgt_error_feedback=True, **drop))
    assert np.abs(fed_back - goal).mean() < 0.5 * np.abs(lost - goal).mean()


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_few_bits_stay_near_the_whole_values(bits):
    simulation = dgt(dgt_low_bits=bits, dgt_k=0.0, **PATIENT)
    assert 0 < np.abs(weights(simulation) - of_reliable()).max() < 0.05


def test_a_killed_worker_comes_back_with_another_session():
    simulation = simulated(
        "dgt",
        3,
        steps="0.5,0.7,1.1",
        links=(Link(0.05, 30),),
        nb_ps=2,
        failures="2@8.35-9",
        lease_seconds=2.0,
        iter_max=25,
        choices=SMALL | {"dgt_wait_ms": 200.0},
    )
    assert simulation.play(lambda now: None, lambda: simulation.clock.now > 300) == "iter_max"
    for shard in simulation.shards:
        workers = [worker for worker, _ in shard.datagrams.receiver.counters()]
        assert workers.count(2) == 2 and workers.count(1) == 1
        assert np.isfinite(shard.core.model.theta).all()


def test_the_same_run_twice_gives_the_same_bits():
    hurt = Link(0.3, 20, 0.1, queue_kb=4.0, reorder=0.1, duplicate=0.1, background_mbps=0.1)
    ends = [weights(dgt(links=(hurt,), dgt_random="1", nb_ps=2)) for _ in range(2)]
    np.testing.assert_array_equal(*ends)
