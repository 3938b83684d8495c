"""File lock that lets one process at a time write a node's files, until the process ends.

The lock of a node's files is ``flock`` on a lock file, which stays open while the process writes
the node's files. A file with the owner's process id cannot serve as a lock, because the file would
remain after ``kill -9``. The directory lock is not a POSIX record lock (``lockf``), for two
reasons. A POSIX record lock does not exclude a second owner in the same process (two servers in one
script). A process loses a record lock as soon as the process closes *any* descriptor of the lock
file, even a descriptor that only read the owner's name.

The disadvantage of ``flock`` is that a fork shares the lock, so a forked child
(``multiprocessing``) would keep a dead owner's lock. For this reason, a forked child closes its
inherited descriptor of the lock file immediately. The parent process keeps the lock, because its
descriptor of the lock file is still open. A program that the owner executes never inherits the lock
file's descriptor (O_CLOEXEC). Over NFS the kernel turns ``flock`` into a lock that other hosts see
(since Linux 2.6.12), if the lock file is open for writing.

A lock file is never removed, because a process that had opened the removed file would hold a lock
that no other process sees. The owner named in the lock file is valid only while the file is locked.
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

from thinwire.ops.types import ConfigurationError

#: Longest wait for the lock of a node's files, in seconds. A restarted node waits for the exit of
#: its old process.
PATIENCE_SECONDS = 2.0
_PAUSE_SECONDS = 0.1
_MOST_BYTES = 4096  # largest number of bytes that are read from a lock file
#: errno values by which a file system reports that it has no locks.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LockOwner:
    """Owner of the lock of a node's files: the process that the lock file names."""

    role: str
    number: int  # id of the node, for example of a worker, from 0 or 1
    pid: int
    host: str
    since: str  # time at which the process took the lock, in ISO 8601
    address: str = ""  # host:port on which the node listens; empty if not known

    @classmethod
    def here(cls, role: str, number: int, address: str = "") -> LockOwner:
        """Return a description of this process (host, process id) as the owner of a lock."""
        # With port 0 the system chooses a free port later, so the real port is not known.
        if address.endswith(":0"):
            address = ""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(role, number, os.getpid(), os.uname().nodename, now, address)

    def age_seconds(self, now: float) -> float:
        """Return the seconds since the owner took the lock, or infinity if `since` is malformed.

        Args:
            now: Present time, in seconds since the epoch.
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
    """Return the owner that a lock file names, or None, without taking the lock.

    Only an attempt to take the lock shows if the named owner still holds the lock.
    """
    try:
        with open(path, "rb") as file:
            document = json.loads(file.read(_MOST_BYTES))
        texts = [str(document[name]) for name in ("role", "host", "since", "address")]
        return LockOwner(texts[0], int(document["number"]), int(document["pid"]), *texts[1:])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_held(path: pathlib.Path) -> bool | None:
    """Return True if a process holds the lock of a lock file; None if the file system has no locks.

    `is_held` takes a shared lock for an instant. A process that fails to take a lock while
    `is_held` tests it tries again.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:  # the lock file is another user's, or the disk is read-only
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


@dataclasses.dataclass(eq=False)
class DirectoryLock:
    """Exclusive lock of a directory for this process, from `take` until `release` or exit.

    Attributes:
        path: Path of the lock file, outside the protected directory, which may be removed and
            recreated.
        protects: Path of the protected directory, for messages.
    """

    path: pathlib.Path
    protects: pathlib.Path
    _descriptor: int | None = dataclasses.field(default=None, init=False)

    def take(self, owner: LockOwner, patience_seconds: float = PATIENCE_SECONDS) -> DirectoryLock:
        """Lock the directory, write the owner into the lock file, and return this object.

        On a file system without locks, `take` logs a warning and succeeds without a lock.

        Args:
            owner: Description of this process, which other processes read from the lock file.
            patience_seconds: Longest wait for the exit of the process that holds the lock, in
                seconds.

        Raises:
            ConfigurationError: Another process holds the lock, or the directory cannot be written.
                The lock file's content is unchanged if another process holds the lock.
        """
        deadline, waits = time.monotonic() + patience_seconds, False
        try:
            while not self._try():
                if time.monotonic() >= deadline:
                    raise ConfigurationError(self._refusal())
                if not waits:
                    _log.info(
                        "the lock file %s is locked by another process; waiting up to %g s",
                        self.path,
                        patience_seconds,
                    )
                waits = True
                time.sleep(_PAUSE_SECONDS)
            self._write(owner)
        except OSError as error:
            self.release()
            raise ConfigurationError(
                f"--run_dir={self.path.parent.parent} cannot be written ({self.path}: "
                f"{error.strerror or error}); expected a folder on a disk with free space where "
                "this user may write. Choose another --run_dir."
            ) from error
        return self

    def release(self) -> None:
        """Unlock the run's directory; do nothing if this object does not hold the lock."""
        if self._descriptor is not None:
            _held.discard(self)
            os.close(self._descriptor)
            self._descriptor = None

    def forget(self) -> None:
        """Close a forked child's copy of the lock file's descriptor; the parent keeps the lock."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _try(self) -> bool:
        """Try once to lock the directory; return True on success."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # Register the `DirectoryLock` before locking the file. Otherwise a child forked between the
        # two steps would not close its copy of the descriptor, and would keep the lock after the
        # parent's end.
        _held.add(self)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self.release()
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _log.warning(
                "the lock file %s cannot be locked (%s): Thinwire cannot detect a second process "
                "that writes to the same run directory. Make sure that no other process uses this "
                "--run_dir, or choose a --run_dir on a disk with locks.",
                *(self.path, error.strerror or error),
            )
            return True
        if self._is_in_place(self._descriptor):
            return True
        self.release()
        return False

    def _is_in_place(self, descriptor: int) -> bool:
        """Return True if the lock file is still at its path, so nobody has removed the file."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        return False

    def _write(self, owner: LockOwner) -> None:
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{json.dumps(dataclasses.asdict(owner))}\n".encode(), 0)

    def _refusal(self) -> str:
        owner = owner_of(self.path)
        named = str(owner) if owner else "a process that the lock file does not name"
        return (
            f"{self.protects} is in use by another process ({named}; lock file {self.path}). Only "
            "one process may write there, because two would overwrite each other's files: stop the "
            "other process first, or give this process another --run_dir."
        )


#: Locks that this process holds. The references keep the locks from being garbage collected.
_held: set[DirectoryLock] = set()


def _forget_all() -> None:
    for lock in _held:
        lock.forget()
    _held.clear()


os.register_at_fork(after_in_child=_forget_all)
