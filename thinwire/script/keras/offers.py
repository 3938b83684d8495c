"""Makes the offer: the description of a script's variables and optimizers for the servers.

The function `new_session` makes the offer and the session with the servers for a run's next phase.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from thinwire.models.flat_model import SharedModel
from thinwire.ops.methods.method import Method
from thinwire.ops.offer import LossScale, Offer, OptimizerOffer
from thinwire.ops.optimizers.described import (
    DescribedOptimizer,
    describe,
    describe_constraints,
)
from thinwire.ops.optimizers.slots import OwnSlots
from thinwire.ops.types import ConfigurationError, State
from thinwire.script.keras.clock import outside_of_trace
from thinwire.script.keras.compiled import describe_compiled
from thinwire.script.keras.kept_optimizer import KerasState
from thinwire.script.keras.optimizers import ScriptOptimizers
from thinwire.script.keras.plan import WITHOUT_SLOTS, StepPlan, named
from thinwire.script.keras.run_member import RunMember
from thinwire.script.keras.step import inner
from thinwire.script.session import Session
from thinwire.worker.program import program_here
from thinwire.worker.script import RECORD


def new_session(
    member: RunMember, optimizers: ScriptOptimizers, plan: StepPlan, shared: SharedModel
) -> Session:
    """Return a session that offers (describes) the model to the PS for the first or next phase.

    Args:
        member: Membership of the model in a run.
        optimizers: Optimizers of the script.
        plan: Optimizers of the script, with the variables that each optimizer updates.
        shared: Variables of the model that all workers train.

    Raises:
        ConfigurationError: The PS cannot update the model as the script does without Thinwire.
    """
    settings, kept = member.own_settings, member.kept
    method, batch_size = settings.run.method, member.data.batch_size
    optimizers.take(plan)
    plan.check(method, member.model.name)
    num_train = member.num_train or member.data.num_examples
    firsts = optimizers.begin_clocks(method)
    offer = make_offer(shared, plan, method, firsts, num_train, batch_size)
    # only the first offer to the PS describes the state before any training
    if not RECORD.program:
        compiled = describe_compiled(member.model, plan, offer, batch_size)
        RECORD.program = program_here(compiled).rows()
    inners = [step.inner for step in member.stepping]
    stepping = [KerasState(step.optimizer) for step in member.stepping]

    def restore(session: Session, last_step: int) -> State | None:
        """Load the optimizer state that an earlier process of this worker saved."""
        return None if kept is None else kept.restore(session, stepping, last_step)

    def check_states(session: Session) -> None:
        """Reject an offer of the model to the PS if this process lacks the optimizer state for it.

        A shard accepts a model's offer only before the phase of the run for which the offer is
        made. After a restart of this worker, the barrier may select the worker to offer its model
        although the phase of the run has begun already. A worker that the barrier selects too late
        joins without an offer, and `check_states` is not called. `CatchUp.check_states` compares
        the optimizer states.
        """
        if not session.takes_weights:
            member.catch_up.check_states(session, inners)

    return Session(
        settings,
        shared,
        num_train,
        optimizers.momentum_for(method),
        dataclasses.replace(offer, succession=member.num_before),
        inners,
        member.session,
        0 if member.session is None or member.barriers is None else member.barriers.phase,
        restore,
        check_states,
    )


def make_offer(
    shared: SharedModel,
    plan: StepPlan,
    method: Method,
    first_batches: tuple[int, ...],
    num_examples: int | None,
    batch_size: int | None,
) -> Offer:
    """Return the offer (the description for the PS) of a model before its first step in a phase.

    Args:
        shared: Variables of the model that all workers train, with their paths.
        plan: Optimizers of one step of the script, with the variables that each optimizer updates.
        method: Training method of the run.
        first_batches: For each optimizer, the batch count at which its learning-rate schedule
            begins.
        num_examples: Number of examples in the whole training set; None if the size is unknown.
        batch_size: Number of rows in one step of the script outside of a run; None if unknown.

    Raises:
        ConfigurationError: The PS must update the weights with the script's optimizers, but the PS
            cannot build one of the optimizers or a Keras constraint.
    """
    paths = {id(v): t.path for v, t in zip(shared.variables, shared.spec.tensors, strict=True)}
    moved = plan.moved
    unused = [path for number, path in paths.items() if number not in moved]
    offer = Offer(
        shared.spec,
        unused=tuple(unused),
        num_examples=num_examples or 0,
        num_batches=math.ceil((num_examples or 0) / batch_size) if batch_size else 0,
        first_batches=first_batches,
        script_optimizer="+".join(type(step.optimizer).__name__ for step in plan.steps),
    )
    if method.steps_on_workers:
        return offer
    described = []
    for optimizer, variables in _owners(shared, plan):
        own_paths = tuple(paths[id(variable)] for variable in variables)
        description = describe(optimizer, variables, method.schedule_clock, own_paths)
        known = description.offer
        known = dataclasses.replace(
            known,
            has_slots=known.has_slots or _has_slots(inner(optimizer), known, variables),
            paths=own_paths if len(plan.steps) > 1 else known.paths,
        )
        described.append(dataclasses.replace(description, offer=known))
    return dataclasses.replace(
        offer,
        optimizers=tuple(description.offer for description in described),
        constraints=describe_constraints(shared.variables, list(paths.values())),
        loss_scale=_loss_scale(described, plan),
    )


def _has_slots(optimizer: Any, offer: OptimizerOffer, variables: Sequence[Any]) -> bool:
    """Return True if a script has set slots (moments) of an optimizer that has not stepped yet."""
    if not optimizer.built or len(optimizer.variables) <= WITHOUT_SLOTS:
        return False
    # the class OwnSlots creates variables
    return outside_of_trace(lambda: not OwnSlots(optimizer, offer, variables).are_initial)


def _owners(shared: SharedModel, plan: StepPlan) -> list[tuple[Any, list[Any]]]:
    """Return each optimizer with the shared variables that it updates, in the order of their steps.

    The model's W_global may list shared variables that no optimizer updates. Shared variables that
    no optimizer updates are returned with the first optimizer, and the offer to the PS lists them
    as unused.
    """
    owner = {id(v): number for number, step in enumerate(plan.steps) for v in step.variables}
    owners: list[tuple[Any, list[Any]]] = [(step.optimizer, []) for step in plan.steps]
    for variable in shared.variables:
        owners[owner.get(id(variable), 0)][1].append(variable)
    for optimizer, variables in owners:
        if not variables:
            raise ConfigurationError(
                f"{named(optimizer)} trains none of the shared variables; expected at least one. "
                "Put its variables into thinwire.W_global too, or leave W_global alone."
            )
    return owners


def _loss_scale(described: Sequence[DescribedOptimizer], plan: StepPlan) -> LossScale | None:
    """Return the dynamic loss scale of a step's only optimizer; None without loss scaling.

    Raises:
        ConfigurationError: The script's training step has several optimizers, and one of the
            optimizers scales its loss.
    """
    scales = [description.loss_scale for description in described]
    if len(scales) > 1 and any(scales):
        name = named(
            next(s.optimizer for s, scale in zip(plan.steps, scales, strict=True) if scale)
        )
        raise ConfigurationError(
            f"{name} is one of {len(scales)} optimizers, but a PS keeps only one loss scale; "
            "expected no loss scaling in a training step with several optimizers. Train in "
            "float32 or mixed_bfloat16, or take a method whose workers apply their optimizers "
            "themselves: --method=dgs, --method=gd or --method=esync."
        )
    return scales[0]
