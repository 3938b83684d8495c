"""A shard's TensorBoard scalars."""

import pytest

from tests.thinwire.runtime.telemetry.test_tensorboard import read
from tests.virtual.shard import core_of, join, push
from tests.virtual.toy import method
from thinwire.ops.routing.counters import ReassemblyCounters
from thinwire.ps.datagrams.counters import DatagramCounts
from thinwire.ps.telemetry.tensorboard import PsScalars


def pushed(core, count, base):
    first = core.version
    for number in range(count):
        push(core, 1, first + number + 1, base)


def scalars_of(core, directory):
    return PsScalars(directory, lambda: core, lambda: {1: 300, 2: 100})


def test_rates_and_means_are_those_since_the_last_time(tmp_path):
    core = core_of(method("asgd", nb_workers=2))
    join(core, 1)
    scalars = scalars_of(core, tmp_path)
    start = scalars._before.at
    pushed(core, 4, base=0)  # 0, 1, 2 and 3 versions behind
    values = scalars.values(start + 2.0)
    assert values["train/updates_per_second"] == pytest.approx(2.0)
    assert values["sync/staleness"] == pytest.approx(1.5)
    assert values["train/learning_rate"] == pytest.approx(0.1)
    assert values["net/bytes_down"] == 400
    pushed(core, 1, base=4)
    later = scalars.values(start + 3.0)
    assert later["train/updates_per_second"] == pytest.approx(1.0)
    assert later["sync/staleness"] == 0
    assert scalars.values(start + 4.0)["sync/staleness"] is None


def test_datagrams_since_the_last_time_and_lost_in_all(tmp_path):
    core = core_of(method("asgd", nb_workers=1))
    book = ReassemblyCounters.zero(1)
    scalars = PsScalars(
        tmp_path, lambda: core, dict, lambda: DatagramCounts.of_sessions([(1, book)], {})
    )
    start = scalars._before.at
    book.num_closed, book.sum_fresh, book.sum_fill = 2, 1.5, 1.6
    book.num_announced[1], book.num_arrived[1] = 10, 7
    first = scalars.values(start + 2.0)
    assert (first["dgt/fresh_ratio"], first["dgt/fill_ratio"]) == (0.75, 0.8)
    assert first["dgt/lost"] == 3 and first["dgt/lateness"] is None
    book.num_closed, book.sum_fresh = 3, 2.5
    book.num_late[1], book.num_late_used, book.sum_of_ages = 2, 2, 3
    later = scalars.values(start + 4.0)
    assert (later["dgt/fresh_ratio"], later["dgt/lateness"], later["dgt/lost"]) == (1.0, 1.5, 1)
    assert scalars.values(start + 6.0)["dgt/fresh_ratio"] is None
    assert "dgt/lost" not in scalars_of(core, tmp_path).values(start)


def test_the_thread_writes_at_the_end(tmp_path):
    core = core_of(method("asgd", nb_workers=1))
    join(core, 1)
    scalars = scalars_of(core, tmp_path)
    scalars.start()
    pushed(core, 3, base=0)
    scalars.close()
    assert read(tmp_path)["net/bytes_down"] == [(3, 400.0)]


def test_a_bad_disk_does_not_end_the_shard(tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(
        "thinwire.ps.telemetry.tensorboard.logging.warning", lambda *words: warnings.append(words)
    )
    (tmp_path / "tb").write_text("in the way")
    scalars = scalars_of(core_of(method("asgd", nb_workers=1)), tmp_path / "tb" / "ps-0")
    scalars.start()
    scalars.close()
    assert len(warnings) == 1
