"""The count at which a schedule of learning rates is read on a worker, and what reads it there.

Keras alone reads a schedule at its optimizer's count of steps, and so do callbacks, TensorBoard and
scripts: by `optimizer.learning_rate`, or by a call of the schedule with `optimizer.iterations`. In
a run that is this worker's count, and the schedule follows the batches that all have consumed. So
a call of a schedule with its optimizer's count gives the rate of the run's count instead. The
optimizer's own count stays what it is, for bias corrections and for scripts.
"""

from __future__ import annotations

import functools
from concurrent import futures
from typing import Any

import keras

from thinwire.script.keras.own_states import OWN_PREFIX

#: Attribute of an optimizer's count that leads to the clock of its schedule.
_CLOCK = "_thinwire_clock"


class RunClock:
    """The count that the schedule of one optimizer is read at, as this worker knows it.

    Attributes:
        variable: The count, which the graph of a step reads; of the kind that optimizers have.
        own: The optimizer's own count at the last exchange, where it steps on this worker.
        count: Its value, which may be ahead of the variable: a graph assigns to that when it can.

    Args:
        optimizer: Keras optimizer with a schedule; without a loss scaling around it.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.count = int(optimizer._iterations)
        self.variable, self.own = self._new_variable(), self._new_variable()
        self._read_at = self._new_variable()  # which no graph assigns to

    def _new_variable(self) -> keras.Variable:
        """Return a variable that TensorFlow does not count as made by the step it is tracing.

        A step that makes variables is traced a second time, and `tf.init_scope` does not hide them.
        Another thread is in no trace.
        """
        with futures.ThreadPoolExecutor(1) as outside:
            return outside.submit(
                keras.Variable,
                self.count,
                dtype="int",
                trainable=False,
                name=f"{OWN_PREFIX}run_clock",
                aggregation="none",
            ).result()

    def go_on(self, count: int) -> None:
        """Let the schedule be read at a count of the run from now on, outside of any step."""
        self.count = count
        self.variable.assign(count)
        self.own.assign(int(self._optimizer._iterations))
        setattr(self._optimizer._iterations, _CLOCK, self)
        kind: Any = type(self._optimizer._learning_rate)
        _read_at_clocks(kind)

    def pause(self) -> None:
        """Let the schedule be read at the optimizer's own count, which the script has set."""
        setattr(self._optimizer._iterations, _CLOCK, None)

    def read(self, schedule: Any) -> float:
        """Return a schedule's rate at the count.

        A graph may not have assigned that yet when its next exchange reads it.
        """
        self._read_at.assign(self.count)
        return float(schedule(self._read_at))


@functools.cache
def _read_at_clocks(kind: Any) -> None:
    """Let schedules of a class be read at the run's count, once for the process.

    That is so where one is called with the count of an optimizer that has a clock; any other call
    is as it was.
    """
    alone: Any = vars(kind).get("__call__", kind.__call__)

    @functools.wraps(alone)
    def call(schedule: Any, step: Any) -> Any:
        clock = getattr(step, _CLOCK, None)
        return alone(schedule, step if clock is None else clock.variable)

    kind.__call__ = call
