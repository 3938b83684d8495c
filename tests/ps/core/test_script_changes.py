"""Weight changes by scripts, which the PS adds in addition to the optimizer's step."""

import dataclasses

import keras
import numpy as np
import pytest

from tests.script_run import BODIES, Rows, ScriptRun, flat_of, offer_of, variables
from thinwire.ops.codecs.base import NonFiniteUpdate
from thinwire.ops.push_head import PushHead
from thinwire.ops.types import Update
from thinwire.proto.framing import Malformed
from thinwire.ps.wire.claims import ClaimBounds
from thinwire.ps.wire.push_decoder import PushDecoder
from thinwire.worker.core.messages import ScriptFigures

OWN = variables()
THETA = flat_of(OWN)
NOTHING = np.zeros_like(THETA)


def run_of(name="bsp", nb_ps=1, nb_workers=2, optimizer=None, **choices):
    offer = offer_of(optimizer or keras.optimizers.SGD(0.1), OWN)
    return ScriptRun(offer, THETA, nb_ps, nb_workers, name, **choices)


def push(run, worker, change, gradient=NOTHING, samples=4, **numbers):
    run.push(worker, gradient.copy(), samples, ScriptFigures(PushHead(**numbers), change=change))


@pytest.mark.parametrize("name", ["bsp", "asgd", "ssp", "adacomp", "dgs", "gsp"])
@pytest.mark.parametrize("nb_ps", [1, 2])
def test_what_all_workers_change_is_added_once(name, nb_ps):
    choices = {"staleness_bound": 3} if name == "ssp" else {}
    choices |= {"groups": ((1, 2), (3,))} if name == "gsp" else {}
    choices |= {"overrides": {"server_optimizer": "sgd"}} if name == "dgs" else {}
    run = run_of(name, nb_ps, 3, **choices)
    change = np.where(np.abs(THETA) > 1, -THETA / 2, 0).astype(np.float32)
    for worker in (1, 2, 3):
        push(run, worker, change)
    np.testing.assert_allclose(run.theta, THETA + change, rtol=0, atol=1e-6)
    for worker in (1, 2, 3):  # workers end with the shards' weights
        push(run, worker, None)
    for worker in run.workers:
        np.testing.assert_array_equal(worker.base, run.theta)


def test_what_one_of_two_changes_counts_half():
    for name in ("bsp", "asgd"):
        run = run_of(name)
        push(run, 1, np.ones_like(THETA))
        push(run, 2, None)
        np.testing.assert_allclose(run.theta, THETA + 0.5, rtol=0, atol=1e-6)


def test_a_worker_that_sits_a_round_out_does_not_count_unless_it_has_changed_something():
    run = run_of()
    push(run, 1, np.ones_like(THETA))
    push(run, 2, None, samples=0)
    np.testing.assert_allclose(run.theta, THETA + 1, rtol=0, atol=1e-6)
    push(run, 1, np.ones_like(THETA))
    push(run, 2, np.zeros_like(THETA) + 3, samples=0)
    np.testing.assert_allclose(run.theta, THETA + 3, rtol=0, atol=1e-6)


def test_the_optimizer_steps_from_what_was_set_and_keeps_its_slots():
    optimizer, alone = keras.optimizers.Adam(0.1), variables()
    rows = Rows(THETA.size, 8)
    optimizer.build(alone)
    run = run_of(optimizer=keras.optimizers.Adam(0.1))
    for step in range(4):
        change = None
        if step % 2:
            change = (flat_of(alone) * -0.25).astype(np.float32)
            for variable in alone:
                variable.assign(variable * 0.75)
        gradient = rows.gradient(flat_of(alone), np.arange(8))
        pieces = np.split(gradient, np.cumsum([v.numpy().size for v in alone])[:-1])
        pairs = zip(pieces, alone, strict=True)
        optimizer.apply([piece.reshape(v.shape) for piece, v in pairs], alone)
        for worker in (1, 2):
            push(run, worker, change, gradient)
    keep = slice(0, -6)  # the last variable has no gradient in an offer
    np.testing.assert_allclose(run.theta[keep], flat_of(alone)[keep], rtol=0, atol=1e-5)


def test_an_overflow_skips_the_step_and_not_what_was_set():
    offer = offer_of(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 8.0), OWN)
    run = ScriptRun(offer, THETA)
    for worker in (1, 2):
        push(run, worker, np.ones_like(THETA), loss_scale=8.0, overflow=worker == 1)
    np.testing.assert_allclose(run.theta, THETA + 1, rtol=0, atol=1e-6)
    assert run.shards[0].version == 1


def test_a_script_that_changes_nothing_sends_nothing_of_it():
    run = run_of(nb_ps=2)
    request = run.workers[0].begin(NOTHING.copy(), 4, 1.0)
    assert not request.changes
    few = np.zeros_like(THETA)
    few[3] = 1
    request = run.workers[0].begin(NOTHING.copy(), 4, 1.0, figures=ScriptFigures(change=few))
    assert sum(block.values.data.size for part in request.changes for block in part) == 1


def test_weights_that_are_not_finite_are_not_sent():
    run, bad = run_of(), np.full_like(THETA, np.nan)
    with pytest.raises(NonFiniteUpdate, match="set weights to NaN"):
        run.workers[0].begin(NOTHING.copy(), 4, 1.0, figures=ScriptFigures(change=bad))


def test_a_shard_that_measures_updates_takes_no_others():
    run = run_of()
    run.decoders[0] = PushDecoder(
        run.layouts[0], run.method.kind, BODIES, 0, ClaimBounds.of(run.method, measures=True)
    )
    push(run, 1, None)
    with pytest.raises(Malformed, match="--max_update_norm"):
        push(run, 2, np.ones_like(THETA))
    other = dataclasses.replace(run.method, collective="ring")
    assert ClaimBounds.of(run.method).takes_changes and not ClaimBounds.of(other).takes_changes


def test_changes_travel_with_the_last_message_of_an_update_alone():
    run = run_of()
    outgoing = run.workers[0].begin(
        NOTHING.copy(), 4, 1.0, figures=ScriptFigures(change=np.ones_like(THETA))
    )
    ((message, pieces),) = run.encoders[0][0].encode(outgoing, 1, 1)
    payload = memoryview(b"".join(bytes(piece) for piece in pieces))
    push = message.push
    assert isinstance(run.decoders[0].decode(1, push, payload).change, Update)
    push.more = True
    with pytest.raises(Malformed, match="last message"):
        run.decoders[0].read(push, payload, parts=True)
    push.more, push.change_bytes = False, len(payload) + 1
    with pytest.raises(Malformed, match="bytes of weight changes"):
        run.decoders[0].decode(1, push, payload)
