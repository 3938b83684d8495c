"""Control streams of scripts with a real shard over loopback, and the shard's restarts."""

import contextlib
import threading
import types

import pytest

from tests.threads.cluster import InProcessCluster
from tests.virtual.toy import method
from tests.waiting import patience, wait_until
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import Unreachable
from thinwire.proto.grpc.session import RequestRejected
from thinwire.runtime.run.credentials import NO_CREDENTIALS
from thinwire.runtime.run.settings import FINISHED, RETURNED_EARLY, SCRIPT_FAILED
from thinwire.worker.client import control as control_module
from thinwire.worker.client.control import Control, RunHalted, ScriptReports

#: Seconds until a silent script's lease ends; few scripts die in these tests.
LEASE = 1.5


class Caller(threading.Thread):
    """A script that does a few calls of its control, one after the other."""

    def __init__(self, *calls):
        super().__init__(daemon=True)
        self.calls, self.done, self.error = calls, 0, None
        self.start()

    def run(self):
        try:
            for call in self.calls:
                call()
                self.done += 1
        except (RunHalted, InterruptedError, Unreachable) as error:
            self.error = error

    def end(self, seconds=20.0):
        self.join(patience(seconds))
        assert not self.is_alive(), "it still waits"
        return self


def passes(control, *names):
    return Caller(*(lambda name=name: control.barrier(name) for name in names))


def run_at(port, num_shards=1, seconds=20.0):
    """The settings of a run that a control reads."""
    return types.SimpleNamespace(
        addresses=(f"127.0.0.1:{port}",),
        nb_ps=num_shards,
        credentials=NO_CREDENTIALS,
        reconnect_timeout_seconds=seconds,
    )


@contextlib.contextmanager
def scripts(nb_workers=2, **config):
    """Yield a cluster without training, and the control of each worker's script."""
    with InProcessCluster(method("asgd", nb_workers), 1, lease_seconds=LEASE, **config) as cluster:
        controls = []
        try:
            for worker in range(1, nb_workers + 1):
                controls.append(Control(run_at(cluster.shards[0].port), worker, "run"))
            yield cluster, controls
        finally:
            for control in controls:
                control.close()


def test_barriers_and_the_end_of_all():
    with scripts() as (cluster, (one, two)):
        first = passes(one, "fit-1-begin", "fit-1-end")
        passes(two, "fit-1-begin").end()
        wait_until(lambda: first.done == 1)
        two.barrier("fit-1-begin")  # passed already
        two.barrier("fit-1-end")
        assert first.end().error is None
        assert one.finish()
        assert two.finish()
        wait_until(lambda: cluster.first.stop_reason == FINISHED)


def test_a_shard_that_is_started_again_goes_on_with_the_scripts():
    with scripts() as (cluster, (one, two)):
        both = [passes(control, "fit-1-begin") for control in (one, two)]
        assert [caller.end().error for caller in both] == [None, None]
        waiting = passes(one, "fit-1-end", "fit-2-begin")
        cluster.shards[0].kill()
        cluster.shards[0].come_back()
        two.barrier("fit-1-end")
        wait_until(lambda: waiting.done == 1)
        cluster.shards[0].kill()
        finishing = Caller(lambda: two.barrier("fit-2-begin"), two.finish)
        cluster.shards[0].come_back()
        assert waiting.end().error is None
        assert finishing.end().error is None
        cluster.shards[0].kill()
        last = Caller(one.finish)  # reported to the next one
        cluster.shards[0].come_back()
        assert last.end().error is None
        wait_until(lambda: cluster.first.stop_reason == FINISHED, what="a script that is gone")


def test_an_error_ends_everybody_who_waits():
    with scripts(3) as (cluster, (one, two, three)):
        waiting = passes(one, "fit-1-begin")
        assert two.finish(failed=True, message="ValueError: no such column")
        error = waiting.end().error
        assert isinstance(error, RunHalted)
        assert error.cause == SCRIPT_FAILED
        assert str(error) == (
            "the run has ended (script_failed): worker 2 failed: ValueError: no such column"
        )
        with pytest.raises(RunHalted) as raised:
            three.barrier("fit-1-begin")
        assert (raised.value.cause, raised.value.message) == (SCRIPT_FAILED, error.message)
        assert not three.finish(), "there is nobody to report to"
        assert cluster.first.stop_reason == SCRIPT_FAILED


def test_a_limit_of_the_run_ends_the_wait():
    with scripts() as (cluster, (one, two)):
        del two
        waiting = passes(one, "fit-1-end")
        wait_until(lambda: list(cluster.shards[0].server.scripts.barriers._waiting()))
        cluster.stop("iter_max")
        error = waiting.end().error
        assert (error.cause, error.message) == ("iter_max", "")


def test_one_that_returns_early():
    with scripts() as (_, (one, two)):
        callers = [passes(control, "fit-1-begin", "fit-1-end") for control in (one, two)]
        assert [caller.end().error for caller in callers] == [None, None]
        assert one.finish()
        with pytest.raises(RunHalted, match="worker 1 returned early") as raised:
            two.barrier("fit-2-begin")
        assert raised.value.cause == RETURNED_EARLY


def test_one_that_dies_is_waited_for_a_lease():
    with scripts() as (_, (one, two)):
        passes(one, "fit-1-begin")
        two.barrier("fit-1-begin")
        two.close()  # without a word
        one.barrier("fit-1-end")


def test_a_wait_can_be_interrupted():
    with scripts() as (_, (one, two)):
        waiting = passes(one, "fit-1-begin")
        one.interrupt()
        assert isinstance(waiting.end().error, InterruptedError)
        with pytest.raises(InterruptedError):
            one.barrier("fit-1-begin")
        one.resume()
        again = passes(one, "fit-1-begin")
        two.barrier("fit-1-begin")
        assert again.end().error is None


def test_an_interrupted_script_waits_for_no_shard_that_is_gone():
    with scripts() as (cluster, (one, _)):
        cluster.shards[0].kill()
        one.interrupt()
        assert not one.finish(failed=True, wait_seconds=1e6)


def test_a_script_of_another_run_is_refused():
    with scripts() as (cluster, _):
        stranger = Control(run_at(cluster.shards[0].port), 1, "another run")
        with pytest.raises(RequestRejected, match="run_id"):
            stranger.barrier("fit-1-begin")


def test_nobody_at_the_address():
    control = Control(run_at(9, seconds=0.5), 1)
    with pytest.raises(Unreachable):
        control.barrier("fit-1-begin")
    assert not control.finish()


def test_every_shard_ends_with_the_scripts():
    chosen = method("asgd", 1)
    with InProcessCluster(chosen, 2, lease_seconds=LEASE) as cluster:
        control = Control(run_at(cluster.shards[0].port, 2), 1, "run")
        assert control.finish(failed=True, message="OSError")
        wait_until(lambda: all(shard.core.stop_reason for shard in cluster.shards))
        assert [shard.core.stop_reason for shard in cluster.shards] == [SCRIPT_FAILED] * 2
        with pytest.raises(RequestRejected, match="PS 1 of 2"):
            Control(run_at(cluster.shards[1].port, 2), 1, "run").barrier("fit-1-begin")


def test_an_evaluation_reaches_all_scripts_through_restarts_of_the_shard():
    run = contextlib.ExitStack()
    with run:
        cluster, (one, two) = run.enter_context(scripts())
        fit = pb.FitBegun(fit=1, validates=True)
        one.report_fit(pb.ToServer(fit_begun=fit))
        found = []
        waiting = Caller(lambda: found.append(one.evaluate(1, 0)))
        cluster.shards[0].kill()
        cluster.shards[0].come_back()
        assert waiting.end().error is None, "the lease of a Supervisor is over"
        assert found[0].nobody == "there is no Supervisor"
        assert one.evaluate(1, 0) is found[0], "once"
        cluster.shards[0].kill()
        cluster.shards[0].come_back()
        assert two.evaluate(1, 0).nobody == "there is no Supervisor"
        interrupted = Caller(lambda: two.evaluate(1, 1))
        wait_until(lambda: two._reports.pending)
        two.interrupt()
        assert isinstance(interrupted.end().error, InterruptedError)


def test_a_shard_that_is_started_again_learns_at_which_barriers_the_model_changed():
    reports = ScriptReports()
    for name, changes in (("fit-1-begin", True), ("fit-1-end", False)):
        reports.receive(pb.ToClient(barrier=pb.Barrier(name=name, changes=changes)))
    (told,) = [each.barrier for each in reports.again()]
    assert list(told.passed) == ["fit-1-begin", "fit-1-end"]
    assert list(told.changed) == ["fit-1-begin"]


def test_a_confirmation_in_the_last_second_of_the_wait_counts(monkeypatch):
    control, waits = Control(run_at(9), 1), []

    def confirm(seconds):
        waits.append(seconds)
        control._reports.is_confirmed = True

    monkeypatch.setattr(control._changed, "wait", confirm)
    monkeypatch.setattr(control_module, "time", types.SimpleNamespace(monotonic=lambda: 100.0))
    assert control.finish(wait_seconds=0.25)
    assert waits == [0.25]
