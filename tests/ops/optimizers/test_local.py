"""Local steps of SGD, momentum and Adam equal numpy; an exchange resets slots correctly."""

import contextlib
import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from thinwire.ops.methods.builder import Choices, compose
from thinwire.ops.optimizers.local import LOCAL_OPTIMIZERS, LocalUpdate
from thinwire.ops.types import ConfigurationError, ModelSpec, TensorSpec

SIZE = 7
LOCAL = {"pacer": "fixed"}


def numbers(seed):
    return np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)


class Numpy:
    """The textbook, with the step count and slots in the order in which they are averaged."""

    def __init__(self, name):
        self.step = getattr(self, name)
        self.count, self.slots = 0, [np.zeros(SIZE), np.zeros(SIZE)]

    def sgd(self, weights, gradient, rate):
        return weights - rate * gradient

    def momentum(self, weights, gradient, rate):
        self.count += 1
        self.slots[0] = 0.9 * self.slots[0] - rate * gradient
        return weights + self.slots[0]

    def adam(self, weights, gradient, rate):
        self.count += 1
        first, second = self.slots
        self.slots = [0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2]
        rate = rate * np.sqrt(1 - 0.999**self.count) / (1 - 0.9**self.count)
        return weights - rate * self.slots[0] / (np.sqrt(self.slots[1]) + 1e-7)


def update_of(name, **fields):
    return LocalUpdate(name, 0.9 if name == "momentum" else 0.0, **fields)


def begin(policy, weights):
    return policy.restart(weights, policy.init(SIZE))


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_steps_are_the_textbook_s(name):
    policy, textbook = update_of(name), Numpy(name)
    weights, expected = numbers(0), numbers(0).astype(np.float64)
    state = begin(policy, weights)
    for number in range(1, 8):
        rate = 0.1 if number < 5 else 0.02
        expected = textbook.step(expected, numbers(number), rate)
        state = policy.step(weights, numbers(number), rate, state, weights)
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-5)  # 0.999**n in float32


@pytest.mark.parametrize("decay", [None, 0.1, 0.0])
def test_adamw_is_that_of_keras_alone_bit_for_bit(decay):
    options = {} if decay is None else {"weight_decay": decay}
    alone, variable = keras.optimizers.AdamW(0.01, **options), keras.Variable(numbers(0))
    alone.build([variable])
    step = tf.function(lambda value: alone.apply([value], [variable]), jit_compile=True)
    policy, weights = LocalUpdate("adamw", weight_decay=decay), numbers(0)
    state = begin(policy, weights)
    for number in range(1, 9):
        step(tf.constant(numbers(number)))
        state = policy.step(weights, numbers(number), 0.01, state, weights)
        if number % 3 == 0:  # an exchange leaves the slots alone
            state = policy.restart(weights, state)
    np.testing.assert_array_equal(weights, variable.numpy())


@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test_fedprox_pulls_to_the_base(name):
    policy, textbook = update_of(name, prox_mu=0.5), Numpy(name)
    base = numbers(0)
    weights, expected = base.copy(), base.astype(np.float64)
    state = begin(policy, weights)
    for number in range(1, 6):
        gradient = numbers(number) + 0.5 * (expected - base)
        expected = textbook.step(expected, gradient, 0.1)
        state = policy.step(weights, numbers(number), 0.1, state, base)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_a_rate_of_its_own_follows_the_schedule(name):
    one, other = update_of(name, rate_factor=0.5), update_of(name)
    weights = [numbers(0), numbers(0)]
    states = [begin(one, weights[0]), begin(other, weights[1])]
    for number in range(1, 4):
        one.step(weights[0], numbers(number), 0.2 / number, states[0], weights[0])
        other.step(weights[1], numbers(number), 0.1 / number, states[1], weights[1])
    np.testing.assert_array_equal(weights[0], weights[1])


@pytest.mark.parametrize("name", ["momentum", "adam"])
@pytest.mark.parametrize("fate", ["keep", "reset", "average"])
def test_an_exchange_clears_the_slots_or_leaves_them(name, fate):
    policy, textbook = update_of(name, opt_state=fate), Numpy(name)
    weights = numbers(0)
    state = begin(policy, weights)
    for number in range(1, 4):
        textbook.step(weights, numbers(number), 0.1)
        policy.step(weights, numbers(number), 0.1, state, weights)
    weights = numbers(9)
    state = policy.restart(weights, state)
    textbook = Numpy(name) if fate == "reset" else textbook
    expected = textbook.step(weights.astype(np.float64), numbers(4), 0.1)
    policy.step(weights, numbers(4), 0.1, state, weights)
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_what_is_averaged_is_the_step_count_and_the_slots(name):
    policy, textbook = update_of(name, opt_state="average"), Numpy(name)
    weights = numbers(0)
    state = begin(policy, weights)
    assert not policy.pack(state).any()
    for number in range(1, 4):
        textbook.step(weights, numbers(number), 0.1)
        policy.step(weights, numbers(number), 0.1, state, weights)
    packed = policy.pack(state)
    num_slots = {"momentum": 1, "adam": 2}[name]
    assert packed.dtype == np.float32 and len(packed) == policy.num_averaged(SIZE)
    expected = np.concatenate([[textbook.count], *textbook.slots[:num_slots]])
    np.testing.assert_allclose(packed, expected, rtol=1e-5, atol=1e-7)

    other = begin(policy, numbers(0))
    mean = packed / 2
    mean[0] = 1.75  # workers with different numbers of steps
    other = policy.unpack(mean, other)
    mean[0] = 2
    np.testing.assert_array_equal(policy.pack(other), mean)


@pytest.mark.parametrize(
    ("name", "fate"), [("sgd", "average"), ("adam", "keep"), ("momentum", "reset")]
)
def test_otherwise_nothing_travels(name, fate):
    policy = update_of(name, opt_state=fate)
    assert policy.num_averaged(SIZE) == 0
    assert policy.pack(policy.init(SIZE)).size == 0


BUILT = [name for name, policy in LOCAL_OPTIMIZERS.items() if policy is LocalUpdate]
SHAPES = ModelSpec((TensorSpec("kernel", (2, 3)), TensorSpec("bias", (1,))))


#: One optimizer for each initial slot value: zeros, a constant, factors, ones, a product.
BEGINNINGS = ["adam", "adagrad", "adafactor", "nadam", "ftrl"]
#: One for each way to keep slots; the rest is for `make product`.
KEPT = [*BEGINNINGS, "muon", "lion"]


@pytest.mark.parametrize("name", BEGINNINGS)
def test_a_reset_begins_anew_with_any_optimizer(name):
    """Some slots begin at 0.1 or 1, not at 0."""
    policy = update_of(name, opt_state="reset")
    used, fresh = policy.init(SIZE, SHAPES), policy.init(SIZE, SHAPES)
    weights = numbers(0)
    used = policy.restart(weights, used)
    policy.step(weights, numbers(1), 0.1, used, weights)
    weights, expected = numbers(2), numbers(2)
    used, fresh = policy.restart(weights, used), policy.restart(expected, fresh)
    policy.step(weights, numbers(3), 0.1, used, weights)
    policy.step(expected, numbers(3), 0.1, fresh, expected)
    np.testing.assert_array_equal(weights, expected)


def averaged():
    found = []
    for name in BUILT:
        with contextlib.suppress(ConfigurationError):
            policy = update_of(name, opt_state="average")
            marks = [pytest.mark.product] * (name not in KEPT)
            found.append(pytest.param(policy, id=name, marks=marks))
    return found


@pytest.mark.parametrize("policy", averaged())
def test_all_that_is_remembered_is_averaged(policy):
    weights, there = numbers(0), numbers(0)
    state, other = begin(policy, weights), begin(policy, there)
    policy.step(weights, numbers(1), 0.1, state, weights)
    packed = policy.pack(state)
    assert len(packed) == policy.num_averaged(SIZE)
    other = policy.restart(weights, policy.unpack(packed, other))
    there = weights.copy()
    policy.step(weights, numbers(2), 0.1, state, weights)
    policy.step(there, numbers(2), 0.1, other, there)
    np.testing.assert_array_equal(weights, there)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.product] * (n not in KEPT)) for n in BUILT],
)
def test_slots_survive_a_save(name):
    policy = update_of(name)
    weights = numbers(0)
    state = begin(policy, weights)
    for number in range(1, 4):
        policy.step(weights, numbers(number), 0.1, state, weights)
    saved, here = policy.save(state), weights.copy()
    other = policy.restore(saved, here, policy.init(SIZE))
    for number in range(4, 7):
        policy.step(weights, numbers(number), 0.1, state, weights)
        policy.step(here, numbers(number), 0.1, other, here)
    np.testing.assert_array_equal(weights, here)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"optimizer": "schedulefreeadamw"}, "schedulefreeadamw: expected one of sgd, momentum"),
        (
            {"optimizer": "lamb", "opt_state": "average"},
            "--local_opt_state=average with --local_optimizer=lamb",
        ),
        ({"opt_state": "forget"}, "--local_opt_state=forget: expected one of keep, reset"),
        ({"momentum": 1.0}, "--local_momentum=1.0: expected 0 to 0.9999"),
        ({"momentum": float("nan")}, "--local_momentum=nan"),
        ({"momentum": 0.5, "optimizer": "adam"}, "--local_optimizer=adam defines its momentum"),
        ({"weight_decay": -1.0}, "--local_weight_decay=-1.0"),
        ({"prox_mu": float("nan")}, "--prox_mu=nan"),
        ({"rate_factor": 0.0}, "--local_lr=0.0"),
        ({"rate_factor": float("inf")}, "--local_lr=inf"),
        ({"rate_factor": float("nan")}, "--local_lr=nan"),
    ],
)
def test_bad_values_are_refused(fields, words):
    with pytest.raises(ConfigurationError, match=words):
        LocalUpdate(**fields)


def composed(name="bsp", overrides=LOCAL, local_steps=3, **choices):
    return compose(
        Choices.of(
            method=name, nb_workers=2, overrides=overrides, local_steps=local_steps, **choices
        )
    )


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ({}, LocalUpdate()),
        ({"local_optimizer": "momentum"}, LocalUpdate("momentum", 0.9)),
        ({"local_optimizer": "momentum", "local_momentum": 0.5}, LocalUpdate("momentum", 0.5)),
        ({"local_momentum": 0.5}, LocalUpdate("sgd", 0.5)),
        ({"local_lr": 0.3, "learning_rate": 0.1}, LocalUpdate(rate_factor=0.3 / 0.1)),
        (
            {"local_optimizer": "adam", "local_opt_state": "reset"},
            LocalUpdate("adam", opt_state="reset"),
        ),
    ],
)
def test_flags_make_the_policy(choices, expected):
    method = composed(**choices)
    assert method.local == expected
    assert method.warnings == ()
    for name, value in dataclasses.asdict(expected).items():
        assert (f"local.{name}", str(value)) in method.fingerprint()


def test_the_fingerprint_names_the_statistics():
    assert ("bn_sync", "True") in composed().fingerprint()
    assert ("bn_sync", "False") in composed(bn_sync=False).fingerprint()


@pytest.mark.parametrize("pacer", [{"overrides": {}, "local_steps": None}, {"local_steps": 1}])
@pytest.mark.parametrize(
    ("choices", "flags"),
    [
        ({"local_optimizer": "adam"}, "--local_optimizer:"),
        ({"local_optimizer": "momentum"}, "--local_optimizer, --local_momentum:"),
        ({"local_opt_state": "reset"}, "--local_opt_state:"),
        ({"local_lr": 0.5}, "--local_lr:"),
    ],
)
def test_without_local_steps_they_are_refused(pacer, choices, flags):
    with pytest.raises(ConfigurationError, match=f"{flags} a worker takes local steps only"):
        composed(**choices, **pacer)
    composed("esync", overrides={}, local_steps=None, **choices)


def test_a_fate_of_no_slots_is_warned_of():
    (warning,) = composed(local_opt_state="average").warnings
    assert warning.startswith("--local_opt_state=average ") and "plain SGD" in warning
    assert composed(local_opt_state="average", local_optimizer="adam").warnings == ()


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_what_a_refused_update_has_left_in_the_slots_is_forgotten(name):
    """It would make the next update too large as well."""
    policy = update_of(name, opt_state="keep")
    weights, expected = numbers(0), numbers(2)
    used, fresh = begin(policy, weights), begin(policy, expected)
    policy.step(weights, 1000 * numbers(1), 0.1, used, weights)
    weights = numbers(2)
    used = policy.forget(weights, used)
    policy.step(weights, numbers(3), 0.1, used, weights)
    policy.step(expected, numbers(3), 0.1, fresh, expected)
    np.testing.assert_array_equal(weights, expected)
