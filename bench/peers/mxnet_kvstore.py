"""Run one worker of MXNet's distributed kvstore, whose server runs the optimizer.

The harness starts a scheduler and a server, which ``import mxnet`` runs if DMLC_ROLE is set. It
starts one process of this module for each worker, with the interpreter that setup.sh installs.
"""

from __future__ import annotations

import itertools
import os

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from numpy.typing import NDArray

from bench.peers import wide_work, work


def _build_model(task: work.Work) -> gluon.nn.HybridSequential:
    """Return the work's model with the initial weights of all contenders."""
    model = gluon.nn.HybridSequential()
    if task.model == work.WIDE:
        *hidden, last = itertools.pairwise(wide_work.WIDTHS)
        model.add(gluon.nn.Flatten())
        for inputs, outputs in hidden:
            model.add(gluon.nn.Dense(outputs, in_units=inputs, activation="relu"))
        model.add(gluon.nn.Dense(last[1], in_units=last[0]))
        tensors = wide_work.to_outputs_first(wide_work.initial(task.seed))
    else:
        _add_cnn(model)
        tensors = work.to_channels_first(work.initial(task.seed))
    model.initialize()
    for parameter, values in zip(_parameters(model), tensors, strict=True):
        parameter.set_data(mx.nd.array(values))
    model.hybridize(static_alloc=True, static_shape=True)
    return model


def _add_cnn(model: gluon.nn.HybridSequential) -> None:
    model.add(
        gluon.nn.Conv2D(32, 3, in_channels=1, activation="relu"),
        gluon.nn.Conv2D(64, 3, in_channels=32, activation="relu"),
        gluon.nn.MaxPool2D(2),
        gluon.nn.Dropout(0.25),
        gluon.nn.Flatten(),
        gluon.nn.Dense(128, in_units=9216, activation="relu"),
        gluon.nn.Dropout(0.5),
        gluon.nn.Dense(10, in_units=128),
    )


def _parameters(model: gluon.nn.HybridSequential) -> list[gluon.Parameter]:
    return list(model.collect_params().values())


def _weights(model: gluon.nn.HybridSequential, task: work.Work) -> NDArray[np.float32]:
    tensors = [parameter.data().asnumpy() for parameter in _parameters(model)]
    if task.model == work.WIDE:
        return wide_work.from_outputs_first(tensors)
    return work.from_channels_first(tensors)


def _train(rank: int, task: work.Work, kvstore: str) -> None:
    """Train until worker 0 has trained long enough; the harness then kills the other workers."""
    mx.random.seed(task.seed + rank)
    random = np.random.default_rng(task.seed + rank)
    model = _build_model(task)
    trainer = gluon.Trainer(
        model.collect_params(),
        "sgd",
        {"learning_rate": task.learning_rate, "momentum": task.momentum},
        kvstore=kvstore,
        update_on_kvstore=True,
    )
    # In synchronous mode the server sums the workers' gradients, so divide by all samples.
    num_summed = task.workers if kvstore == "dist_sync" else 1
    images, labels = work.load()
    images, labels = images[rank :: task.workers, None], labels[rank :: task.workers]
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    progress = work.PeerProgress(task, f"{rank}", rank == 0)
    steps, over = 0, False
    while not over or rank:
        chosen = random.integers(0, len(labels), task.batch_size)
        inputs, classes = mx.nd.array(images[chosen]), mx.nd.array(labels[chosen])
        with autograd.record():
            loss = loss_of(model(inputs), classes)
        loss.backward()
        trainer.step(task.batch_size * num_summed)
        _parameters(model)[0].data().wait_to_read()  # MXNet computes asynchronously
        steps += 1
        over = progress.report(steps, lambda: _weights(model, task))


def main() -> None:
    options = work.parser(__doc__)
    options.add_argument("--kvstore", choices=("dist_sync", "dist_async"), required=True)
    options.add_argument("--rank", type=int, required=True)
    arguments = options.parse_args()
    _train(arguments.rank, work.from_arguments(arguments), arguments.kvstore)
    os._exit(0)  # leaving the store would wait for the other workers, which still train


if __name__ == "__main__":
    main()
