"""ESync's per-file layout: export and import, summaries, gaps, odd names, bad files."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.supervisor.measured_samples import make_round, write_measured
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.telemetry.round_trace import Round
from thinwire.supervisor.report.writer import load_run
from thinwire.tools.esync import convert
from thinwire.tools.esync import runs as measured_runs
from thinwire.tools.esync.format import (
    document_of,
    folder_names,
    mode_of,
    name_of,
    read_mode,
    write_device,
)

SECONDS = st.floats(0, 1e4).map(lambda value: round(value, 6))
STEP = st.fixed_dictionaries(
    {"check ready": SECONDS, "forward and backward": SECONDS, "local update": SECONDS}
)
LAST = st.fixed_dictionaries(
    {"check ready": SECONDS, "global update": SECONDS, "evaluation": SECONDS}
)
ROUNDS = st.lists(
    st.tuples(
        st.integers(0, 10**6),
        SECONDS,
        st.lists(STEP, min_size=1, max_size=4),
        LAST,
        st.none() | st.floats(0.01, 1),
    ),
    min_size=1,
    max_size=4,
)


@given(ROUNDS)
def test_what_is_written_is_read(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("logs") / "net" / "esync"
    rounds, accuracies = [], {}
    for at, (samples, seconds, steps, last, accuracy) in enumerate(rows):
        head = {"num_iters": at + 1, "num_samples": samples, "total_time": seconds, "time": {}}
        rounds.append(Round(**head, n_local=len(steps), steps=[*steps, last]))
        if accuracy:
            accuracies[at] = accuracy
    documents = [document_of(at + 1, each, accuracies.get(at)) for at, each in enumerate(rounds)]
    write_device(folder / "alpha" / "gpu0", documents)
    (back,) = read_mode(folder)
    assert (back.host, back.device, back.accuracies) == ("alpha", "gpu0", accuracies)
    for before, after in zip(rounds, back.rounds, strict=True):
        assert (after.num_iters, after.num_samples) == (before.num_iters, before.num_samples)
        assert (after.total_time, after.n_local) == (before.total_time, before.n_local)
        assert after.steps == before.steps
    again = [document_of(at + 1, each, accuracies.get(at)) for at, each in enumerate(back.rounds)]
    assert again == documents


@pytest.mark.parametrize("asks", [True, False])
def test_sums_are_spread_over_the_steps(asks):
    each = make_round(4)
    if not asks:
        each.time.pop("check ready")
    document = document_of(4, each, None)
    entries = document["time"]
    assert len(entries) == each.entries == (4 if asks else 3)
    for phase, seconds in each.time.items():
        total = sum(entry.get(phase, 0.0) for entry in entries.values())
        assert total == pytest.approx(seconds, abs=1e-5)
    assert "global update" in entries[str(len(entries) - 1)]
    assert "global update" not in entries["0"]
    assert entries["0"]["forward and backward"] == pytest.approx(0.3)
    assert set(document) == {"num_iters", "num_samples", "total_time", "time"}


def test_a_run_goes_out_and_comes_in_again(tmp_path):
    run = write_measured(tmp_path / "run", partition="class")
    folder = convert.export(run, tmp_path / "logs")
    assert folder == tmp_path / "logs" / "lenet" / "esync-niid"
    assert {path.name for path in (folder / "alpha").iterdir()} == {"cpu-0", "cpu-1"}
    with_accuracy = json.loads((folder / "alpha" / "cpu-0" / "iter-5.txt").read_text())
    assert with_accuracy["accuracy"] == 0.5
    assert "accuracy" not in json.loads((folder / "alpha" / "cpu-1" / "iter-5.txt").read_text())
    back = convert.import_logs(folder, tmp_path / "back")
    before, after = measured_runs.load(run), measured_runs.load(back)
    assert after.points == before.points[1:]  # the untrained model belongs to no round
    assert (after.method, after.non_iid, after.network) == ("esync", True, "lenet")
    assert (after.bytes_up, after.bytes_down) == (None, None)
    assert after.samples_per_second == pytest.approx(before.samples_per_second)
    for one, other in zip(before.devices, after.devices, strict=True):
        assert other.ratio_orig == pytest.approx(one.ratio_orig, abs=1e-4)
        assert other.ratio_strict == pytest.approx(one.ratio_strict, abs=1e-4)
    load_run(back)  # the other report takes it too
    assert measured_runs.load(folder).points == after.points


def test_a_shorter_export_leaves_nothing_of_a_longer_one(tmp_path):
    folder = convert.export(write_measured(tmp_path / "long"), tmp_path / "logs")
    convert.export(write_measured(tmp_path / "short", num_rounds=3), tmp_path / "logs")
    assert len(list((folder / "alpha" / "cpu-0").iterdir())) == 3


def test_the_summary_by_hand(tmp_path):
    folder = tmp_path / "resnet18-v1" / "sync-niid"
    device = folder / "cloud1" / "gpu1"
    device.mkdir(parents=True)
    rows = [
        {
            "num_iters": 1,
            "num_samples": 64,
            "total_time": 1.9,
            "time": {
                "0": {"get_batch": 0.1, "forward and backward": 0.5, "global aggregate": 1.25}
            },
        },
        {
            "num_iters": 2,
            "num_samples": 60,
            "total_time": 4.2,
            "accuracy": 0.61249,
            "time": {
                "0": {"forward and backward": 0.5, "global aggregate": 1.5, "evaluation": 0.2}
            },
        },
    ]
    for row in rows:
        (device / f"iter-{row['num_iters']}.txt").write_text(json.dumps(row))
    (device / "iter-4.txt").write_text("behind a gap")
    path = convert.write_summary(folder)
    assert path.name == "Sync-Non-IID.json"
    assert json.loads(path.read_text()) == {
        "cloud1": {
            "gpu1": {
                "accuracy_list": [0.612],
                "num_samples_list": [64, 60],
                "self_iters_list": [1, 1],
                "elapsed_time_list": [1, 4],
                "aggregate_time_list": [1.25, 1.5],
                "evaluations": [[4.2, 2, 0.612]],
            }
        }
    }


@pytest.mark.parametrize(
    ("method", "non_iid", "mode", "name"),
    [
        ("esync", False, "esync", "ESync"),
        ("ssgd", True, "sync-niid", "Sync-Non-IID"),
        ("asgd", False, "async", "Async"),
        ("dcasgd", True, "dcasgd-niid", "DCASGD-Non-IID"),
        ("adacomp", False, "adacomp", "adacomp"),
    ],
)
def test_names_of_modes(method, non_iid, mode, name):
    assert mode_of(method, non_iid) == mode
    assert name_of(mode) == name


def test_devices_that_share_a_name_get_their_rank():
    names = folder_names([("a", "cpu", 0), ("a", "cpu", 1), ("b", "cpu", 2), ("..", "gpu0", 3)])
    assert names == [("a", "cpu-0"), ("a", "cpu-1"), ("b", "cpu"), ("_", "gpu0")]


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"time": {"0": 3}}', '{"time": {"x": {}}}', '{"num_iters": 1, "time": {}}']
)
def test_a_file_that_is_no_round_is_named(tmp_path, text, capsys):
    device = tmp_path / "net" / "esync" / "a" / "cpu"
    device.mkdir(parents=True)
    (device / "iter-1.txt").write_text(text)
    assert convert.main(["summary", str(tmp_path / "net" / "esync")]) == 2
    assert "iter-1.txt" in capsys.readouterr().err


def test_bad_calls(tmp_path, capsys):
    assert convert.main(["export", str(tmp_path / "none"), str(tmp_path)]) == 2
    assert convert.main(["import", str(tmp_path), str(tmp_path / "new")]) == 2
    folder = convert.export(write_measured(tmp_path / "run"), tmp_path / "logs")
    assert convert.main(["import", str(folder), str(tmp_path / "run")]) == 2
    assert "is not empty" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        convert.main(["draw"])
    assert stop.value.code == 1


def test_a_run_without_rounds_says_so(tmp_path):
    run = write_measured(tmp_path / "run")
    for path in (run / "measure").iterdir():
        path.unlink()
    with pytest.raises(ConfigurationError, match="measure=off"):
        convert.export(run, tmp_path / "logs")
