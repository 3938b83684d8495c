"""Compare the steps of a script with one worker with the same steps alone, in alternating epochs.

A small convolutional network trains on loopback, compiled with Adam and all defaults; its PS and
Supervisor run on the same machine. The figures exclude each epoch's first step, because Keras' data
pipeline takes seconds at the ends of epochs, and this time varies.

    python -m bench.systems.one_worker
    KERAS_BACKEND=jax python -m bench.systems.one_worker --rows 16
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

_METHODS = ("bsp", "dgs")
# rows in an epoch
_ROWS = 3840
_ROOT = pathlib.Path(__file__).parents[2]


def main() -> None:
    """Print a line for each method and model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=7, help="shared epochs, and epochs alone")
    parser.add_argument("--rows", type=int, default=256, help="rows of a mini-batch")
    options = parser.parse_args()
    for kind in ("282,250", "20,042"):
        for method in _METHODS:
            sys.stdout.write(f"{method:4} {kind} weights: {_run(method, kind, options)}\n")
            sys.stdout.flush()


def _run(method: str, kind: str, options: argparse.Namespace) -> str:
    """Start the run, and return the line that its worker writes."""
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-m", "thinwire", "run", "--nb_workers=1", f"--method={method}"]
        numbers = [str(options.epochs), str(options.rows)]
        script = [f"--run_dir={folder}/run", __file__, kind, *numbers, f"{folder}/line"]
        done = subprocess.run(
            [*program, *script],
            env=os.environ | {"PYTHONPATH": str(_ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        line = pathlib.Path(folder) / "line"
        if done.returncode or not line.exists():
            raise RuntimeError(done.stdout + done.stderr)
        return line.read_text()


def _script(kind: str, epochs: int, rows: int, line: str) -> None:
    """Train as a user's script does; after each epoch train the same model alone for an epoch."""
    import keras
    import numpy as np

    import thinwire

    class StepTimes(keras.callbacks.Callback):
        """Records the milliseconds of each step, except an epoch's first step."""

        def __init__(self) -> None:
            super().__init__()
            self.milliseconds: list[float] = []
            self._ended_at: float | None = None

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self._ended_at = None

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            now = time.perf_counter()
            if self._ended_at is not None:
                self.milliseconds.append(1e3 * (now - self._ended_at))
            self._ended_at = now

    generator = np.random.default_rng(0)
    x = generator.normal(size=(_ROWS, 32, 32, 3)).astype(np.float32)
    y = generator.integers(0, 10, len(x))
    alone, shared = StepTimes(), StepTimes()
    single, model = _model(kind), thinwire.distribute(_model(kind))

    class AloneBetween(keras.callbacks.Callback):
        """Trains an epoch alone after each shared epoch; the first pair is an uncounted warm-up."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            single.fit(x, y, batch_size=rows, verbose=0, callbacks=[alone])
            if epoch == 0:
                alone.milliseconds.clear()
                shared.milliseconds.clear()

    watching = [shared, AloneBetween()]
    model.fit(x, y, batch_size=rows, epochs=epochs + 1, verbose=0, callbacks=watching)
    alone_ms, shared_ms = (statistics.median(steps.milliseconds) for steps in (alone, shared))
    pathlib.Path(line).write_text(
        f"alone {alone_ms:.1f} ms, shared {shared_ms:.1f} ms a step "
        f"(medians of {len(alone.milliseconds)}): {alone_ms / shared_ms:.2f} of its steps/s"
    )


def _model(kind: str) -> Any:
    import keras

    layers = keras.layers
    ends = {
        "282,250": [layers.MaxPooling2D(), layers.Flatten(), layers.Dense(64, activation="relu")],
        "20,042": [layers.GlobalAveragePooling2D()],
    }
    model = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(32, 3, activation="relu", padding="same"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu", padding="same"),
            *ends[kind],
            layers.Dense(10),
        ]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


if __name__ == "__main__":
    if "THINWIRE_SETTINGS" in os.environ:
        _script(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main()
