"""Calls in a background thread; one call runs at a time."""

import threading

import pytest

from thinwire.worker.background import BackgroundCalls


def test_a_call_goes_on_beside_its_caller_and_its_result_is_taken_once():
    calls, caller = BackgroundCalls("test"), threading.get_ident()
    assert calls.result() is None
    may_end = threading.Event()

    def call():
        assert may_end.wait(10)
        return threading.get_ident()

    calls.start(call)
    with pytest.raises(TimeoutError, match="test: .*0.01 s"):
        calls.result(0.01)
    may_end.set()
    first = calls.result(10)
    assert first not in (None, caller)
    assert calls.result() is None
    calls.start(threading.get_ident)
    assert calls.result(10) == first


def test_what_a_call_raises_is_raised_by_its_result():
    calls = BackgroundCalls("test")
    calls.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calls.result(10)
    calls.start(lambda: "the next")
    assert calls.result(10) == "the next"


def test_a_second_call_before_the_result_of_the_first_is_a_mistake():
    calls = BackgroundCalls("test")
    calls.start(lambda: None)
    with pytest.raises(RuntimeError, match="not taken"):
        calls.start(lambda: None)
