"""Outer optimizers on the PS: vectors, ten-line numpy references, equalities, restarts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.virtual.run import MiniRun
from tests.virtual.toy import method
from thinwire.ops.kernels import load_kernels
from thinwire.ops.optimizers import outer
from thinwire.ops.optimizers.base import Moment
from thinwire.ops.optimizers.outer import FedAdagrad, FedAdam, FedYogi, Nesterov
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ops.optimizers.server import keras_optimizer
from thinwire.ops.push_head import PushHead
from thinwire.ops.types import ConfigurationError, Kind, Update
from thinwire.ops.weighting.base import Arrival
from thinwire.ps.core.model import ShardModel

KERNELS = load_kernels("numpy")
BASE = [1.0, -2.0, 0.5, 3.0]
#: Changes D of two workers in three rounds; the workers send the negated values.
ROUNDS = [
    ([0.1, -0.2, 0.05, 0], [0.3, 0, -0.05, 0.4]),
    ([0.2, 0.1, 0, -0.1], [0, 0.1, 0.1, 0.3]),
    ([-0.1, 0, 0.2, 0.1], [0.1, -0.4, 0, 0.1]),
]
LOCAL = {"pacer": "fixed", "sync": "bsp"}


def composed(name="asgd", overrides=None, **choices):
    overrides = LOCAL | (overrides or {})
    steps = 2 if overrides["pacer"] == "fixed" else None
    return method(name, 2, overrides=overrides, local_steps=steps, **choices)


def shard_of(chosen, theta=BASE, schedule=None, budget=None):
    weights = np.array(theta, np.float32)
    return ShardModel(chosen, weights, KERNELS, budget or Budget(100), schedule or Schedule(0.1))


def played(chosen, samples=(1, 1), rounds=ROUNDS, shard=None):
    """The weights after each round."""
    shard, found = shard or shard_of(chosen), []
    for deltas in rounds:
        arrivals = [
            Arrival(
                number,
                Update(None, -np.array(delta, np.float32)),
                shard.version,
                head=PushHead(samples=n),
            )
            for number, (delta, n) in enumerate(zip(deltas, samples, strict=True), 1)
        ]
        shard.apply(arrivals, shard.version)
        found.append(shard.theta.copy())
    return found


ADAPTIVE = {"global_lr": 0.1}
VECTORS = {
    "diloco": (
        {"overrides": {"server_optimizer": "nesterov"}},
        (1, 1),
        "0.734 -1.867 0.5 2.734",
        "0.4876 -1.9433 0.4335 2.4876",
        "0.32884 -1.68297 0.27215 2.19584",
    ),
    "fedavg": (
        {"overrides": {"weighting": "samples"}},
        (100, 300),
        "0.75 -1.95 0.525 2.7",
        "0.7 -2.05 0.45 2.5",
        "0.65 -1.75 0.4 2.4",
    ),
    "adagrad with momentum": (
        {"overrides": {"server_optimizer": "adagrad"}, "server_beta_1": 0.9, **ADAPTIVE},
        (1, 1),
        "0.99004975 -1.99009901 0.5 2.99004975",
        "0.97758352 -1.99080115 0.49019608 2.97758352",
        "0.96636391 -1.98303531 0.47734186 2.96327161",
    ),
    "adagrad": (
        {"overrides": {"server_optimizer": "adagrad"}, **ADAPTIVE},
        (1, 1),
        "0.90049751 -1.9009901 0.5 2.90049751",
        "0.85597526 -1.97120429 0.40196078 2.85597526",
        "0.85597526 -1.88988661 0.31331097 2.81531642",
    ),
    "adam": (
        {"overrides": {"server_optimizer": "adam"}, **ADAPTIVE},
        (1, 1),
        "0.9047619 -1.90909091 0.5 2.9047619",
        "0.78444077 -1.91571047 0.41666667 2.78444077",
        "0.67562977 -1.84061352 0.29751294 2.64537253",
    ),
    "yogi": (
        {"overrides": {"server_optimizer": "yogi"}, **ADAPTIVE},
        (1, 1),
        "0.9047619 -1.90909091 0.5 2.9047619",
        "0.78490238 -1.915695 0.41666667 2.78490238",
        "0.67702881 -1.84077805 0.29762237 2.64683554",
    ),
}


@pytest.mark.parametrize("name", VECTORS)
def test_vectors(name):
    choices, samples, *expected = VECTORS[name]
    found = played(composed(**choices), samples)
    for weights, row in zip(found, expected, strict=True):
        np.testing.assert_allclose(weights, np.array(row.split(), float), rtol=0, atol=5e-7)


@pytest.mark.parametrize("name", ["diloco", "fedavg", "fedopt", "fedprox"])
def test_a_method_s_row_steps_by_the_vectors(name):
    rows = {"diloco": "diloco", "fedavg": "fedavg", "fedprox": "fedavg", "fedopt": "adam"}
    _, samples, *expected = VECTORS[rows[name]]
    given = {"global_lr": 0.1} if name == "fedopt" else {}
    found = played(method(name, 2, **given), samples)
    np.testing.assert_allclose(found[-1], np.array(expected[-1].split(), float), rtol=0, atol=5e-7)


def test_with_noise_all_count_alike():
    chosen = method("fedavg", 2, dp_clip=1.0, dp_noise=0.5)
    assert chosen.choices["weighting"] == "none"


# -- against ten lines of numpy ---------------------------------------------------------------


def textbook(policy, theta, pseudo_gradients, g):
    """float64, whole arrays, as the papers write it."""
    b = np.array(theta, np.float64)
    m, v = np.zeros_like(b), np.zeros_like(b)
    if getattr(policy, "server_v_start", "") == "tau_squared":
        v += policy.server_tau**2
    for t, D in enumerate(pseudo_gradients):
        if isinstance(policy, Nesterov):
            m = policy.momentum * m + D
            b = b - g * (D + policy.momentum * m)
            continue
        d, b1 = -D, policy.server_beta_1
        m = b1 * m + (1 - b1) * d
        rate = g
        if isinstance(policy, FedAdagrad):
            v = v + d**2
        elif isinstance(policy, FedAdam):
            v = policy.server_beta_2 * v + (1 - policy.server_beta_2) * d**2
            if policy.bias_correction:
                rate *= (1 - policy.server_beta_2 ** (t + 1)) ** 0.5 / (1 - b1 ** (t + 1))
        else:
            v = v - (1 - policy.server_beta_2) * d**2 * np.sign(v - d**2)
        b = b + rate * m / (np.sqrt(v) + policy.server_tau)
    return b


SHARES = st.sampled_from([0.0, 0.5, 0.9, 0.99])
ADAPTIVES = {
    "server_beta_1": SHARES,
    "server_tau": st.sampled_from([1e-4, 1e-3, 0.1]),
    "server_v_start": st.sampled_from(["zero", "tau_squared"]),
}
SQUARES = ADAPTIVES | {"server_beta_2": SHARES}
POLICIES = st.one_of(
    st.builds(Nesterov, momentum=SHARES),
    st.builds(FedAdagrad, **ADAPTIVES),
    st.builds(FedAdam, **SQUARES, bias_correction=st.booleans()),
    st.builds(FedYogi, **SQUARES),
)


@settings(max_examples=60, deadline=None)
@given(POLICIES, st.integers(0, 2**32 - 1), st.integers(1, 12), st.sampled_from([0.01, 0.1, 1.0]))
def test_random_traces_are_the_textbook_s(policy, seed, rounds, rate):
    rng = np.random.default_rng(seed)
    theta = rng.normal(size=9).astype(np.float32)
    started = theta.copy()
    sent = rng.normal(0, 0.1, (rounds, 9)).astype(np.float32)
    sent *= rng.random((rounds, 9)) < 0.7
    state = policy.init(theta)
    for delta in sent:
        touched, state = policy.step(theta, Update(None, delta), Kind.DELTA, rate, KERNELS, state)
        assert touched is None
    expected = textbook(policy, started, -sent.astype(np.float64), rate)
    np.testing.assert_allclose(theta, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("policy", [Nesterov(), FedAdagrad(), FedAdam(), FedYogi()], ids=str)
def test_a_sparse_update_is_the_dense_one_with_zeros(policy, monkeypatch):
    monkeypatch.setattr(outer, "_PIECE", 7)
    weights = [np.arange(20, dtype=np.float32) for _ in range(2)]
    states = [policy.init(each) for each in weights]
    for number in range(1, 5):
        indices = np.arange(number % 3, 20, 3)
        values = np.full(len(indices), 0.1 * number, np.float32)
        dense = np.zeros(20, np.float32)
        dense[indices] = values
        updates = Update(indices, values), Update(None, dense)
        for place, update in enumerate(updates):
            touched, states[place] = policy.step(
                weights[place], update, Kind.DELTA, 0.1, KERNELS, states[place]
            )
            assert touched is None  # momentum moves entries that this update does not send
    np.testing.assert_array_equal(*weights)


@pytest.mark.parametrize("policy", [Nesterov(), FedAdagrad(), FedAdam(), FedYogi()], ids=str)
def test_pieces_make_no_difference(policy, monkeypatch):
    weights = [np.linspace(-1, 1, 50, dtype=np.float32) for _ in range(2)]
    for theta, piece in zip(weights, (1 << 16, 7), strict=True):
        monkeypatch.setattr(outer, "_PIECE", piece)
        state = policy.init(theta)
        for number in range(4):
            delta = np.sin(np.arange(50, dtype=np.float32) * (number + 1)) * np.float32(0.1)
            _, state = policy.step(theta, Update(None, delta), Kind.DELTA, 0.1, KERNELS, state)
    np.testing.assert_array_equal(*weights)


@pytest.mark.parametrize("policy", [Nesterov(), FedAdagrad(), FedAdam(), FedYogi()], ids=str)
def test_an_entry_that_nobody_changes_stays(policy):
    theta = np.ones(3, np.float32)
    state = policy.init(theta)
    delta = np.array([0, 0.1, 0], np.float32)
    for _ in range(3):
        _, state = policy.step(theta, Update(None, delta), Kind.DELTA, 0.1, KERNELS, state)
    assert theta[0] == theta[2] == 1
    assert theta[1] > 1


@pytest.mark.parametrize("policy", [FedAdagrad(), FedAdam(), FedYogi()], ids=str)
def test_huge_changes_make_no_warning(policy, recwarn):
    theta = np.ones(3, np.float32)
    state = policy.init(theta)
    delta = np.full(3, 1e30, np.float32)
    policy.step(theta, Update(None, delta), Kind.DELTA, 0.1, KERNELS, state)
    assert np.isfinite(theta).all()
    assert not recwarn.list


# -- which one a name stands for --------------------------------------------------------------


@pytest.mark.parametrize(("name", "policy"), outer.OUTER_OPTIMIZERS.items())
def test_with_changes_of_weights_a_name_is_the_family_s(name, policy):
    assert isinstance(composed(overrides={"server_optimizer": name}).server, policy)


@pytest.mark.parametrize("name", ["adam", "adagrad"])
def test_with_gradients_a_name_that_keras_has_is_keras_s(name):
    chosen = method("bsp", 2, overrides={"server_optimizer": name})
    assert chosen.server.described.name.lower() == name


def test_of_a_gradient_the_pseudo_gradient_is_the_rate_times_it():
    chosen = method("bsp", 2, overrides={"server_optimizer": "nesterov"})
    shard = shard_of(chosen, schedule=Schedule(0.5))
    rounds = [tuple(-2 * np.array(delta) for delta in deltas) for deltas in ROUNDS]
    last = played(chosen, rounds=rounds, shard=shard)[-1]
    expected = np.array(VECTORS["diloco"][-1].split(), float)
    np.testing.assert_allclose(last, expected, rtol=0, atol=5e-7)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"server_tau": 1.0}, "--server_tau=1.0 .*--server_optimizer=sgd"),
        (
            {"overrides": {"server_optimizer": "nesterov"}, "server_beta_1": 0.5},
            "--server_beta_1=0.5 .*adagrad",
        ),
        (
            {"overrides": {"server_optimizer": "yogi"}, "bias_correction": True},
            "--bias_correction=True .*--server_optimizer=adam",
        ),
        (
            {"overrides": {"server_optimizer": "adam"}, "momentum": 0.5},
            "--momentum=0.5 .*has --server_optimizer=adam",
        ),
        (
            {"overrides": {"server_optimizer": "adam", "pacer": "every"}, "server_tau": 0.1},
            "--server_tau=0.1 .*changes of weights",
        ),
        (
            {"overrides": {"pacer": "every"}, "global_lr_schedule": "0.5:0.5"},
            "--global_lr_schedule .*changes of weights.*--lr_schedule",
        ),
        (
            {"global_lr_schedule": "0.5:0.5", "collective": "ring"},
            "--collective=.*--global_lr_schedule",
        ),
        (
            {"overrides": {"codec": "dgs", "pacer": "every", "server_optimizer": "nesterov"}},
            "--server_optimizer=nesterov with --momentum=0.9",
        ),
    ],
)
def test_what_cannot_act_is_refused(choices, words):
    with pytest.raises(ConfigurationError, match=words):
        composed(**choices)


def test_without_local_steps_there_is_no_optimizer_of_keras_for_it():
    with pytest.raises(ConfigurationError, match="--server_optimizer=nesterov .*--method=asgd"):
        keras_optimizer(Nesterov(), "nesterov")


# -- the outer rate -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sgd", *outer.OUTER_OPTIMIZERS])
def test_each_rate_has_its_own_schedule(name):
    """The PS steps by the outer optimizer; its replies to workers follow the inner optimizer."""
    chosen = composed(
        overrides={"server_optimizer": name},
        global_lr=0.5,
        global_lr_schedule="0.5:0.1",
    )
    for fraction, rate in ((0.4, 0.5), (0.5, 0.05)):
        assert chosen.server.rate(Moment(0.3, Kind.DELTA, fraction=fraction), {}).value == rate
    inner = Schedule(0.3, ((0.5, 0.5),))
    shard = shard_of(chosen, schedule=inner, budget=Budget(4))
    constant = shard_of(composed(overrides={"server_optimizer": name}, global_lr=0.5))
    for each in (shard, constant):
        played(chosen, rounds=ROUNDS[:2], shard=each)
    np.testing.assert_array_equal(shard.theta, constant.theta)  # for any inner rate
    assert shard.learning_rate == 0.15
    before = shard.theta.copy()
    played(chosen, rounds=ROUNDS[2:], shard=shard)
    played(chosen, rounds=ROUNDS[2:], shard=constant)
    whole = constant.theta - before
    np.testing.assert_allclose(shard.theta - before, 0.1 * whole, rtol=1e-3, atol=1e-6)


def test_an_outer_rate_is_in_the_fingerprint():
    rows = dict(composed(global_lr=0.5, global_lr_schedule="0.5:0.1").fingerprint())
    assert rows["server.global_lr"] == "0.5"
    assert rows["server.global_lr_schedule"] == "0.5:0.1"


# -- equalities ---------------------------------------------------------------------------------


def trained(name, nb_ps=1, **choices):
    overrides = choices.pop("overrides", {})
    chosen = method(name, 3, overrides=overrides, **choices)
    return MiniRun(chosen, iter_max=12, nb_ps=nb_ps, rate=0.05).run().theta


PLAIN = {"local_optimizer": "sgd", "momentum": 0.0, "global_lr": 1.0}


@pytest.mark.parametrize("nb_ps", [1, 2])
def test_diloco_without_outer_momentum_is_local_sgd(nb_ps):
    diloco = trained("diloco", nb_ps, local_steps=4, **PLAIN)
    local = trained("bsp", nb_ps, local_steps=4, overrides={"pacer": "fixed"})
    np.testing.assert_array_equal(diloco, local)


def test_diloco_without_outer_momentum_is_esync_of_as_many_steps():
    diloco = trained("diloco", local_steps=4, **PLAIN)
    chosen = method("esync", 3, max_local_steps=4)
    run = MiniRun(chosen, iter_max=12, rate=0.05)
    for worker in run.workers.values():
        worker.ready = lambda: False  # the answer is always "train on", up to the limit
    np.testing.assert_array_equal(diloco, run.run().theta)


def test_diloco_of_one_step_of_sgd_is_bsp():
    diloco = trained("diloco", local_steps=1, **PLAIN)
    np.testing.assert_array_equal(diloco, trained("bsp"))


def test_fedavg_of_equal_workers_is_local_sgd():
    fedavg = trained("fedavg", local_steps=4)
    local = trained("bsp", local_steps=4, overrides={"pacer": "fixed"})
    np.testing.assert_array_equal(fedavg, local)


def test_fedprox_without_its_pull_is_fedavg():
    np.testing.assert_array_equal(trained("fedprox", prox_mu=0.0), trained("fedavg"))


@pytest.mark.parametrize("server", outer.OUTER_OPTIMIZERS)
def test_shards_make_no_difference(server):
    """An entry's step depends on that entry alone."""
    choices = {"overrides": {"server_optimizer": server}, "local_steps": 3}
    one, three = (trained("fedprox", nb_ps, **choices) for nb_ps in (1, 3))
    np.testing.assert_allclose(one, three, rtol=0, atol=1e-6)
    assert np.isfinite(one).all()


@pytest.mark.parametrize("aggregate", ["median", "trimmed_mean"])
@pytest.mark.parametrize("name", ["diloco", "fedopt", "fedavg", "fedprox"])
def test_robust_aggregates_go_with_every_row(name, aggregate):
    """Updates are not weighted: a faulty worker that claims many examples must not count more."""
    chosen = method(name, 3, aggregate=aggregate, local_steps=3, local_optimizer="sgd")
    assert chosen.choices["weighting"] == "none"
    assert np.isfinite(MiniRun(chosen, iter_max=6, rate=0.05).run().theta).all()


@pytest.mark.parametrize("policy", [Nesterov(), FedAdam(bias_correction=True), FedYogi()])
def test_a_restart_changes_no_bit_of_the_next_steps(policy):
    theta, update = np.array(BASE, np.float32), Update(None, np.full(4, 0.1, np.float32))
    state = policy.init(theta)
    for _ in range(3):
        _, state = policy.step(theta, update, Kind.DELTA, 0.1, KERNELS, state)
    there = theta.copy()
    again = policy.restore(policy.save(state), there, policy.init(there))
    for _ in range(2):
        _, state = policy.step(theta, update, Kind.DELTA, 0.1, KERNELS, state)
        _, again = policy.step(there, update, Kind.DELTA, 0.1, KERNELS, again)
    np.testing.assert_array_equal(theta, there)
