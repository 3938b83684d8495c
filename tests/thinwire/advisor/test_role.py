"""--type_node=Advisor as a user runs it: its file, its exit codes, its processes."""

import dataclasses
import json
import sys

import pytest

from tests.command_line import given
from tests.thinwire.advisor.test_predict import dense_rounds, sparse_rounds
from tests.thinwire.simulator.toy import ToyTrainer, dataset, run_of
from tests.virtual.toy import KERNELS, method
from thinwire.advisor import measure, predict
from thinwire.advisor import role as advisor_role
from thinwire.flags.run import read_run
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.telemetry import predictions

CHOSEN = tuple(
    next(each for each in predict.CANDIDATES if each.flags[0] == f"--method={name}")
    for name in ("asgd", "adacomp")
)
ASKED = ("--type_node=Advisor", "--nb_workers=2", "--batch_size=8")


@pytest.fixture
def advise(monkeypatch, tmp_path):
    """Return what advises on the toy problem with rounds of both runs; `rounds` are per run."""
    pool = predict.GradientPool.of_first_steps(run_of(method("asgd"), 2), ToyTrainer(), dataset())
    monkeypatch.setattr(
        advisor_role,
        "_predictor",
        lambda run, pushes: predict.Predictor(pool, dataset(), KERNELS, 4),
    )
    monkeypatch.setattr(predict.trials, "__defaults__", (CHOSEN, predict.FLAGS, None))

    def play(*flags, dense=None, sparse=None):
        rounds = {
            "dense": {1: dense_rounds(), 2: dense_rounds()} if dense is None else dense,
            "sparse": {1: sparse_rounds(), 2: sparse_rounds()} if sparse is None else sparse,
        }
        monkeypatch.setattr(measure, "play", lambda run, which, seconds: rounds[which.name])
        with given(*ASKED, f"--run_dir={tmp_path}", *flags):
            return advisor_role.main(read_run())

    return play


def test_advice_is_written_told_and_told_again(advise, tmp_path, capsys):
    assert advise("--advise_rate=0.5") == 0
    found = predictions.load(tmp_path / predictions.ADVICE_FILE)
    assert [row.flags[0] for row in found.predicted] == ["--method=asgd", "--method=adacomp"]
    assert [link.worker for link in found.links] == [1, 2]
    assert found.links[0].up_mbps == pytest.approx(20, rel=0.1)
    assert found.ideal_samples_per_second == pytest.approx(160)
    assert (found.rate, found.proposal, found.reached) == (0.5, 0, True)  # the toy model is small
    told = capsys.readouterr().out
    assert told.rstrip().endswith(f"--advice={tmp_path / predictions.ADVICE_FILE}")
    assert "advise_rate" not in told.splitlines()[-1]
    assert advise("--advise_rate=0.5", dense={}) == 0  # nothing is measured again
    assert capsys.readouterr().out == told


def test_advice_for_another_run_is_not_told(advise, tmp_path):
    assert advise() == 0
    before = json.loads((tmp_path / predictions.ADVICE_FILE).read_text())
    with pytest.raises(ConfigurationError, match=r"learning_rate.*--overwrite"):
        advise("--learning_rate=0.5")
    assert advise("--learning_rate=0.5", "--overwrite") == 0
    after = json.loads((tmp_path / predictions.ADVICE_FILE).read_text())
    assert set(after["given"]) - set(before["given"]) == {"--learning_rate=0.5"}


def test_what_could_not_be_kept_is_refused_at_once(advise):
    with pytest.raises(ConfigurationError, match=r"--link_mbps=10,10,.*1000"):
        advise("--nb_workers=400", f"--link_mbps={','.join(['10'] * 400)}")


def test_a_worker_without_rounds_is_named(advise, tmp_path):
    with pytest.raises(ConfigurationError, match="worker 2"):
        advise(sparse={1: sparse_rounds()})
    assert not (tmp_path / predictions.ADVICE_FILE).exists()


def test_a_probe_that_fails_gives_its_exit_code(monkeypatch, advise, tmp_path):
    advise()
    (tmp_path / predictions.ADVICE_FILE).unlink()

    def fail(run, which, seconds):
        raise measure.ProbeFailed(3)

    monkeypatch.setattr(measure, "play", fail)
    with given(*ASKED, f"--run_dir={tmp_path}"):
        assert advisor_role.main(read_run()) == 3
    assert not (tmp_path / predictions.ADVICE_FILE).exists()


def test_exit_codes_of_what_is_started(monkeypatch, tmp_path):
    for code, error in ((0, ConfigurationError), (4, measure.ProbeFailed)):
        ends = [sys.executable, "-c", f"raise SystemExit({code})"]
        monkeypatch.setattr(measure, "command", lambda *unused, ends=ends: ends)
        run = dataclasses.replace(run_of(method("asgd"), 2), run_dir=tmp_path)
        with pytest.raises(error):  # it ended without an error and has left no rounds
            measure.play(run, measure.DENSE, 1.0)


def test_what_interrupts_the_advisor_ends_what_it_started(monkeypatch, tmp_path):
    text = (
        "import os, signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]); "
        "os.kill(os.getppid(), signal.SIGTERM); signal.sigwait([signal.SIGINT])"
    )
    waits = [sys.executable, "-c", text]
    monkeypatch.setattr(measure, "command", lambda *unused: waits)
    run = dataclasses.replace(run_of(method("asgd"), 2), run_dir=tmp_path)
    with pytest.raises(measure.ProbeFailed, match="130"):
        measure.play(run, measure.DENSE, 1.0)


@pytest.mark.product  # two clusters, one after the other: 20 s of two cores
@pytest.mark.timeout(300)
def test_links_of_real_processes(nodes):
    nodes.start(
        "advisor",
        "--type_node=Advisor",
        "--nb_workers=1",
        "--link_mbps=10",
        "--step_seconds=0.05",
        "--advise_pushes=4",
    )
    assert nodes.wait("advisor", 240) == 0, nodes.output("advisor")[-3000:]
    found = predictions.load(nodes.run_dir / predictions.ADVICE_FILE)
    (link,) = found.links
    assert link.step_seconds >= 0.05
    assert link.up_mbps == pytest.approx(10, rel=0.5)
    assert link.down_mbps == pytest.approx(10, rel=0.5)
    rates = {row.flags[0]: row.prediction.samples_per_second for row in found.predicted}
    assert rates["--method=asgd"] < rates["--method=dgs"]
    assert "--type_node=Cluster" in nodes.output("advisor").splitlines()[-1]
