"""The server of a script: `init_server`."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import queue
import tempfile
import threading
import time
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.models.flat_model import FlatVariables, SharedModel
from thinwire.ops.sharding.split import shard_positions
from thinwire.ops.types import ConfigurationError
from thinwire.proto.grpc.common import host_and_port
from thinwire.ps.role import ShardProcess
from thinwire.ps.scripts.initial_model import model_of_flags
from thinwire.runtime.persistence.places import CHECKPOINTS, check_place
from thinwire.runtime.run.directory import lock_of
from thinwire.runtime.run.lock import LockOwner
from thinwire.script.settings import ScriptSettings, read_settings

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

#: A script's server does not wait long for a Supervisor that may look at a finished run.
_LINGER_SECONDS = 3.0
_LOOK_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The model at one moment; copies."""

    version: int  # updates applied
    samples: int  # examples consumed
    learning_rate: float
    weights: list[Float32]  # of each shared variable, in its shape
    statistics: Float32  # [m] averaged moving statistics, may be empty


def init_server(
    args: Any = None, model: Any = None, *, num_train: int | None = None, **settings: Any
) -> ServerHandle:
    """Make a server of a model, to be started.

    Args:
        args: See thinwire.script.settings; the same as the workers' will do.
        model: A Keras model. Training starts from the weights that it has.
        num_train: Size of the training set, which flag epochs needs.
        **settings: Further flags by name, such as ``nb_workers=2``. Without run_dir nothing is
            kept; with it, checkpoints are, and the same call again resumes.

    Raises:
        ConfigurationError: Settings that cannot work, or another server writes to run_dir.

    Source: the published program of DGS. Differences: the original blocks for ever.
    """
    if model is None:
        raise ConfigurationError(
            "init_server() was given no model; expected the Keras model that the workers build."
        )
    defaults = {"linger_seconds": _LINGER_SECONDS}
    chosen = read_settings(args, settings, type_node="PS", defaults=defaults)
    if chosen.local:
        raise ConfigurationError("mode msgd trains without a server; leave init_server() out.")
    if chosen.run.model_is_offered:
        raise ConfigurationError(
            "model_from=worker: init_server() has the model already; leave model_from out."
        )
    if chosen.run.nb_ps > 1:
        raise ConfigurationError(
            f"nb_ps={chosen.run.nb_ps}: a script's server is one shard; expected 1. Start several "
            "with main.py --type_node=PS --model=FILE."
        )
    if chosen.run.epochs is not None and num_train is None:
        raise ConfigurationError(
            f"epochs={chosen.run.epochs:g}: the server does not know the training set; expected "
            "num_train, its size."
        )
    return ServerHandle(chosen, SharedModel.of(model), num_train)


class ServerHandle:
    """A parameter server in threads of this process."""

    def __init__(
        self, settings: ScriptSettings, shared: SharedModel, num_train: int | None
    ) -> None:
        """Listen to nobody yet."""
        self._shared = shared
        self._statistics = FlatVariables(shared.statistics)
        self._folder = contextlib.ExitStack()
        run, own = settings.run, settings.shard()
        if "run_dir" not in settings.given:
            folder = tempfile.TemporaryDirectory(prefix="thinwire-")
            run = dataclasses.replace(run, run_dir=pathlib.Path(self._folder.enter_context(folder)))
        owner = LockOwner.here("PS", own.id_ps, run.addresses[own.id_ps])
        if run.checkpoint_dir is not None:
            check_place(run.checkpoint_dir, CHECKPOINTS)
        lock = lock_of(run.run_dir, "PS", own.id_ps).take(owner)  # before what it keeps is read
        self._folder.callback(lock.release)
        # Of one that is never started; at the end of the process its threads may still write.
        weakref.finalize(self, lock.release).atexit = False
        with contextlib.ExitStack() as unless_made:
            unless_made.callback(self._folder.close)
            model = model_of_flags(run, own.id_ps, shared, num_train)
            self._shard = ShardProcess(run, own, model)
            unless_made.pop_all()
        self._bind = own.bind
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def address(self) -> str:
        """``host:port`` that it listens at, once started."""
        return host_and_port(self._bind, self._shard.port)

    @property
    def version(self) -> int:
        """Updates applied so far."""
        return self._shard.core.version

    @property
    def stop_reason(self) -> str | None:
        """Why the run ended; None while it goes on."""
        return self._shard.core.stop_reason

    def start(self) -> ServerHandle:
        """Listen and serve in the background; a run directory of a finished run is just read.

        Raises:
            ConfigurationError: The port is taken, or the server was started before.
        """
        if self._thread is not None:
            raise ConfigurationError("start() was called twice; expected once for each server.")
        goes_on = self._shard.start()
        self._thread = threading.Thread(target=self._serve, name="thinwire-server", daemon=True)
        if goes_on:
            self._thread.start()
        else:
            self._folder.close()
        return self

    def stop(self) -> None:
        """End the run now; workers are notified, `join` returns soon."""
        if self._running:
            self._shard.interrupt()

    def join(
        self, timeout_seconds: float | None = None, idle_seconds: float | None = None
    ) -> str | None:
        """Wait for the end of the run; the model then has the final weights.

        Args:
            timeout_seconds: Return None after so long without an end.
            idle_seconds: End the run when all workers have been gone for so long, whatever is
                left of it: of workers whose own loop may be shorter than the run.

        Returns:
            Why it ended: iter_max, epochs, max_seconds, interrupted or diverged.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        seen = time.monotonic()
        while self._running:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return None
            if self._shard.server.connections.workers or not self._shard.core.known_workers():
                seen = now  # nobody has come yet, or somebody is here
            elif idle_seconds is not None and now - seen >= idle_seconds:
                self.stop()
            if self._thread is not None:
                self._thread.join(_LOOK_SECONDS)
        if self._failure is not None:
            raise self._failure
        self._take_weights()
        return self.stop_reason

    def snapshot(self) -> Snapshot:
        """Return the model as it is between two updates."""
        taken: queue.SimpleQueue[Snapshot] = queue.SimpleQueue()
        if self._running:
            self._shard.server.queue.put(lambda: taken.put(self._copy()))
        while self._running:
            with contextlib.suppress(queue.Empty):
                return taken.get(timeout=_LOOK_SECONDS)
        return self._copy()

    def __enter__(self) -> ServerHandle:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        self.join()

    @property
    def _running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _serve(self) -> None:
        try:
            self._shard.run_to_end()
        except BaseException as error:  # noqa: BLE001 - join() raises it
            self._failure = error
        finally:
            self._folder.close()

    def _copy(self) -> Snapshot:
        spec, core, layout = self._shared.spec, self._shard.core, self._shard.layout
        flat = np.empty(spec.num_parameters, np.float32)
        starts = layout.offsets
        for slot, place in enumerate(shard_positions(spec, layout)):
            flat[place] = core.model.theta[starts[slot] : starts[slot + 1]]
        statistics = core.averages.statistics
        return Snapshot(
            version=core.version,
            samples=core.samples,
            learning_rate=core.model.learning_rate,
            weights=[
                flat[start:stop].reshape(tensor.shape)
                for tensor, start, stop in zip(
                    spec.tensors, spec.offsets, spec.offsets[1:], strict=False
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
