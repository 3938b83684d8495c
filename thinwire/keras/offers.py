"""What a worker offers of a script's model: its variables, its optimizer, what gets no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from thinwire.models.flat_model import SharedModel
from thinwire.ops.methods.method import Method
from thinwire.ops.offer import Offer
from thinwire.ops.optimizers.described import describe, describe_constraints


def make_offer(
    shared: SharedModel,
    optimizer: Any,
    method: Method,
    without_gradient: Sequence[Any],
    batch_size: int | None,
    num_examples: int | None,
) -> Offer:
    """Return the offer of a model that is about to take its first step.

    Args:
        shared: The model.
        optimizer: Compiled.
        method: Of the run.
        without_gradient: Shared variables that the loss does not depend on.
        batch_size: Of one step of the script alone; None: not known.
        num_examples: Of the whole training set; None: not known.

    Raises:
        ConfigurationError: The PS is to step, and cannot build the optimizer or a constraint.
    """
    paths = [tensor.path for tensor in shared.spec.tensors]
    ids = {id(variable) for variable in without_gradient}
    unused = [path for path, each in zip(paths, shared.variables, strict=True) if id(each) in ids]
    if method.steps_on_workers:
        return Offer(
            shared.spec,
            unused=tuple(unused),
            num_examples=num_examples or 0,
            script_optimizer=type(optimizer).__name__,
        )
    # A schedule can only be read by examples where it is known how many make a step.
    clock = method.schedule_clock if batch_size else "steps"
    described = describe(optimizer, shared.variables, batch_size or 0, clock, paths)
    return Offer(
        shared.spec,
        optimizers=(described.offer,),
        constraints=describe_constraints(shared.variables, paths),
        unused=tuple(unused),
        loss_scale=described.loss_scale,
        num_examples=num_examples or 0,
        script_optimizer=type(optimizer).__name__,
    )


def sgd_momentum(optimizer: Any) -> float:
    """Return the momentum that a method may take over from a compiled optimizer; 0: none."""
    if type(optimizer) is not keras.optimizers.SGD or optimizer.nesterov:
        return 0.0
    return float(optimizer.momentum)
