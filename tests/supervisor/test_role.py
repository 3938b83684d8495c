"""What a Supervisor reports of its evaluator, and records of what others have evaluated."""

import types

import pytest

from tests.command_line import given
from tests.supervisor.samples import make_status
from thinwire.flags.run import read_run
from thinwire.proto import thinwire_pb2 as pb
from thinwire.supervisor.role import _Watcher


class Records:
    """What was recorded."""

    evaluations = ()

    def __init__(self):
        self.made = []

    def record(self, status, metrics, versions, final=False):
        self.made.append((metrics, versions, final))


@pytest.fixture
def watcher(tmp_path):
    """A Supervisor with a stream to shard 0 that keeps what it was sent."""
    with given("--type_node=Supervisor", f"--run_dir={tmp_path}"):
        made = _Watcher(read_run(), None, Records())
    shard = types.SimpleNamespace(status=make_status(7), halt_cause="", validates=True, sent=[])
    shard.evaluated = types.SimpleNamespace(empty=lambda: True)
    shard.session = types.SimpleNamespace(send_control=shard.sent.append)
    made.shards = [shard]
    return made


@pytest.mark.parametrize(("versions", "is_final"), [([6], False), ([7], True), ([7, 9], True)])
def test_what_a_script_has_evaluated_is_final_if_the_run_ended_with_it(watcher, versions, is_final):
    watcher._of_script = ({"loss": 0.5}, versions)
    watcher._record_final_of_script()
    assert watcher.recorder.made == ([({"loss": 0.5}, versions, True)] if is_final else [])


def test_shard_0_learns_whenever_the_evaluator_s_process_begins_or_ends(watcher):
    """Scripts wait for one that is on its way, for as long as it takes."""
    evaluator = types.SimpleNamespace(is_alive=True, why_not="", start=lambda: None, tend=str)
    watcher.script_evaluator = evaluator
    watcher._offer_evaluator("")
    for is_alive in (True, False, False, True):
        evaluator.is_alive = is_alive
        watcher._tend_evaluator()
    expected = [pb.Evaluator(available=True, starting=each) for each in (True, False, True)]
    assert [message.evaluator for message in watcher.shards[0].sent] == expected
