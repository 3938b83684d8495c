"""Weights that a model holds in mid-training, compared with those that the run gave it last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.types import ConfigurationError
from thinwire.script.session import Session

if TYPE_CHECKING:
    from thinwire.ops.types import Float32
    from thinwire.runtime.run.settings import Run

#: Of the largest weight: what adding and subtracting another one of its size may change.
_ROUNDING = 1e-6


def is_like(mine: Float32, theirs: Float32) -> bool:
    """Return whether weights [n] are the same but for the rounding of SwapEMAWeights."""
    if np.array_equal(mine, theirs):
        return True
    scale = float(np.abs(theirs).max(initial=0.0))
    return not np.abs(mine - theirs).max(initial=0.0) > _ROUNDING * scale  # not, for NaN


def set_by_script(session: Session) -> Float32 | None:
    """Return the weights [n] of the model if the script has set them after the last step."""
    held = session.variables.read()
    return None if is_like(held, session.weights) else held


def changed_by_script(session: Session, held: Float32, name: str) -> Float32 | None:
    """Return by how much a script has changed weights itself since the newest step.

    Args:
        session: Of the run.
        held: [num_parameters] float32 weights that the model has.
        name: Of the model.

    Returns:
        [num_parameters], to be sent with the next step; None: nothing is new of it.

    Raises:
        ConfigurationError: The PS would take no such changes.
    """
    known = session.sent_weights
    if is_like(held, known):
        return None
    if not takes_changes(session.settings.run):
        raise ConfigurationError(
            f"the script has set weights of {name!r} itself since the newest step (assign or "
            "set_weights in a callback, a train_step, a loop or a layer), and this run takes only "
            "updates: its workers sum among themselves (--collective), or its PS measures them "
            "(--max_update_norm, --update_norm_factor). Leave these flags out."
        )
    return held - known


def assigned_by_script(session: Session, change: Float32 | None) -> Float32 | None:
    """Return what is to be sent of a script's assignments where it steps as well.

    Args:
        session: Of the run.
        change: [num_parameters] float32 that they add up to since the newest step; None: none.

    Returns:
        As `changed_by_script`, with what was not sent before.
    """
    if change is not None and is_like(session.weights + change, session.weights):
        change = None
    unsent = session.unsent_change
    return change if unsent is None else unsent if change is None else unsent + change


def takes_changes(run: Run) -> bool:
    """Return whether the PS takes what a script has set itself, beside updates."""
    return run.method.collective == THROUGH_PS and not run.guards.measures
