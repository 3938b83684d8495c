"""How a launcher's run starts, given shard 0's checkpoint and the recorded settings."""

import json

import numpy as np
import pytest

from tests.command_line import given
from thinwire.flags.run import read_run
from thinwire.launcher.run_start import find_start
from thinwire.ops.types import ConfigurationError
from thinwire.ps.persistence.journal import HighWaterLog, HighWaterMark
from thinwire.runtime.persistence.places import checkpoints_at
from thinwire.runtime.run.directory import checkpoints_of, note_failure
from thinwire.runtime.run.finished import resumed_settings
from thinwire.runtime.run.program import Program, digest_of
from thinwire.runtime.run.resuming import OtherRun

FLAGS = ("--type_node=Cluster", "--method=dgs", "--model_from=worker", "--nb_workers=2")


def run_of(folder, *more):
    with given(*FLAGS, f"--run_dir={folder / 'run'}", *more):
        return read_run()


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import thinwire\n")
    return [str(path), "--epochs=2"]


def leave(folder, script, *flags, **more):
    """Leave what shard 0 has at update 40."""
    run = run_of(folder, *flags)
    path = folder / "train.py"
    rows = Program(path.name, {path.name: digest_of(path)}, tuple(script[1:])).rows()
    state = {
        "core": {"model": {"version": 40, "theta": np.ones(9)}, "generation": 0},
        "settings": resumed_settings(run),
        "programs": {"1": [list(row) for row in rows]},
        **more,
    }
    store = checkpoints_at(run.checkpoint_dir, "ps-0", checkpoints_of(run.run_dir, "ps-0"), 3)
    store.log.take_over("test")
    store.save(40, state)


def test_an_empty_directory_begins(tmp_path, script):
    start = find_start(run_of(tmp_path), script)
    assert (start.finished, start.updates, start.run.overwrite) == (None, 0, False)
    assert start.line == (f"run {tmp_path / 'run'}: begins")


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_same_command_resumes_on_other_places_too(tmp_path, script, elsewhere):
    stored = [f"--checkpoint_dir={tmp_path / 'stored'}"] if elsewhere else []
    leave(tmp_path, script, *stored)
    others = ("--nb_workers=5", "--port=3000", "--log_level=debug", "--max_seconds=9")
    start = find_start(run_of(tmp_path, *stored, *others), script)
    assert start.updates == 40 and not start.run.overwrite
    assert start.line == (f"run {tmp_path / 'run'}: resumes from update 40")


@pytest.mark.parametrize(
    ("flags", "arguments", "text", "words"),
    [
        ((), ["--epochs=3"], None, "the script's arguments were --epochs=2 and are --epochs=3"),
        ((), ["--epochs=2"], "import thinwire, os\n", "train.py has changed"),
        (("--seed=4",), ["--epochs=2"], None, "seed was '1' and is now '4'"),
        (("--method=bsp",), ["--epochs=2"], None, "method was 'dgs' and is now 'bsp'"),
        (("--compression_rate=0.5",), ["--epochs=2"], None, "compression_rate was"),
    ],
)
def test_a_change_is_refused_and_allowed_by_resume(tmp_path, script, flags, arguments, text, words):
    leave(tmp_path, script)
    if text is not None:
        (tmp_path / "train.py").write_text(text)
    command = [script[0], *arguments]
    with pytest.raises(OtherRun, match=words) as refusal:
        find_start(run_of(tmp_path, *flags), command)
    assert "at update 40" in str(refusal.value) and "\n" not in str(refusal.value)
    assert find_start(run_of(tmp_path, *flags, "--resume"), command).updates == 40
    assert find_start(run_of(tmp_path, *flags, "--overwrite"), command).updates == 0


@pytest.mark.parametrize("noted_by", ["the PS", "the launcher"])
def test_a_failed_run_begins_again_even_if_it_has_changed(tmp_path, script, noted_by):
    leave(tmp_path, script, script_failed=noted_by == "the PS")
    if noted_by == "the launcher":
        note_failure(tmp_path / "run", "worker 1 left with exit code 3", 20)
    (tmp_path / "train.py").write_text("import thinwire, os\n")
    start = find_start(run_of(tmp_path), script)
    assert start.run.overwrite and start.updates == 0
    assert start.line.endswith(": begins, because the script of the run before failed")
    assert find_start(run_of(tmp_path, "--resume"), script).updates == 40


def test_a_failure_before_anything_was_trained_leaves_the_run_as_it_was(tmp_path, script):
    leave(tmp_path, script)
    note_failure(tmp_path / "run", "worker 1 left with exit code 3", 40)
    assert find_start(run_of(tmp_path), script).line.endswith("resumes from update 40")


def test_of_ps_on_other_disks_the_supervisor_s_records_are_known(tmp_path, script):
    run = run_of(tmp_path)
    run.run_dir.mkdir()
    (run.run_dir / "metrics.jsonl").write_text('{"version": 3}\n{"version": 7}\n')
    assert find_start(run, script, is_elsewhere=True).updates == 7
    assert find_start(run, script).updates == 0
    summary = {"stop_reason": "script_failed", "updates": 7, "seconds": 1.0}
    (run.run_dir / "summary.json").write_text(json.dumps(summary))
    assert find_start(run, script, is_elsewhere=True).run.overwrite


def test_resume_and_overwrite_exclude_each_other(tmp_path):
    with pytest.raises(Exception, match="--overwrite and --resume"):
        run_of(tmp_path, "--resume", "--overwrite")


@pytest.mark.parametrize(("generation", "updates"), [(2, 40), (3, 47), (4, 47)])
def test_the_journal_s_updates_count_if_they_are_not_of_an_earlier_life(
    tmp_path, script, generation, updates
):
    """A shard that died before its first snapshot has a mark of a later life."""
    core = {"model": {"version": 40, "theta": np.ones(9)}, "generation": 3}
    leave(tmp_path, script, core=core, journal=1)
    folder = checkpoints_of(tmp_path / "run", "ps-0")
    mark = HighWaterLog(folder, HighWaterMark(generation, 40))
    mark.record(47)
    mark.close()
    assert find_start(run_of(tmp_path), script).updates == updates


def test_checkpoints_of_format_1_are_refused_before_any_node_starts(tmp_path, script):
    former = checkpoints_of(tmp_path / "run", "ps-0") / "000012-step-40"
    former.mkdir(parents=True)
    (former / "manifest.json").write_text("{}")
    for flags in ((), ("--resume",)):
        with pytest.raises(ConfigurationError, match="format 1 .*000012-step-40.*--overwrite"):
            find_start(run_of(tmp_path, *flags), script)
    assert (former / "manifest.json").exists()
    assert find_start(run_of(tmp_path, "--overwrite"), script).updates == 0
