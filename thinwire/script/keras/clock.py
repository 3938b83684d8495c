"""Evaluates learning-rate schedules at the run's batch count instead of this worker's step count.

Keras evaluates a learning-rate schedule at the step count of its optimizer. Callbacks, TensorBoard
and scripts, too, evaluate learning-rate schedules at the optimizer's step count, by
`optimizer.learning_rate` or by calling the schedule with `optimizer.iterations`. In a run an
optimizer counts only this worker's steps, but a schedule must follow the batches of all workers. So
a learning-rate schedule that is called with its optimizer's step count returns the rate at the
run's batch count. The optimizer's own step count stays unchanged, because bias corrections and
scripts read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent import futures
from typing import Any, TypeVar

import keras

from thinwire.script.keras.own_states import OWN_PREFIX

#: Attribute of an optimizer's `iterations` variable that holds the `RunClock` of its schedule.
_CLOCK = "_thinwire_clock"
_Created = TypeVar("_Created")


def outside_of_trace(create: Callable[[], _Created]) -> _Created:
    """Call a function that creates variables, outside of the TensorFlow trace in progress.

    TensorFlow traces a step a second time if the step creates variables, even within
    `tf.init_scope`. A TensorFlow trace belongs to one thread, so code in a new thread is outside of
    any trace.
    """
    with futures.ThreadPoolExecutor(1) as outside:
        return outside.submit(create).result()


class RunClock:
    """The batch count of the whole run at which one optimizer's learning-rate schedule is read.

    Attributes:
        variable: Keras variable with the run's batch count, which the graph of a step reads.
        own: Keras variable with the optimizer's own step count at the last exchange with the PS. It
            is used only if the optimizer updates the weights on this worker.
        count: Batch count of the run as an int. It may be ahead of `variable`, because the graph of
            a step assigns `variable` only after the exchange with the PS.

    Args:
        optimizer: Keras optimizer with a learning-rate schedule, without a loss-scaling wrapper.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.count = int(optimizer._iterations)
        self.variable, self.own = self._new_variable(), self._new_variable()
        # only the method `read` assigns to this schedule variable
        self._read_at = self._new_variable()

    def _new_variable(self) -> keras.Variable:
        name = f"{OWN_PREFIX}run_clock"
        return outside_of_trace(
            lambda: keras.Variable(
                self.count, dtype="int", trainable=False, name=name, aggregation="none"
            )
        )

    def go_on(self, count: int) -> None:
        """Set the run's batch count for the learning-rate schedule, outside of any train_step."""
        self.count = count
        self.variable.assign(count)
        self.own.assign(int(self._optimizer._iterations))
        setattr(self._optimizer._iterations, _CLOCK, self)
        kind: Any = type(self._optimizer._learning_rate)
        _read_at_clocks(kind)

    def pause(self) -> None:
        """Evaluate the learning-rate schedule at the optimizer's step count, set by the script."""
        setattr(self._optimizer._iterations, _CLOCK, None)

    def read(self, schedule: Any) -> float:
        """Return a learning-rate schedule's value at the run's batch count `count`.

        The attribute `variable` may still have an older batch count: the graph may assign the new
        count only after the next exchange with the PS has read the rate.
        """
        self._read_at.assign(self.count)
        return float(schedule(self._read_at))


@functools.cache
def _read_at_clocks(kind: Any) -> None:
    """Patch `__call__` of a learning-rate schedule class to use the run's batch count, once.

    The patch of a learning-rate schedule changes only calls with the `iterations` variable of an
    optimizer that has a `RunClock`.
    """
    alone = kind.__call__

    @functools.wraps(alone)
    def call(schedule: Any, step: Any) -> Any:
        clock = getattr(step, _CLOCK, None)
        return alone(schedule, step if clock is None else clock.variable)

    kind.__call__ = call
