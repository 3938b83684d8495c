"""Learning rate schedules are checked by their values, and an invalid rate does not end a run.

Hypothesis draws every constant of every schedule and optimizer of the allow-list, with extreme
values: either the offer is rejected in words, or a shard can make its status at any step.
"""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.command_line import run_of
from tests.virtual.toy import SPEC
from thinwire.ops.offer import CLOCKS, Described, Offer, OptimizerOffer, read_offer
from thinwire.ops.optimizers import allow_list
from thinwire.ops.optimizers.rates import check_rates, rate_at, sample_steps
from thinwire.ops.optimizers.schedule import MOST_UPDATES
from thinwire.ops.types import ConfigurationError
from thinwire.ps.core.batch_clock import BatchClock
from thinwire.ps.persistence.shard_checkpoint import ShardCheckpoint
from thinwire.ps.scripts.initial_model import model_of_offer
from thinwire.ps.shard.preparation import ShardInitials, build_core
from thinwire.runtime.persistence.documents import LARGEST_NUMBER

HOSTILE = {
    "restarts": (
        "CosineDecayRestarts",
        {"first_decay_steps": 1e-9, "t_mul": -1, "m_mul": 1e18, "alpha": -1e18},
    ),
    "restarts_grow": ("CosineDecayRestarts", {"first_decay_steps": 3, "t_mul": 1.0, "m_mul": 1e9}),
    "exponential": ("ExponentialDecay", {"decay_steps": 10, "decay_rate": -0.5}),
    "exponential_grows": ("ExponentialDecay", {"decay_steps": 1, "decay_rate": 1e18}),
    "zero_to_nothing": ("ExponentialDecay", {"decay_steps": 1e9, "decay_rate": 0.0}),
    "inverse": ("InverseTimeDecay", {"decay_steps": 777, "decay_rate": -1}),
    "inverse_of_two": ("InverseTimeDecay", {"decay_steps": 777, "decay_rate": -3}),
    "polynomial": ("PolynomialDecay", {"decay_steps": 1000, "power": -1.5}),
    "polynomial_cycle": ("PolynomialDecay", {"decay_steps": 5, "power": -2, "cycle": True}),
}
#: Schedules of HOSTILE with harmless arguments.
HARMLESS = {"zero_to_nothing"}


def schedule_of(name, arguments):
    first = {} if name == "PiecewiseConstantDecay" else {"initial_learning_rate": 0.1}
    return {"name": name, "config": first | arguments}


def offer_of(optimizer, num_batches=0, first_batches=(), **options):
    offered = (OptimizerOffer(optimizer, **options),)
    counts = {"num_batches": num_batches, "first_batches": first_batches}
    return Offer(SPEC, optimizers=offered, num_examples=100, **counts)


def core_of(offer, *flags):
    """Return the core of a shard that a document is offered to, as a process builds it."""
    run = run_of("--method=bsp", "--server_optimizer=script", "--model_from=worker", *flags)
    read = read_offer(offer.to_json(), 1 << 20)
    payload = memoryview(np.ones(SPEC.num_parameters, np.float32).tobytes())
    model = model_of_offer(run, 0, read, payload)
    initials = ShardInitials(run, 0, model)
    fresh = SimpleNamespace(last=ShardCheckpoint(), generation=0, generations_undone=1)
    return build_core(initials, initials.config(fresh, 60.0), 10.0)


@pytest.mark.parametrize("name", sorted(HOSTILE.keys() - HARMLESS))
def test_a_schedule_without_a_finite_rate_is_refused_by_name(name):
    kind, arguments = HOSTILE[name]
    adam = Described("Adam", {"learning_rate": schedule_of(kind, arguments)})
    with pytest.raises(ConfigurationError, match=f"schedule {kind}.*at step.*--iter_max") as found:
        core_of(offer_of(adam))
    assert "\n" not in str(found.value) and len(str(found.value)) < 1000


def test_one_of_several_optimizers_is_refused_as_well():
    kind, arguments = HOSTILE["restarts"]
    paths = [tensor.path for tensor in SPEC.tensors]
    good = OptimizerOffer(Described("SGD", {"learning_rate": 0.1}), paths=tuple(paths[:1]))
    bad = Described("SGD", {"learning_rate": schedule_of(kind, arguments)})
    both = (good, OptimizerOffer(bad, paths=tuple(paths[1:])))
    with pytest.raises(ConfigurationError, match=kind):
        core_of(Offer(SPEC, optimizers=both))


HONEST = [
    ("CosineDecay", {"decay_steps": 1000, "warmup_target": 0.2, "warmup_steps": 50}),
    ("CosineDecayRestarts", {"first_decay_steps": 100, "t_mul": 2.0, "m_mul": 0.9}),
    ("CosineDecayRestarts", {"first_decay_steps": 100, "t_mul": 1.0}),
    ("ExponentialDecay", {"decay_steps": 1000, "decay_rate": 0.96, "staircase": True}),
    ("InverseTimeDecay", {"decay_steps": 1000, "decay_rate": 0.5}),
    ("PolynomialDecay", {"decay_steps": 777, "power": 0.5, "cycle": True}),
    ("PolynomialDecay", {"decay_steps": 100, "end_learning_rate": -0.1}),
    ("PiecewiseConstantDecay", {"boundaries": [100, 200], "values": [0.1, 0.01, 0.001]}),
    ("PiecewiseConstantDecay", {"boundaries": list(range(999)), "values": [0.1] * 1000}),
]


@pytest.mark.parametrize(("kind", "arguments"), HONEST)
def test_honest_schedules_are_accepted(kind, arguments):
    core = core_of(offer_of(Described("SGD", {"learning_rate": schedule_of(kind, arguments)})))
    assert math.isfinite(core.model.learning_rate)


GROWING = Described(
    "SGD",
    {"learning_rate": schedule_of("ExponentialDecay", {"decay_steps": 10, "decay_rate": 2.0})},
)


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (("--iter_max=100",), {}),
        (("--epochs=2",), {"num_batches": 20}),
        (("--epochs=2", "--iter_max=100"), {"clock": "steps", "num_batches": 10**6}),
        (("--epochs=2", "--iter_max=1000000"), {"num_batches": 20}),
    ],
)
def test_only_steps_that_the_run_can_reach_count(flags, options):
    core_of(offer_of(GROWING, **options), *flags)
    core_of(offer_of(GROWING, **options))  # a search for a rate ends before it overflows
    with pytest.raises(ConfigurationError, match="ExponentialDecay.*inf at step"):
        core_of(offer_of(GROWING, iterations=10_000, **options), *flags)


def test_a_schedule_is_looked_at_from_the_count_that_it_begins_with():
    core_of(offer_of(GROWING, iterations=10_000, first_batches=(0,)), "--iter_max=100")
    with pytest.raises(ConfigurationError, match="ExponentialDecay.*inf at step 10,000"):
        core_of(offer_of(GROWING, first_batches=(10_000,)), "--iter_max=100")


def test_samples_are_within_the_run_and_not_many():
    described = Described("InverseTimeDecay", {"decay_steps": 777.0, "decay_rate": -3.0})
    steps = sample_steps(described, 0, MOST_UPDATES)
    assert {0, 1, 2, 10, 1000, 10**9, 258, 259, 260, 777, 778, 2**31 - 2} <= set(steps)
    assert len(steps) < 200
    long = {"boundaries": list(range(999)), "values": [0.1] * 1000}
    few = sample_steps(Described("PiecewiseConstantDecay", long), 0, MOST_UPDATES)
    assert len(few) <= 4 and {0, MOST_UPDATES} <= set(few)
    later = sample_steps(described, 500, 600)
    assert min(later) == 500 and max(later) == 600 and 501 in later


@pytest.mark.parametrize("rate", [1j, None, "x", [0.1, 0.2], 10**400, math.inf, math.nan])
def test_what_is_no_finite_number_is_no_rate(rate):
    assert not math.isfinite(rate_at(lambda step: rate, 5))
    with pytest.raises(ConfigurationError, match="step 0"):
        check_rates(lambda step: rate, Described("X", {}), 0, 10)


def test_an_exception_is_no_rate():
    assert math.isnan(rate_at(lambda step: 1 / step, 0))


FLOATS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0, 1, -1, 2, 1e-9, 1e-45, 1e18, -1e18, 4.6e18, 1e38, 5e-324, 2**61, 2**62]),
    st.integers(-(2**63), 2**63),
)


def value_of(argument):
    """Return what an argument of the allow-list may be, mostly in range."""
    if argument.kind is bool:
        return st.booleans()
    if argument.kind is list:
        return st.lists(FLOATS, max_size=4)
    low = None if math.isinf(argument.low) else argument.low
    high = None if math.isinf(argument.high) else argument.high
    if argument.kind is int:
        legal = st.integers(int(low or 0), int(high or 100))
    else:
        legal = (
            FLOATS.filter(lambda value: argument.allows(value))
            if low is None
            else st.floats(low, high, allow_nan=False, allow_infinity=False)
        )
    return st.one_of(legal, st.none(), FLOATS) if argument.optional else st.one_of(legal, FLOATS)


@st.composite
def configs(draw, known, name):
    return {
        argument: draw(value_of(rule))
        for argument, rule in known[name].items()
        if draw(st.booleans()) or rule.low > 0
    }


@st.composite
def schedules(draw):
    name = draw(st.sampled_from(sorted(allow_list.SCHEDULES)))
    config = draw(configs(allow_list.SCHEDULES, name))
    if name == "PiecewiseConstantDecay":
        boundaries = sorted(draw(st.lists(FLOATS.filter(lambda x: x == x), max_size=3)))
        values = draw(st.lists(FLOATS, min_size=len(boundaries) + 1, max_size=len(boundaries) + 1))
        return {"name": name, "config": {"boundaries": boundaries, "values": values}}
    return {"name": name, "config": {"initial_learning_rate": draw(FLOATS)} | config}


def check_status(core, versions):
    """Make what documents hold of an optimizer, at any version."""
    for version in versions:
        core.model.samples = version
        core.model.optimizer.clock = BatchClock(1, first=(version,))
        core.model.optimizer.state["steps"] = version
        rate = core.model.learning_rate
        assert abs(rate) <= LARGEST_NUMBER
        assert json.loads(json.dumps(rate, allow_nan=False)) == rate
        assert core.whole().learning_rate == rate


VERSIONS = st.lists(st.integers(0, 2**53), min_size=1, max_size=5)


@settings(max_examples=80, deadline=None)
@given(schedule=schedules(), versions=VERSIONS, clock=st.sampled_from(CLOCKS))
@example({"name": "CosineDecayRestarts", "config": HOSTILE["restarts"][1]}, [7], "batches")
def test_any_schedule_is_refused_or_has_a_status_at_any_version(schedule, versions, clock):
    offer = offer_of(Described("SGD", {"learning_rate": schedule}), clock=clock)
    try:
        core = core_of(offer)
    except ConfigurationError as error:
        assert str(error).strip()
        return
    check_status(core, versions)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), rate=FLOATS, versions=VERSIONS)
def test_any_optimizer_is_refused_or_has_a_status_at_any_version(data, rate, versions):
    name = data.draw(st.sampled_from(sorted(allow_list.OPTIMIZERS)))
    known = {name: {**allow_list.OPTIMIZERS[name], **allow_list._COMMON}}
    config = data.draw(configs(known, name))
    try:
        core = core_of(offer_of(Described(name, {"learning_rate": rate} | config)))
    except ConfigurationError as error:
        assert str(error).strip()
        return
    check_status(core, versions)
