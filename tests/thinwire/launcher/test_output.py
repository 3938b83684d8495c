"""What nodes write, and how it is shown."""

import io
import os

import pytest

from thinwire.launcher.failures import COMPLETED, Failure
from thinwire.launcher.output import Screen, SupervisorOutput, WorkerOutput, each_line


def lines_of(data):
    reader, writer = os.pipe()
    os.write(writer, data)
    os.close(writer)
    try:
        return list(each_line(lambda: os.read(reader, 65_536)))
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"one\ntwo", ["one", "two"]),
        (b"1/3 ...\b\b\b\r2/3 ...\b\b\b\r3/3 done\n", ["3/3 done"]),  # a progress bar of Keras
        (b"windows\r\nnext\r", ["windows", "next"]),
        (b"\n", [""]),
        (b"\xff\n", ["\N{REPLACEMENT CHARACTER}"]),
        (b"a" * 60_000, ["a" * 60_000]),
    ],
)
def test_of_a_line_the_last_state_counts(data, lines):
    assert lines_of(data) == lines


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def streams():
    return io.StringIO(), io.StringIO()


def test_a_worker_s_lines_have_its_name_and_a_file(tmp_path, streams):
    failures = []
    path = tmp_path / "worker-2.out"
    output = WorkerOutput(2, Screen(*streams), path, lambda *each: failures.append(each))
    output.on_line("\x1b[1mloss\x1b[0m: 1", False)
    output.on_line("careful", True)
    output.on_line(COMPLETED, False)
    assert not output.is_complete
    output.on_line(COMPLETED, True)
    assert output.is_complete
    reported = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", reported)
        Failure(7, "Traceback\nValueError: no").report()
    output.on_line("half a line" + reported.getvalue().rstrip("\n"), True)
    output.close()
    assert [each.getvalue() for each in streams] == [
        f"[worker 2] loss: 1\n[worker 2] {COMPLETED}\n",
        "[worker 2] careful\n[worker 2] half a line\n",
    ]
    assert failures == [(2, Failure(7, "Traceback\nValueError: no"))]
    assert (
        path.read_text()
        == f"loss: 1\ncareful\n{COMPLETED}\nhalf a line\nTraceback\nValueError: no\n"
    )


def test_a_line_that_only_looks_like_a_failure_is_a_line():
    assert Failure.read("thinwire-failure {") == ("thinwire-failure {", None)


def test_without_a_terminal_progress_comes_from_time_to_time(streams):
    now = [0.0]
    output = SupervisorOutput("supervisor-0", Screen(*streams), clock=lambda: now[0])
    for second in range(12):
        now[0] = float(second)
        output.on_line(f"step {second}", False)
    assert streams[0].getvalue() == "step 0\nstep 10\n"


def test_on_a_terminal_progress_stays_below(monkeypatch):
    monkeypatch.setattr("os.get_terminal_size", lambda _: os.terminal_size((30, 10)))
    out, error = Terminal(), Terminal()
    monkeypatch.setattr(out, "fileno", lambda: 1)
    screen = Screen(out, error)
    screen.show("x" * 99)
    screen.write("a line")
    screen.close()
    assert out.getvalue() == "x" * 29 + "\r\x1b[Ka line\n" + "x" * 29 + "\n"
