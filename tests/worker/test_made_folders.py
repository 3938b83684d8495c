"""Folders that several workers create."""

import os
import tempfile

import pytest

from thinwire.worker.made_folders import MadeFolders
from thinwire.worker.temporary import record_temporary

record_temporary()


@pytest.mark.parametrize("is_temporary", [False, True])
def test_a_temporary_folder_of_this_process_is_no_other_workers(tmp_path, is_temporary):
    """To make it a second time is a mistake of the script, as alone."""
    if is_temporary:
        place = tempfile.mkdtemp(dir=tmp_path)
    else:
        place = str(tmp_path / "out")
        os.mkdir(place)
    folders = MadeFolders(began=0.0)
    assert folders.share(os.path.realpath(place)) is not is_temporary
    assert not MadeFolders(began=2.0**40).share(os.path.realpath(place)), "older than the run"
