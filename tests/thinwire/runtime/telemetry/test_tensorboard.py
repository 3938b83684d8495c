"""Event files that TensorBoard reads."""

import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from thinwire.runtime.telemetry.tensorboard import ScalarFile


def read(directory):
    """Return {tag: [(step, value)]}."""
    events = EventAccumulator(str(directory)).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_reads_the_scalars(tmp_path):
    file = ScalarFile(tmp_path / "tb" / "worker-1")
    file.write({"eval/accuracy": 0.5, "net/bytes_up": 7}, step=7)
    file.write({"eval/accuracy": 0.75}, step=2**40)
    file.close()
    file.close()
    assert read(tmp_path / "tb" / "worker-1") == {
        "eval/accuracy": [(7, 0.5), (2**40, 0.75)],
        "net/bytes_up": [(7, 7.0)],
    }


def test_what_is_unknown_is_left_out(tmp_path):
    file = ScalarFile(tmp_path)
    file.write({"loss": math.nan, "rate": None}, step=1)
    assert list(tmp_path.iterdir()) == []
    file.write({"loss": math.inf, "rate": 2.0}, step=2)
    file.close()
    assert read(tmp_path) == {"rate": [(2, 2.0)]}


def test_each_write_is_flushed_and_a_new_life_goes_on(tmp_path):
    first = ScalarFile(tmp_path)
    first.write({"loss": 1.0}, step=1)
    second = ScalarFile(tmp_path)  # the first one was killed
    second.write({"loss": 0.5}, step=2)
    assert read(tmp_path) == {"loss": [(1, 1.0), (2, 0.5)]}


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "tb").write_text("in the way")
    with pytest.raises(OSError):
        ScalarFile(tmp_path / "tb" / "ps-0").write({"loss": 1.0}, step=1)
