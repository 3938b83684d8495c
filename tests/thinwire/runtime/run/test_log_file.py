"""A log on a full disk gives one line, not a traceback for every record."""

import errno
import logging

from thinwire.runtime.run.directory import LogFile


def test_a_full_disk_is_said_once(capsys):
    handler = LogFile("/dev/full")
    for number in range(5):
        handler.handle(logging.makeLogRecord({"msg": "record %d", "args": (number,)}))
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and "/dev/full: No space left on device" in text


def test_what_is_no_matter_of_the_disk_is_still_told(tmp_path, capsys):
    handler = LogFile(tmp_path / "log")
    handler.handle(logging.makeLogRecord({"msg": "record %d", "args": ("one",)}))
    assert "TypeError" in capsys.readouterr().err


def test_a_disk_with_space_again_has_the_number_of_missing_records(tmp_path, capsys, monkeypatch):
    handler = LogFile(tmp_path / "log")
    is_full = [False]
    write = handler.stream.write

    def write_unless_full(text):
        if is_full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(text)

    monkeypatch.setattr(handler, "stream", Stream(write_unless_full))
    for number in range(6):
        is_full[0] = number in (1, 2, 4)
        handler.handle(logging.makeLogRecord({"msg": f"record {number}"}))
    assert (tmp_path / "log").read_text() == (
        "record 0\n[thinwire: 2 records are missing here]\nrecord 3\n"
        "[thinwire: 1 records are missing here]\nrecord 5\n"
    )
    assert capsys.readouterr().err.count("\n") == 1


def test_a_stderr_that_is_gone_too_raises_nothing(monkeypatch):
    def write(text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("sys.stderr", Stream(write))
    handler = LogFile("/dev/full")
    handler.handle(logging.makeLogRecord({"msg": "a record"}))


class Stream:
    def __init__(self, write):
        self.write = write

    def flush(self):
        pass
