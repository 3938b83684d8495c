"""Exchanges of a worker's session in tests that compute gradients without a model."""

import time

from thinwire.worker.core.messages import NO_FIGURES
from thinwire.worker.core.worker_round import MiniBatch, RoundAction, RoundStage, SendPush


def advance(session, action):
    """Carry out an action and all that follow, up to the next mini-batch or the run's end.

    Returns:
        The next action, the request that was sent, and the replies that arrived meanwhile.
    """
    request, replies = None, ()
    while action not in (RoundAction.COMPUTE, RoundAction.END):
        if isinstance(action, SendPush):
            request = action.request
        if action is RoundAction.LOAD_ROUND:
            replies = session.received
        action = session.carry_out(action)
    if session.steps.diverged is not None:
        raise session.steps.diverged
    return action, request, replies


def exchange(session, values, samples=10, loss=1.0, figures=NO_FIGURES):
    """Take one step with these values, and wait for the replies; return the replies."""
    if session.steps.stage is RoundStage.READY:
        advance(session, session.steps.begin())
    batch = MiniBatch(values, samples, loss, figures=figures)
    return advance(session, session.computed(batch, time.monotonic()))[2]
