"""A restarted script catches up with a run that has continued without it."""

import types

import pytest

from thinwire import ConfigurationError
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc.session import RequestRejected
from thinwire.script.keras.catching_up import CatchUp
from thinwire.worker.script import LeftBehind


class JoinAttempt:
    """A session of some variables, in a run that is in the phases from `accepts` on."""

    def __init__(self, *variables, accepts=True, num_restarts=0):
        self.shared = types.SimpleNamespace(variables=variables)
        self.own = types.SimpleNamespace(num_restarts=num_restarts)
        self.accepts = accepts

    def open(self):
        if not self.accepts:
            raise RequestRejected(pb.Refusal(reason=pb.REASON_PHASE, phase=4))
        return True

    def stay_behind(self):
        pass


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """The phases with stored final states on the shards."""
    phases = set()
    take = lambda catch_up, session, phase: phase in phases  # noqa: E731
    monkeypatch.setattr(CatchUp, "_take_ended", take)
    return phases


def variable(path):
    return types.SimpleNamespace(path=path)


@pytest.mark.parametrize(("num_restarts", "error"), [(0, ConfigurationError), (1, LeftBehind)])
def test_what_earlier_fits_have_trained_must_be_with_the_run(num_restarts, error):
    """After the launcher has restarted one worker, the other workers continue without it."""
    catch_up, base, head = CatchUp(), variable("base"), variable("head")
    assert not catch_up.open(JoinAttempt(base, head, accepts=False), None)
    with pytest.raises(error, match="base and 0 more variables"):
        catch_up.open(JoinAttempt(head, num_restarts=num_restarts), 4)


def test_a_model_after_it_does_not_have_them():
    catch_up, first, second = CatchUp(), variable("kernel"), variable("kernel")
    assert not catch_up.open(JoinAttempt(first, accepts=False), None)
    catch_up.go_to_next_model([first])
    with pytest.raises(LeftBehind, match="kernel"):
        catch_up.open(JoinAttempt(second, num_restarts=2), 4)


def test_a_script_that_has_all_of_them_goes_on():
    catch_up, base, head = CatchUp(), variable("base"), variable("head")
    assert not catch_up.open(JoinAttempt(base, accepts=False), None)
    assert catch_up.open(JoinAttempt(base, head, num_restarts=1), 4)


def test_what_the_shards_have_kept_is_not_lost(kept):
    catch_up, first, second = CatchUp(), variable("kernel"), variable("kernel")
    kept.add(3)
    assert not catch_up.open(JoinAttempt(first, accepts=False), None)
    catch_up.go_to_next_model([first])
    assert catch_up.open(JoinAttempt(second, num_restarts=2), 4)


def test_what_a_later_fit_has_made_of_the_same_is_enough(kept):
    catch_up, base, head = CatchUp(), variable("base"), variable("head")
    assert not catch_up.open(JoinAttempt(base, head, accepts=False), None)
    kept.add(3)
    assert not catch_up.open(JoinAttempt(base, head, accepts=False), 2)
    assert catch_up.open(JoinAttempt(head), 6)
