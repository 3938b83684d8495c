"""Files named by flags must be finite regular files."""

import contextlib
import errno
import os
import pathlib
import subprocess

import pytest

from thinwire.cli import node
from thinwire.runtime.persistence.documents import write_json_atomically
from thinwire.runtime.run.files import read_bounded, replace_file
from thinwire.runtime.run.script_settings import write_settings
from thinwire.runtime.telemetry.evaluation import Evaluation
from thinwire.supervisor.metrics_log import MetricsLog


def test_a_regular_file_is_read_whole_through_links_too(tmp_path):
    (tmp_path / "a").write_bytes(b"token")
    (tmp_path / "link").symlink_to("a")
    assert read_bounded(tmp_path / "link", 5) == b"token"


def test_what_has_no_end_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # no process writes to it
    (tmp_path / "large").write_bytes(b"123456")
    for path in ("/dev/zero", tmp_path, tmp_path / "pipe"):
        with pytest.raises(OSError, match="regular file|s a directory"):
            read_bounded(pathlib.Path(path))
    with pytest.raises(OSError, match="than 5 bytes"):
        read_bounded(tmp_path / "large", 5)


@pytest.fixture
def full_disk(tmp_path):
    """Return a folder on a disk that takes no byte more."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk")
    with (folder / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


WRITERS = {
    "summary.json": lambda path: write_json_atomically(path, {"a": 1}),
    "page.html": lambda path: replace_file(path, "<html>"),
    "metrics.jsonl": lambda path: append_metrics(path.parent),
    "worker-1.json": lambda path: write_settings(path.parent, "worker-1", [], ["script.py"]),
}


def append_metrics(folder):
    with MetricsLog(folder, resume=False, scalars=Nowhere()) as log:
        log.add_evaluation(
            Evaluation(version=0, samples=0, seconds=0.0, metrics={}, bytes_up=0, bytes_down=0)
        )


class Nowhere:
    def write(self, values, step):
        pass

    def close(self):
        pass


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_told_with_the_file_and_nothing_is_left(name, full_disk):
    """A write error names no file, and an empty file stayed under a hidden name."""
    with pytest.raises(OSError) as caught:
        WRITERS[name](full_disk / name)
    assert caught.value.errno == errno.ENOSPC
    assert pathlib.Path(caught.value.filename).name == name
    told = node._explain(caught.value)
    assert told.startswith(f"cannot write {caught.value.filename}: No space left on device")
    assert "Free space" in told
    left = {path.name for path in full_disk.rglob("*") if path.is_file()}
    assert left <= {"filler", "metrics.jsonl"}


@pytest.mark.parametrize("durable", [True, False])
def test_what_cannot_be_replaced_stays_as_it_was(durable, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "summary.json"
    replace_file(path, "old")
    monkeypatch.setattr(os, "fsync" if durable else "replace", fail)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"new", durable)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
