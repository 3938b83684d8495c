"""The count at which this worker reads a schedule of learning rates.

It does where the script's optimizer steps here, and where no PS can build the schedule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

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
        self._optimizer = optimizer
        self._first = self._steps = int(optimizer._iterations)
        self._at_samples = 0
        self.variable = keras.Variable(
            self._steps, dtype="int", trainable=False, name="run_clock", aggregation="none"
        )

    def begin_phase(self, data: Shared, optimizer: Any) -> None:
        """Count on in another phase of the script.

        Args:
            data: What the run trains on now.
            optimizer: Whose steps are counted: the one of before, or one that begins anew.
        """
        self._batch_size, self._num_examples = data.batch_size, data.num_examples
        is_new, self._optimizer = optimizer is not self._optimizer, optimizer
        self._first = int(optimizer._iterations) if is_new else self._steps
        self._steps, self._at_samples = self._first, 0
        self.variable.assign(self._steps)

    def start(self, samples: int) -> None:
        """Begin where the run is: it has consumed `samples` in the present phase."""
        if self._batch_size:
            self._at_samples, self._steps = samples, self._count(samples, self._batch_size)
            self.variable.assign(self._steps)

    def advance(self, samples: int) -> int:
        """Return the count after a step of this worker, when the run had consumed `samples`.

        Between two exchanges it counts this worker's own steps.
        """
        if samples == self._at_samples or not self._batch_size:
            self._steps += 1
        else:
            self._at_samples, self._steps = samples, self._count(samples, self._batch_size)
        return self._steps

    def _count(self, samples: int, batch_size: int) -> int:
        """An epoch whose last batch is smaller has as many steps as the script's alone."""
        size = self._num_examples
        epochs, rest = divmod(samples, size) if size else (0, samples)
        return self._first + epochs * -(-(size or 0) // batch_size) + -(-rest // batch_size)

    def read(self, schedule: Any) -> float:
        """Return a schedule's rate at the count."""
        return float(schedule(self.variable))

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
