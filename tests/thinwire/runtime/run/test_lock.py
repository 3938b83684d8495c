"""A lock names its owner and is released only by the owner's end."""

import errno
import fcntl
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run import lock as run_lock
from thinwire.runtime.run.directory import clear, lock_of, node_locks
from thinwire.runtime.run.lock import DirectoryLock, LockOwner, owner_of

ROOT = pathlib.Path(__file__).resolve().parents[4]
#: Another process that takes a lock, reports it, and waits; the code before the wait is given.
HOLDER = """
import multiprocessing, os, pathlib, subprocess, sys, time
from thinwire.runtime.run.lock import LockOwner
from thinwire.runtime.run.directory import lock_of
lock_of(pathlib.Path(sys.argv[1]), "PS", 0).take(LockOwner.here("PS", 0, "10.0.0.1:2223"))
child = 0
{before}
print(child, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hold(tmp_path):
    """Return what starts another process that holds the lock of PS 0, and waits until it does."""
    started = []

    def start(before=""):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER.format(before=before), str(tmp_path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        process.child = int(process.stdout.readline())
        return process

    yield start
    for process in started:
        if process.child:
            os.kill(process.child, signal.SIGKILL)
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.fixture
def take(tmp_path):
    """Return what takes locks here; they are given back at the end."""
    taken = []

    def take_one(role="PS", number=0, patience_seconds=0.0):
        taken.append(lock_of(tmp_path, role, number))
        return taken[-1].take(LockOwner.here(role, number), patience_seconds)

    yield take_one
    for lock in taken:
        lock.release()


def test_another_process_is_refused_and_hears_whose_it_is(hold, take, tmp_path):
    owner = hold()
    path = tmp_path / "locks" / "ps-0.lock"
    before = path.read_bytes()
    with pytest.raises(ConfigurationError) as refused:
        take()
    host, folder = os.uname().nodename, tmp_path / "checkpoints" / "ps-0"
    words = f"PS 0, pid {owner.pid} on host {host}, at 10.0.0.1:2223, since 20", "--run_dir", folder
    assert all(str(each) in str(refused.value) for each in words), refused.value
    assert path.read_bytes() == before and owner_of(path).pid == owner.pid
    take("PS", 1), take("Worker", 1), take("Worker", 2), take("Supervisor")  # others continue


def test_a_killed_owner_has_freed_it_at_once(hold, take):
    owner = hold()
    owner.kill()
    owner.wait()
    assert owner_of(take().path).pid == os.getpid()


CHILDREN = {
    "fork": "child = os.fork()\nif not child: time.sleep(60), os._exit(0)",
    "fork and exec": "child = os.fork()\nif not child: os.execvp('sleep', ['sleep', '60'])",
    "subprocess": "child = subprocess.Popen(['sleep', '60'], close_fds=False).pid",
    "multiprocessing": "fork = multiprocessing.get_context('fork')\n"
    "made = fork.Process(target=time.sleep, args=(60,)); made.start(); child = made.pid",
}


@pytest.mark.parametrize("kind", CHILDREN)
def test_a_child_neither_frees_it_nor_keeps_it_for_a_dead_owner(hold, take, kind):
    owner = hold(CHILDREN[kind])
    with pytest.raises(ConfigurationError):
        take()
    owner.kill()
    owner.wait()
    os.kill(owner.child, 0)  # it lives
    take(patience_seconds=10.0)  # it may not have run yet since it was forked


def test_a_second_owner_in_one_process_is_refused_and_reading_frees_nothing(take, hold):
    lock = take()
    assert owner_of(lock.path).role == "PS"
    with pytest.raises(ConfigurationError, match="in use"):
        take()
    lock.release(), lock.release()
    take()


class FakeClock:
    """Time that passes by sleeping; another process releases the lock at `until`."""

    def __init__(self, other, until):
        self.now, self._other, self._until = 0.0, other, until

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        if self.now >= self._until:
            self._other.release()


@pytest.mark.parametrize(("until", "free"), [(0.0, True), (1.5, True), (3.0, False)])
def test_an_owner_that_is_just_ending_is_waited_for(take, until, free, monkeypatch):
    owner = take()
    clock = FakeClock(owner, until)
    monkeypatch.setattr(run_lock, "time", clock)
    with DirectoryLock(owner.path, owner.path.parent) as lock:
        if free:
            lock.take(LockOwner.here("PS", 0))
            assert until <= clock.now <= until + 0.2
        else:
            with pytest.raises(ConfigurationError, match="in use"):
                lock.take(LockOwner.here("PS", 0))
            assert 2.0 <= clock.now <= 2.2


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"role": "PS", "pid": "x"}'])
def test_an_owner_that_is_not_named_refuses_all_the_same(take, content):
    path = take().path
    path.write_bytes(content)
    assert owner_of(path) is None
    with pytest.raises(ConfigurationError, match="does not name"):
        take()
    assert path.read_bytes() == content


def test_a_file_system_without_locks_is_warned_of_once(tmp_path, take, monkeypatch, caplog):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert owner_of(take().path).pid == os.getpid()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be locked" in caplog.text and "No locks available" in caplog.text


def test_a_folder_that_cannot_be_written_is_said(tmp_path, take):
    (tmp_path / "locks").write_text("in the way")
    with pytest.raises(ConfigurationError, match="cannot be written .*locks"):
        take()
    assert not run_lock._held


def test_what_was_removed_meanwhile_is_locked_anew(take, tmp_path, monkeypatch):
    """A process that has opened a removed file holds a lock that no other process sees."""
    flock, removed = fcntl.flock, []

    def remove_first(*arguments):
        if not removed:
            removed.append(shutil.rmtree(tmp_path / "locks"))
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    assert take(patience_seconds=1.0).path.exists()
    with pytest.raises(ConfigurationError, match="in use"):
        take()


def test_who_writes_records_shares_a_lock_and_clearing_leaves_locks(take, tmp_path):
    take("Standalone"), take("PS"), take("Cluster"), take("Advisor")
    for role in ("Supervisor", "Simulator"):
        with pytest.raises(ConfigurationError, match="Standalone 0, pid"):
            take(role)
    clear(tmp_path)
    with pytest.raises(ConfigurationError, match="in use"):
        take("PS")
    assert [lock.path.name for lock in node_locks(tmp_path)] == ["ps-0.lock", "records.lock"]
