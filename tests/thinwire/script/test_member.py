"""A model's part in a run: every event in every standing, and whole scripts by a simple model."""

import pathlib

import hypothesis
import hypothesis.strategies as st
import pytest

from thinwire.proto.barriers import Point
from thinwire.script.member import (
    BEHIND,
    BY_FLAGS,
    OFFERED,
    USES,
    Event,
    MemberAction,
    OutOfTurn,
    ScriptMember,
    Standing,
    Use,
    Wait,
)
from thinwire.worker.core.worker_round import RoundStage

S, E = Standing, Event
BEGIN, LEFT = Wait(Point.BEGIN, compares=True), Wait(Point.LEFT, compares=True)
LEAVE = [
    MemberAction.FINISH_ROUNDS,
    MemberAction.KEEP_STATE,
    MemberAction.TAKE_FINAL,
    MemberAction.LEAVE,
    Wait(Point.END),
]
LOAD = [MemberAction.JOIN, MemberAction.FILL_SLOTS, MemberAction.LEAVE, MemberAction.NOTE_STATES]
RESTING = [
    *(S.ALONE, S.SUCCEEDING, S.JOINED, S.PASSING_OVER, S.LEFT, S.LEFT_BEHIND),
    *(S.REPLACED, S.ENDED, S.ENDED_AHEAD),
]
OF_SCRIPT = [
    *(E.TRAINING_BEGINS, E.STEP_FOUND, E.STEPS_STOP, E.FIT_ENDS, E.CALLBACKS_END),
    *(E.LOOP_STEPS, E.SUCCEEDS, E.IS_REPLACED),
]
#: First action that an event of the script causes in a fit, or the standing that it leads to.
FIRST = {
    (S.ALONE, E.TRAINING_BEGINS): MemberAction.FIND_STEP,
    (S.ALONE, E.STEP_FOUND): MemberAction.TAKE_SESSION,
    (S.ALONE, E.SUCCEEDS): S.SUCCEEDING,
    (S.REPLACED, E.SUCCEEDS): S.SUCCEEDING,
    **{(rest, E.IS_REPLACED): S.REPLACED for rest in RESTING},
    **{
        (rest, E.TRAINING_BEGINS): BEGIN
        for rest in (S.SUCCEEDING, S.JOINED, S.PASSING_OVER, S.LEFT, S.LEFT_BEHIND)
    },
    **{(rest, E.STEPS_STOP): MemberAction.FINISH_ROUNDS for rest in (S.JOINED, S.PASSING_OVER)},
    **{
        (rest, E.FIT_ENDS): MemberAction.FINISH_ROUNDS
        for rest in (S.JOINED, S.PASSING_OVER, S.ENDED, S.ENDED_AHEAD)
    },
    **{(rest, E.CALLBACKS_END): LEFT for rest in (S.LEFT, S.LEFT_BEHIND)},
}
REFUSED = {
    **{(rest, E.STEP_FOUND): True for rest in RESTING if rest is not S.ALONE},
    **{(rest, E.SUCCEEDS): True for rest in RESTING if rest not in (S.ALONE, S.REPLACED)},
}


def member_in(standing, use=Use.FIT, is_offered=True):
    member = ScriptMember(is_offered)
    member.standing, member.use = standing, use
    return member


@pytest.mark.parametrize("event", OF_SCRIPT, ids=lambda event: event.name)
@pytest.mark.parametrize("standing", RESTING, ids=lambda standing: standing.name)
def test_every_event_of_the_script_in_every_standing_without_an_action(standing, event):
    member = member_in(standing)
    if (standing, event) in REFUSED:
        with pytest.raises(OutOfTurn):
            member.receive(event)
        return
    action, expected = member.receive(event), FIRST.get((standing, event))
    if isinstance(expected, Standing):
        assert (action, member.standing) == (None, expected)
    elif expected is None:
        assert (action, member.standing) == (None, standing)
    else:
        assert action == expected
        for other in OF_SCRIPT:  # the driver has to report a result first
            with pytest.raises(OutOfTurn):
                member.receive(other)


@pytest.mark.parametrize("standing", [S.LEFT, S.LEFT_BEHIND])
def test_a_loop_joins_again_and_a_step_within_a_fit_does_not(standing):
    assert member_in(standing).receive(E.LOOP_STEPS) is None
    member = member_in(standing, Use.LOOP)
    actions = done(member, E.LOOP_STEPS, {MemberAction.JOIN: E.JOINED, Wait(Point.LOOP): E.OPENED})
    assert actions == [MemberAction.FORGET_STATES, MemberAction.JOIN, Wait(Point.LOOP)]
    assert member.standing is S.JOINED
    assert member.receive(E.LOOP_STEPS) is None


@pytest.mark.parametrize("standing", Standing, ids=lambda standing: standing.name)
def test_a_result_without_an_action_is_a_mistake(standing):
    for event in set(Event) - set(OF_SCRIPT) - {event for _, event in USES} - {E.FIT_FAILS}:
        with pytest.raises(OutOfTurn):
            member_in(standing).receive(event)


@pytest.mark.parametrize("use", Use, ids=lambda use: use.name)
@pytest.mark.parametrize("event", [E.FIT_BEGINS, E.FIT_RETURNS, E.LOOP_BEGINS])
def test_uses(use, event):
    expected = {
        (Use.IDLE, E.FIT_BEGINS): Use.FIT,
        (Use.LOOP, E.FIT_BEGINS): Use.FIT_OF_LOOP,
        (Use.FIT, E.FIT_RETURNS): Use.IDLE,
        (Use.FIT_OF_LOOP, E.FIT_RETURNS): Use.LOOP,
        (Use.IDLE, E.LOOP_BEGINS): Use.LOOP,
        (Use.LOOP, E.LOOP_BEGINS): Use.LOOP,
    }.get((use, event))
    member = member_in(S.LEFT, use)
    if expected is None:
        with pytest.raises(OutOfTurn):
            member.receive(event)
    else:
        member.receive(event)
        assert member.use is expected


@pytest.mark.parametrize("standing", RESTING, ids=lambda standing: standing.name)
def test_a_failed_fit_leaves_the_run(standing):
    member = member_in(standing)
    assert done(member, E.FIT_FAILS, {}) == [MemberAction.LEAVE_FAILED]
    expected = {S.JOINED: S.LEFT, S.PASSING_OVER: S.LEFT_BEHIND}
    assert member.standing is expected.get(standing, standing)


def test_every_row_can_be_reached_from_its_own_table():
    """A row in a standing that no row and no event leads to would be dead."""
    for table in (OFFERED, BY_FLAGS):
        reached = {S.ALONE, S.ENDED}
        for row in table.values():
            reached |= {row.standing, row.ends or row.standing}
            if MemberAction.JOIN in row.actions:
                reached |= {row.joined, row.behind}
        reached |= {S.SUCCEEDING, S.REPLACED, S.AWAITING_STEP}
        assert {standing for standing, _ in table} <= reached | {S.ENDED_AHEAD}


def done(member, event, answers):
    """Report an event and the result of each action; return the actions."""
    actions, action = [], member.receive(event)
    while action is not None:
        actions.append(action)
        action = member.receive(answers.get(action, E.DONE))
    return actions


class Over(Exception):
    """The run has ended."""


class Plain:
    """The same script, step by step with flags, as a reader would write it down."""

    def __init__(self, answer):
        self.answer, self.log = answer, []
        self.joined = self.has_left = self.is_behind = self.has_ended = False
        self.in_fit = False

    def do(self, *actions):
        for action in actions:
            left_out = {
                MemberAction.LIFT_HOLD,
                MemberAction.REPORT_FIT,
                MemberAction.KEEP_STATE,
                MemberAction.TAKE_FINAL,
            }
            if self.is_behind and action in left_out | {
                MemberAction.FILL_SLOTS,
                MemberAction.NOTE_STATES,
            }:
                continue
            self.log.append(action)
            result = self.answer(action)
            if result is E.HALTED:
                raise Over
            if action is MemberAction.JOIN:
                self.is_behind = result is E.JOINED_BEHIND
        return result if actions and action in (BEGIN, LEFT, MemberAction.FIND_STEP) else None

    def begin(self):
        if self.has_ended:
            return
        try:
            if not self.joined:
                self.do(MemberAction.FIND_STEP, MemberAction.TAKE_SESSION)
                self.joined = True
                self.do(
                    MemberAction.JOIN,
                    MemberAction.FOLLOW_RATE,
                    MemberAction.MEET_RUN,
                    MemberAction.LIFT_HOLD,
                    MemberAction.COUNT_FIT,
                )
                self.do(Wait(Point.BEGIN), MemberAction.REPORT_FIT, MemberAction.SEED)
                return
            self.is_behind = False  # as nobody knows, until it joins
            opening = self.do(BEGIN)
            if opening is E.OPENED:
                self.do(
                    MemberAction.FORGET_STATES,
                    MemberAction.JOIN,
                    Wait(Point.BEGIN_JOINED),
                    MemberAction.REPORT_FIT,
                )
                return
            self.change(opening, Point.BEGIN_OFFERED, Point.BEGIN_JOINED)
            self.do(MemberAction.FORGET_STATES, MemberAction.REPORT_FIT, MemberAction.SEED)
        except Over:
            self.has_ended = True

    def change(self, opening, offered, joined):
        self.do(MemberAction.FIND_STEP, MemberAction.TAKE_SESSION)
        if opening is E.OFFERS:
            self.do(MemberAction.JOIN)
        self.do(Wait(offered))
        if opening is E.FOLLOWS:
            self.do(MemberAction.JOIN)
        self.do(Wait(joined))

    def stop(self):
        if not self.has_ended:
            self.do(MemberAction.FINISH_ROUNDS, MemberAction.TAKE_FINAL, MemberAction.LEAVE)

    def end(self):
        self.do(
            MemberAction.FINISH_ROUNDS,
            MemberAction.KEEP_STATE,
            MemberAction.TAKE_FINAL,
            MemberAction.LEAVE,
        )
        if self.has_ended:
            self.do(MemberAction.NOTE_STATES)
            return
        try:
            self.do(Wait(Point.END), MemberAction.JOIN)
        except Over:
            self.has_ended = True
            self.do(MemberAction.LEAVE, MemberAction.NOTE_STATES)
            return
        self.do(MemberAction.FILL_SLOTS, MemberAction.LEAVE, MemberAction.NOTE_STATES)

    def end_callbacks(self):
        if self.has_ended:
            return
        was_behind = self.is_behind
        try:
            self.is_behind = False
            opening = self.do(LEFT)
            if opening is E.OPENED:
                self.is_behind = was_behind
                return
            self.change(opening, Point.LEFT_OFFERED, Point.LEFT_JOINED)
            self.do(MemberAction.NOTE_STATES, MemberAction.SEED)
        except Over:
            self.has_ended = True

    def fail(self):
        self.do(MemberAction.LEAVE_FAILED)


def answers_to(action):
    """Return the results that an action may have."""
    if action is MemberAction.JOIN:
        return [E.JOINED, E.JOINED, E.JOINED_BEHIND, E.HALTED]
    if action is MemberAction.MEET_RUN:
        return [E.DONE, E.DONE, E.HALTED]
    if action in (BEGIN, LEFT):
        return [E.OPENED, E.OFFERS, E.FOLLOWS, E.HALTED]
    if isinstance(action, Wait):
        return [E.OPENED, E.OPENED, E.OPENED, E.HALTED]
    return [E.DONE]


@hypothesis.settings(max_examples=500)
@hypothesis.given(
    st.lists(st.tuples(st.booleans(), st.sampled_from(["ends", "fails"])), max_size=4),
    st.lists(st.integers(0, 11), min_size=80, max_size=80),
)
def test_whole_scripts_as_the_plain_model(fits, draws):
    def answering():
        numbers = iter(draws)
        return lambda action: (found := answers_to(action))[next(numbers, 0) % len(found)]

    plain, answer, member, log = Plain(answering()), answering(), ScriptMember(True), []

    def report(event):
        action = member.receive(event)
        while action is not None:
            log.append(action)
            action = member.receive(answer(action))

    for stops, way in fits:
        report(E.FIT_BEGINS)
        report(E.TRAINING_BEGINS)
        plain.begin()
        if stops:
            report(E.STEPS_STOP)
            plain.stop()
        if way == "ends":
            report(E.FIT_ENDS)
            report(E.FIT_ENDS)  # Keras has two hooks after the last step
            plain.end()
            if plain.has_ended:
                plain.end()
            report(E.CALLBACKS_END)
            plain.end_callbacks()
        else:
            report(E.FIT_FAILS)
            plain.fail()
        report(E.FIT_RETURNS)
        assert log == plain.log
        assert (member.standing in (S.ENDED, S.ENDED_AHEAD)) == plain.has_ended
        assert member.standing in (S.LEFT, S.LEFT_BEHIND, S.ENDED, S.ENDED_AHEAD)
        assert (member.standing in BEHIND) == plain.is_behind


def test_the_variables_may_be_known_only_in_the_first_step():
    member = member_in(S.ALONE)
    assert done(member, E.TRAINING_BEGINS, {MemberAction.FIND_STEP: E.LATER}) == [
        MemberAction.FIND_STEP
    ]
    assert member.standing is S.AWAITING_STEP and member.begins_with_step
    found = {MemberAction.JOIN: E.JOINED, Wait(Point.BEGIN): E.OPENED}
    actions = done(member, E.STEP_FOUND, found)
    assert (
        actions[:2] == [MemberAction.TAKE_SESSION, MemberAction.JOIN]
        and actions[-1] is MemberAction.SEED
    )
    assert member.standing is S.JOINED and not member.begins_with_step


@pytest.mark.parametrize("event", [E.TRAINING_BEGINS, E.STEP_FOUND])
def test_a_loop_joins_without_the_barriers_of_a_fit(event):
    member = member_in(S.ALONE, Use.LOOP)
    actions = done(member, event, {MemberAction.JOIN: E.JOINED})
    assert actions[event is E.TRAINING_BEGINS :] == [
        *(
            MemberAction.TAKE_SESSION,
            MemberAction.JOIN,
            MemberAction.FOLLOW_RATE,
            MemberAction.MEET_RUN,
            MemberAction.LIFT_HOLD,
            MemberAction.SEED,
        )
    ]
    assert member.standing is S.JOINED


@pytest.mark.parametrize("before", [S.ALONE, S.SUCCEEDING, S.JOINED, S.LEFT, S.LEFT_BEHIND])
@pytest.mark.parametrize("event", [E.FIT_ENDS, E.FIT_FAILS])
def test_a_fit_without_a_step_changes_nothing(before, event):
    member = member_in(before)
    answers = {MemberAction.FIND_STEP: E.LATER, BEGIN: E.OFFERS}
    done(member, E.TRAINING_BEGINS, answers)
    assert member.standing is S.AWAITING_STEP
    for refused in (E.SUCCEEDS, E.IS_REPLACED):
        with pytest.raises(OutOfTurn):
            member.receive(refused)
    done(member, event, {})
    fails = before is S.JOINED and event is E.FIT_FAILS
    assert member.standing is (S.LEFT if fails else before)


def test_a_run_that_ended_before_a_model_s_turn_gives_it_a_session_of_its_own():
    member = member_in(S.SUCCEEDING)
    assert done(member, E.TRAINING_BEGINS, {BEGIN: E.HALTED}) == [
        *(BEGIN, MemberAction.FIND_STEP, MemberAction.TAKE_SESSION)
    ]
    assert member.standing is S.ENDED


def test_an_error_in_an_action_drops_the_actions_after_it():
    member = member_in(S.LEFT)
    assert member.receive(E.TRAINING_BEGINS) == BEGIN
    assert member.receive(E.FAILED) is None
    assert member.standing is S.LEFT
    member = member_in(S.ALONE)
    member.receive(E.TRAINING_BEGINS)
    assert member.receive(E.DONE) is MemberAction.TAKE_SESSION
    assert member.receive(E.DONE) is MemberAction.JOIN
    member.receive(E.FAILED)
    assert member.standing is S.LEFT  # the next fit waits for the others, and joins


def test_servers_with_a_model_from_flags_have_one_phase():
    member = ScriptMember(is_offered=False)
    member.receive(E.FIT_BEGINS)
    joined = {MemberAction.JOIN: E.JOINED}
    assert done(member, E.TRAINING_BEGINS, joined) == [
        MemberAction.FORGET_STATES,
        MemberAction.JOIN,
    ]
    assert done(member, E.STEPS_STOP, {}) == [MemberAction.FINISH_ROUNDS, MemberAction.LEAVE]
    assert done(member, E.FIT_ENDS, {}) == [MemberAction.LEAVE]
    assert member.standing is S.LEFT
    assert done(member, E.FIT_ENDS, {}) == done(member, E.CALLBACKS_END, {}) == []
    assert done(member, E.TRAINING_BEGINS, {MemberAction.JOIN: E.HALTED}) == [
        MemberAction.FORGET_STATES,
        MemberAction.JOIN,
    ]
    assert member.standing is S.ENDED
    assert done(member, E.FIT_ENDS, {}) == [MemberAction.LEAVE]


def test_the_page_shows_every_standing_and_stage():
    page = pathlib.Path(__file__).parents[3] / "docs/guide/architecture.md"
    text = (
        page.read_text().replace("LEAVING_    ", "LEAVING_BEHIND").replace("LEFT_ ", "LEFT_BEHIND ")
    )
    for each in (*Standing, *RoundStage):
        assert each.name in text, each
