"""Barriers of scripts on a fake clock: when they open, leaving workers, the end of a run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.barriers import parse, position_of
from thinwire.ps.scripts.barriers import Barriers
from thinwire.ps.scripts.evaluators import Evaluators
from thinwire.ps.scripts.notices import ScriptsEnd, notice
from thinwire.runtime.run.settings import (
    END_REASONS,
    EXIT_OF_STOP,
    EXIT_SCRIPT,
    FINISHED,
    RETURNED_EARLY,
    SCRIPT_FAILED,
    is_finished,
)

LEASE, PATIENCE, SUPERVISOR = 10.0, 100.0, object()
START, START_WITH_SUPERVISOR = STARTS = ("start", "start-with-supervisor")


def opening(worker, name, **fields):
    return notice(worker, barrier=pb.Barrier(name=name, **fields))


def fit_stop(worker, fit, epochs):
    return notice(worker, stop_fit=pb.StopFit(fit=fit, epochs=epochs))


def body_of(outcome):
    """Return the message in a notice; else the outcome itself."""
    if isinstance(outcome, ScriptsEnd):
        return outcome
    return getattr(outcome.message, outcome.message.WhichOneof("body"))


class Scripts:
    """Barriers with scripts named by a line of words, on a clock that the test moves."""

    def __init__(self, nb_workers=2):
        self.evaluators = Evaluators(LEASE)
        self.barriers = Barriers(nb_workers, self.evaluators, LEASE, PATIENCE)
        self.now, self.outcomes = 0.0, []
        self.chiefs = {}  # as each script knows it

    def note(self, outcomes):
        for outcome in outcomes:
            if isinstance(named := body_of(outcome), pb.Chief):
                self.chiefs[outcome.to] = named.worker
            else:
                self.outcomes.append(outcome)
        return self

    def begin(self, *workers, incarnation=1):
        for worker in workers:
            self.note(self.barriers.begin(worker, incarnation, self.now))
        return self

    def arrive(self, worker, name, passed=(), **changes):
        arrival = pb.Barrier(name=name, passed=passed, **changes)
        return self.note(self.barriers.arrive(worker, arrival, self.now))

    def finish(self, worker, failed=False, message=""):
        return self.note(self.barriers.finish(worker, failed, message, self.now))

    def wait(self, seconds, *alive):
        """Let time pass; the named scripts send heartbeats, all others send none."""
        self.now += seconds
        for worker in alive:
            self.note(self.barriers.alive(worker, self.now))
        return self.note(self.barriers.tick(self.now))

    @property
    def opened(self):
        """Return [(worker, name)] since the last look."""
        found = [o for o in self.outcomes if isinstance(body_of(o), pb.Barrier)]
        self.outcomes = [o for o in self.outcomes if o not in found]
        return [(o.to, body_of(o).name) for o in found]

    @property
    def cause(self):
        return self.barriers.ended.cause if self.barriers.ended else None


def test_a_barrier_opens_when_all_have_come():
    scripts = Scripts(3).begin(1, 2, 3)
    assert scripts.arrive(1, "fit-1-begin").arrive(2, "fit-1-begin").opened == []
    assert scripts.arrive(3, "fit-1-begin").opened == [(w, "fit-1-begin") for w in (1, 2, 3)]
    assert scripts.arrive(2, "fit-1-end").wait(LEASE / 2, 1, 3).opened == []
    assert scripts.arrive(1, "fit-1-end").arrive(3, "fit-1-end").opened[-1] == (3, "fit-1-end")


def test_a_script_stops_the_present_fit_of_all():
    scripts = Scripts(3).begin(1, 2)
    for worker in (1, 2):
        scripts.arrive(worker, "fit-2-begin")
    stop = scripts.barriers.stop_fit
    assert stop(2, 1, 5, 0.0) == stop(2, 3, 5, 0.0) == [], "it is in the second"
    assert stop(2, 2, 5, 0.0) == [fit_stop(1, 2, 5)]
    assert stop(1, 2, 4, 0.0) == [], "once"
    assert scripts.begin(1).outcomes[-1] == fit_stop(1, 2, 5), "its stream was lost"
    assert scripts.begin(3).outcomes[-1] == fit_stop(3, 2, 0), "one that comes late"


def test_the_lowest_worker_that_is_not_lost_writes_the_files():
    scripts = Scripts(3).begin(1, 2, 3)
    assert scripts.chiefs == {1: 1, 2: 1, 3: 1}
    scripts.wait(LEASE / 2, 2, 3).wait(LEASE / 2, 2, 3)
    assert scripts.chiefs == {1: 2, 2: 2, 3: 2}
    assert scripts.begin(1, incarnation=2).chiefs == {1: 1, 2: 1, 3: 1}, "it is back"
    scripts.finish(1).wait(LEASE, 2, 3).wait(LEASE, 2, 3)
    assert scripts.chiefs == {1: 1, 2: 1, 3: 1}, "what it had to write is written"


def test_a_file_is_waited_for_until_its_writer_is_beyond_it():
    scripts = Scripts(2).begin(1, 2)
    for worker in (1, 2):
        scripts.arrive(worker, "fit-1-end")
    assert scripts.arrive(2, "fit-1-saved-1").opened[-1][1] == "fit-1-end"
    assert scripts.arrive(1, "fit-1-saved-2").opened == [(2, "fit-1-saved-1")]
    assert scripts.arrive(2, "fit-1-saved-3").opened == [(1, "fit-1-saved-2")]
    assert scripts.finish(1).opened == [(2, "fit-1-saved-3")]


def test_one_that_never_comes_is_waited_for_only_so_long():
    scripts = Scripts(2).begin(1).arrive(1, "fit-1-begin")
    for _ in range(19):
        assert scripts.wait(LEASE / 2, 1).opened == []
    assert scripts.wait(LEASE / 2, 1).opened == [(1, "fit-1-begin")]
    scripts.begin(2).arrive(2, "fit-1-begin")
    assert scripts.opened == [(2, "fit-1-begin")], "it catches up"
    assert scripts.arrive(1, "fit-1-end").opened == [], "and counts from now on"


def test_one_whose_stream_is_away_is_waited_for_a_lease():
    scripts = Scripts(2).begin(1, 2).arrive(1, "fit-1-end")
    scripts.barriers.lost(2, 1, scripts.now)
    assert scripts.wait(LEASE - 1, 1).opened == []
    assert scripts.wait(1, 1).opened == [(1, "fit-1-end")]


def test_another_incarnation_passes_what_has_opened():
    scripts = Scripts(2).begin(1, 2)
    for name in ("fit-1-begin", "fit-1-end", "fit-2-begin"):
        scripts.arrive(1, name).arrive(2, name)
    scripts.arrive(1, "fit-2-end").opened  # noqa: B018
    scripts.barriers.lost(2, 1, scripts.now)
    scripts.begin(2, incarnation=2).arrive(2, "fit-1-begin")
    assert scripts.opened == [(2, "fit-1-begin")]
    for name in ("fit-1-end", "fit-2-begin"):
        assert scripts.arrive(2, name).opened == [(2, name)]
    assert scripts.arrive(2, "fit-2-end").opened == [(1, "fit-2-end"), (2, "fit-2-end")]


def test_the_end_of_an_old_stream_is_not_that_of_the_new_one():
    scripts = Scripts(2).begin(1, 2).begin(2, incarnation=2)
    scripts.wait(LEASE - 1, 1, 2)
    scripts.barriers.lost(2, 1, scripts.now - 5)
    assert scripts.arrive(1, "fit-1-end").wait(LEASE - 1, 1).opened == []


def test_a_shard_that_is_started_again_learns_what_was_passed():
    before = Scripts(2).begin(1, 2).arrive(1, "fit-1-begin").arrive(2, "fit-1-begin")
    assert len(before.opened) == 2
    # Worker 2 has not received that it opened; worker 1 trains already.
    again = Scripts(2).begin(2).arrive(2, "fit-1-begin")
    assert again.opened == []
    again.begin(1).arrive(1, "", passed=["fit-1-begin"])
    assert again.opened == [(2, "fit-1-begin")]
    assert again.arrive(1, "fit-1-end").arrive(2, "fit-1-end").opened[-1] == (2, "fit-1-end")


def test_after_a_restart_those_who_are_gone_cost_no_more_than_two_leases():
    scripts = Scripts(2).begin(1).arrive(1, "fit-1-end", passed=["fit-1-begin"])
    assert scripts.wait(LEASE, 1).opened == []
    assert scripts.wait(LEASE, 1).opened == [(1, "fit-1-end")]


def test_a_later_barrier_counts_for_the_earlier_ones():
    """No worker waits for a waiting worker: a new incarnation, a shard that knows nothing."""
    scripts = Scripts(2).begin(1, 2).arrive(1, "fit-3-end").arrive(2, "fit-1-begin")
    assert scripts.opened == [(2, "fit-1-begin")]
    assert Scripts(2).begin(1, 2).arrive(1, "x").arrive(2, "y").opened == [(1, "x"), (2, "y")]


def test_the_run_is_finished_when_all_scripts_are():
    scripts = Scripts(3).begin(1, 2, 3).finish(1).finish(2)
    assert scripts.wait(1, 3).cause is None
    assert scripts.finish(3).cause == FINISHED
    assert scripts.barriers.ended == ScriptsEnd(FINISHED, "")
    assert scripts.outcomes == [ScriptsEnd(FINISHED, "")]
    assert scripts.finish(3).wait(1000).outcomes == [ScriptsEnd(FINISHED, "")], "once"


def test_the_run_is_finished_though_one_was_lost_and_one_never_came():
    scripts = Scripts(3).begin(1, 2).finish(1)
    assert scripts.wait(LEASE).cause is None
    assert scripts.wait(PATIENCE - LEASE).cause == FINISHED


def test_a_run_all_of_whose_scripts_are_lost_waits_for_them():
    scripts = Scripts(2).begin(1, 2)
    assert scripts.wait(10 * PATIENCE).cause is None
    assert scripts.begin(1).arrive(1, "fit-1-end").wait(1, 1).opened == [(1, "fit-1-end")]


def test_an_error_ends_the_run_and_its_message_travels():
    scripts = Scripts(3).begin(1, 2, 3).finish(2, failed=True, message="KeyError: 'x'")
    assert scripts.outcomes == [ScriptsEnd(SCRIPT_FAILED, "worker 2 failed: KeyError: 'x'")]
    assert scripts.finish(1).finish(3, failed=True, message="another").cause == SCRIPT_FAILED
    assert len(scripts.outcomes) == 1, "the first error is the one that counts"


@pytest.mark.parametrize("finishes_first", [True, False])
def test_one_that_returns_while_another_is_in_a_later_fit_ends_the_run(finishes_first):
    scripts = Scripts(2).begin(1, 2)
    for name in ("fit-1-begin", "fit-1-end"):
        scripts.arrive(1, name).arrive(2, name)
    if finishes_first:
        scripts.finish(1)
        assert scripts.cause is None
        scripts.arrive(2, "fit-2-begin")
    else:
        scripts.arrive(2, "fit-2-begin")
        assert scripts.cause is None
        scripts.finish(1)
    assert scripts.cause == RETURNED_EARLY
    assert "worker 1 returned early" in scripts.barriers.ended.message
    assert "worker 2 has begun call 2" in scripts.barriers.ended.message


def test_one_that_stops_early_in_the_same_fit_does_not_stop_the_others():
    scripts = Scripts(2).begin(1, 2)
    scripts.arrive(1, "fit-1-begin").arrive(2, "fit-1-begin").arrive(1, "fit-1-end")
    assert scripts.wait(LEASE / 2, 1, 2).cause is None
    scripts.arrive(2, "fit-1-end").finish(1).finish(2)
    assert scripts.cause == FINISHED


def test_names_of_fits_have_an_order():
    names = ["fit-1-begin", "fit-1-end", "fit-2-begin", "fit-10-end", "evaluate"]
    assert sorted(reversed(names), key=position_of) == names


def test_reasons_have_exit_codes_and_finished_is_final():
    assert FINISHED in END_REASONS
    assert EXIT_OF_STOP.get(FINISHED, 0) == 0
    assert EXIT_OF_STOP[SCRIPT_FAILED] == EXIT_OF_STOP[RETURNED_EARLY] == EXIT_SCRIPT == 1
    assert is_finished(None, FINISHED, None)
    assert not is_finished(None, SCRIPT_FAILED, None), "the same command goes on"


# -- random events -----------------------------------------------------------------------------

NAMES = [f"fit-{fit}-{end}" for fit in (1, 2, 3) for end in ("begin", "end")]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["go", "go", "go", "go", "die", "restart", "time"]),
        st.integers(1, 3),
        st.floats(0, 2 * LEASE),
    ),
    max_size=60,
)


class World:
    """Scripts that make the same calls of fit, die and return, and a shard that restarts, too."""

    def __init__(self):
        self.now, self.ended = 0.0, None
        self.at = {}  # worker -> number of the barrier that its process comes to next
        self.waits, self.finished = set(), set()
        self.incarnations = {1: 0, 2: 0, 3: 0}
        self.forget()

    def forget(self):
        """Begin another shard, which knows nothing."""
        self.barriers = Barriers(3, Evaluators(LEASE), LEASE, PATIENCE)
        self.come, self.seen = {}, {}  # worker -> newest barrier that it has come to; when
        self.opened = set()  # as far as this shard may know
        self.absent_at = None  # when those that never came are not waited for

    def note(self, worker, outcomes):
        """Check the shard's reaction to a worker's message or to the passing of time."""
        for outcome in outcomes:
            body = body_of(outcome)
            if isinstance(body, pb.Chief):
                lost = set(range(1, body.worker)) & self.seen.keys() - self.finished
                assert all(self.now >= self.seen[each] + LEASE for each in lost)
                continue
            if isinstance(outcome, ScriptsEnd):
                assert self.ended is None
                self.ended = outcome
                continue
            number = NAMES.index(body.name)
            if number not in self.opened:
                self.check_that_all_have_come(number)
            self.opened.add(number)
            if outcome.to in self.waits and self.at[outcome.to] == number:
                self.waits.discard(outcome.to)
                self.at[outcome.to] += 1

    def check_that_all_have_come(self, number):
        for worker in (1, 2, 3):
            if worker not in self.seen:
                assert self.now >= self.absent_at, f"worker {worker} may still come"
            elif worker not in self.finished and self.now < self.seen[worker] + LEASE:
                assert self.come.get(worker, -1) >= number, f"worker {worker} is on its way"

    def begin(self, worker):
        first = self.now + PATIENCE
        self.absent_at = first if self.absent_at is None else self.absent_at
        self.seen[worker] = self.now
        self.note(worker, self.barriers.begin(worker, self.incarnations[worker], self.now))

    def arrive(self, worker, passed=()):
        name = NAMES[self.at[worker]] if worker in self.waits else ""
        if passed:
            self.opened |= {NAMES.index(each) for each in passed}
            self.absent_at = min(self.absent_at, self.now + 2 * LEASE)
        self.come[worker] = self.at[worker] if name else self.at[worker] - 1
        self.seen[worker] = self.now
        arrival = pb.Barrier(name=name, passed=passed)
        self.note(worker, self.barriers.arrive(worker, arrival, self.now))

    def finish(self, worker):
        self.finished.add(worker)
        self.seen[worker] = self.now
        self.note(worker, self.barriers.finish(worker, False, "", self.now))

    def go(self, worker):
        """Let a script do the next thing that it does."""
        if worker not in self.at:
            self.at[worker] = 0
            self.come.pop(worker, None)
            self.incarnations[worker] += 1
            self.begin(worker)
        elif self.at[worker] == len(NAMES):
            self.finish(worker)
        elif worker not in self.waits:
            self.waits.add(worker)
            self.arrive(worker)

    def die(self, worker):
        if worker in self.at and worker not in self.finished:
            del self.at[worker]
            self.waits.discard(worker)
            self.seen[worker] = self.now
            self.barriers.lost(worker, self.incarnations[worker], self.now)

    def restart(self):
        self.forget()
        for worker in sorted(self.at):
            if self.ended is None:
                self.begin(worker)
                if passed := NAMES[: self.at[worker]]:
                    self.arrive(worker, passed)
                elif worker in self.waits:
                    self.arrive(worker)
            if self.ended is None and worker in self.finished:
                self.finish(worker)

    def wait(self, seconds):
        self.now += seconds
        for worker in sorted(self.at):
            if self.ended is None:
                self.seen[worker] = self.now
                self.note(worker, self.barriers.alive(worker, self.now))
        self.note(0, self.barriers.tick(self.now))


@settings(max_examples=150, deadline=None)
@given(EVENTS)
def test_nothing_opens_early_and_nobody_waits_for_ever(events):
    world = World()
    for what, worker, seconds in events:
        if world.ended is None:
            {
                "go": lambda w=worker: world.go(w),
                "die": lambda w=worker: world.die(w),
                "restart": world.restart,
                "time": lambda s=seconds: world.wait(s),
            }[what]()
    # The remaining scripts continue, and the leases of the others expire: all reach the end.
    for _ in range(20 * len(NAMES)):
        for worker in sorted(world.at):
            if world.ended is None and worker not in world.finished:
                world.go(worker)
        if world.ended is None:
            world.wait(LEASE / 2)
    if world.at:
        assert world.ended is not None, f"waiting: {world.waits} at {world.at}"
        assert world.ended.cause in (FINISHED, RETURNED_EARLY)


# -- phases ---------------------------------------------------------------------------------------


def test_a_phase_begins_where_one_script_s_model_has_changed_and_the_lowest_offers():
    scripts = Scripts(3).begin(2, 3).wait(PATIENCE, 2, 3)  # worker 1 has never come
    scripts.arrive(3, "fit-2-begin").arrive(2, "fit-2-begin", changes=True)
    assert scripts.outcomes == [
        opening(2, "fit-2-begin", changes=True, offers=True),
        opening(3, "fit-2-begin", changes=True),
    ]
    assert scripts.barriers.phase == parse("fit-2-begin").phase == 4
    scripts.outcomes.clear()
    assert scripts.arrive(3, "fit-2-begin-offered").opened == []
    scripts.arrive(2, "fit-2-begin-offered")
    assert scripts.opened == [(2, "fit-2-begin-offered"), (3, "fit-2-begin-offered")]


def test_nobody_s_change_begins_no_phase():
    scripts = Scripts(2).begin(1, 2).arrive(1, "fit-1-left").arrive(2, "fit-1-left")
    assert scripts.outcomes == [opening(1, "fit-1-left"), opening(2, "fit-1-left")]
    assert scripts.barriers.phase == 0


def test_a_shard_that_was_started_again_learns_the_phase_and_a_late_script_too():
    scripts = Scripts(2).begin(1)
    scripts.arrive(1, "", passed=["fit-1-left", "fit-2-begin"], changed=["fit-1-left"])
    assert scripts.barriers.phase == 3
    scripts.begin(2).arrive(2, "fit-1-left")
    assert scripts.outcomes == [opening(2, "fit-1-left", changes=True)]


# -- the run's first evaluator --------------------------------------------------------------------


def at_start(name=START, nb_workers=2):
    """Return scripts that have all come to the barrier before their first step."""
    scripts = Scripts(nb_workers).begin(*range(1, nb_workers + 1))
    for worker in range(1, nb_workers + 1):
        scripts.arrive(worker, name)
    return scripts


def test_nobody_trains_before_the_evaluator_has_come():
    for name in STARTS:
        scripts = Scripts().begin(1, 2)
        scripts.evaluators.offer(SUPERVISOR, True)
        scripts.arrive(1, name).arrive(2, name).wait(LEASE / 2, 1, 2).wait(LEASE / 2, 1, 2)
        assert scripts.opened == []
        scripts.evaluators.connect()
        assert scripts.wait(0).opened == [(1, name), (2, name)]


def test_an_evaluator_alone_does_not_open_the_start():
    scripts = Scripts().begin(1, 2)
    scripts.evaluators.connect()
    assert scripts.arrive(1, START).opened == []
    assert scripts.arrive(2, START).opened == [(1, START), (2, START)]


def test_nobody_waits_for_an_evaluator_whose_process_has_ended():
    scripts = at_start(START_WITH_SUPERVISOR)
    first = scripts.evaluators
    first.offer(SUPERVISOR, True)
    assert scripts.wait(1, 1, 2).opened == []
    first.withdraw(SUPERVISOR, "", scripts.now)
    assert len(scripts.wait(0).opened) == 2
    first.offer(SUPERVISOR, True)  # it is started again
    assert scripts.begin(1, incarnation=2).arrive(1, START_WITH_SUPERVISOR).opened


def test_a_supervisor_that_reports_nothing_is_waited_for_for_a_lease():
    assert len(at_start(START).opened) == 2, "no launcher has started one"
    scripts = at_start(START_WITH_SUPERVISOR)
    assert scripts.wait(LEASE - 1, 1, 2).opened == []
    assert len(scripts.wait(1, 1, 2).opened) == 2


def test_a_supervisor_that_is_lost_may_come_back_within_a_lease():
    scripts = at_start(START_WITH_SUPERVISOR)
    first = scripts.evaluators
    first.offer(SUPERVISOR, True)
    scripts.wait(LEASE, 1, 2)
    first.lose(SUPERVISOR, scripts.now)
    assert scripts.wait(LEASE - 1, 1, 2).opened == []
    first.offer(SUPERVISOR, True)
    assert scripts.wait(LEASE - 1, 1, 2).opened == []
    first.lose(SUPERVISOR, scripts.now)
    assert len(scripts.wait(LEASE, 1, 2).opened) == 2


def test_the_start_waits_no_longer_than_for_workers_that_never_come():
    scripts = Scripts(3).begin(1, 2).arrive(1, START).arrive(2, START)
    scripts.evaluators.offer(SUPERVISOR, True)
    for _ in range(int(PATIENCE / LEASE * 2) - 1):
        assert scripts.wait(LEASE / 2, 1, 2).opened == []
    assert scripts.wait(LEASE / 2, 1, 2).opened == [(1, START), (2, START)]


def test_one_that_comes_later_does_not_wait_at_the_start():
    scripts = at_start()
    assert len(scripts.opened) == 2
    scripts.arrive(1, "fit-1-begin").begin(2, incarnation=2).arrive(2, START)
    assert scripts.opened == [(2, START)]


def test_a_shard_that_was_started_again_holds_nobody_who_has_passed_the_start():
    scripts = Scripts().begin(1, 2)
    scripts.evaluators.offer(SUPERVISOR, True)
    scripts.arrive(1, "", passed=(START,)).arrive(2, START)
    assert scripts.opened == [(2, START)]


@pytest.mark.parametrize("settles", ["arrives", "ends"])
def test_an_evaluator_that_is_started_again_holds_up_nobody(settles):
    """A script that has arrived has done its work at the top, which must precede the run."""
    scripts = Scripts().begin(1, 2).arrive(1, START_WITH_SUPERVISOR)
    first = scripts.evaluators
    first.offer(SUPERVISOR, True)
    if settles == "arrives":
        first.connect()
    else:
        first.withdraw(SUPERVISOR, "", scripts.now)
    first.offer(SUPERVISOR, True)  # it is killed, and another is on its way
    opened = scripts.arrive(2, START_WITH_SUPERVISOR).opened
    assert opened == [(1, START_WITH_SUPERVISOR), (2, START_WITH_SUPERVISOR)]
