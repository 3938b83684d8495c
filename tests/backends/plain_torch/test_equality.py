"""Two workers of half a batch each train as torch alone with the whole batch."""

import pytest
import torch
from torch import nn

from tests.backends.plain_torch.loops import (
    TOLERANCE,
    alone,
    filled,
    flat,
    gap,
    loss_of,
    network,
    plain_loop,
    shared,
)

SCHEDULERS = torch.optim.lr_scheduler


def two_groups(module, kind, **options):
    """Return an optimizer with a group for each layer."""
    first, last = module[0], module[-1]
    groups = [
        {"params": last.parameters(), "lr": 0.004, "weight_decay": 0.1},
        {"params": first.parameters()},
    ]
    return kind(groups, lr=0.01, **options)


OPTIMIZERS = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), 0.1),
    "momentum": lambda m: torch.optim.SGD(
        m.parameters(), 0.05, momentum=0.9, dampening=0.3, weight_decay=0.01
    ),
    "Nesterov": lambda m: two_groups(m, torch.optim.SGD, momentum=0.9, nesterov=True),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), 0.01, weight_decay=0.02, eps=1e-6),
    "AMSGrad": lambda m: torch.optim.Adam(m.parameters(), 0.01, amsgrad=True, maximize=True),
    "AdamW": lambda m: two_groups(m, torch.optim.AdamW, betas=(0.8, 0.95)),
}
RATES = {
    "none": lambda optimizer: None,
    "cosine": lambda optimizer: SCHEDULERS.CosineAnnealingLR(optimizer, 40),
    # it changes the momentum, or Adam's first beta, too
    "one cycle": lambda optimizer: SCHEDULERS.OneCycleLR(optimizer, 0.05, total_steps=50),
    "groups": lambda optimizer: SCHEDULERS.LambdaLR(
        optimizer, [lambda step: 0.9**step, lambda step: 1 / (1 + step)]
    ),
}
PAIRS = [(name, "none") for name in OPTIMIZERS]
PAIRS += [("momentum", "one cycle"), ("Adam", "cosine"), ("AdamW", "groups")]
PAIRS += [("AdamW", "one cycle")]


@pytest.mark.parametrize("name, rates", PAIRS)
def test_two_workers_of_bsp_are_torch_alone(name, rates, tmp_path):
    def make():
        module = network()
        optimizer = OPTIMIZERS[name](module)
        return module, optimizer, RATES[rates](optimizer)

    expected = alone(make)
    for made in shared(tmp_path, make):
        assert gap(made, expected) <= TOLERANCE
        assert made[1].thinwire.num_exchanges == 50
        assert made[1].param_groups[0]["lr"] == expected[1].param_groups[0]["lr"]


def test_two_shards_step_as_one(tmp_path):
    def make():
        module = network()
        return module, OPTIMIZERS["AdamW"](module)

    expected = alone(make)
    for made in shared(tmp_path, make, nb_ps=2):
        assert gap(made, expected) <= TOLERANCE


def test_one_worker_and_a_parameter_that_has_a_gradient_only_at_times(tmp_path):
    """Torch leaves such a parameter as it is, without decay or momentum."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(6, 8)
            self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))
            self.number = 0

        def forward(self, x):
            return self.heads[self.number](torch.tanh(self.body(x)))

    def make():
        module = filled(Branches())
        return module, torch.optim.AdamW(module.parameters(), 0.01, weight_decay=0.1)

    def loop(module, optimizer, place):
        for step in range(30):
            module.number = int(step % 3 == 0)
            optimizer.zero_grad(set_to_none=True)
            loss_of(module, step, place).backward()
            optimizer.step()

    expected = alone(make, loop)
    for made in shared(tmp_path, make, loop):
        assert gap(made, expected) <= TOLERANCE


def test_moving_statistics_are_those_of_all_workers(tmp_path):
    """A worker normalizes by its half of the batch, so only the run's average is equal."""

    def make():
        module = network(nn.BatchNorm1d(8))
        return module, torch.optim.SGD(module.parameters(), 0.05)

    one, two = shared(tmp_path, make, method="bsp", bn_sync=True)
    assert torch.equal(flat(one[0]), flat(two[0]))
    assert one[0][2].running_mean.abs().max() > 0.01 and one[0][2].num_batches_tracked == 50
    (single,) = shared(tmp_path / "one", make, workers=1)
    assert gap(single, alone(make)) <= TOLERANCE


def test_sparse_gradients_of_an_embedding(tmp_path):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(50, 8, sparse=True)
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.table((x[:, :3].abs() * 10).long() % 50).mean(1))

    def make():
        module = filled(Words())
        return module, torch.optim.SGD(module.parameters(), 0.1)

    expected = alone(make)
    for made in shared(tmp_path, make):
        assert gap(made, expected) <= TOLERANCE


@pytest.mark.parametrize("method", ["dgs", "diloco", "sparseloco", "asgd"])
def test_other_methods_take_any_optimizer(method, tmp_path):
    """One worker without loss of information is torch alone, or learns as it does."""

    def make():
        module = network()
        kind = torch.optim.Adam if method == "asgd" else torch.optim.RMSprop
        return module, kind(module.parameters(), 0.01)

    settings = {"local_steps": 5} if method in ("diloco", "sparseloco") else {}
    made = shared(tmp_path, make, method=method, **settings)
    for module, optimizer in made:
        losses = [loss_of(module, step).item() for step in range(4)]
        start = [loss_of(network(), step).item() for step in range(4)]
        assert sum(losses) < 0.8 * sum(start)
        assert optimizer.thinwire.num_exchanges >= 10


def test_a_gan_s_two_optimizers_step_their_own_modules(tmp_path):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = network(), network()

    def make():
        pair = Pair()
        ones = torch.optim.Adam(pair.one.parameters(), 0.01)
        return pair, ones, torch.optim.SGD(pair.two.parameters(), 0.1, momentum=0.9)

    def loop(pair, ones, place, twos):
        for step in range(20):
            # the second optimizer steps between the passes of the first module, as in a GAN
            loss = loss_of(pair.one, step, place) + pair.one[0].weight.square().sum()
            twos.zero_grad()
            loss_of(pair.two, step, place).backward()
            twos.step()
            ones.zero_grad()
            loss.backward()
            ones.step()

    from tests.thinwire.script.keras.runs import scripts
    from thinwire import distribute

    expected = alone(make, loop)

    def script(own):
        pair, ones, twos = make()
        ones = distribute(ones, own, model=pair.one)
        twos = distribute(twos, own, model=pair.two)
        with ones.thinwire:
            loop(pair, ones, (own["id_worker"], 2), twos)
        assert ones.thinwire is twos.thinwire
        return (pair,)

    for method, most in (("bsp", TOLERANCE), ("dgs", 1.0)):
        with scripts(tmp_path / method, method, 2) as run:
            for made in run.each(script):
                assert gap(made, expected) <= most


def test_a_loop_without_a_run_is_torch_alone():
    from thinwire import distribute

    def make():
        module = network()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        return module, distribute(optimizer, model=module)

    module, optimizer = alone(make)
    assert not optimizer.thinwire.active and type(optimizer) is torch.optim.SGD
    other = network()
    plain_loop(other, torch.optim.SGD(other.parameters(), 0.1), (1, 1))
    assert torch.equal(flat(module), flat(other))
    assert optimizer.thinwire.shard([1, 2]) == [1, 2]
