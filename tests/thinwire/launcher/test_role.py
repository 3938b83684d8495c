"""Errors of a Cluster before any node starts, and the addresses of its shards."""

import io
import subprocess
import types

import pytest

from tests.forked import MAIN, forker
from thinwire.flags import launch
from thinwire.launcher import deployment, role, ssh
from thinwire.launcher.hosts import Host
from thinwire.launcher.role import Node
from thinwire.launcher.ssh import ProbedHost
from thinwire.ops.types import ConfigurationError

ROOT = MAIN.parent


def ends_with(folder, code, words, *given):
    command = [forker().python, str(MAIN), "--type_node=Cluster", "--run_dir=run", *given]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if " E " in line]
    assert len(lines) == 1, done.stderr
    assert all(word in lines[0] for word in words), lines[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--launcher=ssh"], ["--hosts_file"]),
        (["--interface=eth0"], ["--interface=eth0", "--launcher=local", "ssh"]),
        (["--launcher=local", "--hosts_file=hosts"], ["--hosts_file=hosts", "local"]),
        (["--hosts_file=missing"], ["--hosts_file=missing"]),
        (["--hosts_file=hosts", "--ip_PS=10.0.0.1"], ["--ip_PS=10.0.0.1", "--interface"]),
        (["--hosts_file=hosts", "--port=0"], ["--port=0"]),
        (["--hosts_file=bad"], ["--hosts_file=bad, line 1", "a/b"]),
        (["--hosts_file=hosts", "--sync_dst_dir=~me/x"], ["--sync_dst_dir=~me/x"]),
        (["--hosts_file=hosts", "--ssh_options='"], ["--ssh_options", "quot"]),
        (["--hosts_file=hosts", "--remote_python=bin/python"], ["--remote_python=bin/python"]),
        (["--link_mbps=1,2,3", "--hosts_file=missing"], ["--link_mbps", "3 values"]),
    ],
    ids=str,
)
def test_bad_flags(tmp_path, given, words):
    (tmp_path / "hosts").write_text("127.0.0.1\n")
    (tmp_path / "bad").write_text("a/b\n")
    ends_with(tmp_path, 2, words, *given)


class Flags:
    """Flags as absl has them, as far as a launcher looks."""

    def __init__(self, **given):
        defaults = {
            "interface": None,
            "gpus_per_worker": None,
            "worker_threads": 0,
            "ssh_options": "",
            "port": 2223,
            "ps_hosts": [],
            "insecure": True,
            "ip_PS": "127.0.0.1",
            "sync_dst_dir": None,
            "model": None,
            "remote_python": None,
            "tls_cert": None,
            "tls_ca": None,
            "token_file": None,
        }
        self.values = {
            name: types.SimpleNamespace(
                value=value, present=name in given, default=defaults.get(name)
            )
            for name, value in (defaults | given).items()
        }

    def __getattr__(self, name):
        return self.values[name].value

    def __getitem__(self, name):
        return self.values[name]

    def __iter__(self):
        return iter(self.values)


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """Make launchers for hosts that answer without a request."""

    def make(hosts, nb_ps, nb_workers, addresses=(), probed=None, gpus=(), **given):
        (tmp_path / "hosts").write_text("\n".join(hosts))
        flags = Flags(hosts_file=str(tmp_path / "hosts"), **given)
        for module in (ssh, launch, deployment, role):
            monkeypatch.setattr(module, "FLAGS", flags)
        probed = probed or dict.fromkeys(hosts)
        found = {Host(name): ProbedHost(4, address, gpus) for name, address in probed.items()}
        monkeypatch.setattr(ssh, "on_all", lambda hosts, do: found)
        monkeypatch.setattr(ssh.Ssh, "host_name", lambda self, host: "127.0.0.9")
        run = types.SimpleNamespace(
            overwrite=False,
            nb_ps=nb_ps,
            nb_workers=nb_workers,
            addresses=addresses,
            run_dir=tmp_path,
            device="auto",
            model_is_offered=True,
        )
        return ssh.SshLauncher(run)

    return make


def test_shards_listen_where_the_file_says(launcher):
    made = launcher(["10.0.0.1", "10.0.0.2", "10.0.0.3"], 2, 2)
    assert made.addresses == ("10.0.0.1:2223", "10.0.0.2:2224")
    assert made._binds == ["10.0.0.1", "10.0.0.2"]


def test_an_alias_stands_for_the_address_behind_it(launcher):
    assert launcher(["mine"], 1, 1).addresses == ("127.0.0.9:2223",)


def test_an_interface_has_an_address_on_each_host(launcher):
    probed = {"10.0.0.1": "192.168.0.1", "10.0.0.2": "192.168.0.2"}
    made = launcher(list(probed), 2, 1, probed=probed, interface="eth1")
    assert made.addresses == ("192.168.0.1:2223", "192.168.0.2:2224")


def test_all_addresses_are_bound_but_the_files_is_dialled(launcher):
    made = launcher(["10.0.0.1", "10.0.0.2"], 2, 1, interface="0.0.0.0")
    assert made.addresses == ("10.0.0.1:2223", "10.0.0.2:2224")
    assert made._binds == ["0.0.0.0", "0.0.0.0"]


def test_the_user_may_say_what_is_dialled(launcher):
    outside = ("gate.example:1", "gate.example:2")
    made = launcher(["10.0.0.1", "10.0.0.2"], 2, 1, addresses=outside, ps_hosts=list(outside))
    assert made.addresses == outside
    assert made._binds == ["10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize(
    ("hosts", "given", "words"),
    [
        (["10.0.0.1"], {"insecure": False}, ["10.0.0.1", "--insecure"]),
        (["10.0.0.1", "10.0.0.2"], {"interface": "10.0.0.1"}, ["--interface=10.0.0.1", "2 hosts"]),
        (["127.0.0.1", "10.0.0.2"], {}, ["line 1", "127.0.0.1", "10.0.0.2 cannot reach"]),
    ],
)
def test_addresses_that_cannot_serve_are_refused(launcher, hosts, given, words):
    with pytest.raises(ConfigurationError) as refused:
        launcher(hosts, len(hosts), 1, **given)
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_host_gets_the_input_once_and_again_for_a_node_that_starts_again(launcher, monkeypatch):
    """The last node there that has read the copy removes it."""
    made, sent = launcher(["10.0.0.1", "10.0.0.2"], 1, 4), []
    monkeypatch.setattr(ssh, "whole_input", lambda given: io.BytesIO(b"line\n"))
    monkeypatch.setattr(
        made._ssh, "run", lambda host, line, given, seconds: sent.append((host.name, given.read()))
    )
    copies = []
    for number, restarts in ((1, 0), (2, 0), (3, 0), (1, 1)):
        node = Node(f"worker-{number}", "Worker", number, (), restarts, input=object())
        copies.append(made._send_input(node, made._host_of(node)))
    assert sent == [("10.0.0.2", b"line\n"), ("10.0.0.1", b"line\n"), ("10.0.0.2", b"line\n")]
    assert copies[0] == copies[2] == copies[3] != copies[1]


def test_workers_on_one_host_get_gpus_of_this_host_and_its_ps_none(launcher):
    made = launcher(["10.0.0.1", "10.0.0.2"], 1, 3, gpus=("0", "1"))
    lines = {}
    for number in (1, 2, 3):
        node = Node(f"worker-{number}", "Worker", number, (), variables={"KERAS_BACKEND": "jax"})
        lines[number] = made._line(node, made._host_of(node))
    assert "exec env KERAS_BACKEND=jax CUDA_VISIBLE_DEVICES=0 " in lines[1]
    assert "CUDA_VISIBLE_DEVICES=0,1 " in lines[2]  # alone on the first host, after the PS
    assert "CUDA_VISIBLE_DEVICES=1 " in lines[3]
    ps = Node("ps-0", "PS", 0, (), variables={"CUDA_VISIBLE_DEVICES": "-1"})
    assert "exec env CUDA_VISIBLE_DEVICES=-1 " in made._line(ps, made._host_of(ps))


def test_more_gpus_per_worker_than_a_host_has_are_refused(launcher):
    with pytest.raises(ConfigurationError, match=r"--gpus_per_worker=3.*10\.0\.0\.1.*2 GPUs"):
        launcher(["10.0.0.1"], 1, 1, gpus=("0", "1"), gpus_per_worker=3)
