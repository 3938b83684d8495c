"""Simulated nodes that follow a script, and a Cluster of these nodes."""

import collections
import signal
import sys
import types

from tests.command_line import given
from thinwire.flags.run import read_run
from thinwire.launcher import role
from thinwire.proto.grpc import Unreachable

Script = collections.namedtuple("Script", "turns code on_signal", defaults=(3, 0, "its code"))
#: It never ends, and ignores every signal.
STUBBORN = Script(turns=10**9, on_signal="nothing")
#: It runs until a signal ends it, with exit code 130.
ENDLESS = Script(turns=10**9, code=130)


class FakeProcess:
    """Ends with `code` after this many turns, or on a signal."""

    def __init__(self, script):
        self.script, self.turns, self.code, self.heard = script, 0, None, []

    def turn(self):
        self.turns += 1
        if self.code is None and self.turns >= self.script.turns:
            self.code = self.script.code

    def poll(self):
        return self.code

    def send_signal(self, number):
        self.heard.append(number)
        if self.script.on_signal == "its code":
            self.code = self.script.code

    def kill(self):
        self.heard.append(signal.SIGKILL)
        self.code = -signal.SIGKILL

    def wait(self):
        assert self.code is not None, "waits for a node that does not end"
        return self.code


class FakeLauncher:
    """Starts nodes by script; `at_turn` may run an action of the test."""

    addresses = ("127.0.0.1:7", "127.0.0.1:8")

    def __init__(self, scripts, at_turn=None, settled=None):
        self.scripts, self.at_turn, self.settled = scripts, at_turn, settled
        self.nodes, self.processes, self.turns, self.closed = {}, {}, 0, False
        self.lives = collections.Counter()

    def start(self, node):
        self.nodes[node.name] = node
        script = self.scripts.get(node.name, Script())
        if isinstance(script, list):  # one for each life
            script = script[node.num_restarts]
        if script is None:
            raise Unreachable("no such host")
        self.lives[node.name] += 1
        self.processes[node.name] = FakeProcess(script)
        return self.processes[node.name]

    def settle(self):
        if self.settled is not None:
            raise self.settled

    def tend(self):
        self.turns += 1
        if self.at_turn is not None:
            self.at_turn(self.turns)
        for process in self.processes.values():
            process.turn()

    def close(self):
        assert all(process.code is not None for process in self.processes.values())
        self.closed = True

    def heard(self, name):
        return self.processes[name].heard


def pretending(monkeypatch, tmp_path):
    """Return a function (scripts, *flags, ...) -> (exit code, launcher)."""
    monkeypatch.setattr(role, "_TURN_SECONDS", 0)
    monkeypatch.setattr(role, "RULES", role.EndRules(kill_after_seconds=0.02))

    def run(scripts=(), *flags, **behaviour):
        launcher = FakeLauncher(dict(scripts), **behaviour)
        module = types.SimpleNamespace(prepare=lambda run, script: launcher)
        monkeypatch.setitem(sys.modules, "fake_launcher", module)
        monkeypatch.setitem(role.LAUNCHERS, "local", "fake_launcher:prepare")
        usual = ("--type_node=Cluster", "--nb_workers=2", "--nb_ps=2", f"--run_dir={tmp_path}")
        with given(*usual, *flags):
            try:
                return role.main(read_run()), launcher
            finally:
                assert launcher.closed or not launcher.nodes

    return run


#: The nodes of a cluster of two shards and two workers.
ALL = {"ps-0", "ps-1", "worker-1", "worker-2", "supervisor-0"}
