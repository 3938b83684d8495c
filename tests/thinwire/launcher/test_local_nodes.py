"""Nodes that a Cluster starts on its own machine: real processes, without TensorFlow."""

import os
import pathlib
import subprocess
import sys

from tests.nodes import MAIN
from tests.waiting import wait_until
from thinwire.launcher.local import start_here
from thinwire.launcher.role import Node


def test_a_node_of_this_machine_says_how_it_ended(monkeypatch, tmp_path):
    monkeypatch.setenv("TF_CONFIG", "not even JSON")  # the place in the run comes with the flags
    monkeypatch.chdir(tmp_path)
    flags = ("--type_node=Worker", "--id_worker=9", f"--run_dir={tmp_path}")
    process = start_here(Node("worker-9", "Worker", 9, flags))
    try:
        assert process.wait() == 2  # there is no worker 9
    finally:
        process.kill()
        process.wait()


#: A Cluster that has started a PS here, and waits.
LAUNCHER = """
import sys, time
from thinwire.cli import node
from thinwire.launcher import local
from thinwire.flags.run import read_run
from thinwire.launcher.role import Node
node.define_flags()
node.FLAGS(["main.py", *sys.argv[1:]])
flags = ("--type_node=PS", f"--run_dir={node.FLAGS.run_dir}")
process = local.LocalLauncher(read_run()).start(Node("ps-0", "PS", 0, flags))
time.sleep(100)
"""


def test_nothing_is_left_of_a_cluster_that_was_killed(tmp_path):
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, "--type_node=Cluster", f"--run_dir={tmp_path}"],
        env=os.environ | {"PYTHONPATH": str(MAIN.parent)},
    )
    try:
        wait_until(lambda: len(nodes_in(tmp_path)) == 2, 40)  # the PS and its watchdog
    finally:
        launcher.kill()
        launcher.wait()
    wait_until(lambda: not nodes_in(tmp_path), 40)


def nodes_in(run_dir):
    """Return the command lines of PS that write to a run directory."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        if b"--type_node=PS" in words and f"--run_dir={run_dir}".encode() in words:
            found.append(words)
    return found
