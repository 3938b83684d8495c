"""The Ray launcher's requests and messages, and its actor, without a cluster."""

import pathlib
import signal
import stat
import subprocess
import sys
import threading
import types

import pytest
from absl import flags

from tests.command_line import given
from thinwire.flags.run import read_run
from thinwire.launcher import deployment, ray
from thinwire.launcher.local import watchdog_command
from thinwire.launcher.program import WATCHDOG
from thinwire.launcher.ray_actor import NodeActor
from thinwire.ops.types import ConfigurationError
from thinwire.proto.moved import MOVED_VARIABLE


def test_resources_have_rays_names():
    with given("--ray_worker_resources=cpus=4,gpus=0.5,fast_disk=1"):
        assert ray.requested("Worker") == {"CPU": 4, "GPU": 0.5, "fast_disk": 1}
        assert ray.requested("PS") == {"CPU": 1}
    assert ray.total([{"CPU": 4, "GPU": 1}, {"CPU": 1}]) == {"CPU": 5, "GPU": 1}
    for bad in ("cpus", "cpus=0", "cpus=x", "=1", "", "cpus=inf"):
        with pytest.raises(flags.Error, match="cpus=4,gpus=1"), given(f"--ray_ps_resources={bad}"):
            pass


@pytest.mark.parametrize("text", ['["pip"]', "no JSON", '{"working_dir": "x"}'])
def test_bad_runtime_environments(tmp_path, text):
    path = tmp_path / "env.json"
    path.write_text(text)
    with given(f"--ray_runtime_env={path}"):
        with pytest.raises(ConfigurationError, match="--ray_runtime_env"):
            ray.own_environment()
        path.write_text('{"pip": ["keras"]}')
        assert ray.own_environment() == {"pip": ["keras"]}


@pytest.mark.parametrize(
    ("flag", "words"),
    [("--device=gpu:0", "--ray_worker_resources=gpus=1"), ("--ip_PS=10.0.0.1", "--ip_PS")],
)
def test_flags_that_ray_does_not_heed(flag, words):
    on_ray = ("--type_node=Cluster", "--launcher=ray", flag)
    with given(*on_ray), pytest.raises(ConfigurationError, match=words):
        ray.RayLauncher(read_run())


def test_the_code_runs_where_ray_unpacks_it(tmp_path):
    script = tmp_path / "mine" / "train.py"
    script.parent.mkdir()
    script.write_text("")
    with given():
        code = deployment.copied_code("", script.parent)
    there = tmp_path / "there"
    deployment.unpack(code.archive, there)
    assert {path.name for path in there.iterdir()} == {"thinwire", "sent"}
    assert (there / "sent" / "script" / "train.py").exists()
    assert not [path for path in (there / "thinwire").iterdir() if path.is_symlink()]
    done = subprocess.run(
        [sys.executable, "-c", "from thinwire.launcher import ray_actor as a; print(a.__file__)"],
        cwd=there,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(there / "thinwire" / "launcher" / "ray_actor.py"), done.stderr


def test_an_actor_runs_a_node(monkeypatch, tmp_path):
    fake = types.SimpleNamespace(get_gpu_ids=lambda: [])
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.chdir(tmp_path)
    child = "import os; found = os.environ['KERAS_BACKEND'] + os.environ['JAX_PLATFORMS'] "
    child += "+ os.environ['CUDA_VISIBLE_DEVICES']; "
    child += f"print(found + open(os.environ['{MOVED_VARIABLE}']).read(), flush=True); input()"
    actor = NodeActor()
    assert actor.read(False, 10) == b""
    actor.start([sys.executable, "-c", child], " a:1 b:2\n", {"KERAS_BACKEND": "jax "})
    assert actor.read(False, 100).strip() == b"jax cpu-1 a:1 b:2"
    actor.note_moved("a:1 c:3\n")
    assert (tmp_path / "ps_moved").read_text() == "a:1 c:3\n"
    actor.write(b"\n")
    assert actor.wait() == 0
    actor.write(b"x")  # without a receiver
    assert ray._BYTE_OF[signal.SIGKILL] == b"K"


def test_an_actor_keeps_the_node_s_input_as_long_as_the_node(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(get_gpu_ids=lambda: []))
    monkeypatch.chdir(tmp_path)
    actor = NodeActor()
    path = pathlib.Path(actor.take_input(b"the first"))
    assert actor.take_input(b"given") == str(path)  # the input of a restarted node
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    reads = [sys.executable, "-c", "import sys; print(sys.stdin.read())"]
    command = watchdog_command(sys.executable, WATCHDOG, reads, given_input=f"file:{path}")
    actor.start(command, "", {})
    assert actor.read(False, 100).strip() == b"given"
    assert actor.wait() == 0 and not path.exists()


class ActorCalls:
    """An actor that makes a call when its result is requested, and records the calls."""

    def __init__(self):
        self.is_placed, self.has_ended, self.written = threading.Event(), threading.Event(), []

    def __getattr__(self, name):
        return types.SimpleNamespace(remote=lambda *given: self.call(name, *given))

    def call(self, name, *given):
        if name == "write":
            self.written += given
        return lambda: self.answer(name)

    def answer(self, name):
        if name == "find":
            assert self.is_placed.wait(30)
        elif name == "wait":
            assert self.has_ended.wait(30)
            return 143
        return b""


def test_a_signal_that_comes_before_ray_has_a_place_reaches_the_node():
    """A user may lose patience with a queue."""
    lost = type("Lost", (Exception,), {})
    kinds = types.SimpleNamespace(RayError=lost, ActorUnavailableError=lost)
    fake, actor = types.SimpleNamespace(get=lambda call: call(), exceptions=kinds), ActorCalls()
    process = ray.RayProcess(fake, actor, lambda found: ([], ""), None)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert actor.written == [] and process.poll() is None
    actor.is_placed.set()
    assert process.started.wait(30)
    process.send_signal(signal.SIGKILL)
    actor.has_ended.set()
    assert process.wait() == -signal.SIGTERM
    assert actor.written == [b"I", b"T", b"K"]


def test_what_a_node_writes_is_passed_on_line_by_line():
    written = {False: [b"one\ntw", b"o\n"], True: [b"an error\n"]}
    process = ray.RayProcess.__new__(ray.RayProcess)
    lines = []
    process._read = lambda is_error: written[is_error].pop(0) if written[is_error] else b""
    process._output = types.SimpleNamespace(
        on_line=lambda line, is_error: lines.append((line, is_error))
    )
    process._follow(False)
    process._follow(True)
    assert [(line.strip(), is_error) for line, is_error in lines] == [
        *(("one", False), ("two", False), ("an error", True)),
    ]
