"""Evaluations requested by scripts, on a fake clock: times, evaluators, and no evaluator."""

import pytest

from tests.ps.scripts.test_run_control import ControlStream, Script
from tests.ps.streams import Shard
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.barriers import Point
from thinwire.proto.security.credentials import PART_OF_SUPERVISOR, part_of
from thinwire.ps.scripts.evaluations import STALL_SECONDS, Evaluations
from thinwire.ps.scripts.evaluators import ANSWER_SECONDS, START_SECONDS, Evaluators
from thinwire.ps.scripts.notices import EVALUATOR, SUPERVISORS, notice

LEASE = 10.0


def evaluated(fit, epoch, loss=0.5, **fields):
    metrics = [pb.Metric(name="loss", values=[loss])]
    return pb.Evaluated(fit=fit, epoch=epoch, answers=True, metrics=metrics, **fields)


class World:
    """Some scripts, an evaluator and a Supervisor, at a clock that the test moves."""

    def __init__(self, *workers, evaluator=True, supervisor=True):
        self.present, self.now, self.version = set(workers), 0.0, 0
        self.evaluators = Evaluators(LEASE)
        self.state = Evaluations(self.evaluators, lambda now: sorted(self.present))
        self.notices, self.asked = [], []
        for worker in workers:
            self.evaluators.script_came(self.now)
            self.note(self.state.begin(worker, 1, self.now))
        if supervisor:
            self.offer(7)
        if evaluator:
            self.begin_evaluator()

    def note(self, notices):
        """Record notices; one for an evaluator that is not connected reaches nobody."""
        reach = [each for each in notices if self.evaluators.is_connected or each.to != EVALUATOR]
        self.notices += reach
        return self

    def offer(self, supervisor):
        """Return what a Supervisor gets that starts evaluators."""
        self.evaluators.offer(supervisor, False)
        seen = self.state.known_to_supervisors()
        self.note(self.state.settle(self.now))
        return seen

    def withdraw(self, supervisor, why):
        self.evaluators.withdraw(supervisor, why, self.now)
        return self.note(self.state.settle(self.now))

    def lose_supervisor(self, supervisor):
        self.evaluators.lose(supervisor, self.now)
        return self.note(self.state.settle(self.now))

    def begin_evaluator(self):
        self.evaluators.connect()
        return self.note(self.state.begin_evaluator(self.now))

    def end_evaluator(self):
        self.evaluators.is_connected = False
        return self.note(self.state.end_evaluator(self.now))

    def request(self, worker, fit, epoch, by_script=False):
        return self.note(self.state.request(worker, fit, epoch, self.now, by_script))

    def answer_of(self, worker, fit, epoch, loss=0.5):
        made = evaluated(fit, epoch, loss, by_script=True)
        return self.note(self.state.answer_of_script(worker, made, self.now))

    def answer(self, fit, epoch, **fields):
        return self.note(self.state.answer(evaluated(fit, epoch, **fields), self.now))

    def wait(self, seconds, updates=1):
        self.now += seconds
        self.version += updates
        return self.note(self.state.tick(self.now, self.version))

    def _taken(self, to):
        found = [each for each in self.notices if to(each.to)]
        self.notices = [each for each in self.notices if not to(each.to)]
        return found

    @property
    def requested(self):
        """Return the epochs that were requested of the evaluator since the last look."""
        found = [each.message.epoch_ended for each in self._taken(EVALUATOR.__eq__)]
        return [(each.fit, each.epoch) for each in found if each.fit]

    def _is_request(self, asked):
        is_request = asked.message.WhichOneof("body") == "epoch_ended"
        if is_request:
            ended = asked.message.epoch_ended
            self.asked.append((asked.to, ended.fit, ended.epoch))
        return is_request

    @property
    def answered(self):
        """Return (worker, fit, epoch, its loss or why it has no loss) since the previous call."""
        found = [
            (each.to, each.message.evaluated)
            for each in self._taken(EVALUATOR.__lt__)
            if not self._is_request(each)
        ]
        return [(worker, e.fit, e.epoch, e.nobody or e.metrics[0].values[0]) for worker, e in found]


def test_the_leader_decides_when_and_all_get_the_same():
    world = World(1, 2, 3)
    assert world.request(2, 1, 0).requested == []
    assert world.request(1, 1, 0).requested == [(1, 0)]
    assert world.request(3, 1, 0).requested == [], "once"
    world.answer(1, 0).answer(1, 0, loss=0.9)
    assert sorted(world.answered) == [(worker, 1, 0, 0.5) for worker in (1, 2, 3)]
    assert world.request(2, 1, 1).request(1, 1, 1).requested == [(1, 1)]


def test_one_that_comes_late_or_again_gets_what_was_answered():
    world = World(1, 2).request(1, 1, 0).answer(1, 0)
    assert world.answered == [(1, 1, 0, 0.5)]
    world.note(world.state.begin(2, 99, world.now)).request(2, 1, 0)
    assert world.answered == [(2, 1, 0, 0.5)]
    assert world.requested == [(1, 0)]


def test_another_leads_where_the_first_is_gone():
    world = World(1, 2).request(2, 1, 0)
    world.present.discard(1)
    assert world.wait(0.1).requested == [(1, 0)]


def test_a_leader_that_was_started_again_is_not_waited_for():
    world = World(1, 2, 3).request(1, 1, 0).request(1, 1, 1).answer(1, 0).answer(1, 1)
    world.requested  # noqa: B018
    world.request(2, 1, 1).note(world.state.begin(1, 2, world.now))
    assert world.request(2, 1, 2).requested == [(1, 2)], "worker 2 leads: the third is behind"
    assert world.request(1, 1, 0).answered[-1] == (1, 1, 0, 0.5)


def test_a_leader_that_has_ended_its_fit_lets_the_others_evaluate():
    world = World(1, 2).request(1, 1, 0).answer(1, 0).request(2, 1, 0)
    assert world.requested == [(1, 0)]
    assert world.request(2, 1, 1).requested == []
    world.note(world.state.arrive(1, "fit-1-end", world.now))
    assert world.requested == [(1, 1)]


def test_nobody_waits_for_a_leader_that_waits_itself():
    world = World(1, 2)
    world.wait(1).request(2, 1, 0)
    for _ in range(9):
        assert world.wait(STALL_SECONDS - 1, updates=1).requested == []
    assert world.wait(STALL_SECONDS, updates=0).requested == [(1, 0)]


def test_an_evaluator_that_comes_gets_what_is_requested():
    world = World(1, 2, evaluator=False)
    fit = pb.FitBegun(fit=1, validates=True, variables=[0], num_weights=1)
    world.note(world.state.begin_fit(1, fit, 0.0)).note(world.state.begin_fit(2, fit, 0.0))
    assert [each.message.fit_begun for each in world._taken(SUPERVISORS.__eq__)] == [fit], "once"
    world.request(1, 1, 0).begin_evaluator()
    first, *_ = world.notices
    assert first == notice(EVALUATOR, fit_begun=fit)
    assert world.requested == [(1, 0)]
    world.end_evaluator().wait(1)
    world.begin_evaluator()
    assert world.requested == [(1, 0)], "another one gets it too"


def test_without_a_supervisor_there_are_no_evaluations_after_a_lease():
    world = World(1, 2, evaluator=False, supervisor=False)
    assert world.wait(1).request(1, 1, 0).answered == []
    world.wait(LEASE - 1, updates=0)
    assert world.answered == [(1, 1, 0, "there is no Supervisor")]
    assert world.request(2, 1, 0).request(1, 1, 1).answered == [
        (2, 1, 0, "there is no Supervisor"),
        (1, 1, 1, "there is no Supervisor"),
    ]


def test_a_supervisor_that_is_killed_may_come_back_within_a_lease():
    world = World(1).request(1, 1, 0)
    world.end_evaluator().lose_supervisor(7)
    world.wait(LEASE - 1)
    assert world.answered == []
    world.offer(8)
    world.wait(START_SECONDS - LEASE)
    assert world.answered == []
    world.begin_evaluator()
    assert world.requested == [(1, 0), (1, 0)]
    assert world.answer(1, 0).answered == [(1, 1, 0, 0.5)]


def test_one_that_stays_away_leaves_that_epoch_without_and_the_next_ones_not():
    world = World(1, 2).request(1, 1, 0).answer(1, 0).request(1, 1, 1)
    world.answered  # noqa: B018
    world.end_evaluator().lose_supervisor(7)
    assert world.wait(LEASE).answered == [(1, 1, 1, "there is no Supervisor")]
    seen = world.offer(8)
    assert [each.evaluated.epoch for each in seen] == [0], "what it had recorded, it gets again"
    world.begin_evaluator()
    assert world.request(2, 1, 1).answered == [(2, 1, 1, "there is no Supervisor")]
    world.requested  # noqa: B018
    assert world.request(1, 1, 2).requested == [(1, 2)]


def test_an_evaluator_that_fails_is_not_waited_for():
    world = World(1, evaluator=False).request(1, 1, 0)
    world.withdraw(7, "KeyError: 'x'")
    assert world.answered == [(1, 1, 0, "KeyError: 'x'")]


def test_an_evaluator_that_does_not_come_is_waited_for_only_so_long():
    world = World(1, evaluator=False).request(1, 1, 0)
    assert world.wait(START_SECONDS - 1).answered == []
    ((_, _, _, why),) = world.wait(1).answered
    assert "600 s" in why
    world = World(1).request(1, 1, 0).wait(START_SECONDS)
    assert world.answered == []
    ((_, _, _, why),) = world.wait(ANSWER_SECONDS - START_SECONDS).answered
    assert why == "the evaluator has not answered within 3600 s"


def test_a_shard_that_is_started_again_learns_the_answers_of_its_scripts():
    world = World(1, 2)
    world.note(world.state.know(1, evaluated(1, 3, loss=0.25), world.now))
    assert world.request(2, 1, 3).answered == [(2, 1, 3, 0.25)]
    assert world.request(2, 1, 4).request(1, 1, 4).requested == [(1, 4)]


# -- at a real server ---------------------------------------------------------------------------


class Observer(ControlStream):
    """Control stream of a Supervisor or an evaluator."""

    def __init__(self, shard, role, **fields):
        version = messages.PROTOCOL_VERSION
        hello = pb.Hello(protocol_version=version, role=role, num_shards=1, **fields)
        super().__init__(shard, hello)


def test_a_run_with_a_supervisor_and_an_evaluator():
    shard = Shard()
    script = Script(shard, 1)
    supervisor = Observer(shard, pb.ROLE_SUPERVISOR).send(evaluator=pb.Evaluator(available=True))
    fit = pb.FitBegun(fit=1, validates=True, variables=[0, 1], num_weights=2)
    script.send(fit_begun=fit)
    assert supervisor.last("fit_begun") == fit
    script.send(epoch_ended=pb.EpochEnded(fit=1, epoch=0))
    evaluator = Observer(shard, pb.ROLE_EVALUATOR, incarnation=5)
    assert evaluator.last("fit_begun") == fit
    assert evaluator.last("epoch_ended") == pb.EpochEnded(fit=1, epoch=0)
    evaluator.send(evaluated=evaluated(1, 0, versions=[3]))
    assert script.last("evaluated") == evaluated(1, 0, versions=[3]) == supervisor.last("evaluated")
    script.send(fit_ended=pb.FitEnded(fit=1, history="{}"))
    assert evaluator.last("fit_ended").history == "{}"
    second = Observer(shard, pb.ROLE_EVALUATOR, incarnation=6)
    assert evaluator.stream.closed
    assert second.last("fit_ended") is not None
    supervisor.send(evaluator=pb.Evaluator(message="KeyError"))
    supervisor.send(halt=pb.Halt(cause="iter_max"))
    assert Observer(shard, pb.ROLE_EVALUATOR, incarnation=7).last("halt").cause == "iter_max"


def test_scripts_wait_for_an_evaluator_that_is_starting():
    shard = Shard()
    scripts = [Script(shard, 1), Script(shard, 2)]
    starting = pb.Evaluator(available=True, starting=True)
    Observer(shard, pb.ROLE_SUPERVISOR).send(evaluator=starting)
    start = pb.Barrier(name=Point.START_WITH_SUPERVISOR.value)
    for each in scripts:
        assert each.send(barrier=start).last("barrier") is None
    Observer(shard, pb.ROLE_EVALUATOR)  # it only pulls
    assert scripts[0].last("barrier") is None
    Observer(shard, pb.ROLE_EVALUATOR, incarnation=5)
    assert [each.last("barrier") for each in scripts] == [start, start]


def test_a_supervisor_whose_evaluator_has_ended_lets_scripts_start():
    shard = Shard()
    script, other = Script(shard, 1), Script(shard, 2)
    starting = pb.Evaluator(available=True, starting=True)
    supervisor = Observer(shard, pb.ROLE_SUPERVISOR).send(evaluator=starting)
    start = pb.Barrier(name=Point.START_WITH_SUPERVISOR.value)
    other.send(barrier=start)
    assert script.send(barrier=start).last("barrier") is None
    supervisor.send(evaluator=pb.Evaluator(message="KeyError"))
    assert script.last("barrier") == start


def test_an_evaluation_of_a_script_s_own_is_recorded():
    shard = Shard()
    supervisor = Observer(shard, pb.ROLE_SUPERVISOR).send(evaluator=pb.Evaluator(available=True))
    metrics = [pb.Metric(name="score", values=[0.5])]
    given = pb.Evaluated(fit=1, metrics=metrics, versions=[9], final=True)
    Script(shard, 1).send(evaluated=given)
    version = shard.core.version
    assert supervisor.last("evaluated") == pb.Evaluated(metrics=metrics, versions=[version])


def test_an_evaluator_pulls_as_an_observer():
    shard = Shard()
    evaluator = Observer(shard, pb.ROLE_EVALUATOR)
    evaluator.send(pull=pb.Pull(observe=True))
    assert evaluator.last("reply").operation == pb.OPERATION_FULL
    assert not shard.server.connections.had_supervisor
    assert part_of(pb.Hello(role=pb.ROLE_EVALUATOR)) == PART_OF_SUPERVISOR


@pytest.mark.parametrize(
    ("role", "body"),
    [
        (pb.ROLE_EVALUATOR, {"halt": pb.Halt(cause="iter_max")}),
        (pb.ROLE_EVALUATOR, {"fit_begun": pb.FitBegun(fit=1)}),
        (pb.ROLE_EVALUATOR, {"evaluated": pb.Evaluated(fit=0)}),
        (pb.ROLE_EVALUATOR, {"evaluated": pb.Evaluated(fit=1, nobody="x" * 2001)}),
        (
            pb.ROLE_EVALUATOR,
            {"evaluated": pb.Evaluated(fit=1, metrics=[pb.Metric(name="a", shape=[2])])},
        ),
        (pb.ROLE_EVALUATOR, {"evaluated": pb.Evaluated(fit=1, metrics=[pb.Metric()] * 1001)}),
        (pb.ROLE_SUPERVISOR, {"evaluated": pb.Evaluated(fit=1)}),
    ],
)
def test_what_observers_must_not_send(role, body):
    observer = Observer(Shard(), role).send(**body)
    assert observer.last("refusal").reason == pb.REASON_MALFORMED
    assert not observer.is_open


@pytest.mark.parametrize(
    "body",
    [
        {"fit_begun": pb.FitBegun()},
        {"fit_begun": pb.FitBegun(fit=1 << 31)},
        {"epoch_ended": pb.EpochEnded(epoch=1)},
        {"epoch_ended": pb.EpochEnded(fit=1, epoch=1 << 31)},
        {"fit_ended": pb.FitEnded(fit=1, history="x" * 900_001)},
        {"evaluated": pb.Evaluated()},
        {"evaluator": pb.Evaluator()},
    ],
)
def test_what_scripts_must_not_send(body):
    script = Script(Shard(), 1).send(**body)
    assert script.last("refusal").reason == pb.REASON_MALFORMED
    assert not script.is_open


# -- evaluations by a script ----------------------------------------------------------------------


def of_script():
    world = World(1, 2, 3)
    world.request(2, 1, 0, by_script=True)
    assert world.answered == world.asked == [], "the leader is on its way"
    world.request(1, 1, 0, by_script=True)
    assert world.answered == []
    assert world.asked == [(1, 1, 0)]
    assert world.requested == [(1, 0)], "to the evaluator, as the first that is not its own"
    return world


def test_a_script_evaluates_in_place_of_the_evaluator():
    world = of_script()
    world.answer_of(2, 1, 0, loss=9.0)
    assert world.answered == [], "it was not asked"
    world.answer_of(1, 1, 0, loss=0.25)
    assert world.answered == [(1, 1, 0, 0.25), (2, 1, 0, 0.25)]
    assert world.request(3, 1, 0, by_script=True).answered == [(3, 1, 0, 0.25)]
    (made,) = world.offer(8)
    assert made.evaluated.by_script, "Supervisors record it"


def test_an_evaluator_that_comes_later_learns_whose_the_fit_is():
    world = of_script()
    world.end_evaluator()
    news = [each.message.epoch_ended for each in world.state.begin_evaluator(world.now)]
    assert news == [pb.EpochEnded(fit=1, epoch=0, by_script=True)]


@pytest.mark.parametrize("cause", ["lost", "started again"])
def test_another_script_is_asked_where_the_first_is_gone(cause):
    world = of_script()
    world.asked.clear()
    if cause == "lost":
        world.present.discard(1)
        world.wait(1.0)
    else:
        world.note(world.state.begin(1, 2, world.now))
        world.wait(0).wait(STALL_SECONDS, updates=0)
    assert world.answered == []
    assert world.asked == [(2, 1, 0)]
    world.answer_of(1, 1, 0, loss=9.0)
    world.answer_of(2, 1, 0, loss=0.5)
    assert (2, 1, 0, 0.5) in world.answered


def test_a_script_whose_stream_was_lost_is_asked_again():
    world = of_script()
    world.request(1, 1, 0, by_script=True)
    assert world.answered == []
    assert world.asked == [(1, 1, 0)] * 2


def test_a_script_evaluates_without_any_supervisor_and_takes_its_time():
    world = World(1, 2, evaluator=False, supervisor=False)
    for worker in (1, 2):
        world.request(worker, 1, 0, by_script=True)
    assert world.wait(2 * LEASE).answered == []
    assert world.asked == [(1, 1, 0)]
    world.wait(ANSWER_SECONDS)
    assert [each[:3] for each in world.answered] == [(1, 1, 0), (2, 1, 0)]
