"""`thinwire status`: from files alone, from a running shard, and its exit codes."""

import contextlib
import json
import os
import time
import types

import pytest

from tests.nodes import free_port
from tests.supervisor.samples import make_status, write_run
from tests.thinwire import toy
from tests.virtual.toy import SPEC
from thinwire import init_server
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.service.handshake import Identity, check_hello
from thinwire.runtime.run.directory import LAUNCH_FILE, METRICS_FILE, lock_of
from thinwire.runtime.run.lock import LockOwner, is_held
from thinwire.tools import recorded, status


def report(capsys, *arguments):
    """Return the exit code and the JSON object."""
    code = status.main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


@contextlib.contextmanager
def living(folder, role, number=0, address=""):
    with lock_of(folder, role, number).take(LockOwner.here(role, number, address)):
        yield


@contextlib.contextmanager
def server(folder, **settings):
    """A PS of this process that listens."""
    given = {"nb_workers": 2, "kernels": "numpy", "port": free_port(), "run_dir": str(folder)}
    with init_server(given | settings, toy.build()) as handle:
        yield handle


# -- files alone -----------------------------------------------------------------------------------


def test_a_finished_run_shows_its_summary(tmp_path, capsys):
    write_run(tmp_path / "run")
    code, found = report(capsys, tmp_path / "run")
    assert (code, found["state"], found["why"]) == (0, "finished", "iter_max")
    assert (found["source"], found["version"], found["nb_workers"]) == ("summary.json", 2000, 4)
    assert found["test_accuracy"] == pytest.approx(0.845, abs=0.01)
    assert status.main([str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert "finished (iter_max)" in text and "accuracy" in text and "421,642" in text


def test_the_script_of_a_run_is_named_with_its_arguments(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    script = {"path": "/data/train.py", "arguments": ["--epochs", "3 4"], "sha256": ""}
    (folder / LAUNCH_FILE).write_text(json.dumps({"script": script}))
    assert report(capsys, folder)[1]["script"] == "/data/train.py --epochs '3 4'"
    status.main([str(folder)])
    assert "adacomp, /data/train.py --epochs" in capsys.readouterr().out


@pytest.mark.parametrize(("reason", "code"), [("interrupted", 130), ("diverged", 5)])
def test_a_stopped_run_gives_the_code_of_its_nodes(tmp_path, capsys, reason, code):
    write_run(tmp_path / "run", stop_reason=reason)
    assert report(capsys, tmp_path / "run")[0] == code


def test_a_run_that_died_after_it_was_resumed_is_dead(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    with open(folder / METRICS_FILE, "a") as file:
        line = {"kind": "status", **make_status(2400).to_dict()}
        file.write(json.dumps(line, separators=(",", ":")) + '\n{"kind":"status","torn')
    code, found = report(capsys, folder)
    assert (code, found["state"], found["version"]) == (3, "dead", 2400)
    assert "same command again" in found["why"]


def test_the_newest_status_is_found_before_much_else(tmp_path):
    path = tmp_path / METRICS_FILE
    line = json.dumps({"kind": "status", **make_status(5).to_dict()}, separators=(",", ":"))
    path.write_text(f"{line}\n" + '{"kind":"eval"}\n' * 40_000)
    assert recorded.newest_status(path).version == 5
    path.write_text('{"kind":"eval"}\n' * 40_000)
    assert recorded.newest_status(path) is None


@pytest.mark.parametrize("run", ["no_such_folder", "host:", "host:0", "host:70000"])
def test_what_is_no_run_is_refused(run, capsys):
    assert status.main([run]) == 2
    assert "neither a folder nor host:port" in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert status.main([str(tmp_path)]) == 2
    assert "contains no run" in capsys.readouterr().err


def test_a_lock_is_held_only_while_its_owner_lives(tmp_path):
    lock = lock_of(tmp_path, "PS", 0)
    assert is_held(lock.path) is False
    with living(tmp_path, "PS"):
        assert is_held(lock.path) is True
    assert is_held(lock.path) is False


def test_a_run_without_a_ps_is_read_from_its_metrics(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    with living(folder, "Standalone"):
        code, found = report(capsys, folder)
    assert (code, found["state"], found["source"]) == (0, "running", "metrics.jsonl")
    (process,) = found["processes"]
    assert process["alive"] and process["pid"] == os.getpid()


# -- shard 0 ---------------------------------------------------------------------------------------


def test_a_running_run_answers_by_directory_and_by_address(tmp_path, capsys):
    with server(tmp_path, method="bsp") as handle:
        for run in (tmp_path, handle.address):
            code, found = report(capsys, run)
            assert (code, found["state"], found["source"]) == (0, "running", "shard 0")
            assert (found["method"], found["version"]) == ("bsp", 0)
        assert handle.stop_reason is None
    assert report(capsys, tmp_path)[0] == 130


def test_one_that_only_looks_need_not_know_the_number_of_shards():
    mine = Identity("run", 0, 3, 0, [], SPEC, [])
    hello = pb.Hello(role=pb.ROLE_SUPERVISOR)
    assert check_hello(hello, mine) is None
    hello.model.extend(messages.tensors_of(mine.spec))  # one that evaluates must
    assert check_hello(hello, mine)[0] == pb.REASON_TOPOLOGY


def test_an_observer_without_the_token_is_rejected(tmp_path, capsys):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    token.chmod(0o600)
    with server(tmp_path / "run", token_file=str(token)) as handle:
        code, found = report(capsys, handle.address)
        assert (code, found["state"]) == (4, "rejected") and "token" in found["why"]
        code, found = report(capsys, handle.address, f"--token_file={token}")
        assert (code, found["state"]) == (0, "running")


def test_a_shard_that_does_not_answer_is_starting_or_gone(tmp_path, capsys):
    address = f"127.0.0.1:{free_port()}"
    with living(tmp_path, "PS", 0, address):
        assert report(capsys, tmp_path, "--seconds=0.2")[:1] == (0,)
    code, found = report(capsys, address, "--seconds=0.2")
    assert (code, found["state"]) == (3, "unanswered")


def test_the_command_needs_no_tensorflow_and_starts_soon(tmp_path):
    from tests.thinwire.cli.test_commands_alone import run

    folder = write_run(tmp_path / "run")
    code = (
        "import sys\nfrom thinwire.tools import observer, status\n"
        "code = status.main(sys.argv[1:])\n"
        "assert not {'tensorflow', 'keras', 'matplotlib'} & set(sys.modules)\nsys.exit(code)"
    )
    before = time.process_time()
    done = run("-c", code, str(folder))
    assert done.returncode == 0, done.stderr
    assert time.process_time() - before < 1.0


def test_a_shard_that_has_ended_answers_no_more(tmp_path):
    (tmp_path / "flags-ps-0.txt").write_text("--port=4000\n--ip_PS=127.0.0.1\n")
    run = recorded.RecordedRun(tmp_path)
    owner = types.SimpleNamespace(address="127.0.0.1:5000")
    for alive, expected in ((False, "127.0.0.1:4000"), (True, "127.0.0.1:5000")):
        run.__dict__["processes"] = [
            recorded.NodeProcess("worker-1", types.SimpleNamespace(address="127.0.0.1:6000"), True),
            recorded.NodeProcess("ps-0", owner, alive),
        ]
        assert run.address == expected
