"""The written files that belong to a worker."""

from thinwire.worker.written_files import WrittenFiles


def test_a_file_that_the_chief_has_written_since_is_nobody_elses(tmp_path):
    mine = WrittenFiles(tmp_path, "worker-2", lambda: False)
    chief = WrittenFiles(tmp_path, "worker-1", lambda: True)
    for path in ("/data/a", "/data/b"):
        mine.note(path, trains=True)
    assert mine.is_own("/data/a") and mine.is_own("/data/b")
    chief.note("/data/b", trains=True)
    later = WrittenFiles(tmp_path, "worker-2", lambda: False)  # it is started again
    for files in (mine, later):
        assert files.is_own("/data/a") and not files.is_own("/data/b")
        assert not files.is_own("/data/c")
