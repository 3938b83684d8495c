"""A script's optimizer on the workers, with real cores: one worker equals the optimizer alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.virtual.run import MiniRun
from tests.virtual.toy import SPEC, Softmax, method
from tests.virtual.worker import core_of, numbers, reply, start
from thinwire.ops.codecs.base import NonFiniteUpdate
from thinwire.ops.downlink.types import Operation
from thinwire.ops.optimizers.local import ScriptStep
from thinwire.ops.push_head import PushHead
from thinwire.ops.types import ConfigurationError, Kind
from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.worker.core.messages import ScriptFigures

RATE = 0.01
SPARSE = ("dgs", "gd", "dgc")
#: Every composition in which a script's own steps are sent.
LOCAL = {
    "esync": ("esync", {"max_local_steps": 3}),
    "local_steps": ("bsp", {"local_steps": 3, "overrides": {"pacer": "fixed"}}),
    "local_steps_asp": ("asgd", {"local_steps": 4, "overrides": {"pacer": "fixed"}}),
}


def script(name, **choices):
    nb_workers = choices.pop("nb_workers", 1)
    warm = {"warmup_epochs": 0} if name == "dgc" else {}
    return method(name, nb_workers, local_optimizer="script", **(warm | choices))


class Adam:
    """Ten simple lines of a script's optimizer with its own slots."""

    def __init__(self):
        self.m, self.v, self.t = np.zeros(28, np.float32), np.zeros(28, np.float32), 0

    def step(self, weights, gradient):
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient**2
        m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        return (weights - RATE * m / (np.sqrt(v) + 1e-7)).astype(np.float32)


def drive(chosen, iter_max, nb_ps=1):
    """Run workers that each step with their own Adam; return the run."""
    run = MiniRun(chosen, iter_max=iter_max, nb_ps=nb_ps, rate=0.5)  # the PS's rate plays no part
    for worker in run.workers.values():
        own = Adam()
        worker.submitted = lambda gradient, w=worker, own=own: own.step(w.core.weights, gradient)
    return run.run()


def alone(run):
    """Return the weights after the same mini-batches without any server."""
    weights = np.random.default_rng(run.seed).normal(size=28).astype(np.float32) * 0.1
    problem, own = Softmax(), Adam()
    for _, batch in run.log:
        weights = own.step(weights, problem.gradient(weights, batch)[1])
    return weights


@pytest.mark.parametrize("nb_ps", [1, 3])
@pytest.mark.parametrize("down_codec", ["auto", "dense", "delta"])
@pytest.mark.parametrize("name", SPARSE)
def test_everything_sent_by_one_worker_is_the_script_alone(name, down_codec, nb_ps):
    chosen = script(name, compression_rate=1.0, overrides={"down_codec": down_codec})
    run = drive(chosen, 60, nb_ps)
    np.testing.assert_allclose(run.theta, alone(run), rtol=0, atol=1e-6)
    assert run.problem.accuracy(run.theta) > 0.5


@pytest.mark.parametrize("nb_ps", [1, 2])
@pytest.mark.parametrize("name", LOCAL)
def test_local_steps_of_one_worker_are_the_script_alone(name, nb_ps):
    base, choices = LOCAL[name]
    run = drive(script(base, **choices), 15, nb_ps)
    assert len(run.log) >= 15
    np.testing.assert_allclose(run.theta, alone(run), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [*SPARSE, *LOCAL])
def test_two_workers_train(name):
    base, choices = LOCAL.get(name, (name, {"compression_rate": 0.2}))
    run = drive(script(base, nb_workers=2, **choices), 150)
    assert run.problem.accuracy(run.theta) > 0.8


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(SPARSE),
    rate=st.sampled_from([0.05, 0.3, 1.0]),
    dtype=st.sampled_from(["float32", "float16", "int8"]),
    seed=st.integers(0, 1000),
    num_steps=st.integers(1, 12),
)
def test_what_was_sent_and_the_residual_are_all_changes(name, rate, dtype, seed, num_steps):
    core = core_of(name, local_optimizer="script", compression_rate=rate, value_dtype=dtype,
                   **({"warmup_epochs": 0} if name == "dgc" else {}))  # fmt: skip
    first = numbers(seed)
    start(core, first)
    rng = np.random.default_rng(seed)
    total = np.zeros(core.spec.num_parameters)
    for _ in range(num_steps):
        change = rng.standard_normal(total.size, np.float32) * np.float32(0.01)
        after = core.weights + change
        total += after.astype(np.float64) - core.weights
        core.begin(after, 8, 1.0)
        core.finish([reply(core.layouts[0], Operation.SET_REST, blocks=[])])
    codec = core.save()["codec"]["inner"]
    residual = codec["residual"] if "residual" in codec else codec["inner"]["residual"]
    np.testing.assert_allclose(core.weights - first, total, rtol=0, atol=1e-5)
    moved = core.base.astype(np.float64) - first
    np.testing.assert_allclose(moved + np.concatenate(residual), total, rtol=0, atol=1e-5)
    if core.end_training() is not None:
        core.finish([reply(core.layouts[0], Operation.SET_REST, blocks=[])])
    moved = core.base.astype(np.float64) - first
    atol = 1e-5 if dtype == "float32" else 0.01  # otherwise the last packet is rounded, too
    np.testing.assert_allclose(moved, total, rtol=0, atol=atol)


@pytest.mark.parametrize("name", [*SPARSE, *LOCAL])
def test_weights_that_are_not_finite_change_nothing(name):
    base, choices = LOCAL.get(name, (name, {}))
    core = core_of(base, local_optimizer="script", **choices)
    start(core, numbers())
    bad = numbers(1)
    bad[3] = np.inf
    for weights, loss in ((bad, 1.0), (numbers(1), np.nan)):
        with pytest.raises(NonFiniteUpdate):
            core.begin(weights, 8, loss)
    np.testing.assert_array_equal(core.weights, numbers())
    assert (core.step, core.round.num_steps) == (0, 0)


def test_the_local_round_of_a_script_survives_its_process(tmp_path):
    base, choices = LOCAL["local_steps"]
    core = core_of(base, local_optimizer="script", **choices)
    start(core, numbers())
    for seed in (1, 2):
        assert core.begin(numbers(seed), 8, 1.0) is None
    np.testing.assert_array_equal(core.weights, numbers(2), "the script's weights, exactly")
    Checkpoints(tmp_path).save(0, core.save())
    other = core_of(base, local_optimizer="script", **choices)
    assert other.restore(Checkpoints(tmp_path).load_latest()[1], 0)
    start(other, numbers())
    np.testing.assert_array_equal(other.resume_round(), numbers(2))
    push = other.begin(numbers(3), 8, 1.0)
    assert (push.head.local_steps, push.head.samples, push.kind) == (3, 24, Kind.DELTA)


def test_a_script_s_momentum_becomes_the_codec_s_where_none_is_given():
    for name in ("dgs", "dgc"):
        chosen = script(name)
        assert chosen.takes_momentum
        given = chosen.with_momentum(0.8)
        assert given.codec != chosen.codec
        assert not given.takes_momentum
        own = script(name, **{f"{name}_momentum": 0.8})
        assert not own.takes_momentum
        assert own.with_momentum(0.3) is not None
        assert own.with_momentum(0.3).codec == own.codec == given.codec
        assert not method(name).takes_momentum, "0.7 and 0.9 count where workers send gradients"
    assert not script("gd").takes_momentum


def test_one_worker_with_sgd_s_momentum_in_the_codec_is_momentum_sgd():
    """The dgs codec has the same momentum for gradients; the SGD steps without momentum."""
    momentum, rate = 0.7, np.float32(0.1)
    chosen = script("dgs", compression_rate=1.0).with_momentum(momentum)
    run = MiniRun(chosen, iter_max=60)
    worker = run.workers[1]
    worker.submitted = lambda gradient: worker.core.weights - rate * gradient
    run.run()
    reference = MiniRun(method("dgs", 1, compression_rate=1.0, dgs_momentum=momentum), 60).run()
    np.testing.assert_allclose(run.theta, reference.theta, rtol=0, atol=1e-6)


def test_the_script_s_rate_goes_with_the_push():
    core = core_of("dgs", local_optimizer="script")
    start(core, numbers())
    push = core.begin(numbers(1), 8, 1.0, figures=ScriptFigures(PushHead(learning_rate=0.125)))
    assert push.head.learning_rate == 0.125
    core.finish([reply(core.layouts[0], Operation.NONE, blocks=[])])
    assert core.begin(numbers(2), 8, 1.0).head.learning_rate is None


def test_an_overflow_takes_part_in_the_round_without_an_update():
    core = core_of("bsp")
    start(core, numbers())
    core.receive(0, reply(core.layouts[0], Operation.NONE, blocks=[], loss_scale=1024.0))
    assert core.loss_scale == 1024
    bad = np.full(core.spec.num_parameters, np.inf, np.float32)
    push = core.begin(
        bad, 8, np.inf, figures=ScriptFigures(PushHead(loss_scale=1024.0, overflow=True))
    )
    head = push.head
    assert (head.overflow, head.loss_scale, head.samples, head.loss) == (True, 1024.0, 8, None)
    assert push.shards == [()]
    core.undelivered()
    core.finish([reply(core.layouts[0], Operation.NONE, blocks=[], loss_scale=512.0)])
    assert core.loss_scale == 512
    assert core.begin(numbers(1), 8, 1.0).head.step == 2


@pytest.mark.parametrize("nb_ps", [1, 2])
@pytest.mark.parametrize(("rows", "is_sparse"), [([0, 2], True), ([0, 1, 2, 3], False)])
def test_few_touched_rows_are_sent_alone(rows, is_sparse, nb_ps):
    run = MiniRun(method("bsp", 1), nb_ps=nb_ps)
    core = run.workers[1].core
    gradient = np.zeros(28, np.float32)
    gradient[:16].reshape(4, 4)[rows] = 1.5
    gradient[16:] = 2
    push = core.begin(gradient, 8, 1.0, figures=ScriptFigures(touched={0: np.array(rows)}))
    found = np.zeros(28, np.float32)
    for layout, blocks in zip(core.layouts, push.shards, strict=True):
        for block in blocks:
            piece = layout.slices[block.slot]
            part = found[SPEC.offsets[piece.tensor] + piece.start :][: piece.size]
            part[slice(None) if block.indices is None else block.indices] = block.values.data
            assert (block.indices is not None) == (is_sparse and piece.tensor == 0)
    np.testing.assert_array_equal(found, gradient)


def test_touched_rows_make_the_same_model():
    thetas = []
    for touched in (True, False):
        run = MiniRun(method("bsp", 2), iter_max=20)
        for worker in run.workers.values():
            begin = worker.core.begin

            def few_rows(gradient, samples, loss, begin=begin, touched=touched):
                gradient[:16].reshape(4, 4)[[1, 3]] = 0
                figures = ScriptFigures(touched={0: np.array([0, 2])} if touched else {})
                return begin(gradient, samples, loss, figures=figures)

            worker.core.begin = few_rows
        thetas.append(run.run().theta)
    np.testing.assert_array_equal(*thetas)


@pytest.mark.parametrize(
    ("name", "choices", "found"),
    [
        ("bsp", {}, "sends gradients. Take --method=dgs"),
        ("adacomp", {}, "sends gradients"),
        ("dgs", {"local_momentum": 0.5}, "--local_momentum=0.5 is for"),
        ("dgs", {"local_lr": 0.5}, "--local_lr=0.5 is for"),
        ("esync", {"local_opt_state": "reset"}, "--local_opt_state=reset is for"),
        ("dgc", {"dgc_clip_norm": 1.0}, "clipnorm"),
    ],
)
def test_what_a_script_s_steps_do_not_go_with(name, choices, found):
    with pytest.raises(ConfigurationError, match=found):
        script(name, **choices)


def test_both_sides_compare_that_the_script_steps():
    rows = dict(script("dgs").fingerprint())
    assert rows["local.optimizer"] == ScriptStep().optimizer
    assert rows == dict(script("dgs").fingerprint())
    assert rows != dict(method("dgs", 1).fingerprint())
