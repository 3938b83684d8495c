"""Copies the shards' weights and optimizer state into a model, for callbacks and saved files.

The argument `member` of each function is the membership of the model in a run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
from absl import logging

from thinwire.ops.types import ConfigurationError
from thinwire.proto.grpc import StreamLost, Unreachable
from thinwire.proto.grpc.session import RequestRejected
from thinwire.runtime.run.settings import END_REASONS
from thinwire.script.central_state import CentralState
from thinwire.script.keras.run_member import RunMember
from thinwire.script.keras.step import steps_allowed
from thinwire.script.own_changes import is_like
from thinwire.script.session import Session
from thinwire.worker.client.control import RunHalted


@contextlib.contextmanager
def saving(member: RunMember, is_own: bool) -> Iterator[bool]:
    """Load the shards' weights and optimizer state into the model while the script saves it.

    Yields:
        True if this worker writes the file: the worker that writes the script's files, or any
        worker if `is_own` is True, so that no other worker can write to the file.
    """
    writes = member.writes_files
    with lent(member) if writes or is_own else contextlib.nullcontext():
        yield writes or is_own
    if not (is_own or member.in_fit or member.barriers is None or member.stopped):
        try:
            member.barriers.saved(writes, member.in_loop)
        except RunHalted as ended:
            member.raise_if_broken(ended.cause, ended.message)


@contextlib.contextmanager
def lent(member: RunMember) -> Iterator[None]:
    """Give the model the shards' weights and optimizer state within the `with` block.

    Within a `fit`, the model in the `with` block of `lent` has the shards' weights, moving
    statistics and optimizer state. After the `with` block of `lent`, the model has this
    worker's own weights and statistics again. If a callback has set the model's weights before
    the `with` block of `lent`, nothing is loaded from the shards.
    """
    session, state = member.present, None
    if session is not None and member.in_fit:
        worker_values = session.variables.read(), session.statistics.read()
        if is_like(worker_values[0], session.weights):
            state = _fetch(session, weights=True)
    if session is None or state is None:
        yield
        return
    session.assign(state.weights())
    _fill_slots(member, session, state)
    try:
        yield
    finally:
        session.assign(worker_values)


def refresh_averages(member: RunMember) -> None:
    """Load the PS's moving averages of weights into the script's optimizers during a `fit`."""
    session, steps = member.present, member.stepping
    if session is not None and any(step.inner.use_ema for step in steps):
        fill_slots(member, session)


def fill_slots(member: RunMember, session: Session) -> bool:
    """Load the PS's optimizer state into the script's optimizers.

    Returns:
        True if the PS had an optimizer state and the script's optimizers have loaded it.
    """
    state = _fetch(session)
    return state is not None and _fill_slots(member, session, state)


def take_final(member: RunMember, session: Session) -> bool:
    """Load the final weights and optimizer state of an ended run into the script's model.

    The shards still answer after the run's end, because they wait until all workers have left.

    Returns:
        True if the PS had a final optimizer state and the script's optimizers have loaded it.
    """
    is_over = session.stopped and session.stop_reason in END_REASONS
    if not is_over or member.is_behind or not session.part.run_id:
        return False
    state = _fetch(session, weights=True)
    if state is None:
        return False
    session.assign(state.weights())
    return _fill_slots(member, session, state)


def _fetch(session: Session, weights: bool = False) -> CentralState | None:
    """Fetch the shards' optimizer state, and the shards' weights if `weights` is true.

    Returns:
        The state; None if the PS has no optimizer state to send or does not answer.
    """
    offer = session.offer
    if offer is None or not (offer.optimizers or weights):
        return None
    try:
        return CentralState.fetch(session.part, session.statistics.size if weights else None)
    except (StreamLost, Unreachable, RequestRejected) as error:
        logging.warning("cannot fetch the PS's state; the model keeps its own: %s", error)
        return None


def _fill_slots(member: RunMember, session: Session, state: CentralState) -> bool:
    offer, steps = session.offer, member.stepping
    if offer is None or not offer.optimizers:
        return False
    before = [None if step.rate is None else float(step.rate.numpy()) for step in steps]
    try:
        with steps_allowed():
            inner = [step.inner for step in steps]
            state.fill_slots(offer, inner, session.shared.variables)
    except (ConfigurationError, ValueError) as error:
        logging.warning(
            "cannot load the PS's optimizer state; the compiled optimizer keeps its own: %s",
            error,
        )
        return False
    for step, rate in zip(steps, before, strict=True):
        if state.scale_streak is not None:
            step.assign_streak(state.scale_streak)
        if rate is None:
            continue
        # A callback may set the learning rate after the last push. The fetched optimizer state
        # would overwrite this rate before the next push reports it to the PS, so the rate is
        # assigned again.
        was_set = rate != np.float32(step.known_rate)
        step.known_rate = float(step.rate.numpy())
        if was_set:
            step.assign_rate(rate)
    return True
