"""Defines `init_server`, which starts a parameter server in threads of a script's process."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.models.flat_model import SharedModel
from thinwire.models.flat_variables import FlatVariables
from thinwire.ops.sharding.split import shard_positions
from thinwire.ops.types import ConfigurationError
from thinwire.proto.grpc.common import host_and_port
from thinwire.ps.core.core import PsCore
from thinwire.ps.scripts.initial_model import model_of_flags
from thinwire.ps.shard.preparation import PreparedShard
from thinwire.ps.shard.process import ShardProcess
from thinwire.runtime.persistence.places import CHECKPOINTS, check_place
from thinwire.runtime.run.directory import lock_of
from thinwire.runtime.run.lock import LockOwner
from thinwire.script.settings import ScriptSettings, read_settings

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

#: Time for which the server still answers after the run's end, in seconds. It is short, because a
#: script's run rarely has a Supervisor that reads the final model.
_LINGER_SECONDS = 3.0
_LOOK_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Copy of a server's model, taken between two updates.

    Attributes:
        version: Number of updates that were applied to the copied model.
        samples: Number of training examples from which the updates of the copied model were
            computed.
        learning_rate: Learning rate of the server when the model was copied.
        weights: For each shared variable, its weights as an array of the variable's shape.
        statistics: [m] float32 moving statistics (batch normalization), averaged over the workers;
            empty if the run averages no statistics.
    """

    version: int
    samples: int
    learning_rate: float
    weights: list[Float32]
    statistics: Float32


def init_server(
    args: Any = None, model: Any = None, *, num_train: int | None = None, **settings: Any
) -> ServerHandle:
    """Return a handle of a parameter server for a model; `ServerHandle.start` starts the server.

    Args:
        args: Settings of the server, in any form that `thinwire.script.settings` reads. The
            settings of a worker are accepted too.
        model: A Keras model with whose current weights the training starts.
        num_train: Number of training examples, with which the server counts epochs for the flag
            epochs.
        **settings: Further flags of the server by name, for example ``nb_workers=2``. With the flag
            run_dir the server writes checkpoints, and a later call with this run_dir resumes from
            them.

    Raises:
        ConfigurationError: The settings are invalid, or another server writes to run_dir.

    Source: the published program of DGS. Differences: DGS's function blocks without end.
    """
    if model is None:
        raise ConfigurationError(
            "init_server() received no model; expected the Keras model that the workers build."
        )
    chosen = read_settings(args, settings, type_node="PS")
    chosen.values.set_default("linger_seconds", _LINGER_SECONDS)
    if chosen.local:
        raise ConfigurationError("mode msgd trains without a PS; do not call init_server().")
    if chosen.run.model_is_offered:
        raise ConfigurationError(
            "model_from=worker: init_server() is given the model itself; leave model_from out."
        )
    if chosen.run.nb_ps > 1:
        raise ConfigurationError(
            f"nb_ps={chosen.run.nb_ps}: a server that a script starts has one shard; expected "
            "nb_ps=1. Start several shards with main.py --type_node=PS --model=FILE."
        )
    if chosen.run.epochs is not None and num_train is None:
        raise ConfigurationError(
            f"epochs={chosen.run.epochs:g}: the parameter server does not know the training set; "
            "expected the argument num_train, the number of training examples."
        )
    return ServerHandle(chosen, SharedModel.of(model), num_train)


class ServerHandle:
    """Handle of a parameter server that runs in threads of this process."""

    def __init__(
        self, settings: ScriptSettings, shared: SharedModel, num_train: int | None
    ) -> None:
        """Prepare the server and lock its run directory; `start` then opens the server's port."""
        self._shared = shared
        self._statistics = FlatVariables(shared.statistics)
        self._folder = contextlib.ExitStack()
        run, shard_flags = settings.run_in(self._folder), settings.shard()
        owner = LockOwner.here("PS", shard_flags.id_ps, run.addresses[shard_flags.id_ps])
        if run.checkpoint_dir is not None:
            check_place(run.checkpoint_dir, CHECKPOINTS)
        # Lock the run directory before `model_of_flags` reads the run's saved state there.
        lock = lock_of(run.run_dir, "PS", shard_flags.id_ps).take(owner)
        self._folder.callback(lock.release)
        # Release the lock of the run directory when a handle that was never started is deleted. Do
        # not release it at the end of the process, because the server's threads may still write to
        # the run directory.
        weakref.finalize(self, lock.release).atexit = False
        with contextlib.ExitStack() as unless_made:
            unless_made.callback(self._folder.close)
            model = model_of_flags(run, shard_flags.id_ps, shared, num_train)
            self._prepared = PreparedShard.of(run, shard_flags, model)
            unless_made.pop_all()
        self._shard: ShardProcess | None = None
        self._bind = shard_flags.bind
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def address(self) -> str:
        """Address ``host:port`` at which the started server listens.

        Raises:
            ConfigurationError: The server does not listen, because it was not started, or because
                the run in run_dir is finished.
        """
        if self._shard is None:
            raise ConfigurationError(
                "the server has no address: start() was not called, or the run in run_dir is "
                "finished. Call start() first, for a new run_dir."
            )
        return host_and_port(self._bind, self._shard.port)

    @property
    def version(self) -> int:
        """Number of updates that the server has applied to the model so far."""
        return self._core.version

    @property
    def stop_reason(self) -> str | None:
        """Reason why the training run ended; None while the run continues."""
        return self._core.stop_reason

    def start(self) -> ServerHandle:
        """Serve workers in background threads; for a finished run in run_dir, only read its model.

        Raises:
            ConfigurationError: Another process uses the server's port, or `start` was called twice.
        """
        if self._thread is not None:
            raise ConfigurationError("start() was called twice on a server; expected one call.")
        shard = self._shard = ShardProcess.open(self._prepared)
        self._thread = threading.Thread(target=self._serve, name="thinwire-server", daemon=True)
        if shard is not None:
            self._thread.start()
        else:
            self._folder.close()
        return self

    def stop(self) -> None:
        """End the run and notify the workers, so that a call of `join` returns soon."""
        if (shard := self._serving) is not None:
            shard.interrupt()

    def join(
        self, timeout_seconds: float | None = None, idle_seconds: float | None = None
    ) -> str | None:
        """Wait for the end of the run, then write the final weights into the model.

        Args:
            timeout_seconds: Longest time to wait for the end of the run, in seconds; None: no
                limit.
            idle_seconds: Time in seconds after which the server ends the run early if all workers
                have been disconnected. Use a limit if workers may leave their loops before the run
                ends. None: do not end the run early.

        Returns:
            Reason why the run ended: iter_max, epochs, max_seconds, interrupted or diverged. None
            if the run has not ended within `timeout_seconds`.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        seen = time.monotonic()
        while (shard := self._serving) is not None:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return None
            if shard.server.connections.workers or not shard.core.known_workers():
                # the server is not idle if no worker has joined yet, or if a worker is connected
                seen = now
            elif idle_seconds is not None and now - seen >= idle_seconds:
                self.stop()
            if self._thread is not None:
                self._thread.join(_LOOK_SECONDS)
        if self._failure is not None:
            raise self._failure
        self._take_weights()
        return self.stop_reason

    def snapshot(self) -> Snapshot:
        """Return a copy of the server's model, taken between two updates."""
        taken: queue.SimpleQueue[Snapshot] = queue.SimpleQueue()
        if (shard := self._serving) is not None:
            shard.server.queue.put(lambda: taken.put(self._copy()))
        while self._serving is not None:
            with contextlib.suppress(queue.Empty):
                return taken.get(timeout=_LOOK_SECONDS)
        return self._copy()

    def __enter__(self) -> ServerHandle:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()
        self.join()

    @property
    def _core(self) -> PsCore:
        """State machine of the shard, also before the start and after the end."""
        return self._prepared.served.core

    @property
    def _serving(self) -> ShardProcess | None:
        """The shard while its threads serve workers; None before and afterwards."""
        is_alive = self._thread is not None and self._thread.is_alive()
        return self._shard if is_alive else None

    def _serve(self) -> None:
        try:
            if self._shard is not None:
                self._shard.run_to_end()
        except BaseException as error:  # noqa: BLE001 - join() raises it
            self._failure = error
        finally:
            self._folder.close()

    def _copy(self) -> Snapshot:
        spec, core, layout = self._shared.spec, self._core, self._prepared.served.layout
        flat = np.empty(spec.num_parameters, np.float32)
        slices = np.split(core.model.theta, layout.offsets[1:-1])
        for place, values in zip(shard_positions(spec, layout), slices, strict=True):
            flat[place] = values
        statistics = core.averages.statistics
        return Snapshot(
            version=core.version,
            samples=core.samples,
            learning_rate=core.model.learning_rate,
            weights=[
                values.reshape(tensor.shape)
                for tensor, values in zip(
                    spec.tensors, np.split(flat, spec.offsets[1:-1]), strict=True
                )
            ],
            statistics=np.empty(0, np.float32) if statistics is None else statistics.copy(),
        )

    def _take_weights(self) -> None:
        last = self._copy()
        for variable, values in zip(self._shared.variables, last.weights, strict=True):
            variable.assign(values)
        if len(last.statistics):
            self._statistics.assign(last.statistics)
