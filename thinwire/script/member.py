"""Decides how one model of a script takes part in a run: a state machine without I/O.

A driver reports events to a `ScriptMember`, which answers each event with one action or None. After
an action, the driver reports its result as the next event. The calls of a model's `fit`, its steps
and a training loop of the script's own are the sources of the other events.

A phase is a part of a run in which the model and its optimizers stay the same. A phase may begin
before the first step of a `fit` or after its last callback. One script then offers its model to the
servers, and all others follow it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator

from thinwire.proto.barriers import Point


class Standing(enum.Enum):
    """Relation of a model to the run."""

    ALONE = "no run has trained the model yet"
    SUCCEEDING = "the run still trains the model that the script trained before this one"
    OPENING = "the run's next phase, or the next fit, begins"
    AWAITING_STEP = "the run's next phase begins with the next step, which shows the variables"
    JOINED = "the run trains the model"
    PASSING_OVER = "the run completed the present fit before this script was restarted"
    LEAVING = "the last step of the fit is over; this worker leaves the run"
    LEAVING_BEHIND = "the same at the end of a fit that this script has passed over"
    LEFT = "this worker has left the run after a fit"
    LEFT_BEHIND = "this worker has left after a fit that the run completed before a restart"
    CLOSING = "the last callback of the fit is over"
    REPLACED = "the run trains a later model of the script"
    ENDED = "the run has ended"
    ENDED_AHEAD = "the run has ended in a later phase than this script's"


#: The run is in a later phase than this script.
BEHIND = frozenset(
    {Standing.PASSING_OVER, Standing.LEAVING_BEHIND, Standing.LEFT_BEHIND, Standing.ENDED_AHEAD}
)


class Use(enum.Enum):
    """Activities of a script with its model."""

    IDLE = "neither a fit nor a loop runs"
    FIT = "a fit runs"
    LOOP = "a training loop of the script's own has begun"
    FIT_OF_LOOP = "a fit runs within a training loop of the script's own"

    @property
    def is_fit(self) -> bool:
        """True while a call of `fit` runs."""
        return self in (Use.FIT, Use.FIT_OF_LOOP)

    @property
    def is_loop(self) -> bool:
        """True after a training loop of the script's own has begun."""
        return self in (Use.LOOP, Use.FIT_OF_LOOP)


class Event(enum.Enum):
    """Event that a driver reports: of the script, or the result of an action."""

    FIT_BEGINS = "the script calls fit"
    TRAINING_BEGINS = "a fit, or the first train_on_batch, is ready for its first step"
    STEP_FOUND = "a step has shown the model's optimizers and variables"
    STEPS_STOP = "the fit stops within an epoch"
    FIT_ENDS = "the last step of a fit is over"
    CALLBACKS_END = "the last callback of a fit is over"
    FIT_FAILS = "a fit raises an error"
    FIT_RETURNS = "a fit returns, also after an error"
    LOOP_BEGINS = "the first step of a training loop of the script's own"
    LOOP_STEPS = "any step of a training loop of the script's own"
    SUCCEEDS = "the script begins to train this model after another one"
    IS_REPLACED = "the script begins to train another model"

    DONE = "the action is done"
    LATER = "the variables are unknown until the next step"
    JOINED = "this worker has joined the run"
    JOINED_BEHIND = "the run is in a later phase than this script"
    OPENED = "all scripts have reached the barrier, and no phase begins"
    OFFERS = "a phase begins, and this script offers its model"
    FOLLOWS = "a phase begins, and another script offers its model"
    HALTED = "the run has ended"
    FAILED = "the action has raised an error"


class MemberAction(enum.Enum):
    """Action of the driver."""

    FIND_STEP = "describe the model's next phase, or report LATER"
    TAKE_SESSION = "leave the session of the present phase, and take the next one's"
    JOIN = "join the run and load its weights"
    FOLLOW_RATE = "take over the learning rate of a run that has taken steps"
    MEET_RUN = "wait for the scripts of all workers, once in a run"
    LIFT_HOLD = "let the script write files again"
    COUNT_FIT = "count a fit that began before the barriers existed"
    REPORT_FIT = "report to the evaluator that a fit has begun"
    SEED = "seed the random layers by worker"
    FORGET_STATES = "forget the recorded optimizer state"
    NOTE_STATES = "record the optimizer state, to find changes by the script"
    FINISH_ROUNDS = "push local steps that no exchange has sent"
    KEEP_STATE = "write a checkpoint of optimizers that step on this worker"
    TAKE_FINAL = "load the final state of an ended run"
    FILL_SLOTS = "load the PS's optimizer state"
    LEAVE = "leave the run"
    LEAVE_FAILED = "leave the run because of an error"


@dataclasses.dataclass(frozen=True)
class Wait:
    """Action of the driver: wait at a barrier until all scripts have reached it.

    Attributes:
        point: Point of the fit.
        compares: True if a phase may begin, so this script compares its model with the run's.
    """

    point: Point
    compares: bool = False


Action = MemberAction | Wait

#: Actions that are left out while the run is in a later phase than this script.
_NOT_BEHIND: frozenset[Action] = frozenset(
    {
        MemberAction.LIFT_HOLD,
        MemberAction.REPORT_FIT,
        MemberAction.KEEP_STATE,
        MemberAction.TAKE_FINAL,
        MemberAction.FILL_SLOTS,
        MemberAction.NOTE_STATES,
    }
)
#: Actions that are left out in a training loop of the script's own.
_OF_FIT: frozenset[Action] = frozenset(
    {MemberAction.COUNT_FIT, MemberAction.REPORT_FIT, Wait(Point.BEGIN), Wait(Point.BEGIN_JOINED)}
)


@dataclasses.dataclass(frozen=True)
class Transition:
    """Actions that follow an event in a standing, and the standings that these actions lead to.

    Attributes:
        standing: Standing until a JOIN among the actions has a result.
        actions: Actions in order.
        joined: Standing from the event JOINED on.
        behind: Standing from the event JOINED_BEHIND on.
        ends: Standing after the last action; None: the standing stays.
    """

    standing: Standing
    actions: tuple[Action, ...] = ()
    joined: Standing = Standing.JOINED
    behind: Standing = Standing.PASSING_OVER
    ends: Standing | None = None


def _phase(offers: bool, offered: Point, joined: Point) -> tuple[Action, ...]:
    """Return the actions that begin a phase.

    The script that offers its model joins before the barrier `offered`, all others after it.
    """
    joins: tuple[Action, ...] = (
        (MemberAction.JOIN, Wait(offered)) if offers else (Wait(offered), MemberAction.JOIN)
    )
    return (MemberAction.FIND_STEP, MemberAction.TAKE_SESSION, *joins, Wait(joined))


_AT_BEGIN, _AT_LEFT = Wait(Point.BEGIN, compares=True), Wait(Point.LEFT, compares=True)
_ENTER: tuple[Action, ...] = (
    *(
        MemberAction.FIND_STEP,
        MemberAction.TAKE_SESSION,
        MemberAction.JOIN,
        MemberAction.FOLLOW_RATE,
        MemberAction.MEET_RUN,
        MemberAction.LIFT_HOLD,
    ),
    *(MemberAction.COUNT_FIT, Wait(Point.BEGIN), MemberAction.REPORT_FIT, MemberAction.SEED),
)
# If workers did not wait for each other after joining, those that join first would take the first
# rounds of a fit without those that join later.
_REJOIN = (
    MemberAction.FORGET_STATES,
    MemberAction.JOIN,
    Wait(Point.BEGIN_JOINED),
    MemberAction.REPORT_FIT,
)
_OFFER, _FOLLOW = (
    (
        *_phase(offers, Point.BEGIN_OFFERED, Point.BEGIN_JOINED),
        *(MemberAction.FORGET_STATES, MemberAction.REPORT_FIT, MemberAction.SEED),
    )
    for offers in (True, False)
)
_OFFER_AT_END, _FOLLOW_AT_END = (
    (
        *_phase(offers, Point.LEFT_OFFERED, Point.LEFT_JOINED),
        MemberAction.NOTE_STATES,
        MemberAction.SEED,
    )
    for offers in (True, False)
)
_LEAVE = (
    MemberAction.FINISH_ROUNDS,
    MemberAction.KEEP_STATE,
    MemberAction.TAKE_FINAL,
    MemberAction.LEAVE,
)
# A worker leaves a second time, because otherwise a restarted worker would wait in its rounds for
# this worker, which takes no more steps.
_LOAD = (MemberAction.JOIN, MemberAction.FILL_SLOTS, MemberAction.LEAVE, MemberAction.NOTE_STATES)


def _offered() -> Iterator[tuple[Standing, Event, Transition]]:
    """Yield the rows for a model that a script offers to the servers."""
    s, e, away = Standing, Event, {"joined": Standing.LEFT, "behind": Standing.LEFT_BEHIND}
    yield s.ALONE, e.TRAINING_BEGINS, Transition(s.OPENING, _ENTER)
    yield s.ALONE, e.STEP_FOUND, Transition(s.OPENING, _ENTER[1:])
    yield s.SUCCEEDING, e.TRAINING_BEGINS, Transition(s.SUCCEEDING, (_AT_BEGIN,))
    yield s.SUCCEEDING, e.OFFERS, Transition(s.OPENING, _OFFER)
    yield s.SUCCEEDING, e.FOLLOWS, Transition(s.OPENING, _FOLLOW)
    yield s.SUCCEEDING, e.OPENED, Transition(s.OPENING, _FOLLOW)
    # The run ended before this model's turn: the model gets a session that keeps its own weights.
    yield (
        s.SUCCEEDING,
        e.HALTED,
        Transition(s.OPENING, (MemberAction.FIND_STEP, MemberAction.TAKE_SESSION), ends=s.ENDED),
    )
    yield s.OPENING, e.OFFERS, Transition(s.OPENING, _OFFER)
    yield s.OPENING, e.FOLLOWS, Transition(s.OPENING, _FOLLOW)
    yield s.OPENING, e.OPENED, Transition(s.OPENING, _REJOIN)
    for standing in (s.JOINED, s.PASSING_OVER, s.LEFT, s.LEFT_BEHIND):
        yield standing, e.TRAINING_BEGINS, Transition(s.OPENING, (_AT_BEGIN,))
    for standing in (s.JOINED, s.PASSING_OVER):
        stop = (MemberAction.FINISH_ROUNDS, MemberAction.TAKE_FINAL, MemberAction.LEAVE)
        yield standing, e.STEPS_STOP, Transition(standing, stop)
    for standing, leaving, ended in (
        (s.JOINED, s.LEAVING, s.ENDED),
        (s.PASSING_OVER, s.LEAVING_BEHIND, s.ENDED_AHEAD),
    ):
        yield standing, e.FIT_ENDS, Transition(leaving, (*_LEAVE, Wait(Point.END)))
        yield leaving, e.OPENED, Transition(leaving, _LOAD, **away)
        yield leaving, e.HALTED, Transition(ended, (MemberAction.LEAVE, MemberAction.NOTE_STATES))
        yield ended, e.FIT_ENDS, Transition(ended, (*_LEAVE, MemberAction.NOTE_STATES))
    for standing in (s.LEFT, s.LEFT_BEHIND):
        yield standing, e.CALLBACKS_END, Transition(s.CLOSING, (_AT_LEFT,), ends=standing)
        loop = (MemberAction.FORGET_STATES, MemberAction.JOIN, Wait(Point.LOOP))
        yield standing, e.LOOP_STEPS, Transition(s.OPENING, loop)
    yield s.CLOSING, e.OFFERS, Transition(s.CLOSING, _OFFER_AT_END, **away)
    yield s.CLOSING, e.FOLLOWS, Transition(s.CLOSING, _FOLLOW_AT_END, **away)


def _by_flags() -> Iterator[tuple[Standing, Event, Transition]]:
    """Yield the rows for a run whose servers have a model from flags: it has one phase."""
    s, e = Standing, Event
    for standing in (s.ALONE, s.JOINED, s.LEFT):
        yield (
            standing,
            e.TRAINING_BEGINS,
            Transition(s.OPENING, (MemberAction.FORGET_STATES, MemberAction.JOIN)),
        )
    yield (
        s.JOINED,
        e.STEPS_STOP,
        Transition(s.JOINED, (MemberAction.FINISH_ROUNDS, MemberAction.LEAVE)),
    )
    yield s.JOINED, e.FIT_ENDS, Transition(s.JOINED, (MemberAction.LEAVE,), ends=s.LEFT)
    yield s.ENDED, e.FIT_ENDS, Transition(s.ENDED, (MemberAction.LEAVE,))


#: Tables of transitions: (standing, event) -> transition. An event of the script without a
#: transition has no effect.
OFFERED = {(standing, event): row for standing, event, row in _offered()}
BY_FLAGS = {(standing, event): row for standing, event, row in _by_flags()}
#: Transitions of the use: (use, event) -> use.
USES = {
    (Use.IDLE, Event.FIT_BEGINS): Use.FIT,
    (Use.FIT, Event.FIT_RETURNS): Use.IDLE,
    (Use.IDLE, Event.LOOP_BEGINS): Use.LOOP,
    (Use.LOOP, Event.LOOP_BEGINS): Use.LOOP,
    (Use.LOOP, Event.FIT_BEGINS): Use.FIT_OF_LOOP,
    (Use.FIT_OF_LOOP, Event.FIT_RETURNS): Use.LOOP,
}
_OF_USE = {event for _, event in USES}
_RESULTS = (
    *(Event.DONE, Event.LATER, Event.JOINED, Event.JOINED_BEHIND),
    *(Event.OPENED, Event.OFFERS, Event.FOLLOWS, Event.HALTED, Event.FAILED),
)


class OutOfTurn(RuntimeError):
    """Raised for an event that cannot occur in the present standing: a mistake of the driver."""


class ScriptMember:
    """Standing and use of one model of a script.

    Attributes:
        standing: Relation of the model to the run.
        use: What the script does with the model.

    Args:
        is_offered: True if scripts offer their models to the servers; False if flags define the
            servers' model.
    """

    def __init__(self, is_offered: bool) -> None:
        self.standing, self.use = Standing.ALONE, Use.IDLE
        self._table = OFFERED if is_offered else BY_FLAGS
        # present row, and the number of its next action; the row is None if no action is due
        self._row: Transition | None = None
        self._next = 0
        # standing to which an error, or a fit without steps, returns
        self._rest = Standing.ALONE

    @property
    def is_behind(self) -> bool:
        """True if the run is in a later phase than this script."""
        return self.standing in BEHIND

    @property
    def begins_with_step(self) -> bool:
        """True if the next step shows the variables with which the run's next phase begins."""
        return self.standing in (Standing.ALONE, Standing.AWAITING_STEP)

    def receive(self, event: Event) -> Action | None:
        """Take an event; return the next action, whose result is the next event.

        Returns:
            The action; None if no action is due before the next event of the script.

        Raises:
            OutOfTurn: The event cannot occur now.
        """
        if event in _RESULTS:
            return self._take_result(event)
        if event is Event.FIT_FAILS:
            return self._fail()
        if event in _OF_USE:
            self._change_use(event)
            return None
        if self.standing is Standing.AWAITING_STEP:
            return self._take_awaited(event)
        if self._row is not None:
            raise OutOfTurn(f"{event} while an action of {self.standing} is under way")
        if event is Event.LOOP_STEPS and self.use.is_fit:
            return None
        return self._take_script(event)

    def _take_script(self, event: Event) -> Action | None:
        """Take an event of the script in a standing in which no action is due."""
        if event is Event.SUCCEEDS and self.standing in (Standing.ALONE, Standing.REPLACED):
            self.standing = Standing.SUCCEEDING
        elif event is Event.IS_REPLACED:
            self.standing = Standing.REPLACED
        elif (row := self._table.get((self.standing, event))) is not None:
            self._rest = self.standing
            return self._begin(row)
        elif event in (Event.STEP_FOUND, Event.SUCCEEDS):
            raise OutOfTurn(f"{event} in {self.standing}")
        return None

    def _take_awaited(self, event: Event) -> Action | None:
        """Take an event of the script while a phase waits for the first step."""
        if event is Event.STEP_FOUND:
            self.standing = Standing.OPENING
            return self._go_on()
        if event is Event.FIT_ENDS:  # without a step: nothing has begun
            self._end(self._rest)
        elif event in (Event.SUCCEEDS, Event.IS_REPLACED):
            raise OutOfTurn(f"{event} in {self.standing}")
        return None

    def _take_result(self, event: Event) -> Action | None:
        """Take the result of an action."""
        row = self._row
        if row is None:
            raise OutOfTurn(f"{event} without an action")
        if event is Event.FAILED:
            self._end(self._rest)
            return None
        if event is Event.LATER:
            self.standing = Standing.AWAITING_STEP
            return None
        if event is Event.HALTED:
            follows = self._table.get((self.standing, event))
            if follows is not None:
                return self._begin(follows)
            self._end(Standing.ENDED_AHEAD if self.is_behind else Standing.ENDED)
            return None
        if event is Event.JOINED:
            self.standing = row.joined
        elif event is Event.JOINED_BEHIND:
            self.standing = row.behind
        elif event is not Event.DONE and self._next == len(row.actions):
            follows = self._table.get((self.standing, event))
            if follows is not None:
                return self._begin(follows)
        return self._go_on()

    def _begin(self, row: Transition) -> Action | None:
        self._row, self._next, self.standing = row, 0, row.standing
        return self._go_on()

    def _go_on(self) -> Action | None:
        """Return the present row's next action; end the row after its last action."""
        row = self._row
        while row is not None and self._next < len(row.actions):
            action = row.actions[self._next]
            self._next += 1
            if action is MemberAction.TAKE_SESSION:  # from now on, the session is this model's own
                self._rest = Standing.LEFT
            is_left_out = self.is_behind and action in _NOT_BEHIND
            if not is_left_out and (self.use.is_fit or action not in _OF_FIT):
                return action
        self._end(self.standing if row is None or row.ends is None else row.ends)
        return None

    def _end(self, standing: Standing) -> None:
        self.standing, self._row = standing, None

    def _change_use(self, event: Event) -> None:
        if (self.use, event) not in USES:
            raise OutOfTurn(f"{event} while {self.use}")
        self.use = USES[self.use, event]

    def _fail(self) -> Action | None:
        """Leave the run because of an error in a `fit`; drop all further actions."""
        if self._row is not None:
            self._end(self._rest)
        if self.standing in (Standing.JOINED, Standing.PASSING_OVER):
            self.standing = Standing.LEFT_BEHIND if self.is_behind else Standing.LEFT
        self._row, self._next = _FAILURE, 0
        return self._go_on()


_FAILURE = Transition(Standing.LEFT, (MemberAction.LEAVE_FAILED,))
