"""Ctrl-C reaches listeners in addition to Python's own handler."""

import os
import signal
import threading

import pytest

from thinwire.script.interrupts import add_listener, remove_listener


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(10)  # the handler runs meanwhile


def test_listeners_are_called_until_they_are_removed():
    first, second = threading.Event(), threading.Event()
    add_listener(first.set)
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert first.wait(10)
    remove_listener(first.set)
    first.clear()
    add_listener(second.set)
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert second.wait(10)
    assert not first.is_set()
    remove_listener(second.set)
    remove_listener(second.set)


def test_a_signal_to_a_child_is_not_the_parents():
    """Pools of processes that prepare data end their children by this signal."""
    listener = threading.Event().set
    add_listener(listener)
    child = os.fork()
    if not child:
        os._exit(0 if signal.set_wakeup_fd(-1) == -1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    remove_listener(listener)
