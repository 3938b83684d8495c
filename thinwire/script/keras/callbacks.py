"""Callbacks that log a run's traffic and staleness in `fit`; exported as `thinwire.callbacks`.

Put the callbacks `Traffic`, `Staleness` and `Version` before callbacks that read the logs, for
example CSVLogger and TensorBoard. Keras' History contains the values of `Traffic`, `Staleness` and
`Version`, even if History precedes them in the list of callbacks. If the model trains outside of a
run, the callbacks `Traffic` and `Staleness` log zeros.
"""

from __future__ import annotations

from typing import Any

import keras

from thinwire.script.steps import EpochTraffic


class Traffic(keras.callbacks.Callback):
    """Logs ``bytes_up`` and ``bytes_down``: bytes that a worker sent and received in an epoch."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add ``bytes_up`` and ``bytes_down`` to the logs of the epoch."""
        if logs is not None:
            traffic = _traffic(self.model)
            logs |= {"bytes_up": traffic.bytes_up, "bytes_down": traffic.bytes_down}


class Staleness(keras.callbacks.Callback):
    """Logs the staleness of this worker's updates: how many updates the PS merged since its pull.

    The log ``staleness`` is the mean over the epoch's exchanges with the PS, ``staleness_max`` the
    maximum. The unit of staleness is the number of updates. Staleness is 0 if all workers exchange
    with the PS in the same synchronous training round.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the mean and the maximum staleness of the worker's updates to the epoch's logs."""
        if logs is not None:
            traffic = _traffic(self.model)
            mean = traffic.staleness / max(1, traffic.num_exchanges)
            logs |= {"staleness": mean, "staleness_max": traffic.largest_staleness}


class Version(keras.callbacks.Callback):
    """Logs ``version``: the number of updates of all workers that the model contains.

    If the model trains outside of a run, ``version`` is the number of the optimizer's steps.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the model's version (the number of updates in it) to the logs of the epoch."""
        session = getattr(self.model, "thinwire", None)
        if logs is None:
            return
        if session is not None and session.last is not None:
            logs["version"] = session.last.version
        elif self.model.optimizer is not None:
            logs["version"] = int(self.model.optimizer.iterations)


def _traffic(model: keras.Model) -> EpochTraffic:
    session = getattr(model, "thinwire", None)
    return EpochTraffic() if session is None else session.traffic
