"""Each mechanism around a fit alone: its state from fit to fit and epoch to epoch."""

import itertools
import threading
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from tests.command_line import run_of
from tests.thinwire.script.data.places import places
from tests.virtual.toy import method
from thinwire.proto import thinwire_pb2 as pb
from thinwire.script import interrupts
from thinwire.script.central_state import CentralState
from thinwire.script.data.place import BatchParts, Shared, StepRows, UnfilledRounds
from thinwire.script.kept_state import KeptState
from thinwire.script.keras import central, distribute, own_loop, succession, train_metrics
from thinwire.script.keras.exchange import StepExchange
from thinwire.script.keras.fit_lifecycle import FitLifecycle
from thinwire.script.keras.held_weights import Assignments
from thinwire.script.keras.kept_optimizer import KerasState
from thinwire.script.keras.loops import LoopSteps
from thinwire.script.keras.optimizers import ScriptOptimizers
from thinwire.script.keras.own_states import OwnStates
from thinwire.script.keras.row_kinds import RowKind
from thinwire.script.keras.row_sums import RowSums, _Part
from thinwire.script.keras.run_member import RunMember
from thinwire.script.keras.train_metrics import TrainMetrics
from thinwire.script.member import Event
from thinwire.script.session import Session


class Step(SimpleNamespace):
    """Stand-in for an optimizer, compared by identity."""

    __hash__, __eq__ = object.__hash__, object.__eq__


def test_a_sum_is_scaled_by_the_rows_of_the_same_step_in_every_epoch():
    sums, part = RowSums(None, None, None), _Part("loss", RowKind.SUM)
    sums.begin_fit(StepRows.of_rows(places(2)[0], 3, (5, 2)))
    for _ in range(2):
        sums.begin_epoch()
        factors = []
        for rows in (2, 2, 1):
            sums.begin_step(rows)
            factors.append(float(sums._factor(part)))
            sums.end_step()
        assert factors == [1.5, 1.5, 1.0]


def test_each_fit_counts_its_batches_from_its_own_first_one():
    """An earlier fit may have ended within a pass over the data."""
    data = Shared({}, parts=BatchParts(each=4, num_steps=3, last=1))
    exchange = StepExchange(SimpleNamespace(in_fit=True, data=data), None, None)
    exchange.begin_fit()
    assert [exchange._parts_of_batch(repeats=False) for _ in range(5)] == [4, 4, 1, 4, 4]
    exchange.begin_fit()
    assert [exchange._parts_of_batch(repeats=False) for _ in range(3)] == [4, 4, 1]
    assert exchange._parts_of_batch(repeats=True) == 1


def lifecycle(**given):
    """Return the fits of a member of a run, which has the attributes given."""
    exchange = given.pop("exchange", SimpleNamespace(begin_epoch=lambda: None))
    model = SimpleNamespace(stop_training=False)
    member = SimpleNamespace(**{"model": model, "data": Shared({}), "ends_after": None, **given})
    row_sums = SimpleNamespace(begin_epoch=lambda: None)
    return FitLifecycle(member, None, exchange, None, row_sums), member


def test_a_round_that_turned_out_to_be_of_others_counts_its_part_of_the_batch():
    """In a round known to be of other workers, those workers count the whole batch."""
    pacer = SimpleNamespace(local_epochs=0)
    run = SimpleNamespace(method=SimpleNamespace(pacer=pacer))
    session = SimpleNamespace(settings=SimpleNamespace(run=run))
    sat_out = []
    exchange = SimpleNamespace(
        raise_failure=lambda: None,
        begin_epoch=lambda: None,
        sit_out=lambda session, parts: sat_out.append(parts),
    )
    data = Shared({}, short_by=2, parts=BatchParts(each=3), unfilled=UnfilledRounds())
    fit, _ = lifecycle(session=session, exchange=exchange, data=data)
    for _ in range(2):
        data.unfilled.note()  # batches of a pass that only built the model
        fit.on_epoch_begin(0)
        data.unfilled.note()
        fit.end_steps()
        fit.end_steps()  # once
        assert sat_out == [0, 0, 3]
        sat_out.clear()


def test_a_fit_ends_after_the_epoch_that_all_have_agreed_on():
    answers = iter([0, 3, 3])
    barriers = SimpleNamespace(meet=lambda meeting: pb.EpochMeeting(epochs=next(answers)))
    given = {"met_barriers": barriers, "until_end": lambda wait: wait()}
    (fit, member), ended = lifecycle(meets_others=True, **given), []
    for epoch in range(3):
        fit.on_epoch_begin(epoch)
        member.model.stop_training = epoch == 1  # a callback of this worker alone
        fit.end_epoch()
        ended.append(member.model.stop_training)
    assert ended == [False, False, True]


def test_merged_metrics_keep_what_stood_in_them_before_the_first_batch():
    """A callback may have evaluated: Keras alone counts on from there."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"], run_eagerly=True)
    model.train_on_batch(np.ones((4, 2)), np.ones((4, 1)))
    merging = TrainMetrics(SimpleNamespace(model=model))
    merging.begin_epoch()
    metrics = [metric for _, metric in merging._metrics()]
    before = [np.array([variable.numpy() for variable in each.variables]) for each in metrics]
    assert any(values.any() for values in before)
    states = merging.describe()
    assert not any(np.frombuffer(state.values).any() for state in states)
    added = [
        pb.MetricState(name=each.name, values=(np.frombuffer(each.values) + 2).tobytes())
        for each in states
    ]
    merging.take(added)
    for metric, values in zip(metrics, before, strict=True):
        now = [variable.numpy() for variable in metric.variables]
        np.testing.assert_allclose(now, values + 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("run_id", "phase", "is_restored"), [("r", 2, True), ("r", 4, False), ("s", 2, False)]
)
def test_kept_state_is_restored_in_its_own_run_and_phase(tmp_path, run_id, phase, is_restored):
    """With another phase the script may have set weights that the moments do not belong to."""
    run = run_of("--method=dgs", "--model_from=worker", f"--run_dir={tmp_path}")

    def settings():
        worker = SimpleNamespace(id_worker=1, num_restarts=0)
        return SimpleNamespace(run=run, worker=lambda: worker)

    def session(run_id, phase):
        core = SimpleNamespace(step=5, save=lambda: {"step": 5})
        part = SimpleNamespace(run_id=run_id, core=core)
        return SimpleNamespace(part=part, phase=phase, settings=settings())

    def optimizer(value):
        made, variable = keras.optimizers.SGD(0.1, momentum=0.9), keras.Variable(np.zeros(3))
        made.build([variable])
        made.variables[-1].assign(np.full(3, value))
        return made

    KeptState(settings()).save(session("r", 2), [KerasState(optimizer(7.0))], at_end=True)
    later = optimizer(0.0)
    found = KeptState(settings()).restore(session(run_id, phase), [KerasState(later)], 5)
    assert (found is not None) == is_restored
    assert later.variables[-1].numpy().tolist() == [7.0 * is_restored] * 3


def shared_session(*variables, **more):
    """The part of a session that the member of a run uses."""
    shared = SimpleNamespace(variables=list(variables))
    return SimpleNamespace(shared=shared, stopped=False, **more)


def test_each_model_of_a_script_knows_how_many_had_its_place_before():
    """The servers identify the models by this number, because models may have equal variables."""
    models = [RunMember(None, None) for _ in range(3)]
    models[0].session = shared_session()
    for before, after in itertools.pairwise(models):
        succession.take_over(after, before)
    assert [each.num_before for each in models] == [0, 1, 2]
    assert [succession.has_place(each) for each in models] == [False, False, True]


def test_what_a_script_has_assigned_before_it_joins_is_no_change_of_the_run_s_weights():
    """The script then loads the run's weights, and its assignment is lost."""
    member, variable = RunMember(None, None), keras.Variable(np.zeros(2, np.float32))
    part = SimpleNamespace(closing=threading.Event(), run_id="r")
    member.session = shared_session(variable, part=part, assign=lambda: variable.assign([5, 5]))
    member.catch_up = SimpleNamespace(
        open=lambda session, phase: True, remember_states=lambda optimizers: None
    )
    variable.assign([1.0, 2.0])
    member.assignments.record(variable, np.zeros(2, np.float32))
    assert member.join() is Event.JOINED
    interrupts.remove_listener(member.interrupt)
    assert not bool(member.assignments.has_any)
    assert member.assignments.take([variable]) is None
    assert isinstance(member.assignments, Assignments)


def test_a_model_that_was_saved_in_mid_fit_goes_on_with_its_own_statistics(monkeypatch):
    """The statistics have changed since the last exchange; the weights have not."""
    held = {"weights": np.float32([1, 2]), "statistics": np.float32([7.0])}
    of_run = (np.float32([1, 2]), np.float32([3.0]))

    def assign(values=None):
        held["weights"], held["statistics"] = of_run if values is None else values

    session = SimpleNamespace(
        variables=SimpleNamespace(read=lambda: held["weights"]),
        statistics=SimpleNamespace(read=lambda: held["statistics"], size=1),
        weights=of_run[0],
        offer=SimpleNamespace(optimizers=()),
        part=None,
        assign=assign,
    )
    state = SimpleNamespace(weights=lambda: of_run)
    monkeypatch.setattr(CentralState, "fetch", lambda part, num_statistics: state)
    with central.lent(SimpleNamespace(present=session, in_fit=True, stepping=[])):
        assert held["statistics"].tolist() == [3.0]
    assert held["statistics"].tolist() == [7.0]


def test_a_loop_exchanges_though_one_of_its_optimizers_hardly_ever_steps():
    often, rare, steps = Step(name="often"), Step(name="rare"), LoopSteps()
    steps.add(often, [])
    steps.add(rare, [])
    due = [steps.is_due(often) for _ in range(16)]
    assert [number for number, is_due in enumerate(due, 1) if is_due] == [8, 16]
    assert steps.is_due(rare)  # a whole turn
    assert not steps.is_due(often)


def test_a_schedule_goes_on_at_the_run_s_count_in_the_next_phase():
    """This worker's own count is the count of its own steps only."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    optimizer = keras.optimizers.SGD(schedule)
    step = Step(inner=optimizer, has_schedule=True, clock=None)
    member = RunMember(None, None, stepping=[step])
    optimizers = ScriptOptimizers(member, None, None)
    assert optimizers.begin_clocks(method("bsp")) == (0,)
    member.session = SimpleNamespace(part=SimpleNamespace(schedule_count=lambda number: 40))
    member.advance_clocks()
    assert optimizers.begin_clocks(method("bsp")) == (40,)
    assert float(step.clock.read(schedule)) == pytest.approx(0.1 * 0.5**4)


def test_an_evaluator_has_the_first_value_of_a_variable_that_the_run_does_not_share():
    """Whichever fit has changed it."""
    model = SimpleNamespace(non_trainable_weights=[])
    variable, states = keras.Variable(np.zeros(2), name="of_the_loss"), OwnStates()
    states.begin(model, [])
    assert variable.path not in states.changed([])
    variable.assign([1.0, 0.0])
    states.begin(model, [])  # of the second fit
    assert variable.path in states.changed([])


@pytest.mark.parametrize(
    ("failed", "expected"), [(False, ["flush", "close done"]), (True, ["close error"])]
)
def test_local_steps_are_sent_at_the_end_of_a_script_that_has_not_failed(failed, expected):
    calls = []
    member = RunMember(None, None)
    member.leave_at_end(failed, "")  # the script has not joined
    member.session = SimpleNamespace(
        stopped=False,
        part=SimpleNamespace(flush=lambda: calls.append("flush")),
        close=lambda cause: calls.append(f"close {cause}"),
    )
    member.leave_at_end(failed, "")
    assert calls == expected


@pytest.mark.parametrize("phase", [None, 0, 2])
def test_the_phase_of_a_session_is_that_of_its_offer(phase):
    session = Session.__new__(Session)
    session._offering = None if phase is None else SimpleNamespace(phase=phase)
    assert session.phase == (phase or 0)


@pytest.mark.parametrize("is_launched", [True, False])
def test_a_script_that_no_launcher_started_ends_with_the_reason(is_launched, monkeypatch):
    ends = []
    monkeypatch.setattr(distribute, "exit_with_reason", lambda: ends.append(True))
    monkeypatch.setattr(distribute, "RECORD", distribute.RECORD.__class__())
    chosen = SimpleNamespace(local=False, is_launched=is_launched)
    monkeypatch.setattr(distribute, "read_settings", lambda *args, **words: chosen)
    for name in ("ModelSession", "note_settings", "_write_checkpoints_once"):
        monkeypatch.setattr(distribute, name, lambda *args: None)
    distribute._new_session(SimpleNamespace(), distribute._Call(None, None, None, {}))
    assert ends == [True] * (not is_launched)


@pytest.mark.parametrize(("in_fit", "pulls"), [(False, 1), (True, 0)])
def test_a_loop_s_model_is_pulled_between_two_steps_alone(in_fit, pulls, monkeypatch):
    done = []
    session = SimpleNamespace(
        stopped=False,
        part=SimpleNamespace(pull=lambda: done.append("pull")),
        assign=lambda: done.append("assign"),
    )
    member = SimpleNamespace(
        session=session,
        in_fit=in_fit,
        in_loop=True,
        finish_rounds=lambda session: None,
        lock=threading.Lock(),
    )
    monkeypatch.setattr(own_loop, "set_by_script", lambda session: None)
    loop = own_loop.OwnLoop.__new__(own_loop.OwnLoop)
    loop._member, loop._exchange = member, SimpleNamespace(has_failed=False)
    loop.refresh(with_slots=False)
    assert done == ["pull", "assign"] * pulls


@pytest.mark.parametrize(
    ("is_additive", "adds", "expected"),
    [(False, 0.0, None), (False, 1.0, None), (None, 1.0, None), (None, 0.0, [0.0])],
)
def test_a_state_that_depends_on_itself_is_not_added_up(is_additive, adds, expected):
    class Own(keras.metrics.Metric):
        """A metric of a script."""

        def __init__(self):
            super().__init__(name="own")
            self.state = self.add_weight(name="state", initializer="zeros")

    metric, metrics = Own(), TrainMetrics(None)
    metrics._initial[id(metric)] = np.zeros(1)
    metric.state.assign(adds)
    metrics._tested[id(metric)] = train_metrics._Tested(metric, is_additive)
    added = metrics._added(metric)
    assert added is None if expected is None else added.tolist() == expected
