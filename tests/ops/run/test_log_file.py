"""A log on a full disk is a line, not a traceback for every record."""

import logging

from thinwire.ops.run.directory import LogFile


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
