"""Finds weights that a script has set: compares a model's weights with the pulled weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.types import ConfigurationError
from thinwire.script.session import Session

if TYPE_CHECKING:
    from thinwire.ops.types import Float32
    from thinwire.runtime.run.settings import Run

#: Rounding error of a weight, relative to the largest weight, that does not count as a change.
#: SwapEMAWeights adds and subtracts weights of equal size, which changes a float32 weight by less
#: than this fraction.
_ROUNDING = 1e-6


def is_like(mine: Float32, theirs: Float32) -> bool:
    """Return True if two arrays of weights [n] differ at most by the rounding of SwapEMAWeights."""
    if np.array_equal(mine, theirs):
        return True
    scale = float(np.abs(theirs).max(initial=0.0))
    # Use `not >` instead of `<=`: if a weight is NaN, the result is True, so the weights of a
    # diverged model do not count as weights that the script has set.
    return not np.abs(mine - theirs).max(initial=0.0) > _ROUNDING * scale


def set_by_script(session: Session) -> Float32 | None:
    """Return the model's weights [n] if the script has set them since the last step, else None.

    Args:
        session: This worker's session with the servers.
    """
    held = session.variables.read()
    return None if is_like(held, session.weights) else held


def changed_by_script(
    session: Session, held: Float32, name: str, is_exact: bool = False
) -> Float32 | None:
    """Return by how much the script itself has changed weights since its last step.

    Args:
        session: This worker's session with the servers.
        held: [num_parameters] float32 weights that the script's model has now.
        name: Name of the model for error messages.
        is_exact: True if the smallest difference is a change; False to allow for rounding.

    Returns:
        [num_parameters] float32 changes to send with the next step; None if the script has changed
        no weights.

    Raises:
        ConfigurationError: The script has changed weights itself, but the PS accepts only updates
            from optimizers.
    """
    known = session.part.sent_weights
    if np.array_equal(held, known, equal_nan=True) or (not is_exact and is_like(held, known)):
        return None
    if not takes_changes(session.settings.run):
        raise ConfigurationError(
            f"the script has set weights of {name!r} itself since the newest step (assign or "
            "set_weights in a callback, a train_step, a loop or a layer), but this run accepts "
            "only updates: its workers sum updates without the PS (--collective), or its PS "
            "measures updates (--max_update_norm, --update_norm_factor). Remove these flags."
        )
    return held - known


def assigned_by_script(
    session: Session, change: Float32 | None, is_exact: bool = False
) -> Float32 | None:
    """Return a script's own changes of weights for the next step, if workers run optimizers.

    Args:
        session: This worker's session with the servers.
        change: [num_parameters] float32 sum of the changes that the script has assigned to weights
            since the newest step; None without such a change.
        is_exact: True if the smallest difference is a change; False to allow for rounding.

    Returns:
        [num_parameters] float32 changes, including earlier changes that have not been sent; None
        if there is no change to send.
    """
    if change is not None and not is_exact and is_like(session.weights + change, session.weights):
        change = None
    unsent = session.part.unsent_change
    return change if unsent is None else unsent if change is None else unsent + change


def takes_changes(run: Run) -> bool:
    """Return True if the PS accepts a script's own changes of weights in addition to updates."""
    return run.method.collective == THROUGH_PS and not run.guards.measures
