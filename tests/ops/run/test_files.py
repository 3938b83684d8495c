"""Files that flags name have an end, or are refused."""

import os
import pathlib

import pytest

from thinwire.ops.run.files import read_bounded


def test_a_regular_file_is_read_whole_through_links_too(tmp_path):
    (tmp_path / "a").write_bytes(b"token")
    (tmp_path / "link").symlink_to("a")
    assert read_bounded(tmp_path / "link", 5) == b"token"


def test_what_has_no_end_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it
    (tmp_path / "large").write_bytes(b"123456")
    for path in ("/dev/zero", tmp_path, tmp_path / "pipe"):
        with pytest.raises(OSError, match="no regular file|s a directory"):
            read_bounded(pathlib.Path(path))
    with pytest.raises(OSError, match="more than 5 bytes"):
        read_bounded(tmp_path / "large", 5)
