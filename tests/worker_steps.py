"""Exchanges of a worker's session in tests that compute gradients without a model."""

import time

from thinwire.worker.core.messages import NO_FIGURES
from thinwire.worker.core.worker_round import MiniBatch, RoundStage


def exchange(session, values, samples=10, loss=1.0, figures=NO_FIGURES):
    """Take one step with these values, and wait for the replies; return the replies."""
    if session.steps.stage is RoundStage.READY:
        session.advance(session.steps.begin())
    session.forget_exchange()
    batch = MiniBatch(values, samples, loss, figures=figures)
    session.advance(session.computed(batch, time.monotonic()))
    return session.received
