"""Runs pytest and other commands in forks of a process that has TensorFlow, one at a time.

    fork_server.py MODULE ...

imports the modules, then reads requests from standard input and writes replies to standard output,
a JSON object each. Importing TensorFlow and Keras takes 4 s, more than most killers need. The
modules must be those that no mutant can change: never the package, its tests or gRPC: its threads
do not survive a fork.

It is a file of the copied tree and is started by its path, so it must import nothing of the tree.

When a command has ended or has used up its time, everything that it started is killed. Tests start
nodes in new process sessions, so killing a process group would spare them. Therefore this process
is the reaper of all its descendants: it is the first process of a PID namespace where that is
possible, and a subreaper elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import pathlib
import select
import signal
import socket
import struct
import sys
import time

_PR_SET_CHILD_SUBREAPER = 36
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_NEVER_LOADED = ("grpc", "thinwire", "tests")
_POLL_SECONDS = 0.02


def _exit_code(pid: int) -> int | None:
    """Reap every child that has ended; return the exit code of `pid` if it was among them."""
    code = None
    while code is None:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == 0:
            return None
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
    return code


def _parents() -> dict[int, int]:
    """Return the parent of every process that can be seen."""
    parents = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        parents[int(stat.parent.name)] = int(fields[1])
    return parents


def _descendants() -> list[int]:
    parents, family = _parents(), {os.getpid()}
    while larger := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= larger
    return sorted(family - {os.getpid()})


def _kill_all() -> None:
    """Kill every descendant, and reap it."""
    while True:
        for pid in _descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        time.sleep(_POLL_SECONDS)


def _raise_loopback() -> None:
    """Let 127.0.0.1 be reached in a new namespace of networks."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_one:
        fcntl.ioctl(any_one.fileno(), _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def _has_failure(report: str) -> bool:
    try:
        text = pathlib.Path(report).read_text()
    except OSError:
        return False
    return '"outcome": "failed"' in text or '"outcome": "uncollected"' in text


def _become(request: dict) -> int:
    """Run the requested command in the child process; return the exit code."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(os.devnull) as nothing, open(request["output"], "ab") as output:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(request["environment"])
    arguments = request["arguments"]
    if request["program"] is not None:
        os.execvp(request["program"], [request["program"], *arguments])
    import pytest

    sys.argv = ["pytest", *arguments]
    return int(pytest.main(arguments))


def _run(request: dict) -> dict:
    """Fork, wait for the end or for the time limit, and clean up."""
    begin = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            code = _become(request)
        except BaseException as error:  # noqa: BLE001 (a fork must never return to the loop)
            sys.stderr.write(f"{error!r}\n")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code, stopped = None, ""
    runner = select.poll()
    runner.register(0, select.POLLHUP)
    while code is None and not stopped:
        if runner.poll(0):
            stopped = "runner has ended"
        elif time.monotonic() - begin > request["limit_seconds"]:
            stopped = "timeout"
        elif request["ends_at_failure"] and _has_failure(request["report"]):
            stopped = "failure"
        else:
            time.sleep(_POLL_SECONDS)
            code = _exit_code(pid)
    _kill_all()
    return {"code": code, "stopped": stopped, "seconds": time.monotonic() - begin}


def main() -> None:
    """Load, then serve until standard input ends."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # TensorFlow reads these two when it is imported
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # A compiled file counts as current by its source's size and second: mutants may agree in both.
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _raise_loopback()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner ends this process in an orderly way
    sys.path[0] = os.getcwd()  # this file's folder would hide other modules
    for name in sys.argv[1:]:
        importlib.import_module(name)
    loaded = [name for name in _NEVER_LOADED if name in sys.modules]
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    replies.write(json.dumps({"ready": not loaded, "loaded": loaded}) + "\n")
    if loaded:
        return
    for line in sys.stdin:
        reply = _run(json.loads(line))
        with contextlib.suppress(BrokenPipeError):  # the runner was killed
            replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
