"""`thinwire doctor`: its checks, its conclusions, and its exit codes."""

import json
import pathlib
import re
import resource
import shutil
import socket
import subprocess
import threading
import tomllib
import types

import pytest

from tests.nodes import free_port
from tests.thinwire.launcher.sshd import MISSING, SSHD, Sshd
from tests.thinwire.tools.test_status import server
from thinwire.launcher import link_probe
from thinwire.proto.grpc import health
from thinwire.runtime.run.credentials import NO_CREDENTIALS
from thinwire.tools import doctor, findings, machine, network
from thinwire.tools.findings import Finding

ROOT = pathlib.Path(__file__).resolve().parents[3]
needs_sshd = pytest.mark.skipif(SSHD is None or shutil.which("ssh") is None, reason=MISSING)


def levels(found):
    return [each.level for each in found]


# -- findings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "code"), [([], 0), (["ok"], 0), (["ok", "warning"], 1), (["problem", "warning"], 2)]
)
def test_the_worst_finding_is_the_exit_code(given, code):
    assert findings.worst_code(Finding("x", level, "y") for level in given) == code


@pytest.mark.parametrize(("value", "level"), [(1, "ok"), (2, "warning"), (4, "problem")])
def test_values_are_graded_by_two_bounds(value, level):
    found = findings.graded("x", value, "text", "advice", 1, 3)
    assert found.level == level
    assert ("advice" in str(found)) == (level != "ok")


# -- this machine ------------------------------------------------------------------------------


def test_the_floors_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    floors = dict(each.split(">=") for each in project["dependencies"])
    assert floors == machine.FLOORS
    extras, backends = project["optional-dependencies"], machine.BACKENDS
    assert extras["cpu"] == [f"tensorflow-cpu>={backends['tensorflow'].floor}"]
    for name in ("jax", "torch"):
        assert extras[name] == [f"{name}>={backends[name].floor}"]
    assert {*machine._EXTRAS} <= extras.keys()


def test_a_package_that_is_too_old_or_missing_is_a_problem(monkeypatch):
    found = {name: "99.0" for name in machine.FLOORS} | {"numpy": "1.26.4", "rich": None}
    monkeypatch.setattr(machine, "version_of", found.get)
    numpy, rich = machine.packages()
    assert (numpy.level, numpy.what, rich.what) == ("problem", "numpy", "rich")
    assert "older than 2.0" in numpy.text and "pip install 'rich>=13'" in rich.advice


def test_few_open_files_are_a_warning(monkeypatch):
    for soft, level in ((64, "problem"), (256, "warning"), (4096, "ok")):
        monkeypatch.setattr(resource, "getrlimit", lambda which, soft=soft: (soft, 4096))
        assert machine.open_files().level == level


def test_a_run_directory_is_examined_and_left_alone(tmp_path):
    assert levels(machine.run_directory(tmp_path / "runs" / "new"))[:1] == ["ok"]
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_problem(tmp_path, monkeypatch):
    usage = types.SimpleNamespace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    assert next(iter(machine.run_directory(tmp_path))).level == "problem"


def test_a_port_that_is_taken_is_a_warning():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = machine.port(taken.getsockname()[1])
    assert found.level == "warning" and "--port" in found.advice
    assert machine.port(free_port()).level == "ok"


PROBED = {
    "import_seconds": 2.0,
    "version": "2.21.0",
    "keras": "3.15.1",
    "backend": "tensorflow",
    "gpus": [],
    "built_with_cuda": False,
    "step_seconds": 0.03,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["ok", "ok", "ok"]),
        ({"version": "2.19.1"}, ["problem", "ok", "ok"]),
        ({"backend": "jax", "version": "0.7.1"}, ["problem", "ok", "ok"]),
        ({"backend": "jax", "version": "0.10.2"}, ["ok", "ok", "ok"]),
        ({"backend": "torch", "version": "2.13.0+cpu"}, ["ok", "ok", "ok"]),
        ({"import_seconds": 30.0}, ["warning", "ok", "ok"]),
        ({"step_seconds": 2.0}, ["ok", "ok", "warning"]),
    ],
)
def test_the_backend_is_examined_in_a_process_of_its_own(monkeypatch, changes, expected):
    done = types.SimpleNamespace(stdout=f"noise\n{json.dumps(PROBED | changes)}\n", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *unused, **more: done)
    assert levels(machine.backend(1.0)) == expected


def test_a_gpu_that_tensorflow_does_not_see_is_a_warning(monkeypatch, tmp_path):
    (tmp_path / "0000:01:00.0").mkdir()
    monkeypatch.setattr(machine, "_GPUS", tmp_path)
    done = types.SimpleNamespace(stdout=json.dumps(PROBED), stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *unused, **more: done)
    assert levels(machine.backend(1.0)) == ["ok", "warning", "ok"]


def test_a_tensorflow_that_fails_or_hangs_is_named(monkeypatch):
    broken = types.SimpleNamespace(stdout="", stderr="ImportError: libcuda\n")
    monkeypatch.setattr(subprocess, "run", lambda *unused, **more: broken)
    (found,) = machine.backend(1.0)
    assert found.level == "problem" and "libcuda" in found.text

    def hang(*unused, **more):
        raise subprocess.TimeoutExpired("python", 1.0)

    monkeypatch.setattr(subprocess, "run", hang)
    assert levels(machine.backend(1.0)) == ["warning"]


@pytest.mark.parametrize(
    ("installed", "variables", "passed"),
    [
        (("tensorflow-cpu", "jax"), {}, None),
        (("torch", "jax"), {}, "jax"),
        (("torch",), {}, "torch"),
        (("torch", "jax"), {"KERAS_BACKEND": "torch"}, "torch"),
    ],
)
def test_without_tensorflow_another_installed_backend_is_examined(
    monkeypatch, installed, variables, passed
):
    monkeypatch.setattr(machine, "version_of", lambda name: "9.9" if name in installed else None)
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environments = []

    def run(command, env, **more):
        environments.append(env)
        probe = PROBED | {"backend": passed or "tensorflow", "version": "9.9"}
        return types.SimpleNamespace(stdout=json.dumps(probe), stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    assert levels(machine.backend(1.0)) == ["ok", "ok", "ok"]
    assert [each.get("KERAS_BACKEND") for each in environments] == [passed]


def test_no_backend_is_a_problem_that_names_the_extras(monkeypatch):
    monkeypatch.setattr(machine, "version_of", lambda name: None)
    (found,) = machine.backend(1.0)
    assert found.level == "problem"
    assert all(f"thinwire[{extra}]" in found.advice for extra in ("cpu", "gpu", "jax", "torch"))


# -- shards ------------------------------------------------------------------------------------


def test_a_serving_shard_is_reached_and_its_link_measured(tmp_path):
    with server(tmp_path) as handle:
        found = list(network.shard(handle.address, NO_CREDENTIALS))
        assert levels(found)[0] == "ok" and "round trip" in found[0].text
        assert re.search(r"SERVING, [\d.]+ Mbit/s down", found[1].text)
        assert handle.stop_reason is None


@pytest.mark.parametrize(
    ("address", "level", "text"),
    [
        ("127.0.0.1:{}", "warning", "port"),
        ("no-such-host.invalid:1", "problem", "no such host"),
        ("nonsense", "problem", "not host:port"),
    ],
)
def test_a_shard_that_is_not_reached_is_explained(address, level, text):
    (found,) = network.shard(address.format(free_port()), NO_CREDENTIALS)
    assert (found.level, text in found.text) == (level, True)


def test_another_program_at_the_port_is_a_problem():
    with socket.create_server(("127.0.0.1", 0)) as other:
        *_, found = network.shard(f"127.0.0.1:{other.getsockname()[1]}", NO_CREDENTIALS)
    assert found.level == "problem" and "Thinwire" in found.advice


def test_an_answer_of_another_program_is_cut(monkeypatch):
    def refuse(*arguments):
        raise health.HealthCheckFailed("x" * 500)

    monkeypatch.setattr(health, "probe", refuse)
    (found,) = network._serving("the shard", "127.0.0.1:1", NO_CREDENTIALS)
    assert found.text == "x" * 200


# -- hosts -------------------------------------------------------------------------------------


def test_the_link_probe_measures_a_link(monkeypatch):
    monkeypatch.setattr(link_probe, "_BULK_SECONDS", 0.05)
    number = free_port()
    thread = threading.Thread(target=link_probe.serve, args=(number, 2.0), daemon=True)
    thread.start()
    for _ in range(200):
        try:
            seconds, mbps = link_probe.measure("127.0.0.1", number)
            break
        except ConnectionRefusedError:
            threading.Event().wait(0.01)
    assert 0 < seconds < 1 and mbps > 1


@needs_sshd
def test_hosts_are_examined_over_ssh(tmp_path, capsys):
    sshd = Sshd(tmp_path / "sshd")
    try:
        file = tmp_path / "hosts"
        file.write_text(f"{sshd.host} slots=2\nnobody@127.0.0.1:1\n")
        found = list(network.hosts(file, sshd.options, doctor.sys.executable, 0))
    finally:
        sshd.stop()
    assert levels(found) == ["ok", "ok", "problem", "ok"], found
    assert "clock off by" in found[1].text and "Mbit/s" in found[3].text


# -- the command -------------------------------------------------------------------------------


def test_the_command_writes_every_finding(monkeypatch, capsys, tmp_path):
    good = Finding("TensorFlow", "ok", "fine")
    monkeypatch.setattr(machine, "backend", lambda seconds: iter([good]))
    arguments = [f"--run_dir={tmp_path}", f"--port={free_port()}"]
    doctor.main(arguments)
    text = capsys.readouterr().out
    assert len(text.splitlines()) >= 9 and "ok       TensorFlow" in text
    with server(tmp_path) as handle:
        doctor.main([*arguments, f"--ps_hosts={handle.address}", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {"what", "level", "text", "advice"} == set(found[0])
    assert any(each["what"] == f"PS {handle.address}" for each in found)


def test_a_hosts_file_that_is_not_there_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(machine, "backend", lambda seconds: iter(()))
    assert doctor.main([f"--hosts_file={tmp_path / 'none'}"]) == 2
    assert "--hosts_file=" in capsys.readouterr().err
