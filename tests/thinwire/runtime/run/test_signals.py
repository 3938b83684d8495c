"""The first signal ends a process, its repeats are ignored, and later signals end it faster."""

import os
import signal
import subprocess
import sys

import pytest

from thinwire.runtime.run import signals
from thinwire.runtime.run.signals import handle_signals


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    return now


def test_a_group_that_is_told_all_at_once_hears_one_wish(clock):
    heard, insisted = [], []
    before = signal.getsignal(signal.SIGTERM)
    with handle_signals(
        lambda number, frame: heard.append(number),
        insisted=lambda number, frame: insisted.append(number),
    ):
        signal.raise_signal(signal.SIGTERM)
        clock[0] += 0.9
        signal.raise_signal(signal.SIGINT)  # its parent has passed it on
        assert (heard, insisted) == ([signal.SIGTERM], [])
        clock[0] += 0.2
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    assert insisted == [signal.SIGINT, signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


def test_each_block_begins_anew(clock):
    heard = []
    for _ in range(2):
        with handle_signals(lambda number, frame: heard.append(number)):
            signal.raise_signal(signal.SIGINT)
        clock[0] += 10
    assert heard == [signal.SIGINT] * 2


def test_whoever_insists_is_not_kept_waiting():
    script = (
        "import signal, time; from thinwire.runtime.run import signals\n"
        "signals.SAME_REQUEST_SECONDS = -1\n"
        "with signals.handle_signals(lambda number, frame: None):\n"
        "    signal.raise_signal(signal.SIGTERM); signal.raise_signal(signal.SIGTERM)\n"
        "    print('still here')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert (done.returncode, done.stdout) == (130, b"")
