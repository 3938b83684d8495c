"""The model versions of a simulated run that are evaluated."""

import types

from tests.thinwire.simulator.toy import played
from thinwire.simulator.records import SimulationRecords


class Recorder:
    """Records the evaluated versions."""

    def __init__(self):
        self.evaluated, self.latest = [], None

    def evaluate(self, status, weights, versions, final, statistics):
        self.evaluated.append((versions[0], final))

    def has_reached_target(self):
        return False

    def status(self, status):
        pass

    def rounds(self, worker, batch):
        pass


def test_a_version_is_evaluated_once_when_its_time_or_interval_has_come():
    simulation, recorder = played("asgd", 2, iter_max=60), Recorder()
    own = types.SimpleNamespace(eval_interval_seconds=100.0, eval_interval_updates=10)
    records = SimulationRecords(simulation._run, own, recorder, simulation)
    core = simulation.shards[0].core
    for now, version in ((0.0, 60), (200.0, 60), (201.0, 69), (202.0, 70), (303.0, 71)):
        core.model.version = version
        records.keep(now)
    assert recorder.evaluated == [(60, False), (69, False), (71, False)]
