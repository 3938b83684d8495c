"""What a run costs, in the logs of `fit`; scripts find it as `thinwire.callbacks`.

Put them before callbacks that read the logs, such as CSVLogger and TensorBoard. History has their
keys in any case. Where the model trains alone they log what that costs: nothing.
"""

from __future__ import annotations

from typing import Any

import keras

from thinwire.script.keras.traffic import EpochTraffic


class Traffic(keras.callbacks.Callback):
    """Logs the bytes of an epoch: ``bytes_up`` and ``bytes_down`` of this worker, as integers."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add both to the logs."""
        del epoch
        if logs is not None:
            found = _traffic(self.model)
            logs |= {"bytes_up": found.bytes_up, "bytes_down": found.bytes_down}


class Staleness(keras.callbacks.Callback):
    """Logs how far the model had moved on when this worker's updates were merged.

    ``staleness`` is the mean over the epoch's exchanges, ``staleness_max`` the largest, both in
    updates; 0 where all workers step together.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add both to the logs."""
        del epoch
        if logs is not None:
            found = _traffic(self.model)
            mean = found.staleness / max(1, found.num_exchanges)
            logs |= {"staleness": mean, "staleness_max": found.largest_staleness}


class Version(keras.callbacks.Callback):
    """Logs ``version``: the updates that are in the model, those of all workers.

    Where the model trains alone these are the optimizer's steps.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add it to the logs."""
        del epoch
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
