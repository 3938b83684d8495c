"""Copies to and from a second logical processor are counted, in a process that has two."""

import re
import subprocess
import sys

from bench.machine.crossings import CODECS, WORKERS


def test_what_crosses_is_what_is_sent():
    command = [sys.executable, "-m", "bench.machine.crossings"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    control, *lines = done.stdout.splitlines()
    assert control == "/CPU:1; a graph with a transfer to the host counts 1"
    assert [line[:12].strip() for line in lines] == [*CODECS, *WORKERS]
    for line in lines:
        down, up, gradient = map(int, re.findall(r"(\d+) B", line))
        if line[:12].strip() in ("fedprox", "diloco"):  # the process sends and receives the model
            assert down < gradient + 1000 and up < gradient + 1000
        elif line.startswith("dgt"):
            most = WORKERS[line[:12].strip()].most_down
            assert down < most / 4 * gradient + 1000 and up < gradient + 6000
        else:
            assert 0 < down < gradient / 20 and up < gradient / 10
        assert line.endswith(" 0")
