"""Which exchange a worker takes part in: through the parameter server, or among the workers."""

from __future__ import annotations

import threading
from typing import Any

from ops.collectives import THROUGH_PS
from ops.run import Run
from worker.collective_exchange import AmongWorkers
from worker.core import WorkerCore
from worker.exchange import Exchange
from worker.flags import WorkerFlags


def exchange_for(
    run: Run, own: WorkerFlags, core: WorkerCore, closing: threading.Event
) -> Exchange:
    """Return the exchange that --collective asks for; nothing is dialled yet.

    Args:
        run: The run's settings.
        own: This worker's settings.
        core: Of this worker.
        closing: Set when the worker is asked to stop.
    """
    made: Any = Exchange if run.method.collective == THROUGH_PS else AmongWorkers
    exchange: Exchange = made(
        run, own.id_worker, core.spec, core.layouts, own.device.link, closing, core.aux_size
    )
    if isinstance(exchange, AmongWorkers):
        exchange.attach(own, core)
    return exchange
