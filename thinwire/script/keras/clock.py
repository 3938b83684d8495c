"""Lets learning-rate schedules follow the run's batch count instead of this worker's step count.

Keras evaluates a schedule at its optimizer's step count. Callbacks, TensorBoard and scripts also
evaluate schedules at this count, by `optimizer.learning_rate` or by calling the schedule with
`optimizer.iterations`. In a run the optimizer counts only this worker's steps, but a schedule must
follow the batches that all workers have consumed. So a schedule that is called with its optimizer's
step count returns the rate at the run's batch count. The optimizer's own step count does not
change, because bias corrections and scripts read it.
"""

from __future__ import annotations

import functools
from concurrent import futures
from typing import Any

import keras

from thinwire.script.keras.own_states import OWN_PREFIX

#: Attribute of an optimizer's `iterations` variable that holds the `RunClock` of its schedule.
_CLOCK = "_thinwire_clock"


class RunClock:
    """The run's batch count at which one optimizer's schedule is evaluated on this worker.

    Attributes:
        variable: Keras variable with the run's batch count, for the graph of a step.
        own: Keras variable with the optimizer's own step count at the last exchange. It is used
            only if the optimizer steps on this worker.
        count: The run's batch count as an int. `count` may be ahead of `variable`, because the
            graph of a step assigns `variable` only after the exchange.

    Args:
        optimizer: Keras optimizer with a schedule, without a loss-scaling wrapper.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.count = int(optimizer._iterations)
        self.variable, self.own = self._new_variable(), self._new_variable()
        self._read_at = self._new_variable()  # only `read` assigns to this variable

    def _new_variable(self) -> keras.Variable:
        """Create a variable in another thread, outside of the TensorFlow trace in progress.

        TensorFlow traces a step a second time if the step creates variables, even within
        `tf.init_scope`. A trace belongs to one thread, so a new thread is outside of any trace.
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
        """Set the run's batch count for the schedule; must be called outside of any train_step."""
        self.count = count
        self.variable.assign(count)
        self.own.assign(int(self._optimizer._iterations))
        setattr(self._optimizer._iterations, _CLOCK, self)
        kind: Any = type(self._optimizer._learning_rate)
        _read_at_clocks(kind)

    def pause(self) -> None:
        """Evaluate the schedule at the optimizer's own step count, which the script has set."""
        setattr(self._optimizer._iterations, _CLOCK, None)

    def read(self, schedule: Any) -> float:
        """Return a schedule's learning rate at the run's batch count `count`.

        The attribute `variable` may still have an older batch count: the graph may assign the new
        count only after the next exchange has read the rate.
        """
        self._read_at.assign(self.count)
        return float(schedule(self._read_at))


@functools.cache
def _read_at_clocks(kind: Any) -> None:
    """Patch `__call__` of a schedule class to use the run's batch count, once per process.

    The patch changes only calls with the `iterations` variable of an optimizer that has a
    `RunClock`.
    """
    alone: Any = vars(kind).get("__call__", kind.__call__)

    @functools.wraps(alone)
    def call(schedule: Any, step: Any) -> Any:
        clock = getattr(step, _CLOCK, None)
        return alone(schedule, step if clock is None else clock.variable)

    kind.__call__ = call
