"""A cluster over a real sshd: start, output, stop; no process stays after any kind of end."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.nodes import MAIN, free_port
from tests.thinwire.launcher.sshd import MISSING, SSHD, Sshd
from tests.waiting import wait_until
from thinwire.launcher.hosts import Host
from thinwire.launcher.ssh import HostFailed, Ssh

needs_sshd = pytest.mark.skipif(SSHD is None or shutil.which("ssh") is None, reason=MISSING)
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def sshd(tmp_path):
    started = Sshd(tmp_path / "sshd")
    yield started
    started.stop()


def running(folder: pathlib.Path) -> dict[int, str]:
    """Return the processes with a folder in their command line."""
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(folder) in text:
                found[int(entry.name)] = text
    return found


def wait_for_none(folder):
    wait_until(lambda: not running(folder), what=lambda: str(running(folder)))


def start(nodes, hosts, options, *flags):
    """Start a cluster of 2 workers with their code in a folder with a blank and a quote."""
    (nodes.folder / "hosts").write_text(hosts)
    nodes.start(
        "cluster",
        "--type_node=Cluster",
        f"--hosts_file={nodes.folder / 'hosts'}",
        f"--sync_dst_dir={nodes.folder / 'it'}'s code",
        f"--ssh_options={options}",
        "--nb_workers=2",
        "--method=asgd",
        *flags,
    )


@needs_sshd
def test_one_command_starts_follows_and_ends_a_cluster(nodes, sshd):
    groups = nodes.folder / "my groups"
    groups.write_text("1 2\n")
    start(
        nodes,
        f"# one\n{sshd.host} slots=3\n",
        sshd.options,
        "--method=gsp",
        f"--groups_file={groups}",
        "--iter_max=60",
    )
    assert nodes.wait("cluster", 120) == 0, nodes.output("cluster")
    assert nodes.summary()["updates"] == 60
    assert nodes.summary()["nb_workers"] == 2
    copied = nodes.folder / "it's code"
    assert (copied / "sent" / "groups_file" / "my groups").read_text() == "1 2\n"
    assert {path.name for path in copied.iterdir()} == {"thinwire", "sent"}
    assert "exit codes: {'ps-0': 0, 'worker-1': 0, 'worker-2': 0" in nodes.output("cluster")
    wait_for_none(nodes.run_dir)


SCRIPT = """
import helper, keras, numpy, os, sys, thinwire
word = sys.stdin.read()
x = numpy.loadtxt("rows.txt", dtype="float32", ndmin=2)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
thinwire.distribute(model).fit(x, x[:, :1], batch_size=4, verbose=0)
print(helper.WORD, os.path.basename(os.getcwd()), word)
"""


@pytest.mark.product
@needs_sshd
def test_a_script_runs_on_the_hosts_with_its_folder_and_its_input(nodes, sshd):
    folder = nodes.folder / "my script"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "helper.py").write_text("WORD = 'helped'")
    (folder / "rows.txt").write_text("1 2\n" * 16)
    (nodes.folder / "hosts").write_text(f"{sshd.host} slots=3\n")
    own = (f"--hosts_file={nodes.folder / 'hosts'}", f"--ssh_options={sshd.options}")
    done = subprocess.run(
        [
            *(sys.executable, str(MAIN), "run", *own),
            *(f"--sync_dst_dir={nodes.folder / 'there'}", f"--port={nodes.port}"),
            *(f"--run_dir={nodes.run_dir}", str(folder / "train.py")),
        ],
        cwd=nodes.folder,
        input="given",
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for worker in (1, 2):
        assert f"[worker {worker}] helped script given" in lines
    assert not list((nodes.folder / "there").rglob("stdin-*"))
    assert nodes.summary()["stop_reason"] == "finished"
    assert not list((nodes.run_dir / "settings").glob("*"))
    wait_for_none(nodes.run_dir)


@needs_sshd
@pytest.mark.product
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_launcher_that_ends_leaves_nothing_running(nodes, sshd, number):
    start(nodes, sshd.host, sshd.options, "--iter_max=1000000")
    nodes.watch(lambda status: all(worker.pushes >= 2 for worker in status.workers), 150)
    assert len([text for text in running(nodes.run_dir).values() if "watchdog.py" in text]) >= 4
    nodes.kill("cluster", number)
    if number == signal.SIGINT:
        assert nodes.wait("cluster") == 130, nodes.output("cluster")
        assert nodes.summary()["stop_reason"] == "interrupted"
    wait_for_none(nodes.run_dir)


@needs_sshd
def test_hosts_that_cannot_be_reached_are_named_and_nothing_starts(nodes, sshd):
    dead = free_port()
    start(nodes, f"{sshd.host}\n127.0.0.1:{dead}\nno-such-host.invalid\n", sshd.options)
    before = time.monotonic()
    assert nodes.wait("cluster", 40) == 3
    assert time.monotonic() - before < 20
    output = nodes.output("cluster")
    assert f"line 2, 127.0.0.1:{dead}: ssh: " in output
    assert "line 3, no-such-host.invalid: ssh: " in output
    assert "line 1" not in output
    assert "2 of 3 hosts" in output
    assert not (nodes.folder / "it's code").exists()
    assert not running(nodes.run_dir)


@needs_sshd
def test_an_unknown_host_key_is_refused(sshd):
    (sshd.folder / "known_hosts").write_text("")
    host = Host("127.0.0.1", port=sshd.port)
    with pytest.raises(HostFailed, match="Host key verification failed"):
        Ssh(sshd.options.split()).run(host, "true", b"", 20)


@needs_sshd
def test_what_a_host_has(sshd):
    ssh, host = Ssh(sshd.options.split()), Host("127.0.0.1", port=sshd.port)
    assert ssh.probe(host, sys.executable, "lo").address == "127.0.0.1"
    with pytest.raises(HostFailed, match=r"--interface=nolo.*IPv4.*lo"):
        ssh.probe(host, sys.executable, "nolo")
    with pytest.raises(HostFailed, match="is --remote_python right"):
        ssh.probe(host, "/no/python", "")
