"""Every process reads the launcher's whole input, and no process waits for another reader."""

import contextlib
import os
import pty
import subprocess
import sys
import threading

import pytest

from thinwire.runtime import standard_input
from thinwire.runtime.standard_input import InputKind, StandardInput, kind_of

BYTES = bytes(range(256)) * 1200  # more than a pipe and the read-ahead hold


@contextlib.contextmanager
def piped():
    """Give an input that is a pipe, and the descriptor that writes it."""
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        for descriptor in (reader, writer):
            with contextlib.suppress(OSError):
                os.close(descriptor)


def write_all(writer, data):
    def write():
        position = 0
        while position < len(data):
            position += os.write(writer, data[position : position + 5000])
        os.close(writer)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


def read_all(descriptor):
    with open(descriptor, "rb") as file:
        return file.read()


def unread_in(descriptor):
    """Return whether a read would return now."""
    return bool(standard_input.select.select([descriptor], [], [], 0)[0])


def test_each_process_reads_all_bytes_of_a_stream_also_a_later_one(tmp_path):
    with piped() as (reader, writer):
        given = StandardInput(tmp_path, reader)
        first, second = given.open(), given.open()
        write_all(writer, BYTES)
        found = [b"", b""]

        def read(number, descriptor):
            found[number] = read_all(descriptor)

        readers = [threading.Thread(target=read, args=each) for each in ((0, first), (1, second))]
        for each in readers:
            each.start()
        for each in readers:
            each.join(30)
        assert found == [BYTES, BYTES]
        assert read_all(given.open()) == BYTES  # one that was started again
        assert list(tmp_path.iterdir()) == []  # the copy has no name


def test_a_process_that_reads_nothing_keeps_nobody_waiting(tmp_path):
    with piped() as (reader, writer):
        given = StandardInput(tmp_path, reader)
        idle, active = given.open(), given.open()
        write_all(writer, BYTES)
        assert read_all(active) == BYTES
        os.close(idle)  # it has ended
        assert read_all(given.open()) == BYTES


def test_a_stream_that_nobody_reads_is_not_copied_without_end(tmp_path):
    """The writer waits, as with a script alone: only the read-ahead and a pipe are filled."""
    with piped() as (reader, writer):
        given = StandardInput(tmp_path, reader)
        opened = given.open()
        os.set_blocking(writer, False)
        taken = threading.Event()
        written = 0
        while not taken.wait(0.2):  # the system gives no event for a pipe that stays full
            before = written
            with contextlib.suppress(BlockingIOError):
                while True:
                    written += os.write(writer, bytes(4096))
            if written == before:
                taken.set()
        assert given._size <= 3 * standard_input.READ_AHEAD_BYTES
        assert written < 1 << 20
        os.close(opened)


def test_a_stream_that_never_ends_is_read_as_it_comes(tmp_path):
    with piped() as (reader, writer):
        given = StandardInput(tmp_path, reader)
        opened = given.open()
        for word in (b"one\n", b"two\n"):
            os.write(writer, word)
            assert os.read(opened, 100) == word
        assert not unread_in(opened)  # neither more bytes nor the end
        os.close(writer)
        assert os.read(opened, 100) == b""
        os.close(opened)


def test_the_first_bytes_of_a_stream_are_reported_once(tmp_path):
    with piped() as (reader, writer):
        seen = []
        given = StandardInput(tmp_path, reader, lambda: seen.append(1))
        opened = given.open()
        assert not seen  # an open pipe of a service, that brings nothing
        write_all(writer, BYTES)
        assert read_all(opened) == BYTES and read_all(given.open()) == BYTES
        assert seen == [1]


def test_a_file_is_read_from_the_position_that_the_launcher_got_and_keeps_its_own(tmp_path):
    """The lines that a shell loop has not read stay: `while read f; do ...; done < list`."""
    path = tmp_path / "list"
    path.write_bytes(b"first\nsecond\nthird\n")
    with open(path, "rb") as file:
        os.lseek(file.fileno(), 6, os.SEEK_SET)
        given = StandardInput(tmp_path, file.fileno())
        assert given.kind is InputKind.FILE
        first, second = given.open(), given.open()
        os.lseek(first, 0, os.SEEK_END)  # positions are each process's own
        os.close(first)
        assert read_all(second) == b"second\nthird\n"
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 6
        with given.whole(0) as copy:
            assert copy.read() == b"second\nthird\n"
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 6


def test_a_file_that_cannot_be_opened_again_is_read_by_its_descriptor(tmp_path, monkeypatch):
    """The case of another user's process, or of a system without /proc."""
    path = tmp_path / "list"
    path.write_bytes(BYTES)
    opened = os.open

    def refuse(name, *arguments, **keywords):
        if str(name).startswith("/proc/"):
            raise PermissionError(13, "Permission denied")
        return opened(name, *arguments, **keywords)

    with open(path, "rb") as file:
        monkeypatch.setattr(os, "open", refuse)
        given = StandardInput(tmp_path, file.fileno())
        assert read_all(given.open()) == read_all(given.open()) == BYTES
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 0


def test_a_terminal_is_not_read_and_nothing_is_no_input(tmp_path):
    main, terminal = pty.openpty()
    try:
        os.write(main, b"typed\n")
        given = StandardInput(tmp_path, terminal)
        assert (given.kind, given.open(), given.whole(0)) == (InputKind.TERMINAL, None, None)
        assert unread_in(terminal)
    finally:
        os.close(main)
        os.close(terminal)
    with open(os.devnull, "rb") as null:
        assert StandardInput(tmp_path, null.fileno()).open() is None
    assert kind_of(terminal) is InputKind.NOTHING  # closed


def test_a_whole_stream_is_waited_for_while_it_brings_bytes(tmp_path):
    with piped() as (reader, writer):
        given = StandardInput(tmp_path, reader)
        write_all(writer, BYTES)
        with given.whole(30) as copy:
            assert copy.read() == BYTES
    with piped() as (reader, writer):
        os.write(writer, b"not the end")
        given = StandardInput(tmp_path, reader)
        assert given.whole(0.05) is None
        os.close(writer)
        assert read_all(given.open()) == b"not the end"


def test_a_copy_that_cannot_be_written_is_reported_and_ends(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    with piped() as (reader, writer):
        given = StandardInput(tmp_path, reader)
        opened = given.open()
        os.write(writer, b"lost")
        assert read_all(opened) == b""
        assert "stdin: No space left on device" in caplog.text and str(tmp_path) in caplog.text
        assert given.whole(0) is None


@pytest.mark.parametrize("size", [0, 1, 70_000_000])
def test_memory_stays_small_whatever_comes(tmp_path, size):
    """In a separate process, so that its peak memory can be measured."""
    program = f"""
import os, pathlib, resource
from thinwire.runtime.standard_input import StandardInput
given = StandardInput(pathlib.Path({str(tmp_path)!r}))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(2):
    opened, count = given.open(), 0
    while data := os.read(opened, 1 << 20):
        count += len(data)
    assert count == {size}, count
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16_000
"""
    done = subprocess.run(
        f"head -c {size} /dev/zero | {sys.executable} -c '{program.replace(chr(39), chr(34))}'",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
