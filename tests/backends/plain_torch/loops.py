"""Training loops of plain torch: alone, and as workers of a run in threads."""

import numpy as np
import torch
from torch import nn

from tests.thinwire.script.keras.runs import scripts
from thinwire import distribute

#: Largest accepted difference of two workers with half a batch each from torch alone.
TOLERANCE = 1e-6
BATCH, STEPS = 24, 50
RNG = np.random.default_rng(3)
X = torch.from_numpy(RNG.normal(size=(96, 6)).astype(np.float32))
Y = (X @ torch.from_numpy(RNG.normal(size=(6, 4)).astype(np.float32))).argmax(1)


def filled(module, seed=1):
    """Give a module weights that do not depend on torch's global random numbers; return it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def network(*middle):
    """Return a module of six inputs and four classes, with equal weights in each call."""
    return filled(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *middle, nn.Linear(8, 4)))


def batch_of(step, place=(1, 1)):
    """Return the rows of a step that a worker (number, of how many) trains on."""
    number, count = place
    rows = slice(step * BATCH % len(X), step * BATCH % len(X) + BATCH)
    return X[rows][number - 1 :: count], Y[rows][number - 1 :: count]


def loss_of(module, step, place=(1, 1)):
    """Return the loss of a step's rows."""
    x, y = batch_of(step, place)
    return nn.functional.cross_entropy(module(x), y)


def plain_loop(module, optimizer, place, scheduler=None, steps=STEPS):
    """Train as torch's tutorials do."""
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(module, step, place).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def flat(module):
    """Return all parameters and moving statistics as one vector."""
    values = [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]
    return torch.cat([value.detach().reshape(-1) for value in values])


def alone(make, loop=plain_loop):
    """Return what `make` made, trained by torch alone."""
    made = make()
    loop(*made[:2], (1, 1), *made[2:])
    return made


def shared(folder, make, loop=plain_loop, method="bsp", workers=2, **settings):
    """Return what `make` made in each worker of a run, trained together."""

    def script(own):
        module, optimizer, *more = make()
        optimizer = distribute(optimizer, own, model=module)
        with optimizer.thinwire:
            loop(module, optimizer, (own["id_worker"], workers), *more)
        return (module, optimizer, *more)

    with scripts(folder, method, workers, **settings) as run:
        return run.each(script)


def gap(made, expected):
    """Return the largest difference of the weights."""
    return float((flat(made[0]) - flat(expected[0])).abs().max())
