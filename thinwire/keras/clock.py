"""The count at which this worker reads a schedule of learning rates.

It does where the script's optimizer steps here, and where no PS can build the schedule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import keras

from thinwire.keras.own_states import OWN_PREFIX
from thinwire.sharing.place import Shared


class RunClock:
    """Counts the steps that the script alone would have taken for the run's examples.

    Attributes:
        variable: The count, which the graph of a step reads; of the kind that optimizers have.
    """

    def __init__(self, data: Shared, optimizer: Any) -> None:
        """Begin at the optimizer's own count.

        Args:
            data: What the run trains on; without a batch size the optimizer's own count is read.
            optimizer: Whose steps are counted; built.
        """
        self._batch_size, self._num_examples = data.batch_size, data.num_examples
        self._first = self._steps = int(optimizer._iterations)
        self._at_samples = self._num_advances = 0
        self.variable = self._new_variable()
        self._read_at = self._new_variable()  # which no graph assigns to

    def _new_variable(self) -> keras.Variable:
        """Return a variable that TensorFlow does not count as made by the step it is tracing.

        A step that makes variables is traced a second time, and `tf.init_scope` does not hide them.
        Another thread is in no trace.
        """
        with futures.ThreadPoolExecutor(1) as outside:
            return outside.submit(
                keras.Variable,
                self._steps,
                dtype="int",
                trainable=False,
                name=f"{OWN_PREFIX}run_clock",
                aggregation="none",
            ).result()

    @property
    def steps(self) -> int:
        """The count."""
        return self._steps

    def begin_phase(self, data: Shared, steps: int | None = None) -> None:
        """Count on in another phase of the script.

        Args:
            data: What the run trains on now.
            steps: The count to go on from, if the script has set one.
        """
        self._batch_size, self._num_examples = data.batch_size, data.num_examples
        self._steps = self._steps if steps is None else steps
        self._first, self._at_samples, self._num_advances = self._steps, 0, 0
        self.variable.assign(self._steps)

    def start(self, samples: int, per_batch: int = 1) -> None:
        """Begin where the run is: it has consumed `samples` in the present phase.

        Args:
            samples: By all workers.
            per_batch: How often the optimizer steps with each mini-batch.
        """
        if self._batch_size:
            num_batches = self._count(samples, self._batch_size)
            self._at_samples, self._steps = samples, self._first + per_batch * num_batches
            self.variable.assign(self._steps)

    def advance(self, samples: int, per_batch: int = 1) -> int:
        """Return the count after a step of this worker, when the run had consumed `samples`.

        Between two exchanges it counts this worker's own steps. Arguments as `start`.
        """
        turn = self._num_advances % per_batch + 1
        self._num_advances += 1
        if samples == self._at_samples or not self._batch_size:
            self._steps += 1
        else:
            num_before = self._count(samples, self._batch_size) - 1
            self._at_samples, self._steps = samples, self._first + per_batch * num_before + turn
        return self._steps

    def _count(self, samples: int, batch_size: int) -> int:
        """Return the mini-batches of the script alone that so many examples are.

        An epoch whose last batch is smaller has as many as the script's alone.
        """
        size = self._num_examples
        epochs, rest = divmod(samples, size) if size else (0, samples)
        return epochs * -(-(size or 0) // batch_size) + -(-rest // batch_size)

    def read(self, schedule: Any) -> float:
        """Return a schedule's rate at the count.

        A graph may not have assigned that yet when its next exchange reads it.
        """
        self._read_at.assign(self._steps)
        return float(schedule(self._read_at))

    @contextlib.contextmanager
    def reading(self, optimizer: Any) -> Iterator[None]:
        """Let an optimizer's schedule read this count while a step is traced."""
        schedule = optimizer._learning_rate
        if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            yield
            return
        optimizer._learning_rate = lambda: schedule(self.variable)
        try:
            yield
        finally:
            optimizer._learning_rate = schedule
