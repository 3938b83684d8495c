"""Compare the training loops: Standalone with train_on_batch, and a worker with Standalone.

The model is mnist_cnn with batch size 64; each worker has one thread.

    python -m bench.systems.loop --seconds 20
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable

from bench.machine.apart import measure_apart
from bench.peers import thinwire, work
from bench.table import Row, quartiles, render, spread, times

_STEPS_A_TURN = 10
_TURNS = 12
_ROUNDS = 2


def rows(seconds: float = 20.0) -> list[Row]:
    """Measure the loops; return the table's rows."""
    return [_standalone_row(), *_worker_rows(seconds)]


def _standalone_row() -> Row:
    seconds = measure_apart("bench.systems.loop", "--in_process")
    ours, keras = map(statistics.median, seconds)
    ratios = quartiles(theirs / standalone for standalone, theirs in zip(*seconds, strict=True))
    name = "Standalone / train_on_batch"
    return Row(name, 1 / ours, "steps/s", 1 / keras, keras / ours, 0.98, "higher", spread=ratios)


def _in_process() -> list[list[float]]:
    """Return two lists of a step's seconds: with Standalone, and with Keras' train_on_batch."""
    import keras
    import tensorflow as tf

    from thinwire.models.flat_model import SharedModel
    from thinwire.ops.methods.builder import Choices, compose
    from thinwire.runtime.run.settings import ModelChoice
    from thinwire.worker.standalone import LocalTrainer

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    images, labels = work.load()
    batch = (images[:64, :, :, None].copy(), labels[:64].astype("int32"))
    shape = ModelChoice("mnist_cnn", None, 28, 1, 10)
    choices = Choices.of(method="asgd", nb_workers=1, momentum=0.9)
    trainer = LocalTrainer(SharedModel(shape, 1), compose(choices), 0.0)
    model = SharedModel(shape, 1).model
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )

    def repeat(step: Callable[[], object]) -> Callable[[], None]:
        def turn() -> None:
            for _ in range(_STEPS_A_TURN):
                step()

        return turn

    contenders = [
        repeat(lambda: trainer.train(*batch, 0.01)),
        repeat(lambda: model.train_on_batch(*batch)),
    ]
    seconds = times(contenders, _TURNS)
    return [[duration / _STEPS_A_TURN for duration in turns] for turns in seconds]


def _task(seconds: float) -> work.Work:
    return work.Work(seconds, 0, 1, 64, 0.01, 0.9, 1)


def _alternate(contenders: list[Callable[[], float]]) -> list[list[float]]:
    """Run the contenders alternately; return the list of figures of each contender."""
    results = [[contender() for contender in contenders] for _ in range(_ROUNDS)]
    return [list(column) for column in zip(*results, strict=True)]


def _standalone_rate(seconds: float) -> float:
    """Return the steps per second of a Standalone process."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        command = [*thinwire.flags(_task(seconds), "asgd"), "--type_node=Standalone"]
        thinwire.run(command, seconds + 120.0, folder)
        summary = json.loads((folder / "summary.json").read_text())
        return summary["updates"] / summary["seconds"]


def _worker_rate(seconds: float, *flags: str) -> float:
    """Return the steps per second of a cluster with one worker, without the warm-up."""
    steady = thinwire.measure(_task(seconds), "asgd", flags)
    return steady["samples"] / steady["seconds"] / 64


def _worker_rows(seconds: float) -> list[Row]:
    waiting, ahead, alone = _alternate(
        [
            lambda: _worker_rate(seconds),
            lambda: _worker_rate(seconds, "--overlap"),
            lambda: _standalone_rate(seconds),
        ]
    )
    name = "worker loop, dense, loopback"
    return [
        _worker_row(f"{name} / Standalone", waiting, alone),
        _worker_row(f"{name}, --overlap / Standalone", ahead, alone),
    ]


def _worker_row(name: str, ours: list[float], alone: list[float]) -> Row:
    rate, limit = statistics.median(ours), statistics.median(alone)
    ratios = spread(worker / other for worker, other in zip(ours, alone, strict=True))
    return Row(name, rate, "steps/s", limit, rate / limit, 0.9, "higher", spread=ratios)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=20.0)
    options.add_argument(
        "--in_process",
        action="store_true",
        help="measure the step loops in this process, print JSON",
    )
    arguments = options.parse_args()
    if arguments.in_process:
        sys.stdout.write(json.dumps(_in_process()) + "\n")
    else:
        sys.stdout.write(render(rows(arguments.seconds)))


if __name__ == "__main__":
    main()
