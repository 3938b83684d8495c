"""Arguments, errors and output of `thinwire run` before any process starts."""

import json
import os
import subprocess
import types

import pytest

from tests.command_line import given
from tests.forked import MAIN, forker
from thinwire.cli import node
from thinwire.flags.run import read_run
from thinwire.launcher import launch_document, role
from thinwire.runtime.run.program import Program, digest_of
from thinwire.runtime.run.resuming import changed_script
from thinwire.supervisor.script_evaluator import ScriptEvaluator
from thinwire.tools.recorded import RecordedRun

SCRIPT = "import keras  # with Adam\n"


def run(folder, *words, script="train.py", **environment):
    (folder / "train.py").write_text(SCRIPT)
    arguments = [*words, *([script] if script else []), *(["--own=1"] if script else [])]
    return subprocess.run(
        [forker().python, str(MAIN), "run", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
    )


def test_a_dry_run_shows_everything_and_writes_nothing(tmp_path):
    done = run(tmp_path, "--dry_run", "--method=dgs", "--nb_ps=2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("method: dgs (pacer every, codec dgs")
    starts = {line.partition(":")[0] for line in lines}
    assert {
        "ps-0",
        "ps-1",
        "worker-1",
        "worker-2",
        "supervisor-0",
        "up, per exchange and worker",
    } <= (starts)
    worker = next(line for line in lines if line.startswith("worker-2: "))
    assert worker.endswith("-- train.py --own=1") and "--id_worker=2" in worker
    assert "--preload_keras" not in done.stdout  # changes of weights are added
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_ps_that_will_need_keras_imports_it_in_time(tmp_path):
    assert run(tmp_path, "--dry_run").stdout.count("--preload_keras") == 1


def test_a_dry_run_knows_the_size_of_the_model_from_last_time(tmp_path):
    folder = tmp_path / "runs" / "train"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text('{"num_parameters": 1000}')
    out = run(tmp_path, "--dry_run", "--value_dtype=bfloat16").stdout
    assert "2,000 bytes with N = 1,000" in out and "down: 4 bytes x N (dense): 4,000 bytes" in out


@pytest.mark.parametrize(
    ("words", "script", "code", "text"),
    [
        ([], None, 2, "was given no script"),
        ([], "missing.py", 2, "missing.py is no file"),
        (["--network=cnn"], "train.py", 2, "--network is not for `thinwire run`"),
        (["--batch_size=5"], "train.py", 2, "--batch_size is not for `thinwire run`"),
        (["--learning_rate=1"], "train.py", 2, "the optimizer that the script compiles"),
        (["--method=dgs", "--local_lr=1"], "train.py", 2, "--local_lr is not for"),
        (
            ["--method=dgs", "--learning_rate=1"],
            "train.py",
            2,
            "the optimizer that the script compiles",
        ),
        (["--model_from=flags"], "train.py", 2, "the script provides the model"),
        (["--like=nowhere"], "train.py", 2, "--like=nowhere"),
        (["--no_such_flag=1"], "train.py", 1, "no_such_flag"),
        (["--type_node=PS"], "train.py", 1, "--type_node=PS"),
        (["--launcher=ssh"], "train.py", 2, "--hosts_file"),
    ],
)
def test_what_is_refused_before_anything_starts(tmp_path, words, script, code, text):
    done = run(tmp_path, "--dry_run", *words, script=script)
    assert done.returncode == code and text in done.stderr, done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_run_is_repeated_with_what_is_different_named(tmp_path):
    folder = tmp_path / "runs" / "train"
    folder.mkdir(parents=True)
    document = {
        "flags": ["--nb_workers=3", "--method=dgs", "--seed=9"],
        "versions": {"numpy": "0.1"},
        "script": {
            "path": str(tmp_path / "train.py"),
            "folder": str(tmp_path),
            "arguments": ["--old=2"],
            "sha256": "0",
        },
    }
    (folder / "launch.json").write_text(json.dumps(document))
    done = run(tmp_path, "--dry_run", "--like=runs/train", "--method=asgd", script=None)
    assert done.returncode == 0, done.stderr
    assert "method: asgd" in done.stdout and "run directory: runs/train-2" in done.stdout
    worker = next(line for line in done.stdout.splitlines() if line.startswith("worker-3"))
    assert "--seed=9" in worker and worker.endswith(f"-- {tmp_path / 'train.py'} --old=2")
    assert "numpy was 0.1 and is" in done.stderr and "train.py has changed" in done.stderr


def test_flags_of_the_environment_count_and_the_command_line_wins(tmp_path):
    flags = "--method=dgs --compression_rate=0.3 --restart_workers=2"
    done = run(tmp_path, "--dry_run", "--compression_rate=0.2", THINWIRE_FLAGS=flags)
    assert done.returncode == 0, done.stderr
    assert "method: dgs" in done.stdout
    worker = next(line for line in done.stdout.splitlines() if line.startswith("worker-1: "))
    assert worker.count("--compression_rate=") == 1 and "--compression_rate=0.2" in worker
    assert "--restart_workers" not in worker  # the launcher's own


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ("--method=dgs other.py", 2, "'other.py'"),
        ("--no_such_flag", 2, "no_such_flag"),
        ("--type_node=PS", 1, "--type_node=PS"),
        ("--network=cnn", 2, "--network is not for `thinwire run`"),
    ],
)
def test_flags_of_the_environment_are_checked_as_others(tmp_path, flags, code, words):
    done = run(tmp_path, "--dry_run", THINWIRE_FLAGS=flags)
    assert done.returncode == code and words in done.stderr, done.stderr


def test_a_node_takes_the_environment_s_flags_but_a_launcher_s(monkeypatch):
    monkeypatch.setenv("THINWIRE_FLAGS", "--lease_seconds 7 --restart_workers=2")
    assert node._environment_words([], ["--type_node=PS"]) == ["--lease_seconds=7.0"]
    both = ["--lease_seconds=7.0", "--restart_workers=2"]
    assert node._environment_words(["--type_node=Cluster"], []) == both
    assert node._environment_words([], ["--type_node", "Advisor"]) == both
    assert "THINWIRE_FLAGS" not in role.environment()  # children have them as flags


@pytest.fixture
def package(tmp_path):
    (tmp_path / "pack").mkdir()
    for name in ("__init__", "__main__", "train"):
        (tmp_path / "pack" / f"{name}.py").write_text(SCRIPT)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "__init__.py").write_text("raise RuntimeError('imported')")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "module", "run_dir"),
    [
        (["-m", "pack.train"], "pack.train", "runs/train"),
        (["--method", "dgs", "--nb_workers=2", "-m", "pack"], "pack", "runs/pack"),
        (["--overwrite", "-m", "pack.train"], "pack.train", "runs/train"),
    ],
)
def test_a_module_stands_in_the_script_s_place(package, words, module, run_dir):
    done = run(package, "--dry_run", *words, "--nb_ps=7", "-m", "x", script=None)
    assert done.returncode == 0, done.stderr
    worker = next(line for line in done.stdout.splitlines() if line.startswith("worker-2: "))
    assert worker.endswith(f"-- -m {module} --nb_ps=7 -m x"), worker
    assert f"run directory: {run_dir}\n" in done.stdout


def test_an_m_behind_a_script_is_the_script_s(tmp_path):
    done = run(tmp_path, "--dry_run", "train.py", "-m", "pack", script=None)
    worker = next(line for line in done.stdout.splitlines() if line.startswith("worker-2: "))
    assert worker.endswith("-- train.py -m pack")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-m"], "-m is the last word"),
        (["-m", "pack.missing"], "-m pack.missing: there is no module pack.missing in"),
        (["-m", "none.missing"], "no module none.missing"),  # and nothing is imported
        (["-m", "none"], "a package without __main__.py"),
        (["-m", "train.py"], "without .py"),
    ],
)
def test_a_module_that_does_not_exist_is_refused(package, words, text):
    done = run(package, "--dry_run", *words, script=None)
    assert done.returncode == 2 and text in done.stderr, done.stderr


def test_a_module_is_repeated_and_evaluated_as_one(package, monkeypatch):
    monkeypatch.chdir(package)
    folder = package / "runs" / "train"
    folder.mkdir(parents=True)
    words = ["-m", "pack.train", "--old=2"]
    with given("--type_node=Cluster"):
        found = read_run()
        document = launch_document.document(found, words)
    (folder / "launch.json").write_text(json.dumps(document | {"began": 1.0}))
    assert launch_document.recorded(str(folder)).words() == words
    assert RecordedRun(folder).script == words
    evaluator = ScriptEvaluator(types.SimpleNamespace(run_dir=folder))
    assert (evaluator._script, evaluator._folder, evaluator.why_not) == (words, str(package), "")
    rows = Program("train.py", {"train.py": digest_of(package / "pack" / "train.py")}, ("--old=2",))
    assert changed_script({1: rows.rows()}, words) is None
    assert "arguments" in changed_script({1: rows.rows()}, [*words[:2], "--old=3"])
    (package / "pack" / "train.py").write_text("edited")
    assert "train.py has changed" in changed_script({1: rows.rows()}, words)


@pytest.mark.parametrize(
    ("text", "words", "warned"),
    [
        ("", ["--nb_workers=4", "--epochs=2"], ["--nb_workers=4"]),
        ("", ["--nb_workers", "4", "--method=dgs"], ["--nb_workers", "--method=dgs"]),
        ("", ["--", "--nb_workers=4"], []),
        ("", ["--batch_size=4", "--seed=1", "--unknown=1", "-m", "nb_workers"], []),
        ("add_argument('--method')", ["--method=x"], []),
    ],
)
def test_a_flag_of_thinwire_behind_the_script_is_named(tmp_path, text, words, warned):
    (tmp_path / "mine.py").write_text(text)
    done = run(tmp_path, "--dry_run", "mine.py", *words, script=None)
    lines = [line for line in done.stderr.splitlines() if "mine.py, so" in line]
    assert done.returncode == 0 and len(lines) == bool(warned), done.stderr
    if warned:
        assert f" W {' '.join(warned)} stand" in lines[0]
        assert lines[0].endswith(f"before the script: thinwire run {warned[0]} mine.py")


def test_a_repeated_run_has_no_folder_of_the_first(tmp_path):
    """The record has neither the run directory nor --overwrite, which concern the first run."""
    (tmp_path / "train.py").write_text(SCRIPT)
    place = (f"--run_dir={tmp_path / 'run'}", "--overwrite", "--model_from=worker")
    with given("--method=dgs", "--compression_rate=0.5", "--keras_backend=jax,torch", *place):
        found = launch_document.document(read_run(), [str(tmp_path / "train.py")])
    names = {word.partition("=")[0] for word in found["flags"]}
    assert {"--method", "--compression_rate", "--seed", "--keras_backend"} <= names
    assert not {"--run_dir", "--overwrite", "--resume", "--model_from"} & names
