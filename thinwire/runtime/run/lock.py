"""One process at a time writes a node's files: a lock that its owner's death frees.

The lock is ``flock`` on a file that stays open for as long as the process writes, and not a file
with a process number in it, which nobody removes after ``kill -9``. Of the kernel's locks it is
``flock`` because of what the others do in one process: a POSIX record lock (``lockf``) does not
refuse a second owner in the same process (two servers in one script), and is lost as soon as the
process closes *any* descriptor of the file, be it one that only read who the owner is.

What speaks against ``flock`` is that a fork shares it: a forked child (``multiprocessing``) would
keep a dead owner's lock. So a fork closes its copy immediately, which frees nothing, as the owner's
is still open; a program that is executed never has one (O_CLOEXEC). Over NFS the kernel makes of it
a lock that other hosts see (Linux 2.6.12), for which the file must be open for writing.

A lock file is never removed: a process that had opened it before would hold a lock that no other
process sees. The owner that it names counts only while it is locked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import json
import logging
import math
import os
import pathlib
import time
from collections.abc import Callable
from types import TracebackType

from thinwire.ops.types import ConfigurationError

#: How long a process that is just ending is waited for: an orderly restart must not be refused.
PATIENCE_SECONDS = 2.0
_PAUSE_SECONDS = 0.1
_MOST_BYTES = 4096  # of what is read of an owner
#: What a file system that has no locks answers.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LockOwner:
    """The owner that a lock file names."""

    role: str
    number: int  # its id
    pid: int
    host: str
    since: str  # ISO 8601
    address: str = ""  # where it listens, if that is known

    @classmethod
    def here(cls, role: str, number: int, address: str = "") -> LockOwner:
        """Return this process as an owner."""
        if address.endswith(":0"):  # any free port
            address = ""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(role, number, os.getpid(), os.uname().nodename, now, address)

    def age_seconds(self, now: float) -> float:
        """Return how long it has held the lock; infinity where `since` cannot be read.

        Args:
            now: Seconds since the epoch.
        """
        try:
            return now - datetime.datetime.fromisoformat(self.since).timestamp()
        except ValueError:
            return math.inf

    def __str__(self) -> str:
        at = f", at {self.address}" if self.address else ""
        return (
            f"{self.role} {self.number}, pid {self.pid} on host {self.host}{at}, since {self.since}"
        )


def owner_of(path: pathlib.Path) -> LockOwner | None:
    """Return who a lock file names, without waiting for it; None where it names nobody.

    Only an attempt to take the lock shows whether that process still holds it.
    """
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(_MOST_BYTES))
        texts = [str(found[name]) for name in ("role", "host", "since", "address")]
        return LockOwner(texts[0], int(found["number"]), int(found["pid"]), *texts[1:])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_held(path: pathlib.Path) -> bool | None:
    """Return whether a process holds a lock now; None where the file system has no locks.

    The look shares the lock for an instant, which a process that takes it just then waits out.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:  # another user's, or a disk that is read-only
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    finally:
        os.close(descriptor)
    return False


class DirectoryLock:
    """What this process alone may write, from `take` until `release` or its end.

    Args:
        path: The lock file, outside of what it protects: that may be removed and made anew.
        protects: The directory that it stands for, for messages.
        clock: For tests.
        sleep: For tests.
    """

    def __init__(
        self,
        path: pathlib.Path,
        protects: pathlib.Path,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.path, self._protects = path, protects
        self._clock, self._sleep = clock, sleep
        self._descriptor: int | None = None

    def take(self, owner: LockOwner, patience_seconds: float = PATIENCE_SECONDS) -> DirectoryLock:
        """Take the lock and write down whose it is; a refused process has changed nothing.

        Where the file system has no locks this warns, and goes on without.

        Args:
            owner: Who takes it.
            patience_seconds: For an owner that is just ending.

        Raises:
            ConfigurationError: Another process holds it, or the directory cannot be written.
        """
        deadline, waits = self._clock() + patience_seconds, False
        try:
            while not self._try():
                if self._clock() >= deadline:
                    raise ConfigurationError(self._refusal())
                if not waits:
                    _log.info("%s is locked; waiting up to %g s", self.path, patience_seconds)
                waits = True
                self._sleep(_PAUSE_SECONDS)
            self._write(owner)
        except OSError as error:
            self.release()
            raise ConfigurationError(
                f"--run_dir={self.path.parent.parent} cannot be written ({self.path}: "
                f"{error.strerror or error}); expected a folder on a disk with free "
                "space where this user may write. Choose another."
            ) from error
        return self

    def release(self) -> None:
        """Let others take it; nothing if it is not held."""
        if self._descriptor is not None:
            _held.discard(self)
            os.close(self._descriptor)
            self._descriptor = None

    def forget(self) -> None:
        """Close a fork's copy: the process that was forked holds the lock on."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def _try(self) -> bool:
        """Return whether the lock is now ours."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        _held.add(self)  # before it is locked: a fork in between would share the lock
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self.release()
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _log.warning(
                "%s cannot be locked (%s): a second process that writes there by mistake would "
                "not be noticed. Make sure that there is none, or choose a --run_dir on a disk "
                "with locks.",
                *(self.path, error.strerror or error),
            )
            return True
        if self._is_in_place(self._descriptor):
            return True
        self.release()
        return False

    def _is_in_place(self, descriptor: int) -> bool:
        """Return whether what was locked is what others find: the folder may have been removed."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        return False

    def _write(self, owner: LockOwner) -> None:
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{json.dumps(dataclasses.asdict(owner))}\n".encode(), 0)

    def _refusal(self) -> str:
        owner = owner_of(self.path)
        named = str(owner) if owner else "a process that it does not name"
        return (
            f"{self._protects} is in use by another process ({named}; lock file {self.path}). Only "
            "one may write there, or each would destroy what the other keeps: stop that one first, "
            "or give this one another --run_dir."
        )


#: Those of this process; held here, so that none ends because nobody looks at it any more.
_held: set[DirectoryLock] = set()


def _forget_all() -> None:
    for lock in _held:
        lock.forget()
    _held.clear()


os.register_at_fork(after_in_child=_forget_all)
