"""Ctrl-C is heard beside Python's own handler."""

import os
import signal
import threading

import pytest

from thinwire.fit import forget, hear_interrupts


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(10)  # the handler runs meanwhile


def test_listeners_hear_interrupts_until_they_are_forgotten():
    first, second = threading.Event(), threading.Event()
    hear_interrupts(first.set)
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert first.wait(10)
    forget(first.set)
    first.clear()
    hear_interrupts(second.set)
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert second.wait(10)
    assert not first.is_set()
    forget(second.set)
    forget(second.set)
