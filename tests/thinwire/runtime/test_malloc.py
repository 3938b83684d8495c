"""malloc's settings take effect with glibc and do nothing elsewhere."""

import ctypes
import sys
import types

from thinwire.runtime.malloc import keep_freed_memory, return_freed_memory


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory() is False


def test_a_c_library_without_mallopt_is_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace())
    assert keep_freed_memory() is False


def test_every_setting_is_handed_to_malloc(monkeypatch):
    calls = []
    library = types.SimpleNamespace(mallopt=lambda *setting: calls.append(setting) or 1)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert keep_freed_memory() is True
    assert calls == [(-3, 1 << 30), (-1, 2**31 - 1), (-2, 256 << 20)]


def test_what_is_free_is_given_back_where_malloc_can(monkeypatch):
    calls = []
    library = types.SimpleNamespace(malloc_trim=calls.append)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    return_freed_memory()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace())
    return_freed_memory()
    assert calls == [0]
