"""Torch's optimizers on a shard against ten lines of numpy each, and what a shard refuses.

The comparison with torch itself is in tests/backends/torch, where torch is installed.
"""

import numpy as np
import pytest

from thinwire.ops.kernels import load_kernels
from thinwire.ops.offer import Described, Offer, OptimizerOffer, read_offer
from thinwire.ops.optimizers.base import Moment
from thinwire.ops.optimizers.script import server_update
from thinwire.ops.optimizers.slots import planned
from thinwire.ops.optimizers.torch_groups import groups_of
from thinwire.ops.types import ConfigurationError, Kind, ModelSpec, TensorSpec, Update

NUMPY = load_kernels("numpy")
SPEC = ModelSpec((TensorSpec("a", (3, 2)), TensorSpec("b", (4,)), TensorSpec("c", (40_000,))))
SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01}
SGD |= {"nesterov": False, "maximize": False}
ADAM = {"lr": 0.01, "beta_1": 0.9, "beta_2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
ADAM |= {"amsgrad": False, "maximize": False, "decoupled_weight_decay": False}


def offer_of(kind, groups, group_of=(0, 1, 0), **more):
    config = {"groups": groups, "group_of": list(group_of), "steps": [0] * 3}
    described = Described(f"torch.optim.{kind}", config)
    paths = tuple(tensor.path for tensor in SPEC.tensors)
    return Offer(SPEC, optimizers=(OptimizerOffer(described, paths=paths, **more),))


def reference(kind, group, weights, gradients):
    """Weights [n] after the steps with some gradients, in float64; None: a step without one."""
    theta, first, second, most, count = np.array(weights, np.float64), None, 0.0, 0.0, 0
    for gradient in gradients:
        if gradient is None:
            continue
        count += 1
        g = np.array(gradient, np.float64) * (-1 if group["maximize"] else 1)
        decoupled = group.get("decoupled_weight_decay")
        theta = theta * (1 - group["lr"] * group["weight_decay"]) if decoupled else theta
        g = g if decoupled else g + group["weight_decay"] * theta
        if kind == "SGD":
            damped = (1 - group["dampening"]) * g
            first = g if first is None else group["momentum"] * first + damped
            theta = theta - group["lr"] * (
                g + group["momentum"] * first if group["nesterov"] else first
            )
            continue
        first = (0 if first is None else first) * group["beta_1"] + (1 - group["beta_1"]) * g
        second = group["beta_2"] * second + (1 - group["beta_2"]) * g * g
        most = np.maximum(most, second)
        size = np.sqrt((most if group["amsgrad"] else second) / (1 - group["beta_2"] ** count))
        mean = first / (1 - group["beta_1"] ** count)
        theta = theta - group["lr"] * mean / (size + group["eps"])
    return theta


def stepped(update, theta, steps):
    """Apply (gradient, settings, positions without a gradient) of each step to theta."""
    state = update.init(theta, SPEC)
    for gradient, settings, without in steps:
        moment = Moment(0.0, settings=settings, without_gradient=without)
        rate = update.rate(moment, state).value
        _, state = update.step(theta, Update(None, gradient), Kind.GRADIENT, rate, NUMPY, state)
    return state


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("SGD", {}),
        ("SGD", {"nesterov": True, "dampening": 0.0}),
        ("SGD", {"maximize": True}),
        ("Adam", {}),
        ("Adam", {"amsgrad": True, "maximize": True}),
        ("AdamW", {"decoupled_weight_decay": True}),
    ],
)
def test_each_parameter_steps_as_its_group_says(kind, changes):
    base = (SGD if kind == "SGD" else ADAM) | changes
    groups = [base, base | {"lr": 0.05, "weight_decay": 0.0}]
    rng, offsets = np.random.default_rng(1), SPEC.offsets
    theta = rng.normal(size=SPEC.num_parameters).astype(np.float32)
    initial = theta.copy()
    gradients = rng.normal(size=(6, len(theta))).astype(np.float32)
    without = [(), (), (1,), (0, 1), (), ()]
    update = server_update(offer_of(kind, groups))
    steps = zip(gradients, [update.groups.settings] * 6, without, strict=True)
    stepped(update, theta, steps)
    for n, group in enumerate((groups[0], groups[1], groups[0])):
        part = slice(offsets[n], offsets[n + 1])
        given = [
            None if n in absent else g[part] for g, absent in zip(gradients, without, strict=True)
        ]
        expected = reference(kind, group, initial[part], given)
        np.testing.assert_allclose(theta[part], expected, rtol=2e-5, atol=2e-6)


def test_the_numbers_of_a_push_count_from_that_step_on():
    update, theta = server_update(offer_of("SGD", [SGD, SGD])), np.zeros(40_010, np.float32)
    ones, later = np.ones_like(theta), [0.5, 0.0, 0.0, 0.0, 0.25, 0.0, 0.0, 0.0]
    stepped(update, theta, [(ones, later, ()), (ones, (), ())])
    assert set(theta[:6]) == {-1.0} and set(theta[6:10]) == {-0.5}


def test_the_first_step_with_momentum_makes_the_buffer():
    """Torch copies the gradient then, without dampening; a step before has no momentum."""
    first = {"lr": 0.1, "momentum": 0.0, "dampening": 0.5, "weight_decay": 0.0}
    first |= {"nesterov": False, "maximize": False}
    groups = [first, first | {"momentum": 0.9}]
    update, theta = server_update(offer_of("SGD", groups)), np.zeros(40_010, np.float32)
    ones, later = np.ones_like(theta), [0.1, 0.9, 0.5, 0.0] * 2
    stepped(update, theta, [(ones, update.groups.settings, ()), (ones, later, ())])
    assert np.allclose(theta[:6], -0.2) and np.allclose(theta[6:10], -0.1 - 0.1 * (0.9 + 0.5))


def test_plain_sgd_keeps_a_sparse_update_sparse():
    plain = SGD | {"momentum": 0.0, "weight_decay": 0.0}
    update = server_update(offer_of("SGD", [plain, plain | {"lr": 0.5}]))
    assert update.traits.keeps_sparse and not update.groups.roles
    theta, positions = np.zeros(40_010, np.float32), np.array([0, 7])
    state = update.init(theta, SPEC)
    push = Update(positions, np.array([1, 1], np.float32))
    touched, _ = update.step(theta, push, Kind.GRADIENT, 0.1, NUMPY, state)
    assert touched.tolist() == [0, 7] and np.allclose(theta[positions], [-0.1, -0.5])
    assert not theta[[1, 6, 8, 100]].any()
    assert not server_update(offer_of("SGD", [SGD, SGD])).traits.keeps_sparse


def test_a_saved_state_and_the_slots_continue_the_run():
    update, rng = server_update(offer_of("Adam", [ADAM, ADAM])), np.random.default_rng(2)
    gradients = rng.normal(size=(4, 40_010)).astype(np.float32)
    settings = update.groups.settings
    whole, part = np.zeros(40_010, np.float32), np.zeros(40_010, np.float32)
    stepped(update, whole, [(g, settings, ()) for g in gradients])
    state = stepped(update, part, [(g, settings, ()) for g in gradients[:2]])
    saved = update.save(state)
    resumed = update.restore(saved, part, update.init(part, SPEC))
    for gradient in gradients[2:]:
        rate = update.rate(Moment(0.0, settings=settings), resumed).value
        update.step(part, Update(None, gradient), Kind.GRADIENT, rate, NUMPY, resumed)
    assert np.array_equal(part, whole)
    slots = {(slot.slice, slot.role): slot.values for slot in update.slots(resumed)[0]}
    assert slots[1, "step"] == 4 and slots[0, "exp_avg"].shape == (3, 2)
    assert update.save(resumed)["steps"].tolist() == [4, 4, 4] != saved["steps"].tolist()


def test_slots_that_a_script_brings_are_sent_with_the_weights():
    offer = offer_of("SGD", [SGD], (0, 0, 0), has_slots=True, iterations=7)
    places = planned(offer.optimizers[0], SPEC)
    assert [(place.slice, place.role) for place in places] == [
        (n, "momentum_buffer") for n in range(3)
    ]
    assert read_offer(offer.to_json(), 1 << 30).optimizers == offer.optimizers


@pytest.mark.parametrize(
    "kind, changes, text",
    [
        ("LBFGS", {}, "expected one of torch.optim.SGD"),
        ("SGD", {"groups": []}, "1 to 1024"),
        ("SGD", {"groups": 5}, "1 to 1024"),
        ("SGD", {"groups": [SGD | {"lr": -1}]}, "lr=-1; expected a number from 0"),
        ("SGD", {"groups": [SGD | {"lr": True}]}, "lr=True"),
        ("SGD", {"groups": [SGD | {"nesterov": 1}]}, "expected true or false"),
        ("SGD", {"groups": [{"lr": 1}]}, "expected lr, momentum"),
        ("Adam", {"groups": [ADAM | {"beta_1": 2}]}, "from 0 to 1"),
        ("Adam", {"groups": [ADAM | {"beta_2": 1.0}]}, "from 0 to 1"),
        ("SGD", {"group_of": [1]}, "not in the description"),
        ("SGD", {"group_of": "0"}, "not in the description"),
        ("SGD", {}, "a path for each parameter"),
        ("SGD", {"steps": [-1]}, "a number of steps"),
        ("SGD", {"steps": [0, 0]}, "a number of steps"),
        ("SGD", {"more": 1}, "1 to 1024"),
    ],
)
def test_a_description_from_an_untrusted_worker_is_checked(kind, changes, text):
    config = {"groups": [SGD], "group_of": [0], "steps": [0]} | changes
    described = Described(f"torch.optim.{kind}", config)
    with pytest.raises(ConfigurationError, match=text):
        server_update(Offer(SPEC, optimizers=(OptimizerOffer(described, paths=("a", "b")),)))


def test_a_description_is_read_as_it_was_made():
    groups = groups_of(offer_of("Adam", [ADAM, ADAM | {"lr": 0.5}]).optimizers[0].optimizer)
    assert groups_of(groups.described()) == groups
    assert groups.named("lr") == [0.01, 0.5] and groups.of_group(1, groups.settings)["lr"] == 0.5
