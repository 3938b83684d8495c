"""Weights that a model holds in mid-training, compared with those that the run gave it last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.types import ConfigurationError
from thinwire.session import Session

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

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


def check_held(session: Session, held: Float32, name: str) -> None:
    """Refuse to step from weights that a script has changed itself, where the PS steps.

    Args:
        session: Of the run.
        held: [num_parameters] float32 weights that the model has.
        name: Of the model.

    Raises:
        ConfigurationError: They are not those that the run gave it last.
    """
    if is_like(held, session.weights):
        return
    changed = np.flatnonzero(held != session.weights)
    path = session.shared.spec.tensors[
        int(np.searchsorted(session.shared.spec.offsets, changed[0], "right")) - 1
    ].path
    raise ConfigurationError(
        f"the script has changed {len(changed)} weights of {name!r} itself since "
        f"the newest step, the first of them in {path}: by assign or set_weights in a "
        "train_step, a loop, a layer or a callback. The PS steps from its own weights, so that "
        "this would be lost; expected weights that only optimizers and constraints change "
        "while the model trains. Take a method whose workers step themselves, which exchange "
        "whatever has changed: --method=dgs, --method=dgc, --method=gd or --method=esync."
    )
