"""Processes of a run call `keras.utils.get_file` in sequence, and download each file once."""

import errno
import pathlib
import threading

import pytest

from thinwire.runtime.run.script_settings import SETTINGS_FOLDER, remove_settings
from thinwire.worker.downloads import Downloads


class Server:
    """Stands for `get_file`: writes a file in two parts, and shows whether calls overlap."""

    def __init__(self, folder, failures=0):
        self.path, self.failures = folder / "data.bin", failures
        self.calls, self._busy = [], threading.Lock()
        self.others_wait = threading.Event()

    def get_file(self, name, **keywords):
        assert self._busy.acquire(blocking=False), "two processes download at the same time"
        try:
            self.calls.append((name, keywords))
            self.path.write_text("half")
            assert self.others_wait.wait(20)
            if len(self.calls) <= self.failures:
                self.path.unlink()
                raise OSError("no route to host")
            self.path.write_text("whole")
            return str(self.path)
        finally:
            self._busy.release()


def processes(folder, number=1, began=1.0):
    return [Downloads(folder / SETTINGS_FOLDER, began) for _ in range(number)]


def download(server, downloads, *args, **keywords):
    return downloads.share(server.get_file)(*args, **keywords)


@pytest.mark.parametrize("failures", [0, 1])
def test_others_wait_and_find_the_whole_file(failures, tmp_path, monkeypatch):
    server, number = Server(tmp_path, failures), 3
    waiting = threading.Barrier(number, action=server.others_wait.set)
    monkeypatch.setattr("thinwire.worker.downloads.logging.info", lambda *_: waiting.wait(20))
    seen, errors = [], []

    def work(downloads):
        try:
            path = download(server, downloads, "x", extract=True)
            seen.append(pathlib.Path(path).read_text())
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(each,)) for each in processes(tmp_path, number)]
    for thread in threads:
        thread.start()
    waiting.wait(20)  # for all but the one that downloads
    for thread in threads:
        thread.join(20)
    assert server.calls == [("x", {"extract": True})] * (1 + failures)
    assert (seen, len(errors)) == (["whole"] * (number - failures), failures)


def test_what_another_process_has_downloaded_is_downloaded_again_where_that_is_meant(tmp_path):
    server = Server(tmp_path)
    server.others_wait.set()
    first, second = processes(tmp_path, 2)
    for each in (first, second):
        assert download(server, each, "x") == str(server.path)
    assert len(server.calls) == 1
    download(server, second, "x")  # a second time in the same script
    download(server, second, "x", force_download=True)
    download(server, first, "y")
    assert len(server.calls) == 4
    (later,) = processes(tmp_path, began=2.0)
    download(server, later, "x")
    assert len(server.calls) == 5, "an earlier run in the same directory"
    server.path.unlink()
    (another,) = processes(tmp_path, began=2.0)
    download(server, another, "x")
    assert len(server.calls) == 6, "it is gone"


def test_a_list_that_cannot_be_read_written_or_locked_stops_nobody(tmp_path, monkeypatch):
    server = Server(tmp_path)
    server.others_wait.set()
    one, two = processes(tmp_path, 2)
    download(server, one, "x")
    (written,) = (tmp_path / SETTINGS_FOLDER).iterdir()
    written.write_text(written.read_text() + '\n[1.0, "half')
    download(server, two, "x")
    assert len(server.calls) == 1
    remove_settings(tmp_path, ["worker-1"])
    (tmp_path / SETTINGS_FOLDER).write_text("a file, not a folder")
    assert download(server, two, "z") == str(server.path)
    (tmp_path / SETTINGS_FOLDER).unlink()

    def lock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", lock)
    assert download(server, two, "w") == str(server.path)
