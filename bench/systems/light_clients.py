"""Run light devices: the client code of real workers, with prepared gradients and no model.

``bench.systems.many`` starts this program: ``python -m bench.systems.light_clients NUMBER PROCESSES
SECONDS FLAGS...`` is process NUMBER of PROCESSES. Each device has its own
`thinwire.worker.trainer.WorkerSession`, so it uses a worker's codec, wire coding, channel,
heartbeat and core. Instead of computing a gradient a device sleeps for SECONDS. Each line of
standard input is the number of devices, over all processes, that must be active. When standard
input ends, all devices leave, and the program prints their exchanges as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from absl import flags

from thinwire.cli import node as command_line
from thinwire.flags import run as run_flags
from thinwire.ops.kernels.numpy_ops import aligned
from thinwire.worker import flags as worker_flags
from thinwire.worker.core.worker_round import Action, MiniBatch, RoundAction
from thinwire.worker.trainer import WorkerSession

if TYPE_CHECKING:
    from thinwire.ops.types import Float32, ModelSpec
    from thinwire.runtime.run.settings import Run
    from thinwire.worker.flags import WorkerFlags

READY = "active"
#: Maximum random deviation of a step's duration from the mean, as a share of the mean. It keeps
#: devices from stepping at the same moments.
_VARIATION = 0.2
_NUM_GRADIENTS = 8


class LightDevice:
    """One device: a session, a buffer for the gradient, and a thread.

    Attributes:
        number: Number of the device, which is its worker's id.
        exchanges: (start, end) of each exchange, by time.monotonic().
        error: Exception that ended the device too early; None if there is no error.
        has_begun: Event that is set after the first exchange, or when the device ends.
    """

    def __init__(
        self,
        run: Run,
        own: WorkerFlags,
        spec: ModelSpec,
        gradients: Sequence[Float32],
        step_seconds: float,
    ) -> None:
        self.number, self._run, self._gradients = own.id_worker, run, gradients
        self._session = WorkerSession(run, own, spec, np.empty(0, np.float32))
        self._random = np.random.default_rng(own.id_worker)
        self._buffer, self._step_seconds = aligned(spec.num_parameters), step_seconds
        self.exchanges: list[tuple[float, float]] = []
        self.error: BaseException | None = None
        self.has_begun = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Make the device leave after its current exchange; `join` waits until it has left."""
        self._over.set()

    def join(self) -> None:
        """Wait until the device has left."""
        self._thread.join()

    def _live(self) -> None:
        session = self._session
        try:
            session.join()
            session.begin()
            action = self._carry_on(session.steps.begin())
            while action is RoundAction.COMPUTE and not (self._over.is_set() or session.stopped):
                action = self._step()
            session.leave("done")
        except Exception as error:  # noqa: BLE001 - another thread reports it
            self.error = error
        finally:
            self.has_begun.set()

    def _carry_on(self, action: Action) -> Action:
        began = time.monotonic()
        while action not in (RoundAction.COMPUTE, RoundAction.END):
            has_replies = action is RoundAction.LOAD_ROUND
            action = self._session.carry_out(action)
            if has_replies:
                self.exchanges.append((began, time.monotonic()))
                self.has_begun.set()
        if (diverged := self._session.steps.diverged) is not None:
            raise diverged
        return action

    def _step(self) -> Action:
        session, started = self._session, time.monotonic()
        varied = self._random.uniform(1 - _VARIATION, 1 + _VARIATION)
        if self._step_seconds:
            self._over.wait(self._step_seconds * varied)
        lent = self._gradients[int(self._random.integers(len(self._gradients)))]
        np.copyto(self._buffer, lent)  # a worker copies TensorFlow's gradient in this way
        batch = MiniBatch(self._buffer, self._run.batch_size, 1.0)
        return self._carry_on(session.computed(batch, started))


def real_gradients(run: Run) -> tuple[ModelSpec, list[Float32]]:
    """Return the spec of a run's model, and the gradients of the run's first steps."""
    from thinwire.data.loading import load_dataset, take_shards
    from thinwire.models.flat_model import SharedModel
    from thinwire.simulator.trainer import Trainer
    from thinwire.worker.role import limit_threads

    limit_threads(1)
    shared = SharedModel(run.model, run.seed)
    dataset = load_dataset(run.data, run.model, None, run.seed, parts=("train",))
    trainer = Trainer(shared, bn_sync=False, clip_norm=0.0)
    shard, weights = take_shards(run, dataset)[0], aligned(len(trainer.weights))
    np.copyto(weights, trainer.weights)
    gradients = []
    for _ in range(_NUM_GRADIENTS):
        step = trainer.step(weights, trainer.statistics, shard, trainer.local_of(1))
        weights -= np.float32(run.schedule.rate(0.0)) * step.gradient
        gradients.append(step.gradient)
    return shared.spec, gradients


def main(arguments: Sequence[str]) -> None:
    """Run the devices of this process; read the numbers of active devices from standard input."""
    number, processes, step_seconds, *words = arguments
    command_line.define_flags()
    flags.FLAGS(["main.py", *words])
    run = run_flags.read_run()
    node_flags = worker_flags.read(run.nb_workers)
    spec, gradients = real_gradients(run)
    devices: list[LightDevice] = []
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        numbers = [n for n in range(1, int(line) + 1) if n % int(processes) == int(number)]
        for worker in numbers[len(devices) :]:
            device_flags = dataclasses.replace(node_flags, id_worker=worker)
            devices.append(LightDevice(run, device_flags, spec, gradients, float(step_seconds)))
        for device in devices:
            device.has_begun.wait()
        sys.stdout.write(f"{READY}\n")
        sys.stdout.flush()
    for device in devices:
        device.end()
    for device in devices:
        device.join()
    errors = [f"{device.number}: {device.error!r}" for device in devices if device.error]
    exchanges = {str(device.number): device.exchanges for device in devices}
    sys.stdout.write(json.dumps({"exchanges": exchanges, "errors": errors}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
