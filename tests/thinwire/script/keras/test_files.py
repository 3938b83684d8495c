"""Keras callbacks that write files, without a run."""

import os

import keras
import pytest

from thinwire.script.keras.files import writing_once

#: A callback that writes, and the attribute with its path.
WRITERS = [
    (keras.callbacks.CSVLogger, "filename"),
    (keras.callbacks.TensorBoard, "log_dir"),
]


@pytest.mark.parametrize(("kind", "attribute"), WRITERS)
def test_what_a_worker_that_does_not_write_puts_down_goes_nowhere(kind, attribute, tmp_path):
    given = str(tmp_path / "given")
    callback = kind(given)
    with writing_once([callback], lambda: True):
        assert getattr(callback, attribute) == given
    with writing_once([callback], lambda: False):
        elsewhere = getattr(callback, attribute)
        assert elsewhere != given
    assert getattr(callback, attribute) == given
    assert elsewhere == os.devnull or not os.path.exists(elsewhere)


def test_a_backup_is_written_and_deleted_by_one_worker(tmp_path):
    callback = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    saved = []
    callback._save_model = lambda: saved.append(1)
    for writes in (True, False):
        with writing_once([callback], lambda writes=writes: writes):
            callback._save_model()
            assert callback.delete_checkpoint is writes
    assert saved == [1] and callback.delete_checkpoint


def test_a_monitor_is_told_by_one_worker():
    callback, sent = keras.callbacks.RemoteMonitor(), []
    callback.on_epoch_end = lambda epoch, logs=None: sent.append(epoch)
    with writing_once([callback], lambda: False):
        callback.on_epoch_end(0)
    with writing_once([callback], lambda: True):
        callback.on_epoch_end(1)
    callback.on_epoch_end(2)
    assert sent == [1, 2]
