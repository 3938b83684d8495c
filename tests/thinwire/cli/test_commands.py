"""Every command with no arguments, a wrong word, --help, and a closed output pipe."""

import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import forker
from tests.light_starts import ends
from thinwire.cli import commands as cli
from thinwire.cli import node

ROOT = Path(__file__).resolve().parents[3]
MAIN = str(ROOT / "main.py")
#: The `thinwire` command as installed.
INSTALLED = "import sys\nfrom thinwire.cli.commands import run_command\nsys.exit(run_command())\n"
#: Not a preexec_fn: gRPC, where this process has it, does not survive what runs between a fork and
#: an exec, and aborts the child.
WITHOUT_STDOUT = "import os, sys\nos.close(1)\nos.execv(sys.argv[1], sys.argv[1:])\n"
COMMANDS = {f"thinwire {command}".strip(): ("-m", "thinwire", command) for command in cli.COMMANDS}
COMMANDS |= {"python main.py": (MAIN,)}
COMMANDS |= {f"main.py {role}": (MAIN, f"--type_node={role}") for role in node.ROLES}
#: One command for each path from the command line to its program: a tool with a separate
#: parser, a role by either name, and `run`.
PATHS = ("thinwire stop", "thinwire worker", "thinwire run", "python main.py", "main.py PS")
#: Documented in docs/reference/operations.md for a command line that cannot be.
BAD_COMMAND_LINE = (1, 2)
ONE_LINE = re.compile(r"\S.+\n")


def start(how, words=(), unbuffered="", **streams):
    environment = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    return subprocess.Popen(
        [sys.executable, *how, *words],
        env=os.environ | environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        **streams,
    )


def start_without_reader(how, words, folder, **more):
    """Start a command with an unread pipe as stdout, as ``| head -0`` leaves it."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return start(how, words, stdout=writing, cwd=folder, **more)
    finally:
        os.close(writing)


def start_without_stdout(how, words, folder):
    command = [sys.executable, *how, *words]
    return start(("-c", WITHOUT_STDOUT, *command), cwd=folder)


def ended(process):
    """Return (exit code, stdout or None, stderr)."""
    out, error = process.communicate(timeout=120)
    return process.returncode, out, error


def is_refusal(end):
    assert end.returncode in BAD_COMMAND_LINE and end.stdout == "", end
    assert "xyzzy" in end.stderr or "required" in end.stderr  # an invalid or missing argument first
    assert "Traceback" not in end.stderr
    assert not list(end.folder.iterdir())


OTHERS = [each for each in COMMANDS if each not in PATHS]
TOOLS = [each for each in (*cli.TOOLS, "run") if each != "doctor"]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Play command lines with usual streams."""
    lines = [[*how, "xyzzy"] for how in COMMANDS.values()]
    lines += [[*COMMANDS[command], "--help"] for command in PATHS]
    lines += [["-m", "thinwire", command] for command in TOOLS]
    return ends(lines, tmp_path_factory.mktemp("played"))


@pytest.mark.parametrize("command", PATHS)
def test_a_command_ends_as_documented_whatever_its_streams_are(command, played, tmp_path):
    how = COMMANDS[command]
    unread = start_without_reader(how, ["--help"], tmp_path)
    closed = start_without_stdout(how, ["--help"], tmp_path)
    with open("/dev/full", "w") as full:
        lost = start(how, ["--help"], stdout=full, cwd=tmp_path)
    wrong_closed = start_without_stdout(how, ["xyzzy"], tmp_path)

    helped, wrong = played[*how, "--help"], played[*how, "xyzzy"]
    assert (helped.returncode, helped.stderr) == (0, "") and len(helped.stdout) > 100
    assert ended(unread) == (0, None, "")
    assert ended(closed) == (0, None, "")
    code, _, error = ended(lost)
    assert code == 2
    assert error == "stdout cannot be written (No space left on device); its text is lost\n"
    is_refusal(wrong)
    assert ended(wrong_closed)[0] == wrong.returncode
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", OTHERS)
def test_a_wrong_word_is_refused_and_leaves_nothing(command, played):
    """Their help is started in test_cli."""
    is_refusal(played[*COMMANDS[command], "xyzzy"])


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_or_a_full_disk_ends_no_work(unbuffered, tmp_path):
    work = ["certificates", "--out", "made"]
    unread = start_without_reader(("-m", "thinwire"), work, tmp_path, unbuffered=unbuffered)
    assert ended(unread) == (0, None, "")
    assert (tmp_path / "made" / "worker-4.key").exists()
    both = start_without_reader(("-m", "thinwire"), ["version"], tmp_path, unbuffered=unbuffered)
    assert ended(both) == (0, None, "")
    with open("/dev/full", "w") as full:
        lost = start(("-m", "thinwire", "version"), (), unbuffered, stdout=full)
    assert ended(lost)[0] == 2


def test_what_a_closed_stdout_leaves_free_is_no_file_of_the_command(tmp_path):
    """Native code and children write to file descriptor 1, whichever file it is."""
    code = (
        "import os\nfrom thinwire.runtime.run.streams import standard_streams\n"
        "with standard_streams():\n"
        "    file = open('kept', 'w')\n    os.system('echo child')\n    print('text')\n"
        "    raise SystemExit(file.fileno())\n"
    )
    code, _, error = ended(start_without_stdout(("-c", code), (), tmp_path))
    assert (code > 2, error) == (True, "")
    assert (tmp_path / "kept").read_text() == ""


def test_doctor_with_nothing_examines_this_machine(tmp_path):
    """Its Python that imports TensorFlow is a fork of a process that has imported it."""
    texts = tmp_path / "stdout", tmp_path / "stderr"
    with open(texts[0], "wb") as output, open(texts[1], "wb") as errors:
        words = ["-m", "thinwire", "doctor"]
        code = forker().start(words, output, dict(os.environ), errors, tmp_path).wait(120)
    text, error = (each.read_text() for each in texts)
    assert code in (0, 1, 2) and not error
    assert re.search(r"TensorFlow .* imported in", text), text


@pytest.mark.parametrize("command", TOOLS)
def test_a_tool_with_nothing_says_what_is_missing_or_does_its_work(command, played):
    end = played["-m", "thinwire", command]
    code, text, error = end.returncode, end.stdout, end.stderr
    assert "Traceback" not in error
    if command == "version":  # it needs nothing
        assert code == 0 and text and not error
        return
    assert code in BAD_COMMAND_LINE and text == ""
    assert f"thinwire {command} " in error  # its usage
    assert "required" in error or "expected" in error


@pytest.mark.processes
@pytest.mark.parametrize("name", ["thinwire", "main.py"])
def test_every_role_starts_with_nothing_typed(name, tmp_path):
    """Each is left alone until its first line, interrupted, and has no word of a fault.

    Each has a folder to itself: a role that is slow to stop has written records by then, and the
    Simulator refuses a run directory with records of real processes.
    """
    installed = tmp_path / "thinwire"
    installed.write_text(INSTALLED)
    lines = {"thinwire": [[str(installed), command] for command in cli.ROLES]}
    lines["main.py"] = [[MAIN], *([MAIN, f"--type_node={role}"] for role in ("PS", "Supervisor"))]
    for number, words in enumerate(lines[name]):
        folder = tmp_path / str(number)
        folder.mkdir()
        reading, writing = os.pipe()
        with open(reading, encoding="utf-8") as log, open(writing, "wb") as output:
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1"}
            process = forker().start(words, output, environment, cwd=folder)
            output.close()
            try:
                first = next(log, "")
                process.send_signal(signal.SIGINT)
                text = "".join(itertools.chain([first], log))
                code = process.wait(60)
            finally:
                process.kill()
        in_use = code == 2 and "2223" in text  # the default port is another's on this machine
        assert code == 130 or in_use, (words, code, text)
        assert ONE_LINE.fullmatch(first) and "Traceback" not in text, (words, text)
