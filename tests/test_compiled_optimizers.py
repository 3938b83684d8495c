"""BSP with two workers equals Keras alone, for every optimizer, on 1 and 2 shards.

A shard steps with Keras's own class. Errors are possible in how an optimizer's slots, counts and
settings reach a shard and are split. `make test` runs one optimizer for each kind, on two shards.
"""

import dataclasses

import keras
import numpy as np
import pytest
from keras.optimizers import schedules

from tests.script_run import Rows, ScriptRun, flat_of, offer_of, train_alone, variables
from thinwire.ops.optimizers import allow_list
from thinwire.ops.optimizers.slots import OwnSlots
from thinwire.ops.push_head import PushHead
from thinwire.ops.sharding import split
from thinwire.ops.types import ConfigurationError
from thinwire.worker.core.messages import ScriptFigures

STEPS, BATCH, BOUND = 10, 8, 1e-5
o = keras.optimizers


def muon():
    return o.Muon(0.02, exclude_layers=["dense"], weight_decay=0.1, adam_weight_decay=0.3)


def excluding(optimizer, *names):
    optimizer.exclude_from_weight_decay(var_names=list(names))
    return optimizer


#: Name of a compiled setting -> the optimizer.
OPTIMIZERS = {
    **{name: getattr(o, name) for name in allow_list.OPTIMIZERS},
    "Adadelta": lambda: o.Adadelta(1.0),
    "momentum": lambda: o.SGD(0.1, momentum=0.9),
    "nesterov": lambda: o.SGD(0.1, momentum=0.9, nesterov=True),
    "amsgrad": lambda: o.Adam(0.05, amsgrad=True),
    "centered": lambda: o.RMSprop(0.02, momentum=0.5, centered=True),
    "ftrl": lambda: o.Ftrl(
        0.1,
        learning_rate_power=-0.6,
        l1_regularization_strength=0.01,
        l2_regularization_strength=0.01,
        l2_shrinkage_regularization_strength=0.01,
        beta=0.1,
    ),
    "adafactor": lambda: o.Adafactor(0.1, relative_step=False, clip_threshold=0.5),
    "muon": muon,
    "muon excluded": lambda: excluding(muon(), "kernel"),
    "warm-up of schedule-free": lambda: o.ScheduleFreeAdamW(0.1, warmup_steps=5),
    "clipnorm": lambda: o.Adam(0.05, clipnorm=0.3),
    "clipnorm of sgd": lambda: o.SGD(0.1, clipnorm=0.3),
    "clipvalue": lambda: o.SGD(0.1, clipvalue=0.1),
    "weight decay": lambda: o.SGD(0.1, weight_decay=0.2),
    "decay but of biases": lambda: excluding(o.AdamW(0.05, weight_decay=0.4), "bias"),
    "decay but of a layer": lambda: excluding(o.SGD(0.05, weight_decay=0.4), "dense/", "scale"),
    "ema": lambda: o.Adam(0.05, use_ema=True, ema_momentum=0.8),
    "ema overwrites": lambda: o.SGD(0.1, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=3),
    "accumulation": lambda: o.Adam(0.05, gradient_accumulation_steps=3),
    "accumulation and ema": lambda: o.SGD(
        0.1,
        momentum=0.5,
        gradient_accumulation_steps=3,
        use_ema=True,
        ema_momentum=0.7,
        ema_overwrite_frequency=2,
    ),
    "accumulation, clipped": lambda: o.Lamb(
        0.05, gradient_accumulation_steps=2, clipnorm=0.1, weight_decay=0.1
    ),
    "static loss scale": lambda: o.SGD(0.1, loss_scale_factor=8.0),
    "cosine with warm-up": lambda: o.AdamW(
        schedules.CosineDecay(0.0, 12, warmup_target=0.1, warmup_steps=4, alpha=0.1),
        weight_decay=0.1,
    ),
    "exponential": lambda: o.SGD(schedules.ExponentialDecay(0.1, 5, 0.5, staircase=True)),
    "piecewise": lambda: o.SGD(schedules.PiecewiseConstantDecay([4, 9], [0.2, 0.1, 0.05]), 0.9),
    "polynomial": lambda: o.Adam(schedules.PolynomialDecay(0.1, 7, 0.01, 2.0, cycle=True)),
    "inverse time": lambda: o.RMSprop(schedules.InverseTimeDecay(0.05, 3, 0.5)),
    "cosine restarts": lambda: o.Adafactor(schedules.CosineDecayRestarts(0.1, 5)),
    "schedule under accumulation": lambda: o.Adam(
        schedules.CosineDecay(0.1, 15), gradient_accumulation_steps=2
    ),
}
#: Optimizers with the same kinds of slots and settings as another one. Optimizers of `MOVED`
#: are compared with Keras alone on two shards there.
LIKE_OTHERS = {
    *("RMSprop", "Adagrad", "Adamax", "AdamW", "Adafactor", "Muon", "ScheduleFreeAdamW", "Ftrl"),
    *("Adadelta", "Adam", "Nadam", "Lion", "Lamb", "momentum", "muon", "clipnorm", "ema"),
    *("accumulation", "accumulation and ema", "exponential", "inverse time", "polynomial"),
    *("cosine restarts", "decay but of biases"),
}
CONSTRAINTS = {
    "dense/kernel": keras.constraints.MaxNorm(1.0),
    "conv/kernel": keras.constraints.UnitNorm(axis=[0, 1, 2]),
    "dense/bias": keras.constraints.NonNeg(),
    "embedding/table": keras.constraints.MinMaxNorm(0.5, 1.0, 0.9, axis=1),
}


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    """Cut tensors as small as the test's tensors over the shards, if an optimizer allows it."""
    monkeypatch.setattr(split, "MAX_SLICE_ENTRIES", 16)


def batches(num_rows=64):
    rng = np.random.default_rng(5)
    return [rng.choice(num_rows, BATCH, replace=False) for _ in range(STEPS)]


def distributed(offer, theta, rows, parts_of, nb_ps=1, **choices):
    run = ScriptRun(offer, theta, nb_ps, **choices)
    for batch in batches():
        run.round(rows, parts_of(batch))
    return run


def halves(batch):
    return np.split(batch, 2)


def check(make, constraints=None, parts_of=halves, shards=(2,), **offered):
    """Compare Keras alone with two workers, on some numbers of shards."""
    own, optimizer = variables(constraints), make()
    theta, rows = flat_of(own), Rows(flat_of(own).size, 64)
    offer = offer_of(optimizer, own, **offered)
    expected = train_alone(optimizer, own, rows, batches())
    assert np.abs(expected - theta).max() > 1e-3, "nothing was trained"
    for nb_ps in shards:
        run = distributed(offer, theta, rows, parts_of, nb_ps)
        np.testing.assert_allclose(run.theta, expected, rtol=0, atol=BOUND, err_msg=str(nb_ps))
        again = make()
        run.fill(again, variables())
        for filled, slot in zip(again.variables, optimizer.variables, strict=True):
            np.testing.assert_allclose(filled, slot, rtol=1e-4, atol=BOUND, err_msg=slot.name)


def often(names, rarely):
    """Return parameters; some of them run only in `make product`."""
    return [pytest.param(n, marks=pytest.mark.product) if n in rarely else n for n in names]


@pytest.mark.parametrize("nb_ps", often([1, 2], [1]))
@pytest.mark.parametrize("name", often(OPTIMIZERS, LIKE_OTHERS))
def test_two_workers_equal_keras_alone(name, nb_ps):
    check(OPTIMIZERS[name], shards=(nb_ps,))


@pytest.mark.parametrize("name", often(["SGD", "Adam", "Lamb"], ["Adam"]))
def test_constraints_act_on_the_merged_step(name):
    check(OPTIMIZERS[name], CONSTRAINTS)


def test_a_norm_of_all_gradients_needs_one_shard():
    check(lambda: o.SGD(0.1, global_clipnorm=0.5), shards=(1,))
    with pytest.raises(ConfigurationError, match="--nb_ps=2.*global_clipnorm.*--nb_ps=1"):
        check(lambda: o.SGD(0.1, global_clipnorm=0.5), shards=(2,))


@pytest.mark.parametrize("name", ["SGD", "clipnorm of sgd"])
def test_uneven_parts_count_by_their_rows(name):
    check(OPTIMIZERS[name], parts_of=lambda batch: np.split(batch, [3]))


def test_a_schedule_may_keep_the_optimizer_s_own_count():
    check(OPTIMIZERS["exponential"], clock="steps")


@pytest.mark.parametrize("name", ["SGD", "momentum"])
def test_sgd_equals_keras_bit_for_bit_with_one_worker(name):
    own, optimizer = variables(), OPTIMIZERS[name]()
    theta, rows = flat_of(own), Rows(flat_of(own).size, 64)
    offer = offer_of(optimizer, own)
    run = distributed(offer, theta, rows, lambda batch: [batch], nb_ps=2, nb_workers=1)
    assert run.theta.tobytes() == train_alone(optimizer, own, rows, batches()).tobytes()


#: One optimizer for each kind of state.
STATES = ["momentum", "Adam", "Adafactor", "Nadam", "Muon", "accumulation and ema"]
#: The same with the average of weights that ScheduleFreeAdamW keeps.
MOVED = [*STATES, "ScheduleFreeAdamW"]
#: Every class is restored in tests/ops/test_conformance.py.
RARELY_SAVED = ["Adam", "SGD", "Adafactor", "Nadam"]


@pytest.mark.parametrize("name", often([*STATES, "SGD", "piecewise"], RARELY_SAVED))
def test_a_saved_shard_goes_on_bit_for_bit_with_its_slots(name):
    own, optimizer = variables(), OPTIMIZERS[name]()
    theta, rows = flat_of(own), Rows(flat_of(own).size, 64)
    offer = offer_of(optimizer, own)
    run = ScriptRun(offer, theta)
    for batch in batches()[:3]:
        run.round(rows, halves(batch))
    restored = ScriptRun(offer, theta, former=run)
    for batch in batches()[3:6]:
        run.round(rows, halves(batch))
        restored.round(rows, halves(batch))
    assert restored.theta.tobytes() == run.theta.tobytes()
    one, other = (each.shards[0].state_dict()["model"] for each in (restored, run))
    assert str(one["optimizer"]) == str(other["optimizer"])


@pytest.mark.parametrize("name", often(MOVED, ["Adam"]))
def test_an_optimizer_that_has_moved_goes_on_with_its_slots(name):
    own, optimizer = variables(), OPTIMIZERS[name]()
    rows, plan = Rows(flat_of(own).size, 64), batches()
    theta = train_alone(optimizer, own, rows, plan[:7])
    offer = offer_of(optimizer, own)
    assert offer.optimizers[0].iterations == 7
    own_slots = OwnSlots(optimizer, offer.optimizers[0], own)
    run = ScriptRun(offer, theta, 2, slots=[own_slots.collect()])
    expected = train_alone(optimizer, own, rows, plan[7:])
    for batch in plan[7:]:
        run.round(rows, halves(batch))
    np.testing.assert_allclose(run.theta, expected, rtol=0, atol=BOUND)


# -- rates and scales ---------------------------------------------------------------------------


def started(optimizer, name="bsp", **offered):
    own = variables()
    theta = flat_of(own)
    run = ScriptRun(offer_of(optimizer, own, **offered), theta, name=name)
    return run, np.full(theta.size, 0.5, np.float32)


@pytest.mark.parametrize("make", [o.SGD, o.Adam])
def test_the_rate_is_the_optimizer_s_until_a_script_sets_another(make):
    run, gradient = started(make(0.25))
    assert run.workers[0].learning_rate == run.shards[0].model.learning_rate == 0.25
    before = run.theta
    for number, rate in ((1, 0.125), (2, 9.0)):  # the lowest worker's value counts
        run.push(number, gradient, 4, ScriptFigures(PushHead(learning_rate=rate)))
    assert run.workers[1].learning_rate == 0.125
    run.push(1, gradient, 4)
    run.push(2, gradient, 4)
    assert run.workers[0].learning_rate == 0.125
    steps = 2 * 0.125 * (0.5 if make is o.SGD else 1.0)
    np.testing.assert_allclose((before - run.theta)[:-6], steps, rtol=1e-4)


def stairs():
    """Return a schedule that names the count that it is read at, in tenths."""
    return schedules.PiecewiseConstantDecay([0, 1, 2, 3, 4], [0.0, 0.1, 0.2, 0.3, 0.4, 0.5])


def count_of(run):
    """Return the count that the schedule is read at, as the rate and the replies have it."""
    model = run.shards[0].model
    count = round(10 * model.learning_rate)
    assert [each.schedule_counts for each in run.workers if each.versions[0] == model.version] in (
        [(count,)],
        [(count,), (count,)],
    )
    return count


def parts(number):
    return ScriptFigures(PushHead(batch_parts=number))


def test_a_schedule_counts_the_script_s_batches_whatever_their_rows():
    """A worker that has no row of a short batch has its part of the batch nevertheless."""
    run, gradient = started(o.SGD(stairs()))
    seen = []
    for rows in ((4, 4), (4, 4), (1, 0), (7, 1), (2, 2)):
        seen.append(count_of(run))
        for number, samples in enumerate(rows, 1):
            run.push(number, gradient, samples)
    assert [*seen, count_of(run)] == [0, 1, 2, 3, 4, 5]


def test_without_rounds_parts_of_batches_add_up():
    run, gradient = started(o.SGD(stairs()), name="asgd")
    seen = []
    for number, own in ((1, 2), (1, 2), (2, 1), (1, 1), (2, 2)):
        run.push(number, gradient, 4, parts(own))
        seen.append(count_of(run))
    assert seen == [1, 2, 2, 3, 4]


def test_the_count_of_batches_goes_on_after_a_restart():
    run, gradient = started(o.SGD(stairs()), name="asgd")
    for own in (2, 2, 1):
        run.push(1, gradient, 4, parts(own))
    other = ScriptRun(run.offer, run.theta, name="asgd", former=run)
    assert count_of(other) == 2
    other.push(2, gradient, 4, parts(1))  # the other half of the third batch
    assert count_of(other) == 3


def test_a_phase_begins_with_the_count_of_its_schedule_not_of_its_optimizer():
    optimizer = o.SGD(stairs())
    optimizer.iterations.assign(7)
    own = variables()
    offer = dataclasses.replace(offer_of(optimizer, own), first_batches=(2,))
    run = ScriptRun(offer, flat_of(own))
    assert count_of(run) == 2


def test_a_batch_that_overflows_is_not_counted():
    run, gradient = started(o.LossScaleOptimizer(o.SGD(stairs()), initial_scale=64.0))
    for figures in (OVERFLOW, ScriptFigures(PushHead(loss_scale=32.0))):
        for number in (1, 2):
            run.push(number, gradient, 4, figures)
    assert (run.shards[0].version, count_of(run)) == (2, 1)


def scaled(growth=2):
    return o.LossScaleOptimizer(o.SGD(0.1), initial_scale=64.0, dynamic_growth_steps=growth)


OVERFLOW = ScriptFigures(PushHead(loss_scale=64.0, overflow=True))


def test_an_overflow_skips_a_synchronous_round_and_halves_the_scale_once():
    run, gradient = started(scaled())
    assert run.workers[0].loss_scale == 64.0
    before = run.theta
    run.push(1, gradient, 4, OVERFLOW)
    run.push(2, gradient, 4, OVERFLOW)
    model = run.shards[0].model
    assert (model.version, model.samples, run.workers[1].loss_scale) == (1, 8, 32.0)
    assert run.theta.tobytes() == before.tobytes() == run.workers[0].weights.tobytes()
    fine = ScriptFigures(PushHead(loss_scale=32.0))
    run.push(1, gradient, 4, ScriptFigures(PushHead(loss_scale=32.0, overflow=True)))
    run.push(2, gradient, 4, fine)
    assert run.theta.tobytes() == before.tobytes() and model.loss_scale == 16.0
    for _ in range(2):  # growth counts rounds, not pushes
        assert model.loss_scale == 16.0
        run.push(1, gradient, 4, fine)
        run.push(2, gradient, 4, fine)
    assert model.loss_scale == 32.0
    np.testing.assert_allclose((before - run.theta)[:-6], 2 * 0.1 * 0.5, rtol=1e-5)


def test_an_overflow_skips_only_its_own_push_without_rounds():
    run, gradient = started(scaled(growth=100), name="asgd")
    model, before = run.shards[0].model, run.theta
    run.push(1, gradient, 4, OVERFLOW)
    run.push(2, gradient, 4, ScriptFigures(PushHead(loss_scale=64.0)))
    run.push(1, gradient, 4, OVERFLOW)  # at a scale that was halved already
    assert (model.version, model.loss_scale) == (3, 32.0)
    np.testing.assert_allclose((before - run.theta)[:-6], 0.1 * 0.5, rtol=1e-5)


def test_the_loss_scale_outlives_a_restart():
    run, gradient = started(scaled(growth=3), name="asgd")
    run.push(1, gradient, 4, OVERFLOW)
    run.push(2, gradient, 4, ScriptFigures(PushHead(loss_scale=64.0)))
    other = ScriptRun(run.offer, run.theta, name="asgd", former=run)
    for number in (1, 2):
        other.push(number, gradient, 4, ScriptFigures(PushHead(loss_scale=32.0)))
    assert other.shards[0].model.loss_scale == 64.0
