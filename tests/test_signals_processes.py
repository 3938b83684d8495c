"""Signals during a process's start and while it waits: it ends quickly with exit code 130."""

import signal
import subprocess
import sys
import time

import pytest

from thinwire.launcher.local import exit_code, watchdog_command
from thinwire.launcher.program import NODE, SCRIPT, WATCHDOG

ROLE = ("--type_node=PS", "--network=lenet", "--dataset=synthetic")


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("words", [ROLE, ("run", "script.py")], ids=["role", "run"])
def test_a_signal_before_anything_is_prepared_gives_130(number, words):
    # The node inherits the mask: a signal then waits for the first line that can handle it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        process = subprocess.Popen(
            [sys.executable, *NODE, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (130, b"")


@pytest.mark.processes
@pytest.mark.parametrize(
    "node", [(*NODE, *ROLE), (*SCRIPT, "--seed=1", "--id_worker=1", "--run_dir={}", "--", "{}/s")]
)
def test_a_cluster_that_is_interrupted_as_it_starts_shows_no_traceback(node, tmp_path):
    (tmp_path / "s").write_text("print('never')\n")
    command = [sys.executable, *(word.format(tmp_path) for word in node)]
    supervised = watchdog_command(sys.executable, WATCHDOG, command)
    process = subprocess.Popen(
        supervised, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    process.stdin.write(b"I")
    process.stdin.flush()
    output = process.stdout.read()  # until its end; at the end of the input it would be terminated
    assert exit_code(process.wait(30)) == 130
    assert b"Traceback" not in output and b"never" not in output


@pytest.mark.processes
@pytest.mark.product
def test_nodes_do_not_wait_for_one_that_is_stopped(nodes):
    nodes.common = (*nodes.common, "--lease_seconds=120")
    nodes.cluster(2, "--method=bsp", "--iter_max=1000000")
    nodes.watch(lambda status: status.version >= 5)
    nodes.kill("worker-2", signal.SIGSTOP)
    for name in ("worker-1", "ps"):
        began = time.monotonic()
        nodes.kill(name, signal.SIGTERM)
        assert nodes.wait(name, 30) == 130
        assert time.monotonic() - began < 5
    nodes.kill("worker-2")
