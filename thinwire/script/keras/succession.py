"""Trains several models of one script in turn: a run trains the script's newest model."""

from __future__ import annotations

from typing import Any, NoReturn

from thinwire.ops.types import ConfigurationError
from thinwire.script import interrupts
from thinwire.script.data.fit_counts import FitNumber
from thinwire.script.keras.run_member import RunMember
from thinwire.script.member import Event, Standing
from thinwire.worker.script import RECORD


def count_fit(member: RunMember, data: Any) -> FitNumber:
    """Count a call of `fit` of a model among the calls for all models of the script.

    Args:
        member: Membership of the model in a run.
        data: Argument `x` that the script passes to `fit`.
    """
    other_counts = (other.fit_counts for other in others_of(member))
    member.fit_counts = next(
        (counts for counts in other_counts if counts.num_fits), member.fit_counts
    )
    return member.fit_counts.begin_fit(data)


def others_of(member: RunMember) -> list[RunMember]:
    """Return the memberships in the run of the other models that this script distributed."""
    members = (other for other in RECORD.sessions if isinstance(other, RunMember))
    return [other for other in members if other is not member and other.place == member.place]


def begin_to_train(member: RunMember) -> None:
    """Let the run train a model instead of the model that the script trained before.

    The next phase of the run (in which it trains one model) begins with this model. Calls of `fit`
    are counted over all models of the script.

    Raises:
        ConfigurationError: A `fit` of another model of the script is still running, or a training
            loop of the script's own trains this model or another model.
    """
    if not member.is_offered:
        return
    others = others_of(member)
    for other in others:
        if other.in_fit or other.in_loop:
            _refuse(member, other, in_loop=other.in_loop)
    before = next((other for other in others if has_place(other)), None)
    if before is None:
        return
    if member.in_loop:
        _refuse(member, before, in_loop=True)
    if member.barriers is None:
        RECORD.endings.append(member.leave_at_end)
    take_over(member, before)


def has_place(member: RunMember) -> bool:
    """Return True if the run trains a model now, and not a later model of the script."""
    return member.session is not None and member.state.standing is not Standing.REPLACED


def take_over(member: RunMember, other: RunMember) -> None:
    """Let the run train a model instead of the script's previous model, that of `other`."""
    interrupts.remove_listener(other.interrupt)
    member.session, member.barriers = other.session, other.barriers
    member.catch_up = other.catch_up
    member.catch_up.go_to_next_model(other.joined.shared.variables)
    other.state.receive(Event.IS_REPLACED)
    member.state.receive(Event.SUCCEEDS)
    member.num_before = other.num_before + 1
    if member.barriers is not None:
        member.barriers.on_stop = member.stop_fit


def check_loop(member: RunMember) -> None:
    """Reject a script's own training loop if the script has trained another model in the run.

    Raises:
        ConfigurationError: The script has trained another model in the run.
    """
    for other in others_of(member):
        if other.session is not None:
            _refuse(member, other, in_loop=True)


def _refuse(member: RunMember, other: RunMember, in_loop: bool) -> NoReturn:
    """Reject the training of a model together with another model of the script.

    Args:
        member: Membership in the run of the rejected model.
        other: Membership in the run of the other model of the script.
        in_loop: True if a training loop of the script's own trains one of the two models.

    Raises:
        ConfigurationError: Each call of the function raises this error.
    """
    reason = "a loop of the script's own trains one of them" if in_loop else "both at a time"
    raise ConfigurationError(
        f"{member.model.name!r} is a second model that this script trains with "
        f"thinwire.distribute(), next to {other.model.name!r} ({reason}); expected models that "
        "model.fit(...) trains one after the other, or loops whose optimizers are all "
        "distributed before the first step of any loop: one = thinwire.distribute(one, "
        "model=first); other = thinwire.distribute(other, model=second). Or train one of the "
        "two in a run of its own, or without distribute(): every worker then trains it alone."
    )
