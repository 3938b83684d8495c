"""A script that was started again when its run has moved on."""

import types

import pytest

from thinwire import ConfigurationError
from thinwire.keras.catching_up import CatchUp
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc.session import RequestRejected
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


def variable(path):
    return types.SimpleNamespace(path=path)


@pytest.mark.parametrize(("num_restarts", "error"), [(0, ConfigurationError), (1, LeftBehind)])
def test_what_earlier_fits_have_trained_must_be_with_the_run(num_restarts, error):
    """Where the launcher has started one worker again, the others go on without it."""
    catch_up, base, head = CatchUp(), variable("base"), variable("head")
    assert not catch_up.open(JoinAttempt(base, head, accepts=False), None)
    assert catch_up.is_behind
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
    assert not catch_up.is_behind
