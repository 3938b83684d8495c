"""Several optimizers of one script on the PS: each steps its own variables, as Keras alone does."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.script_run import SHAPES, UNUSED, Rows, ScriptRun, flat_of, offer_of, variables
from thinwire.ops.push_head import PushHead
from thinwire.ps.core import events
from thinwire.worker.core.messages import ScriptFigures

BATCH, STEPS = 16, 12
#: Alternating, so that neither optimizer's slices are adjacent.
FIRST = ("embedding/table", "dense/bias", "scale")
PAIRS = {
    "adam_sgd": (lambda: keras.optimizers.Adam(0.01), lambda: keras.optimizers.SGD(0.1)),
    "momentum_adamw": (
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    ),
    "schedule_rmsprop": (
        lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.05, STEPS)),
        lambda: keras.optimizers.RMSprop(0.01, global_clipnorm=0.5),
    ),
}


def groups_of(own):
    first = [variable for path, variable in zip(SHAPES, own, strict=True) if path in FIRST]
    second = [variable for path, variable in zip(SHAPES, own, strict=True) if path not in FIRST]
    return first, second


def gradients(rows, own, stepped, batch):
    flat, start, found = rows.gradient(flat_of(own), batch), 0, {}
    for path, variable in zip(SHAPES, own, strict=True):
        size = int(np.prod(variable.shape))
        part = flat[start : start + size].reshape(variable.shape)
        found[id(variable)] = None if path == UNUSED else tf.constant(part)
        start += size
    return [found[id(variable)] for variable in stepped]


def alone(pair, rows, plan, own):
    """Let both optimizers step one after the other on each batch; the second sees the first's."""
    steps = list(zip(pair, groups_of(own), strict=True))
    for optimizer, stepped in steps:
        optimizer.build(stepped)
    for batch in plan:
        for optimizer, stepped in steps:
            optimizer.apply(gradients(rows, own, stepped, batch), stepped)
    return flat_of(own)


def step(run, rows, batch, number, repeats):
    figures = ScriptFigures(PushHead(optimizer=number, repeats_batch=repeats))
    for worker, part in enumerate((batch[: BATCH // 4], batch[BATCH // 4 :]), 1):
        theta = run.workers[worker - 1].weights
        run.push(worker, rows.gradient(theta, part), len(part), figures)


def run_of(pair, own, nb_ps=1, **choices):
    several = list(zip(pair, groups_of(own), strict=True))
    offer = offer_of(several, own)
    return ScriptRun(offer, flat_of(own), nb_ps, **choices)


def plan_of(count=STEPS):
    rng = np.random.default_rng(3)
    return [rng.permutation(64)[:BATCH] for _ in range(count)]


@pytest.mark.parametrize("nb_ps", [1, 2])
@pytest.mark.parametrize("name", PAIRS)
def test_two_workers_step_as_both_optimizers_do_alone(name, nb_ps):
    if nb_ps > 1 and name == "schedule_rmsprop":
        return  # one of them clips by the norm of all gradients
    own, pair, plan = variables(), [make() for make in PAIRS[name]], plan_of()
    rows = Rows(flat_of(own).size, 64)
    run = run_of([make() for make in PAIRS[name]], own, nb_ps)
    for batch in plan:
        for number in (0, 1):
            step(run, rows, batch, number, repeats=number > 0)
    before = run.theta
    np.testing.assert_allclose(before, alone(pair, rows, plan, own), rtol=0, atol=1e-5)
    model = run.shards[0].model
    assert (model.version, model.samples) == (2 * STEPS, STEPS * BATCH)
    for number, (optimizer, stepped) in enumerate(zip(pair, groups_of(own), strict=True)):
        values = [variable.numpy() for variable in optimizer.variables]
        again = PAIRS[name][number]()
        run.fill(again, stepped, number)
        for variable, expected in zip(again.variables, values, strict=True):
            np.testing.assert_allclose(variable.numpy(), expected, rtol=0, atol=1e-5)


def test_a_push_brings_only_what_its_optimizer_steps():
    own = variables()
    run, rows = run_of([make() for make in PAIRS["adam_sgd"]], own), Rows(flat_of(own).size, 64)
    (layout,), seen = run.layouts, []
    handle = run.shards[0].handle

    def noted(event, now):
        if isinstance(event, events.Push):
            seen.append((event.head.optimizer, len(event.update.values)))
        return handle(event, now)

    run.shards[0].handle = noted
    for number in (0, 1):
        step(run, rows, plan_of(1)[0], number, repeats=False)
    sizes = [sum(int(np.prod(each.shape)) for each in group) for group in groups_of(own)]
    assert seen == [(0, sizes[0])] * 2 + [(1, sizes[1])] * 2
    assert layout.size == sum(sizes)


def test_a_restarted_shard_goes_on_with_all_of_them():
    own, plan = variables(), plan_of()
    rows, pair = Rows(flat_of(own).size, 64), [make() for make in PAIRS["momentum_adamw"]]
    half = len(plan) // 2
    first = run_of(pair, own)
    for batch in plan[:half]:
        for number in (0, 1):
            step(first, rows, batch, number, repeats=number > 0)
    second = run_of(pair, own, former=first)
    whole = run_of(pair, own)
    for run, batches in ((second, plan[half:]), (whole, plan)):
        for batch in batches:
            for number in (0, 1):
                step(run, rows, batch, number, repeats=number > 0)
    np.testing.assert_array_equal(second.theta, whole.theta)


def test_a_rate_is_set_for_one_optimizer():
    own, pair = variables(), [keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)]
    run = run_of(pair, own, nb_workers=1)
    ones = np.ones(flat_of(own).size, np.float32)
    before = run.theta
    for number, rate in ((0, 0.5), (1, None), (0, None)):
        run.push(1, ones, 4, ScriptFigures(PushHead(learning_rate=rate, optimizer=number)))
    moved, start = before - run.theta, 0
    for path, shape in SHAPES.items():
        size = int(np.prod(shape))
        expected = 1.0 if path in FIRST else 0.1
        np.testing.assert_allclose(moved[start : start + size], expected, atol=1e-6)
        start += size


def test_a_round_of_different_optimizers_is_refused_by_name():
    own = variables()
    run = run_of([make() for make in PAIRS["adam_sgd"]], own)
    ones, refused = np.ones(flat_of(own).size, np.float32), []
    core, handle = run.shards[0], run.shards[0].handle

    def noted(event, now):
        actions = handle(event, now)
        refused.extend(each for each in actions if isinstance(each, events.Reject))
        return [each for each in actions if not isinstance(each, events.Reject)]

    core.handle = noted
    for worker in (1, 2):
        run.push(worker, ones, 4, ScriptFigures(PushHead(optimizer=worker - 1)))
    assert [each.worker for each in refused] == [1, 2]
    assert {each.reason for each in refused} == {"OPTIMIZER"}
    words = "worker 1 steps optimizer 1 of the script and worker 2 optimizer 2"
    assert all(words in each.message for each in refused)
    assert "--method=asgd" in refused[1].message
    assert core.version == 0


def test_one_after_the_other_needs_no_order():
    own = variables()
    run = run_of([make() for make in PAIRS["adam_sgd"]], own, name="asgd")
    ones = np.ones(flat_of(own).size, np.float32)
    for worker, number in ((1, 0), (2, 1), (2, 1), (1, 0), (1, 1)):
        run.push(worker, ones, 4, ScriptFigures(PushHead(optimizer=number)))
    assert run.shards[0].version == 5
    assert int(run.shards[0].model.slots()[0].slots[0].values) == 2


def test_the_rows_of_an_embedding_travel_alone():
    own = variables()
    run = run_of([make() for make in PAIRS["adam_sgd"]], own, nb_workers=1)
    table = SHAPES["embedding/table"]
    gradient = np.zeros(flat_of(own).size, np.float32)
    gradient[: table[1]] = 1.0
    touched = {0: np.array([0])}
    outgoing = run.workers[0].begin(
        gradient, 4, 1.0, figures=ScriptFigures(PushHead(optimizer=0), touched=touched)
    )
    assert outgoing.shards[0][0].indices.tolist() == list(range(table[1]))
    assert [block.slot for block in outgoing.shards[0]] == [0, 2, 4]
