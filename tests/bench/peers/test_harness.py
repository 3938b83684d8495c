"""The harness stores each finished run, retries failed runs and reports missing root rights."""

import contextlib
import dataclasses
import json
import os
import sys

import pytest

from bench.peers import __main__ as harness
from bench.peers import curves, evaluating, report, running, work
from bench.peers.contenders import CONTENDERS, Contender, PeerNode
from bench.peers.lab import SERVER, Lab, Place, this_machine


class Machine:
    """Stands for the runs themselves."""

    def __init__(self, monkeypatch, obstacle=""):
        self.calls, self.said, self.failing, self.diverging = [], [], set(), set()
        self.tasks = []
        monkeypatch.setattr(harness, "why_not", lambda: obstacle)
        monkeypatch.setattr(harness, "namespaces", lambda *_: contextlib.nullcontext("lab"))
        monkeypatch.setattr(harness, "evaluator", lambda *_: None)
        monkeypatch.setattr(harness, "run", self.run)
        present = {
            name: dataclasses.replace(each, python=harness.Path(sys.executable))
            for name, each in CONTENDERS.items()
        }
        monkeypatch.setattr(harness, "CONTENDERS", present)

    def run(self, contender, task, lab, targets, evaluate):
        self.calls.append((contender.name, task.learning_rate))
        self.tasks.append(task)
        if contender.name in self.failing:
            self.failing.discard(contender.name)
            raise running.PeerFailed("gloo aborted")
        if contender.name in self.diverging:
            raise running.PeerDiverged(f"diverged in {harness.ROOT}/ps")
        rates = curves.Rates(10.0, 20.0, 1.0, 1.0)
        point = curves.CurvePoint(5.0, 50.0, 1.0, 1.0, 0.9)
        return {
            "samples_per_second": 640.0,
            "rates": dataclasses.asdict(rates),
            "curve": [dataclasses.asdict(point)],
        }

    def measure(self, path, *names, links=("none",), rates=(0.01,)):
        settings = harness.settings(names, links, rates, 1, 60.0, 600.0, (0.8,))
        table = harness.Harness(settings, path, self.said.append)
        table.measure()
        return table


def test_runs_are_appended_and_resumed(tmp_path, monkeypatch):
    machine, path = Machine(monkeypatch), tmp_path / "records.jsonl"
    machine.measure(path, "torch DDP", "thinwire asgd")
    lines = path.read_text().splitlines()
    assert [json.loads(line)["contender"] for line in lines] == ["torch DDP", "thinwire asgd"]
    path.write_text(lines[0] + "\n" + lines[1][:40])  # ended in the middle
    machine.calls.clear()
    machine.measure(path, "torch DDP", "thinwire asgd")
    assert machine.calls == [("thinwire asgd", 0.01)]


def test_a_crash_is_tried_again_and_kept_in_mind(tmp_path, monkeypatch):
    machine, name = Machine(monkeypatch), "torch DDP, PowerSGD"
    machine.failing = {name}
    table = machine.measure(tmp_path / "records.jsonl", name)
    (record,) = table.records
    assert record["ok"] and record["attempts"] == 2 and record["error"] == "gloo aborted"
    assert any("attempt 1: gloo aborted" in line for line in machine.said)


def test_a_run_that_diverges_is_an_outcome(tmp_path, monkeypatch):
    machine, path = Machine(monkeypatch), tmp_path / "records.jsonl"
    machine.diverging = {"thinwire asgd"}
    for _ in range(2):
        (record,) = machine.measure(path, "thinwire asgd").records
        assert record["diverged"] and not record["ok"]
        assert record["error"] == "diverged in ps"  # a file for others names no folder of ours
    assert machine.calls == [("thinwire asgd", 0.01)]  # neither tried again nor resumed
    assert report.failures([record])[0].endswith("diverged")


def test_without_root_peers_run_without_a_limit_only(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, obstacle="not root")
    names = ("torch DDP", "thinwire dgs")
    table = machine.measure(tmp_path / "records.jsonl", *names, links=("none", "100"))
    assert [name for name, _ in machine.calls] == [*names, "thinwire dgs"]
    left_out = [record for record in table.records if not record["ok"]]
    assert [(r["contender"], r["left_out"]) for r in left_out] == [("torch DDP", True)]
    assert "emulated links" in machine.said[0]


def test_a_decoder_reads_the_text_of_this_python_in_batches_of_its_own(tmp_path, monkeypatch):
    machine = Machine(monkeypatch)
    names = ("torchft DiLoCo", "torch DDP")
    table = machine.measure(tmp_path / "records.jsonl", *names, links=("none", "1"))
    found = [(task.model, task.batch_size, task.steps) for task in machine.tasks]
    # Over the thinnest link two rounds are timed; a method that sends everything is timed for 20.
    assert found == [
        ("decoder", 16, 0),
        ("mnist_cnn", 64, 0),
        ("decoder", 16, 101),
        ("mnist_cnn", 64, 20),
    ]
    assert (harness.Path(machine.tasks[0].text) / "abc.py").exists()
    assert table.settings.round_steps == {"torchft DiLoCo": 50}


def test_an_environment_that_is_not_there_is_said(tmp_path, monkeypatch):
    machine = Machine(monkeypatch)
    gone = dataclasses.replace(CONTENDERS["torch DDP"], python=tmp_path / "python")
    monkeypatch.setitem(harness.CONTENDERS, "torch DDP", gone)
    table = machine.measure(tmp_path / "records.jsonl", "torch DDP")
    assert "setup.sh" in table.records[0]["error"] and not machine.calls


SCRIPT = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
began = time.monotonic()
lines = [{"time": began + n, "steps": n + 1, "snapshot": None} for n in range(9)]
(folder / "progress-0.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""


def _contender(script, others=(), sort="among workers"):
    def nodes(task, lab):
        leader = PeerNode(SERVER, (sys.executable, "-c", script, task.folder), leads=True)
        return [leader, *(PeerNode(SERVER, (sys.executable, "-c", other)) for other in others)]

    return Contender("one", sort, True, harness.Path(sys.executable), nodes)


def _run(contender, seconds=60.0):
    lab = Lab({SERVER: Place((), "127.0.0.1", "lo")}, [7000])
    task = work.Work(seconds, 0, 2, 64, 0.01, 0.9, 1)
    return running.run(contender, task, lab, [0.8], lambda _: 0.9)


def test_processes_are_run_and_those_left_are_ended(tmp_path):
    path = tmp_path / "pid"
    stays = f"import os, time; os.write(os.open({str(path)!r}, 65), b'%d' % os.getpid())"
    path.touch()
    waits = f"import os\nwhile not os.path.getsize({str(path)!r}): pass\n"
    found = _run(_contender(waits + SCRIPT, [stays + "; time.sleep(1000)"]))
    assert found["samples_per_second"] == pytest.approx(64.0)
    assert found["steps"] == 9 and found["rates"]["bytes_up"] is None
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)


ROUNDS = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
now = time.monotonic()
lines = [{"time": now + 10 * n, "steps": 100 * (n + 1), "snapshot": None} for n in range(3)]
(folder / "progress-all.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""


def test_the_clock_of_rounds_begins_with_the_first_step():
    rounds = dataclasses.replace(_contender(ROUNDS, sort="ours"), round_steps=50)
    assert _run(rounds)["seconds"] == pytest.approx(30.0)
    peer = dataclasses.replace(_contender(ROUNDS), round_steps=50)  # it reports every step
    assert _run(peer)["seconds"] == pytest.approx(20.0)


def test_a_peer_that_waits_for_an_exchange_counts_by_what_it_kept(monkeypatch):
    monkeypatch.setattr(running, "_START_SECONDS", 0.0)
    keeps = "(folder / '00000.npy').write_bytes(b'')\n"
    found = _run(_contender(SCRIPT + keeps + "time.sleep(1000)"), seconds=2.0)
    assert found["steps"] == 9


def test_ours_says_by_its_exit_code_that_it_diverged():
    stands = "import time; time.sleep(1000)"
    with pytest.raises(running.PeerDiverged):
        _run(_contender(stands, ["raise SystemExit(5)"], "ours"))
    with pytest.raises(running.PeerFailed, match="ended with 5"):
        _run(_contender(stands, ["import sys; sys.exit(5)"]))


@pytest.mark.parametrize(
    ("script", "others", "told"),
    [
        ("raise SystemExit('out of memory')", (), "ended with 1; out of memory"),
        ("import time; time.sleep(1000)", ["raise SystemExit('no port')"], "no port"),
        ("", (), "no step was done"),
    ],
    ids=["leader", "other", "nothing"],
)
def test_failures_tell_what_was_said(script, others, told):
    with pytest.raises(running.PeerFailed, match=told):
        _run(_contender(script, others))


def test_rows_come_from_records_too(tmp_path, monkeypatch):
    machine, path = Machine(monkeypatch), tmp_path / "records.jsonl"
    machine.measure(path, "torch DDP", "thinwire asgd")
    found = {row.work: row for row in harness.rows_of(path)}
    assert found["thinwire asgd / torch DDP, samples/s, no limit"].ratio == 1.0
    assert any("seconds to 0.85" in name for name in found)


OURS_IN_TORCH = CONTENDERS["thinwire torch bsp"]


@pytest.mark.product
@pytest.mark.skipif(not OURS_IN_TORCH.python.exists(), reason="run bench/peers/setup.sh")
def test_a_torch_script_of_ours_learns_and_its_watcher_keeps_the_model():
    task = work.Work(120.0, 0, 2, 64, 0.03, 0.9, 1, steps=40, snapshot_seconds=0.5)
    evaluate = evaluating.evaluator(work.MNIST_CNN, "")
    with this_machine(2) as lab:
        found = running.run(OURS_IN_TORCH, task, lab, [0.99], evaluate)
    assert 80 <= found["steps"] <= 120
    assert found["curve"][-1]["score"] > 0.4  # ten classes
