"""The GPUs of a machine, dealt to its workers: what each process finds in its environment."""

import collections
import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
from hypothesis import given as drawn
from hypothesis import strategies

from tests.command_line import given
from thinwire.flags.run import read_run
from thinwire.launcher import gpus, host_probe, local, role, run
from thinwire.launcher.program import HERE
from thinwire.ops.types import ConfigurationError

#: What may matter to a Keras backend.
NAMES = (
    *("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "KERAS_BACKEND"),
    *("XLA_PYTHON_CLIENT_PREALLOCATE", "TF_FORCE_GPU_ALLOW_GROWTH"),
)
STUB = f"""
import json, os
found = {{name: os.environ[name] for name in {NAMES} if name in os.environ}}
print(json.dumps([found, os.environ.get("OMP_WAIT_POLICY")]))
"""
CPU = {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"}
SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
A100 = "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-0000)"
MIG = "  MIG 1g.5gb     Device  {}: (UUID: MIG-{}-9d0b)"


# -- the machine's GPUs --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2, 3", ["2", "3"]),
        ("1,-1,0", ["1"]),  # CUDA stops there, too
        ("GPU-5d5ba0d6-0000,MIG-GPU-ab/1/0", ["GPU-5d5ba0d6-0000", "MIG-GPU-ab/1/0"]),
    ],
)
def test_gpus_that_the_user_has_chosen_keep_their_names(chosen, expected):
    assert host_probe.visible_gpus(chosen) == expected


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        ("", []),
        (f"{A100}\n{A100.replace('GPU 0', 'GPU 1')}\n", ["0", "1"]),
        (
            "\n".join([A100, MIG.format(0, "a"), MIG.format(1, "b"), A100.replace("5d5", "6d6")]),
            ["MIG-a-9d0b", "MIG-b-9d0b", "GPU-6d6ba0d6-0000"],
        ),
    ],
)
def test_the_driver_s_program_lists_the_gpus(monkeypatch, listing, expected):
    monkeypatch.setattr(host_probe, "_listing", lambda: listing)
    assert host_probe.visible_gpus(None) == expected


def test_without_the_driver_s_program_its_folder_is_counted(monkeypatch, tmp_path):
    monkeypatch.setattr(host_probe.shutil, "which", lambda name: None)
    monkeypatch.setattr(host_probe, "_DRIVER", str(tmp_path / "none"))
    assert host_probe.visible_gpus(None) == []
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(host_probe, "_DRIVER", str(tmp_path))
    assert host_probe.visible_gpus(None) == ["0", "1"]


def test_a_program_that_fails_counts_as_none(monkeypatch, tmp_path):
    for script in ("#!/bin/sh\nexit 9\n", "no program"):
        path = tmp_path / "nvidia-smi"
        path.write_text(script)
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert host_probe._listing() is None


# -- dealing -------------------------------------------------------------------------------------


@drawn(
    num_gpus=strategies.integers(1, 9),
    num_workers=strategies.integers(1, 20),
    per_worker=strategies.none() | strategies.integers(0, 9),
)
def test_workers_get_equally_many_gpus_and_share_as_few_as_can_be(
    num_gpus, num_workers, per_worker
):
    names = [str(number) for number in range(num_gpus)]
    if per_worker is not None and per_worker > num_gpus:
        with pytest.raises(ConfigurationError, match=f"--gpus_per_worker={per_worker}"):
            gpus.deal(names, num_workers, per_worker)
        return
    shares = gpus.deal(names, num_workers, per_worker)
    (size,) = {len(share) for share in shares}
    expected = max(1, num_gpus // num_workers) if per_worker is None else per_worker
    assert (len(shares), size) == (num_workers, expected)
    assert all(len({*share}) == size for share in shares)
    uses = collections.Counter({name: 0 for name in names})
    uses.update(name for share in shares for name in share)
    assert max(uses.values()) - min(uses.values()) <= 1


def test_a_process_uses_one_mig_instance():
    names = ["MIG-a", "MIG-b", "MIG-c"]
    assert gpus.deal(names, 1, None) == [("MIG-a",)]
    with pytest.raises(ConfigurationError, match="only one MIG instance"):
        gpus.deal(names, 1, 2)


# -- the environment of each process -------------------------------------------------------------


class Lines(list):
    """Receives a node's output."""

    def on_line(self, line, is_error):
        self.append(line)


@pytest.fixture
def environments(monkeypatch, tmp_path):
    """Return a function (number of GPUs, *flags, **variables) -> node -> what it found."""
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    monkeypatch.setattr(local, "HERE", HERE._replace(node=(str(stub),), script=(str(stub),)))
    for name in (*NAMES, "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)

    def start(num_gpus, *flags, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        names = [str(number) for number in range(num_gpus)]
        monkeypatch.setattr(host_probe, "_installed_gpus", lambda: names)
        usual = ("--type_node=Cluster", "--model_from=worker", f"--run_dir={tmp_path}", "--port=0")
        found, processes = {}, []
        with given(*usual, *flags):
            settings = read_run()
            launcher = local.LocalLauncher(settings)
            for node in role.nodes_of(settings, launcher.addresses):
                node = run.of_script(node, settings, [str(stub)])
                lines = found[node.name] = Lines()
                node = dataclasses.replace(node, output=lines)
                processes.append(launcher.start(node))
        assert [process.wait() for process in processes] == [0] * len(processes)
        given_by_node = {name: json.loads(lines[-1]) for name, lines in found.items()}
        # the processes of a machine share its cores, so idle threads must sleep
        assert {policy for _, policy in given_by_node.values()} == {"PASSIVE"}
        return {name: own for name, (own, _) in given_by_node.items()}

    return start


@pytest.mark.parametrize("device", [[], ["--device=auto"]])
def test_every_worker_sees_its_own_gpus_and_other_nodes_none(environments, device):
    found = environments(4, "--nb_workers=2", *device)
    assert found == {
        "ps-0": CPU,
        "worker-1": {"CUDA_VISIBLE_DEVICES": "0,1"},
        "worker-2": {"CUDA_VISIBLE_DEVICES": "2,3"},
        "supervisor-0": CPU,
    }


def test_workers_of_one_gpu_reserve_no_memory_and_take_turns(environments):
    found = environments(2, "--nb_workers=3")
    gpu = {f"worker-{number}": found[f"worker-{number}"] for number in (1, 2, 3)}
    assert gpu["worker-1"] == gpu["worker-3"] == {"CUDA_VISIBLE_DEVICES": "0", **SHARED}
    assert gpu["worker-2"] == {"CUDA_VISIBLE_DEVICES": "1"}


def test_a_number_of_gpus_may_be_given(environments):
    found = environments(4, "--nb_workers=2", "--gpus_per_worker=1")
    assert [found[f"worker-{number}"]["CUDA_VISIBLE_DEVICES"] for number in (1, 2)] == ["0", "1"]
    found = environments(4, "--nb_workers=2", "--gpus_per_worker=0")
    assert found["worker-1"] == found["worker-2"] == CPU


def test_what_the_user_has_set_is_respected(environments):
    found = environments(
        9,
        "--nb_workers=3",
        CUDA_VISIBLE_DEVICES="GPU-a,7",
        XLA_PYTHON_CLIENT_PREALLOCATE="true",
        KERAS_BACKEND="torch",
        JAX_PLATFORMS="cuda",
    )
    own = {"KERAS_BACKEND": "torch", "JAX_PLATFORMS": "cuda"}
    own["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"
    growth = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    assert found["worker-1"] == {"CUDA_VISIBLE_DEVICES": "GPU-a", **own, **growth}
    assert found["worker-2"] == {"CUDA_VISIBLE_DEVICES": "7", **own}
    assert found["ps-0"] == found["supervisor-0"] == own | CPU


def test_without_gpus_a_worker_s_environment_is_the_user_s(environments):
    assert environments(0, "--nb_workers=2")["worker-1"] == {}
    found = environments(2, "--nb_workers=1", CUDA_VISIBLE_DEVICES="-1")
    assert found["worker-1"] == {"CUDA_VISIBLE_DEVICES": "-1"}


def test_a_device_that_flags_name_is_the_workers_alone(environments, tmp_path):
    found = environments(2, "--nb_workers=2", "--device=gpu:1")
    assert found["worker-1"] == found["worker-2"] == SHARED  # the worker itself sets the GPU
    with given("--type_node=Cluster", "--device=gpu:1", "--nb_workers=1"):
        nodes = {node.role: node.flags for node in role.nodes_of(read_run(), ["a:1"])}
    assert "--device=gpu:1" in nodes["Worker"]
    assert "--device=cpu" in nodes["PS"] and "--device=cpu" in nodes["Supervisor"]


def test_a_device_and_a_number_of_gpus_contradict_each_other(environments):
    with pytest.raises(ConfigurationError, match="--gpus_per_worker=1 with --device=cpu"):
        environments(2, "--nb_workers=1", "--device=cpu", "--gpus_per_worker=1")


def test_workers_may_have_different_backends(environments):
    flags = ("--nb_workers=2", "--keras_backend=jax,torch")
    found = environments(0, *flags, KERAS_BACKEND="tensorflow")
    assert found["worker-1"] == {"KERAS_BACKEND": "jax"}
    assert found["worker-2"] == {"KERAS_BACKEND": "torch"}
    assert found["ps-0"]["KERAS_BACKEND"] == "tensorflow"
    installed = [name for name in ("jax", "torch") if importlib.util.find_spec(name)]
    assert found["supervisor-0"]["KERAS_BACKEND"] == (installed or ["tensorflow"])[0]


def test_one_backend_counts_for_all_workers_and_another_number_is_refused(environments):
    found = environments(0, "--nb_workers=2", "--keras_backend=torch")
    assert found["worker-1"] == found["worker-2"] == {"KERAS_BACKEND": "torch"}
    with pytest.raises(ConfigurationError, match="--keras_backend has 2 values"):
        environments(0, "--nb_workers=3", "--keras_backend=jax,torch")


def test_the_probe_of_a_host_names_its_gpus_and_backends():
    program = pathlib.Path(host_probe.__file__).read_bytes()
    done = subprocess.run(
        [sys.executable, "-I", "-", ""],
        input=program,
        capture_output=True,
        check=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "3,GPU-b"},
    )
    report = json.loads(done.stdout.decode().removeprefix("thinwire-probe "))
    assert report["gpus"] == ["3", "GPU-b"] and report["address"] is None
    assert {*report["backends"]} <= {*host_probe.BACKENDS} and report["backends"]
