"""The two functions of AdaComp's interface: `PS()` serves a model, `Worker(dataset)` trains it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from thinwire.data.loading import TrainingShard
from thinwire.data.partition import label_counts
from thinwire.data.pipeline.cursor import Cursor, check_batch_size
from thinwire.data.pipeline.lazy import feed_of
from thinwire.models.flat_model import SharedModel
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.directory import lock_of
from thinwire.runtime.run.lock import LockOwner
from thinwire.runtime.run.settings import Run
from thinwire.runtime.run.signals import handle_signals
from thinwire.script.session import needed_size
from thinwire.script.settings import LOCAL, ScriptSettings, read_settings
from thinwire.worker.role import Worker as WorkerRole


def PS(  # noqa: N802 - AdaComp's name
    args: Any = None, model: Any = None, *, num_train: int | None = None, **settings: Any
) -> str:
    """Serve a model as a parameter server (PS) until the training run ends.

    Args:
        args: Settings of the PS, in any form that `thinwire.script.settings` reads.
        model: A Keras model, which holds the final weights after the call. None: the model that the
            flag network or the flag model names, by default AdaComp's CNN.
        num_train: Number of training examples, with which the PS counts epochs for the flag epochs.
            None: the size of the data set that the flag dataset names.
        **settings: Flags of the PS by name. Without the flag run_dir the PS writes no checkpoints.

    Returns:
        Reason why the run ended: iter_max, epochs, max_seconds, interrupted or diverged.

    Raises:
        ConfigurationError: The settings are invalid, or another process writes to the folder
            run_dir.

    Source: AdaComp's published code.
    """
    from thinwire.script.server import ServerHandle

    chosen = _read(args, settings, "PS")
    shared = _shared(chosen.run, model)
    if chosen.run.nb_ps > 1:
        raise ConfigurationError(
            f"nb_ps={chosen.run.nb_ps}: PS() starts only one shard; expected nb_ps=1. Start "
            "several shards with main.py --type_node=PS."
        )
    server = ServerHandle(chosen, shared, num_train).start()
    with _ended_by_signals(lambda number, frame: server.stop()):
        return str(server.join())


def Worker(  # noqa: N802 - AdaComp's name
    dataset: tuple[Any, Any],
    args: Any = None,
    model: Any = None,
    *,
    num_train: int | None = None,
    **settings: Any,
) -> str:
    """Train a model as a worker, on the worker's own data set, until the training run ends.

    Args:
        dataset: Scaled examples of this worker: (images [n, ...], labels [n] whole numbers). The
            worker repeats the examples without end, in a new order in each epoch.
        args: Settings of this worker, in any form that the module `thinwire.script.settings` reads.
        model: A Keras model with a loss or logits, which holds the newest weights after the call.
            None: the model that the flag network or the flag model names.
        num_train: Number of training examples of all workers together, which the warm-up of the
            method dgc needs.
        **settings: Flags of the worker by name. Without the flag run_dir the worker saves no state
            and cannot resume.

    Returns:
        Reason why the run ended: iter_max, epochs, max_seconds, target_accuracy or interrupted.

    Raises:
        ConfigurationError: The settings or the examples are invalid, or another process writes to
            run_dir as this worker.
        Unreachable, Refused, Diverged: No server answers, the server rejects this worker, or
            gradients stay non-finite. A command would end with the exit code 3, 4 or 5
            (docs/reference/operations.md).

    Source: AdaComp's published code.
    """
    chosen = _read(args, settings, "Worker")
    worker_flags = chosen.worker()
    shared = _shared(chosen.run, model)
    size = needed_size(chosen.run.method.codec, num_train)
    shard = _shard_of(dataset, chosen.run, worker_flags.id_worker, size)
    with contextlib.ExitStack() as folder:
        run = chosen.run_in(folder)
        lock = lock_of(run.run_dir, "Worker", worker_flags.id_worker)
        folder.enter_context(lock.take(LockOwner.here("Worker", worker_flags.id_worker)))
        worker = WorkerRole(run, worker_flags, shared, shard)
        with _ended_by_signals(worker.interrupt):
            worker.train()
        return worker.session.stop_reason or "interrupted"


def _read(args: Any, settings: dict[str, Any], type_node: str) -> ScriptSettings:
    chosen = read_settings(args, settings, type_node=type_node, builds_model=True)
    if chosen.local:
        raise ConfigurationError(f"mode {LOCAL} trains without a PS; expected a mode with a PS.")
    return chosen


def _shared(run: Run, model: Any) -> SharedModel:
    return SharedModel(run.model, run.seed) if model is None else SharedModel.of(model)


def _shard_of(dataset: tuple[Any, Any], run: Run, id_worker: int, num_train: int) -> TrainingShard:
    """Return a worker's examples as an object that draws the worker's mini-batches in turn."""
    try:
        images, labels = (np.asarray(part) for part in dataset)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"the dataset is a {type(dataset).__name__}; expected (images, labels), two arrays."
        ) from error
    whole = labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer)
    if not whole or len(images) != len(labels):
        raise ConfigurationError(
            f"the dataset has images of shape {images.shape}, and labels of dtype {labels.dtype} "
            f"and shape {labels.shape}; expected one whole number as the label of each image."
        )
    check_batch_size(run.batch_size, len(labels), run.data.partition)
    labels = labels.astype(np.int32)
    cursor = Cursor(np.arange(len(labels)), run.batch_size, run.seed * 100_003 + id_worker)
    images = images.astype(np.float32)
    feed = feed_of(images, cursor)
    return TrainingShard(images, labels, cursor, label_counts(labels), feed, num_train)


@contextlib.contextmanager
def _ended_by_signals(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Within the `with` block, let a first Ctrl-C end the run cleanly, a second one the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def receive(number: int, frame: Any) -> None:
        received.append(number)
        handler(number, frame)

    with handle_signals(receive):
        yield
    if signal.SIGINT in received:
        raise KeyboardInterrupt
