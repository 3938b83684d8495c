"""A watchdog ends its command when its launcher ends in any way."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.waiting import wait_until
from thinwire.launcher import watchdog
from thinwire.launcher.local import exit_code
from thinwire.launcher.program import WATCHDOG

#: Prints its process id, then waits for ever; on SIGTERM it ends, or is stubborn.
CHILD = """
import os, signal, sys
def end(number, frame):
    sys.exit(7)
signal.pthread_sigmask(signal.SIG_SETMASK, [])
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[1] == "stubborn" else end)
print(os.getpid(), flush=True)
signal.pause()
"""


@pytest.fixture
def supervised():
    started = []

    def start(manner, silence="60", grace="10"):
        command = [
            sys.executable,
            *WATCHDOG,
            silence,
            grace,
            "announce",
            sys.executable,
            "-c",
            CHILD,
            manner,
        ]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=0
        )
        started.append(process)
        lines = {process.stdout.readline().strip() for _ in range(2)}
        assert watchdog.STARTED in lines
        return process, int((lines - {watchdog.STARTED}).pop())

    yield start
    for process in started:
        process.kill()
        process.wait()


def is_alive(pid):
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def test_the_end_of_its_input_ends_the_command(supervised):
    process, child = supervised("gentle")
    process.stdin.close()
    assert process.wait(10) == 7
    assert not is_alive(child)


def test_silence_ends_the_command_and_beats_keep_it(supervised):
    process, child = supervised("gentle", silence="0.5")
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        process.stdin.write(watchdog.BEAT.decode())
        assert process.poll() is None
        time.sleep(0.1)
    assert process.wait(10) == 7
    assert not is_alive(child)


@pytest.mark.parametrize(("byte", "manner", "code"), [("T", "gentle", 7), ("K", "stubborn", 137)])
def test_signals_are_passed_on(supervised, byte, manner, code):
    process, child = supervised(manner)
    process.stdin.write(byte)
    assert process.wait(10) == code
    assert not is_alive(child)


def test_a_stubborn_command_is_killed_after_the_grace(supervised):
    process, child = supervised("stubborn", grace="0.5")
    process.send_signal(signal.SIGTERM)
    before = time.monotonic()
    assert process.wait(30) == 137
    assert time.monotonic() - before >= 0.5
    assert not is_alive(child)


def test_without_grace_there_is_no_gentle_end(supervised):
    process, child = supervised("gentle", grace="0")
    process.stdin.close()
    assert process.wait(10) == 137
    assert not is_alive(child)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux signals children")
def test_a_killed_watchdog_takes_its_command_along(supervised):
    process, child = supervised("stubborn")
    process.kill()
    process.wait()
    wait_until(lambda: not is_alive(child), 10)


def test_exit_codes():
    """Exit codes as subprocess reports them; 130 is a node's own, a cut ssh means a killed node."""
    assert [exit_code(code) for code in (0, 5, 130, 137, 143, 255)] == [0, 5, 130, -9, -15, -1]


#: Leaves a process behind in a separate session; its parents have ended and it ignores signals.
DAEMON = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_SETMASK, [])
reading, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            os.setsid()
            os.write(writing, b"%d " % os.getppid() + b"%d" % os.getpid())
            signal.pause()
        signal.pause()
    os._exit(0)
os.wait()
print(os.read(reading, 100).decode(), flush=True)
if sys.argv[1] == "waits":
    signal.pause()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux' subreapers")
@pytest.mark.parametrize(("manner", "code"), [("returns", 0), ("waits", 128 + signal.SIGTERM)])
def test_a_process_in_a_session_of_its_own_ends_with_the_command(manner, code):
    command = [sys.executable, *WATCHDOG, "60", "10", "quiet", sys.executable, "-c", DAEMON, manner]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        try:
            assert len(pids) == 2
            if manner == "waits":
                assert all(map(is_alive, pids))
                process.stdin.close()
            assert process.wait(20) == code
            assert not any(map(is_alive, pids))
        finally:
            for pid in filter(is_alive, pids):
                os.kill(pid, signal.SIGKILL)
            process.kill()


@pytest.mark.parametrize("kind", ["nothing", "descriptor", "file"])
def test_the_command_has_an_input_of_its_own(tmp_path, kind):
    path = tmp_path / "input"
    path.write_bytes(b"seven\n")
    reads = [sys.executable, "-c", "import sys; print([sys.stdin.read()])"]
    with open(path, "rb") as file:
        words = {
            "nothing": [],
            "descriptor": [f"{watchdog.INPUT}fd:{file.fileno()}"],
            "file": [f"{watchdog.INPUT}file:{path}"],
        }[kind]
        process = subprocess.Popen(
            [sys.executable, *WATCHDOG, "60", "10", "quiet", *words, *reads],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[file.fileno()],
        )
        try:
            assert process.stdout.readline() == (
                "['']\n" if kind == "nothing" else "['seven\\n']\n"
            )
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.communicate()
