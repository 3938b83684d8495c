"""What a worker offers of a script's model: its variables, its optimizer, what gets no gradient."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import keras

from thinwire.models.flat_model import SharedModel
from thinwire.ops.methods.method import Method
from thinwire.ops.offer import LossScale, Offer, OptimizerOffer
from thinwire.ops.optimizers.described import (
    DescribedOptimizer,
    describe,
    describe_constraints,
)
from thinwire.ops.optimizers.slots import OwnSlots
from thinwire.ops.types import ConfigurationError
from thinwire.script.keras.plan import StepPlan, named
from thinwire.script.keras.step import inner

#: Variables of an optimizer that has no slots: its steps and its rate.
_WITHOUT_SLOTS = 2


def make_offer(
    shared: SharedModel,
    plan: StepPlan,
    method: Method,
    first_batches: tuple[int, ...],
    num_examples: int | None,
    batch_size: int | None,
) -> Offer:
    """Return the offer of a model that is about to take its first step.

    Args:
        shared: The model.
        plan: What it does.
        method: Of the run.
        first_batches: The count that each optimizer's schedule begins with.
        num_examples: Of the whole training set; None: not known.
        batch_size: Rows in one step of the script alone; None: not known.

    Raises:
        ConfigurationError: The PS is to step, and cannot build an optimizer or a constraint.
    """
    paths = {id(v): t.path for v, t in zip(shared.variables, shared.spec.tensors, strict=True)}
    moved = {id(each) for each in plan.variables} - {id(each) for each in plan.without_gradient}
    unused = [path for number, path in paths.items() if number not in moved]
    names = "+".join(type(step.optimizer).__name__ for step in plan.steps)
    known = Offer(
        shared.spec,
        unused=tuple(unused),
        num_examples=num_examples or 0,
        num_batches=math.ceil((num_examples or 0) / batch_size) if batch_size else 0,
        first_batches=first_batches,
        script_optimizer=names,
    )
    if method.steps_on_workers:
        return known
    described = []
    for optimizer, variables in _owners(shared, plan):
        own = tuple(paths[id(each)] for each in variables)
        found = describe(optimizer, variables, method.schedule_clock, own)
        if not found.offer.has_slots and _has_slots(inner(optimizer), found.offer, variables):
            found = dataclasses.replace(
                found, offer=dataclasses.replace(found.offer, has_slots=True)
            )
        if len(plan.steps) > 1:
            found = dataclasses.replace(found, offer=dataclasses.replace(found.offer, paths=own))
        described.append(found)
    return dataclasses.replace(
        known,
        optimizers=tuple(each.offer for each in described),
        constraints=describe_constraints(shared.variables, list(paths.values())),
        loss_scale=_loss_scale(described, plan),
    )


def _has_slots(optimizer: Any, offer: OptimizerOffer, variables: Sequence[Any]) -> bool:
    """Return whether a script has set slots of an optimizer that counts no steps."""
    if not optimizer.built or len(optimizer.variables) <= _WITHOUT_SLOTS:
        return False
    # OwnSlots makes variables, and TensorFlow traces a step again that makes one. Another thread
    # is in no trace.
    with futures.ThreadPoolExecutor(1) as outside:
        return outside.submit(
            lambda: not OwnSlots(optimizer, offer, variables).are_initial
        ).result()


def _owners(shared: SharedModel, plan: StepPlan) -> list[tuple[Any, list[Any]]]:
    """Return each optimizer with the shared variables that it steps, in order.

    What is shared and never stepped, as W_global may have it, is the first one's, and unused.
    """
    owner = {id(v): number for number, step in enumerate(plan.steps) for v in step.variables}
    found: list[tuple[Any, list[Any]]] = [(step.optimizer, []) for step in plan.steps]
    for variable in shared.variables:
        found[owner.get(id(variable), 0)][1].append(variable)
    for optimizer, variables in found:
        if not variables:
            raise ConfigurationError(
                f"{named(optimizer)} steps none of the shared variables; expected at least one. "
                "Put its variables into thinwire.W_global too, or leave W_global alone."
            )
    return found


def _loss_scale(described: Sequence[DescribedOptimizer], plan: StepPlan) -> LossScale | None:
    """Return the dynamic loss scale of a single optimizer; refuse several.

    Raises:
        ConfigurationError: One of several optimizers scales its loss.
    """
    scales = [each.loss_scale for each in described]
    if len(scales) > 1 and any(scales):
        name = named(
            next(s.optimizer for s, scale in zip(plan.steps, scales, strict=True) if scale)
        )
        raise ConfigurationError(
            f"{name} is one of {len(scales)} optimizers, and a PS keeps one loss scale; expected "
            "none where there are several. Train in float32 or mixed_bfloat16, or take a method "
            "whose workers step themselves: --method=dgs, --method=gd or --method=esync."
        )
    return scales[0]


def sgd_momentum(optimizer: Any) -> float:
    """Return the momentum that a method may take over from a compiled optimizer; 0: none."""
    if type(optimizer) is not keras.optimizers.SGD or optimizer.nesterov:
        return 0.0
    return float(optimizer.momentum)
