"""A script run as a worker behaves like ``python script.py``: output, errors and its end."""

import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from tests.forked import MAIN, forker
from thinwire.launcher import program, script
from thinwire.launcher.failures import Cause, Failure
from thinwire.runtime.run.settings import EXIT_CONFIGURATION

FLAGS = ("--seed=1", "--id_worker=2", "--run_dir=run", "--worker_threads=1", "--tls_ca=ca.crt")
#: Ends as if something had been exchanged.
TRAINED = """
from thinwire.worker.script import RECORD
class Session: num_exchanges, stopped = 1, False
RECORD.sessions.append(Session())
RECORD.endings.append(lambda failed, message: print("END", failed, message))
"""


def start(folder, text, *arguments, own=()):
    (folder / "sub").mkdir(exist_ok=True)
    (folder / "sub" / "mine.py").write_text(textwrap.dedent(text))
    command = [forker().python, *program.SCRIPT, *FLAGS, *own, "--", "sub/mine.py", *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"},
    )


def run(folder, text, *arguments, own=()):
    process = start(folder, text, *arguments, own=own)
    out, error = process.communicate(timeout=60)
    failures = [found for line in error.splitlines() if (found := Failure.read(line)[1])]
    return process.returncode, out, error, failures[0] if failures else None


def test_it_runs_as_a_program_of_its_own(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "helper.py").write_text("name = __name__")
    code, out, error, failure = run(
        tmp_path,
        TRAINED
        + """
import helper, os, sys, pickle
def function(): pass
assert pickle.loads(pickle.dumps(function)) is function
print([__name__, __file__, sys.argv, os.getcwd(), sys.path[0], helper.name])
print(any("launcher" in each for each in sys.path))
print(os.environ["TF_FORCE_GPU_ALLOW_GROWTH"])  # the evaluator may have the same GPU
        """,
        "--epochs=3",
        "--",
        "x",
    )
    assert (code, failure) == (0, None), error
    folder = str(tmp_path.resolve())
    seen = ["__main__", "sub/mine.py", ["sub/mine.py", "--epochs=3", "--", "x"], folder]
    lines = [str([*seen, f"{folder}/sub", "helper"]), "False", "true", "END False "]
    assert out.splitlines() == lines


SHOWS = """
import os, pickle, sys
from . import helper
def function(): pass
assert pickle.loads(pickle.dumps(function)) is function
spec = sys.modules["__main__"].__spec__
print([__name__, __package__, __file__, spec.name, spec.origin, __cached__ == spec.cached])
print(sys.argv, sys.path[0], os.getcwd(), helper.name, type(__loader__).__name__)
"""


@pytest.mark.parametrize("module", ["pack.sub.train", "pack.sub", "pack.__main__"])
def test_a_module_runs_as_python_runs_it(tmp_path, module):
    folder = tmp_path / "pack" / "sub"
    folder.mkdir(parents=True)
    init = "import sys; print('package', sys.argv[0])"
    for package in (folder, folder.parent):
        (package / "__init__.py").write_text(init)
        (package / "helper.py").write_text("name = __name__")
        (package / "__main__.py").write_text(SHOWS)
    (folder / "train.py").write_text(SHOWS)
    words = ["-m", module, "--epochs=3", "--", "x"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    alone = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert alone.returncode == 0 and module.partition(".__")[0] in alone.stdout, alone.stderr
    launched = subprocess.run(
        [forker().python, *program.SCRIPT, *FLAGS, "--", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert launched.stdout == alone.stdout, launched.stderr
    failure = Failure.read(launched.stderr.strip())[1]
    assert f"-m {module} ended without a call of thinwire.distribute()" in failure.text


@pytest.mark.parametrize(("module", "words"), [("no.such", "no"), ("empty", "empty.__main__")])
def test_a_module_that_cannot_run_fails_as_with_python(tmp_path, module, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "__init__.py").write_text("")
    done = subprocess.run(
        [forker().python, *program.SCRIPT, *FLAGS, "--", "-m", module],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    failure = Failure.read(done.stderr.strip())[1]
    assert done.returncode == 1 and f"No module named '{words}'" in failure.headline.replace(
        f"named {words}", f"named '{words}'"
    )


def test_its_settings_are_a_file_of_its_own_that_goes_with_it(tmp_path):
    code, out, _, _ = run(
        tmp_path,
        TRAINED
        + """
import os, stat
path = os.environ["THINWIRE_SETTINGS"]
print(oct(stat.S_IMODE(os.stat(path).st_mode)), open(path).read())
        """,
    )
    mode, _, document = out.splitlines()[0].partition(" ")
    found = json.loads(document)
    assert (code, mode, found["script"]) == (0, "0o600", ["sub/mine.py"])
    whole = {f"--run_dir={tmp_path.resolve()}/run", f"--tls_ca={tmp_path.resolve()}/ca.crt"}
    assert whole <= {*found["flags"]}, "the script may change its folder"
    folder = tmp_path / "run" / "settings"
    assert not list(folder.iterdir()) and stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.product
@pytest.mark.parametrize(("kernels", "calls"), [("numpy", 1), ("tf", 2)])
def test_an_exchange_within_a_step_has_a_thread_of_tensorflow_s(tmp_path, kernels, calls):
    """A function called in TensorFlow's own thread would wait for ever for its own step."""
    text = TRAINED + (
        "import tensorflow as tf\nprint(tf.config.threading.get_inter_op_parallelism_threads())\n"
    )
    code, out, error, _ = run(tmp_path, text, own=(f"--kernels={kernels}",))
    assert (code, out.splitlines()[0]) == (0, str(calls)), error


@pytest.mark.product
def test_workers_draw_the_same_numbers(tmp_path):
    text = (
        TRAINED
        + """
import random, numpy
print(random.random(), numpy.random.rand(), hash("word"), list({"a", "b", "c"}))
import tensorflow as tf
print(tf.random.uniform([]).numpy(), tf.config.threading.get_intra_op_parallelism_threads())
    """
    )
    first, second = run(tmp_path, text), run(tmp_path, text)
    assert first[0] == 0 and first[1] == second[1], first
    assert first[1].splitlines()[1].endswith(" 1")


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("def f():\n  raise ValueError('oh no')\nf()", 1, ["mine.py", "in f", "ValueError: oh no"]),
        ("x = = 1", 1, ["SyntaxError"]),
        (TRAINED + "raise SystemExit(7)", 7, ["exit code 7"]),
        (TRAINED + "import sys; sys.exit('words')", 1, ["exit code 1"]),
        (TRAINED + "raise KeyboardInterrupt", 130, ["interrupted"]),
        (
            TRAINED
            + "end = SystemExit(0)\nfrom thinwire.worker.script import RECORD\n"
            + "RECORD.left_fit_by = end\nraise end",
            1,
            ["in the middle of fit", "stop_training"],
        ),
        ("print('alone')", 2, ["mine.py", "thinwire.distribute()"]),
        (
            TRAINED.replace("num_exchanges, stopped = 1", "num_exchanges, stopped = 0"),
            2,
            ["without an exchange"],
        ),
        (
            "import thinwire\ndef f():\n  raise thinwire.ConfigurationError('bad')\nf()",
            2,
            ["mine.py:3: bad"],
        ),
        (
            TRAINED
            + "from thinwire.worker.client.control import RunHalted\n"
            + "raise RunHalted('returned_early', 'worker 2')",
            1,
            ["returned_early", "worker 2"],
        ),
    ],
)
def test_a_failure_is_reported_once_with_its_exit_code(tmp_path, text, code, words):
    got, out, error, failure = run(tmp_path, text)
    assert failure is not None, error
    assert (got, failure.code) == (code, code)
    assert all(word in failure.text for word in words), failure.text
    assert "launcher/script.py" not in failure.text and "Traceback" not in error.split("{")[0]
    if "Session" in text:
        assert f"END True {failure.headline}" in out


@pytest.mark.parametrize(("reason", "code"), [("script_failed", 1), ("interrupted", 130)])
def test_a_script_whose_run_others_ended_leaves_their_reason_and_no_traceback(
    tmp_path, reason, code
):
    text = (
        "from thinwire.worker.client.control import RunHalted\n"
        f"raise RunHalted('{reason}', 'worker 2: oh no')"
    )
    got, out, error, failure = run(tmp_path, TRAINED + text)
    assert (got, failure.code, failure.cause) == (code, code, Cause.ELSEWHERE), error
    assert "worker 2: oh no" in failure.headline and "END" not in out
    assert len(error.splitlines()) == 1


def test_an_error_of_thinwire_in_a_thread_fails_the_script(tmp_path):
    """The main thread comes to the end of the script, and nothing has trained."""
    text = """
import threading, thinwire
def train(): raise thinwire.ConfigurationError("--x=1: no. Give 2.")
thread = threading.Thread(target=train)
thread.start(); thread.join()
"""
    code, _, error, failure = run(tmp_path, TRAINED + text)
    assert (code, failure.code, failure.cause) == (2, 2, Cause.THINWIRE), error
    assert failure.headline.endswith("--x=1: no. Give 2.") and "Traceback" not in error


def test_an_error_of_the_script_in_a_thread_is_shown_as_alone(tmp_path):
    text = """
import threading
def load(): raise ValueError("no file")
thread = threading.Thread(target=load)
thread.start(); thread.join()
"""
    code, _, error, failure = run(tmp_path, TRAINED + text)
    assert (code, failure) == (0, None)
    assert "Traceback" in error and "ValueError: no file" in error


def test_the_reason_is_one_line_where_the_error_has_several(tmp_path):
    text = "raise ValueError('no such column\\nsee the header')"
    _, _, _, failure = run(tmp_path, text)
    assert failure.headline.endswith("sub/mine.py:1: ValueError: no such column")
    assert failure.text.endswith("see the header") and failure.has_page


def test_words_of_sys_exit_are_the_reason(tmp_path):
    code, _, error, failure = run(tmp_path, "import sys; sys.exit('no data here')")
    assert (code, failure.headline) == (1, "mine.py ended with exit code 1: no data here")
    assert error.splitlines()[0] == "no data here"


def test_one_that_cannot_come_back_is_lost_and_ends_nothing(tmp_path):
    text = "from thinwire.worker.script import LeftBehind\nraise LeftBehind('too late')"
    code, out, error, failure = run(tmp_path, TRAINED + text)
    assert (code, failure.code, failure.cause) == (3, 3, Cause.LOST), error
    assert "too late" in failure.text and "Traceback" not in failure.text
    assert "END" not in out


def test_an_end_from_outside_is_no_error_of_its_own(tmp_path):
    """TensorFlow replaces a SystemExit that passes through it by another error."""
    text = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGTERM)
    while True: pass
except SystemExit as error:
    raise RuntimeError("REPLACED BY SystemExit") from None
    """
    code, _, error, failure = run(tmp_path, text)
    assert (code, error, failure) == (128 + signal.SIGTERM, "", None)


def test_files_that_it_leaves_open_are_complete_although_it_ends_without_a_search(tmp_path):
    """Modules are cleared as usual; only cycles are not looked for among TensorFlow's objects."""
    text = """
import atexit, gc
gc.unfreeze()
atexit.register(lambda: open("at_exit", "w").write(str(gc.get_freeze_count())))
left_open = open("left", "w")
left_open.write("all of it")
    """
    code, _, error, _ = run(tmp_path, TRAINED + text)
    assert code == 0, error
    assert (tmp_path / "left").read_text() == "all of it"
    assert (tmp_path / "at_exit").read_text() == "0"  # the script's own functions come first


def test_ended_from_outside_it_cleans_up_and_is_quiet(tmp_path):
    process = start(
        tmp_path,
        """
        import tempfile, time
        with tempfile.TemporaryDirectory() as folder:
            print(folder, flush=True)
            time.sleep(60)
        """,
    )
    folder = process.stdout.readline().strip()
    assert os.path.isdir(folder)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert not os.path.exists(folder) and "failure" not in error
    assert not list((tmp_path / "run" / "settings").iterdir())


def test_the_bootstrap_is_found_from_any_folder(tmp_path):
    assert (MAIN.parent / "thinwire" / "launcher" / "script.py").is_file()
    done = subprocess.run(
        [forker().python, *program.SCRIPT, *FLAGS, "--", "missing.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "missing.py" in done.stderr


@pytest.mark.parametrize(
    ("is_distributed", "has_exchanged", "words"),
    [(True, True, None), (True, False, "without an exchange"), (False, False, "without a call of")],
)
def test_a_script_that_trained_with_nobody_has_failed(
    monkeypatch, is_distributed, has_exchanged, words
):
    """The script ends without an error, although its worker may have trained alone."""
    record = SimpleNamespace(is_distributed=is_distributed, has_exchanged=has_exchanged)
    monkeypatch.setattr(script, "RECORD", record)
    failure = script._idleness("train.py")
    assert (failure is not None) == (words is not None)
    if failure is not None:
        assert (failure.code, failure.cause) == (EXIT_CONFIGURATION, Cause.THINWIRE)
        assert words in failure.text
