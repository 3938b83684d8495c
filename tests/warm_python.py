# Python, as `sys.executable` of a fork: see tests/forked.py, which fills in the three names below.
# It needs no packages, and imports as little as it can.

import json
import os
import signal
import socket
import sys

REAL, ADDRESS, HASH_SEED = "PYTHON", "SOCKET", "HASHES"
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def can_be_forked(words):
    """Return whether a fork is what Python would start: a file, or a script with the usual seed."""
    if words[:2] in (["-m", "thinwire"], ["-u", "-c"]):  # the second is a worker of xdist
        return True
    program = words[1] if words[:1] == ["-P"] and words[1:] else (words or [""])[0]
    if not program.endswith("/thinwire/launcher/script.py"):
        return program.endswith(".py")
    if os.environ.get("PYTHONHASHSEED", "random") == "random":
        flags = words[: words.index("--")] if "--" in words else words
        seeds = [word.partition("=")[2] for word in flags if word.startswith("--seed=")]
        if not seeds or seeds[-1] != HASH_SEED:
            return False
        os.environ["PYTHONHASHSEED"] = HASH_SEED
    return os.environ["PYTHONHASHSEED"] == HASH_SEED


def has_streams():
    try:
        return all(os.fstat(number) for number in (0, 1, 2))
    except OSError:
        return False


def run_fork(words):
    """Have a fork run, and end as it does; it is killed when this process is."""
    life, _ = os.pipe()
    blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(ADDRESS)
    request = {"args": words, "env": dict(os.environ), "cwd": os.getcwd(), "blocked": blocked}
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2, life])
    pid = json.loads(connection.recv(1 << 17))["pid"]
    for number in FORWARDED:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    for number in (0, 1, 2):  # the reader waits only for the fork
        os.close(number)
    received = connection.recv(1 << 17)
    code = json.loads(received)["code"] if received else -signal.SIGKILL
    if code < 0:
        if -code != signal.SIGKILL:  # Python ignores SIGPIPE
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if can_be_forked(sys.argv[1:]) and has_streams():
    run_fork(sys.argv[1:])
os.execv(REAL, [REAL, *sys.argv[1:]])
