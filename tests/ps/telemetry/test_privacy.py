"""A private run's guarantee in status, summary, log line, report and TensorBoard."""

import dataclasses
import json
import types

import pytest

from tests.supervisor.samples import write_run
from tests.thinwire.simulator.toy import simulated
from thinwire.ops.privacy.accountant import BLOCK, epsilon, in_words
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.telemetry.status import StatusReporter
from thinwire.ps.telemetry.tensorboard import PsScalars
from thinwire.runtime.telemetry.run_status import summarise
from thinwire.supervisor.report.writer import write_report
from thinwire.tools import status

PRIVATE = {
    **{"overrides": {"pacer": "fixed", "weighting": "none"}, "local_steps": 2},
    **{"dp_clip": 0.5, "dp_noise": 2.0},
}


def played(nb_ps=1, **settings):
    run = simulated("bsp", 3, choices=PRIVATE, iter_max=12, nb_ps=nb_ps, dp_delta=1e-6, **settings)
    run.play(lambda now: None, lambda: False)
    return run


def board_of(run, number=0, **sources):
    own = run.shards[number].status_sources(run.spec.num_parameters)
    return StatusReporter(run._run, dataclasses.replace(own, **sources))


def test_the_block_has_the_promise_of_the_rounds_so_far():
    run = played()
    block = board_of(run).status().policies[BLOCK]
    assert block == {
        **{"clip": 0.5, "noise": 2.0, "delta": 1e-6, "rounds": 12},
        "epsilon": epsilon(2.0, 12, 1e-6),
    }
    assert summarise(board_of(run).status(), [])[BLOCK] == block


def test_undone_updates_of_any_shard_were_released():
    run = played(nb_ps=2)
    run.shards[1].core.counters.lost_updates = 3
    run.shards[0].reports[(pb.ROLE_SHARD, 1)] = board_of(run, 1).shard_document()
    assert board_of(run).privacy()[BLOCK]["rounds"] == 15


def test_a_worker_that_came_late_is_not_the_measure():
    run = played()
    core = types.SimpleNamespace(
        version=12,
        counters=types.SimpleNamespace(
            worker=lambda number: types.SimpleNamespace(pushes=(5, 7)[number]), lost_updates=0
        ),
        known_workers=lambda: (0, 1),
        membership=types.SimpleNamespace(num_left=1),
    )
    assert board_of(run, core=lambda: core).privacy()[BLOCK]["rounds"] == 8


def test_the_same_seed_simulates_the_same_noise():
    first, second = (played().shards[0].core.model.theta for _ in range(2))
    assert (first == second).all()


def test_tensorboard_has_epsilon(tmp_path):
    run = played()
    core, board = run.shards[0].core, board_of(run)
    values = PsScalars(tmp_path, lambda: core, dict, privacy=board.privacy).values(1.0)
    assert values["privacy/epsilon"] == epsilon(2.0, 12, 1e-6)
    assert "privacy/epsilon" not in PsScalars(tmp_path, lambda: core, dict).values(1.0)


@pytest.fixture
def run_dir(tmp_path):
    folder = write_run(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    summary |= board_of(played()).privacy()
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_status_and_report_show_it(run_dir, capsys):
    block = json.loads((run_dir / "summary.json").read_text())
    assert status.main([str(run_dir)]) == 0
    assert f"privacy     {in_words(block)}" in capsys.readouterr().out
    assert status.main([str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[BLOCK] == block[BLOCK]
    write_report(run_dir)
    assert in_words(block) in (run_dir / "report" / "index.html").read_text()
