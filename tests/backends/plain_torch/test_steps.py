"""What torch scripts do around a step: scalers, closures, accumulation, compiled modules, hooks."""

import collections
import copy
import pickle
import re
import time

import numpy as np
import pytest
import torch
from torch import nn

from tests.backends.plain_torch.loops import (
    TOLERANCE,
    X,
    alone,
    filled,
    flat,
    gap,
    loss_of,
    network,
    plain_loop,
    shared,
)
from tests.thinwire.script.keras.runs import scripts
from thinwire import ConfigurationError, distribute


def adamw(module=None):
    module = network() if module is None else module
    return module, torch.optim.AdamW(module.parameters(), 0.01)


def scaled_loop(module, optimizer, place, overflows=()):
    """A loop with a GradScaler; the gradients of some steps overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(20):
        optimizer.zero_grad()
        scaler.scale(loss_of(module, step, place)).backward()
        if step in overflows:
            module[0].weight.grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("method, workers", [("bsp", 1), ("dgs", 1), ("bsp", 2), ("diloco", 2)])
def test_a_step_that_a_scaler_skips_takes_part_empty(method, workers, tmp_path):
    """No optimizer steps, and the other workers do not wait for this one."""

    def loop(module, optimizer, place):
        # worker 1 alone has an overflow in step 7, all workers have one in steps 3 and 4
        scaled_loop(module, optimizer, place, (3, 4, 7) if place[0] == 1 else (3, 4))

    settings = {"local_steps": 4} if method == "diloco" else {}
    made = shared(tmp_path, adamw, loop, method, workers, **settings)
    assert all(torch.isfinite(flat(module)).all() for module, _ in made)
    if method == "bsp" and workers == 1:
        assert gap(made[0], alone(adamw, loop)) <= TOLERANCE
    if method != "diloco":
        assert {optimizer.thinwire.num_exchanges for _, optimizer in made} == {20}


def test_four_backward_passes_and_one_step(tmp_path):
    def loop(module, optimizer, place):
        for step in range(40):
            (loss_of(module, step, place) / 4).backward()
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()

    expected = alone(adamw, loop)
    for made in shared(tmp_path, adamw, loop):
        assert gap(made, expected) <= TOLERANCE
        assert made[1].thinwire.num_exchanges == 10


def closure_loop(module, optimizer, place):
    for step in range(12):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(module, step, place)
            loss.backward()
            return loss

        assert float(optimizer.step(closure).detach()) > 0


def test_a_closure_is_evaluated_before_its_gradients_are_pushed(tmp_path):
    expected = alone(adamw, closure_loop)
    for made in shared(tmp_path, adamw, closure_loop):
        assert gap(made, expected) <= TOLERANCE
        assert made[1].thinwire._session.part.steps.loss > 0


def test_lbfgs_takes_local_steps_of_diloco(tmp_path):
    def make():
        module = network()
        return module, torch.optim.LBFGS(module.parameters(), 0.1, max_iter=4)

    start = sum(loss_of(network(), step).item() for step in range(4))
    made = shared(tmp_path, make, closure_loop, "diloco", local_steps=3)
    for module, optimizer in made:
        assert sum(loss_of(module, step).item() for step in range(4)) < 0.85 * start
        assert optimizer.thinwire.num_exchanges == 4


def test_a_compiled_module_has_the_names_of_the_module(tmp_path):
    def script(own):
        module = network()
        compiled = torch.compile(module, backend="eager")
        optimizer = torch.optim.AdamW(compiled.parameters(), 0.01)
        optimizer = distribute(optimizer, own, model=compiled)
        with optimizer.thinwire:
            plain_loop(compiled, optimizer, (own["id_worker"], 2), steps=10)
        names = [tensor.path for tensor in optimizer.thinwire._session.shared.spec.tensors]
        return module, names

    expected = alone(adamw, lambda *given: plain_loop(*given, steps=10))
    with scripts(tmp_path, "bsp", 2) as run:
        for module, names in run.each(script):
            assert gap((module,), expected) <= TOLERANCE
            assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.two(torch.tanh(self.one(x))))


def test_tied_parameters_are_shared_once(tmp_path):
    def make():
        return adamw(filled(Tied()))

    expected = alone(make)
    for module, optimizer in shared(tmp_path, make):
        assert gap((module,), expected) <= TOLERANCE
        assert module.one.weight is module.two.weight
        assert len(optimizer.thinwire._session.shared.variables) == 5


@pytest.mark.parametrize("method", ["bsp", "dgs"])
def test_a_frozen_backbone_is_neither_trained_nor_sent(method, tmp_path):
    def make():
        module = network()
        module[0].requires_grad_(False)
        return adamw(module)

    expected = alone(make)
    for module, optimizer in shared(tmp_path, make, method=method):
        assert torch.equal(module[0].weight, network()[0].weight)
        assert optimizer.thinwire._session.variables.size == 36
        if method == "bsp":
            assert gap((module,), expected) <= TOLERANCE


@pytest.mark.parametrize("method", ["bsp", "asgd", "dgs", "diloco"])
def test_layers_are_unfrozen_and_a_group_is_added_in_the_middle(method, tmp_path):
    """All scripts wait for each other there, and the optimizer's state stays."""

    def make():
        module = network(nn.Linear(8, 8))
        module[0].requires_grad_(False)
        module[2].requires_grad_(False)
        return module, torch.optim.AdamW([*module[0].parameters(), *module[3].parameters()], 0.01)

    def loop(module, optimizer, place):
        plain_loop(module, optimizer, place, steps=8)
        module[0].requires_grad_(True)
        plain_loop(module, optimizer, place, steps=8)
        module[2].requires_grad_(True)
        optimizer.add_param_group({"params": module[2].parameters(), "lr": 0.003})
        plain_loop(module, optimizer, place, steps=8)
        states.append(copy.deepcopy(optimizer.state_dict()["state"]))

    states = []
    expected, settings = alone(make, loop), {"local_steps": 4} if method == "diloco" else {}
    for module, optimizer in shared(tmp_path, make, loop, method, **settings):
        assert optimizer.thinwire._session.variables.size == 56 + 72 + 36
        assert not torch.equal(module[0].weight, make()[0][0].weight)
        if method == "bsp":
            assert gap((module,), expected) <= TOLERANCE
            assert (
                optimizer.state_dict()["state"].keys() == expected[1].state_dict()["state"].keys()
            )


def test_schedulers_and_hooks_see_the_optimizer_as_before(tmp_path, recwarn):
    """A scheduler made before or after `distribute`, hooks, isinstance, repr."""
    calls = []

    def make():
        module, optimizer = adamw()
        optimizer.register_step_pre_hook(lambda *given: calls.append("before"))
        optimizer.register_step_post_hook(lambda *given: calls.append("after"))
        return module, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)

    def loop(module, optimizer, place, scheduler):
        later = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        for step in range(10):
            optimizer.zero_grad()
            loss_of(module, step, place).backward()
            optimizer.step()
            scheduler.step()
            later.step()

    expected = alone(make, loop)
    calls.clear()
    (made,) = shared(tmp_path, make, loop, workers=1)
    assert calls == ["before", "after"] * 10
    assert gap(made, expected) <= TOLERANCE
    assert isinstance(made[1], torch.optim.AdamW) and repr(made[1]) == repr(expected[1])
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


@pytest.mark.parametrize("method", ["bsp", "dgs"])
def test_weights_that_the_script_sets_itself_reach_the_other_workers(method, tmp_path):
    """As a clipping of weights does."""

    def loop(module, optimizer, place):
        for step in range(15):
            optimizer.zero_grad()
            loss_of(module, step, place).backward()
            optimizer.step()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.clamp_(-0.2, 0.2)

    def make():
        module = network()
        return module, torch.optim.SGD(module.parameters(), 0.3)

    expected = alone(make, loop)
    made = shared(tmp_path, make, loop, method)
    assert flat(made[0][0]).abs().max() <= 0.2 + 1e-6
    if method == "bsp":
        assert gap(made[0], expected) <= 1e-5


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_the_state_of_the_servers_is_in_state_dict_and_continues(kind, tmp_path):
    """A script saves the state of a run, and another run continues with it."""
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}

    def make():
        module = network()
        return module, kind(module.parameters(), 0.01, **options)

    def half(module, optimizer, place):
        plain_loop(module, optimizer, place, steps=12)
        saved.append((copy.deepcopy(module.state_dict()), copy.deepcopy(optimizer.state_dict())))

    def rest(module, optimizer, place):
        module.load_state_dict(saved[-1][0])
        optimizer.load_state_dict(copy.deepcopy(saved[-1][1]))
        plain_loop(module, optimizer, place, steps=12)

    saved = []
    half(*make(), (1, 1))
    expected_state, expected = saved.pop()[1], None
    shared(tmp_path / "one", make, half)
    for number, known in expected_state["state"].items():
        for name, value in known.items():
            found = saved[-1][1]["state"][number][name]
            np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-6, err_msg=name)
    assert saved[-1][1]["param_groups"] == expected_state["param_groups"]
    expected = alone(make, rest)
    for made in shared(tmp_path / "two", make, rest):
        assert gap(made, expected) <= TOLERANCE


def test_steps_after_the_end_of_the_run_change_nothing(tmp_path):
    def loop(module, optimizer, place):
        plain_loop(module, optimizer, place, steps=30)
        assert optimizer.thinwire.stopped and optimizer.thinwire.stop_reason == "iter_max"
        assert optimizer.state_dict()["state"][0]["step"] == 20
        last = flat(module)
        plain_loop(module, optimizer, place, steps=1)
        assert torch.equal(flat(module), last)

    (made,) = shared(tmp_path, adamw, loop, workers=1, iter_max=20, linger_seconds=15)
    expected = alone(adamw, lambda *given: plain_loop(*given, steps=20))
    assert gap(made, expected) <= TOLERANCE


class DistributedDataParallel(nn.Module):
    """Has the name by which torch's wrapper is recognized without a process group."""


def wrapped():
    module = nn.Sequential(network(), DistributedDataParallel())
    return module, torch.optim.SGD(module.parameters(), 0.1)


def of_another():
    return network(), torch.optim.SGD(network().parameters(), 0.1)


def in_float64():
    module = network().double()
    return module, torch.optim.SGD(module.parameters(), 0.1)


def without_parameters():
    module = network().requires_grad_(False)
    return module, torch.optim.SGD(module.parameters(), 0.1)


def own_class():
    class Own(torch.optim.SGD):
        pass

    module = network()
    return module, Own(module.parameters(), 0.1)


def negative_rate():
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    optimizer.param_groups[0]["lr"] = -1.0
    return module, optimizer


@pytest.mark.parametrize(
    "make, text",
    [
        (wrapped, "wrapped in torch's DistributedDataParallel"),
        (of_another, "has a parameter of shape (8, 6) that the module has not"),
        (in_float64, "parameter 0.weight has the dtype torch.float64"),
        (without_parameters, "no parameter with requires_grad=True"),
        (own_class, "which a PS cannot step"),
        (negative_rate, "parameter group 0 has lr=-1"),
        (lambda: (None, network_optimizer()), "received SGD without a module"),
        (lambda: ("net", network_optimizer()), "received model= with a str"),
    ],
)
def test_what_cannot_train_is_refused_in_one_line(make, text, tmp_path):
    with pytest.raises(ConfigurationError, match=re.escape(text)) as caught:
        shared(tmp_path, make, lambda m, o, p: loss_and_step(m, o), workers=1)
    assert "\n" not in str(caught.value)


def network_optimizer():
    return torch.optim.SGD(network().parameters(), 0.1)


def loss_and_step(module, optimizer):
    x = X.to(next(module.parameters()).dtype)
    if any(parameter.requires_grad for parameter in module.parameters()):
        module(x).sum().backward()
    optimizer.step()


def test_calls_that_come_too_late_or_twice_are_refused(tmp_path):
    def script(own):
        module, optimizer = adamw()
        assert distribute(distribute(optimizer, own, model=module), own, model=module) is optimizer
        with pytest.raises(ConfigurationError, match="a second time with other arguments"):
            distribute(optimizer, own, model=network())
        with pytest.raises(ConfigurationError, match="expected one torch.optim.Optimizer"):
            distribute(module, own)
        with optimizer.thinwire:
            plain_loop(module, optimizer, (1, 1), steps=2)
            saved = optimizer.state_dict()
            with pytest.raises(ConfigurationError, match="load_state_dict was called after"):
                optimizer.load_state_dict(saved)
            with pytest.raises(ConfigurationError, match="after the first step of another"):
                distribute(network_optimizer(), own, model=network())

    with scripts(tmp_path, "bsp", 1) as run:
        run.each(script)


def test_two_optimizers_of_one_parameter_are_refused(tmp_path):
    def script(own):
        module = network()
        for optimizer in (torch.optim.SGD(module.parameters(), 0.1) for _ in range(2)):
            distribute(optimizer, own, model=module)
        loss_of(module, 0).backward()
        optimizer.step()

    with scripts(tmp_path, "bsp", 1) as run, pytest.raises(ConfigurationError, match="two optimiz"):
        run.each(script)


def test_a_gan_that_freezes_the_other_module_at_each_step(tmp_path):
    """The pattern of pix2pix: no phase begins, and the frozen module stays as it is."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = network(), network()

    def make():
        pair = Pair()
        ones = torch.optim.Adam(pair.one.parameters(), 0.01)
        return pair, ones, torch.optim.Adam(pair.two.parameters(), 0.01)

    def loop(pair, ones, place, twos):
        for step in range(12):
            for module, other, optimizer in (
                (pair.two, pair.one, twos),
                (pair.one, pair.two, ones),
            ):
                module.requires_grad_(True)
                other.requires_grad_(False)
                optimizer.zero_grad()
                (loss_of(pair.one, step, place) + loss_of(pair.two, step, place)).backward()
                optimizer.step()

    def script(own):
        pair, ones, twos = make()
        twos = distribute(twos, own, model=pair.two)
        ones = distribute(ones, own, model=pair.one)
        with ones.thinwire:
            loop(pair, ones, (own["id_worker"], 2), twos)
        assert ones.thinwire._session.phase == 0
        return (pair,)

    expected = alone(make, loop)
    for method, most in (("bsp", TOLERANCE), ("dgs", 1.0)):
        with scripts(tmp_path / method, method, 2) as run:
            for made in run.each(script):
                assert gap(made, expected) <= most


def test_copies_and_pickles_are_optimizers_outside_of_the_run(tmp_path):
    def loop(module, optimizer, place):
        plain_loop(module, optimizer, place, steps=5)
        pickled = pickle.loads(pickle.dumps(optimizer))  # noqa: S301 - made here
        for copied in (copy.deepcopy(optimizer), pickled):
            assert type(copied) is torch.optim.AdamW
            assert len(copied.state) == 4
            copied.step()

    shared(tmp_path, adamw, loop, workers=1)


class Recalling(torch.optim.SGD):
    """An optimizer of a script's own: its step has an argument, its state is not plain."""

    def step(self, closure=None, scale=1.0):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("seen", {})[0] = collections.deque([scale])
                parameter.grad.mul_(scale)
        return super().step(closure)


def test_an_optimizer_of_a_script_s_own_steps_with_its_arguments(tmp_path, caplog):
    """torch cannot save its state, which ends nothing."""

    def make():
        module = network()
        return module, Recalling(module.parameters(), 0.1)

    def loop(module, optimizer, place):
        for step in range(12):
            optimizer.zero_grad()
            loss_of(module, step, place).backward()
            optimizer.step(scale=0.5)
            time.sleep(0.02)  # so that a checkpoint is due

    settings = {"run_dir": str(tmp_path / "worker"), "checkpoint_interval_seconds": 0.1}
    module = shared(tmp_path, make, loop, "diloco", 1, local_steps=3, **settings)[0][0]
    assert not torch.equal(flat(module), flat(network()))


def test_a_small_change_by_the_script_is_kept(tmp_path):
    def loop(module, optimizer, place):
        for step in range(40):
            optimizer.zero_grad()
            loss_of(module, step, place).backward()
            optimizer.step()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(1 - 8e-7)

    expected = alone(adamw, loop)
    for made in shared(tmp_path, adamw, loop, workers=1):
        assert gap(made, expected) <= TOLERANCE


def test_a_beta_of_one_is_refused_where_it_is_set(tmp_path):
    def loop(module, optimizer, place):
        plain_loop(module, optimizer, place, steps=2)
        optimizer.param_groups[0]["betas"] = (1.0, 0.999)
        plain_loop(module, optimizer, place, steps=1)

    with pytest.raises(ConfigurationError, match="parameter group 0 has beta_1=1"):
        shared(tmp_path, adamw, loop, workers=1)
