"""The output of nodes, and how the launcher shows it."""

import errno
import io
import os

import pytest

from thinwire.launcher.failures import COMPLETED, Failure
from thinwire.launcher.line_merger import MergedLines
from thinwire.launcher.output import Screen, SupervisorOutput, WorkerOutput, each_line, follow


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


def worker_output(worker, screen, path, on_failure):
    """Return the output of a run's only worker, whose lines wait for no other worker."""
    merged = MergedLines([worker], lambda line: output.write(line.text, line.is_error))
    output = WorkerOutput(worker, screen, path, on_failure, merged)
    return output


@pytest.fixture
def streams():
    return io.StringIO(), io.StringIO()


def test_a_worker_s_lines_have_its_name_and_a_file(tmp_path, streams):
    failures = []
    path = tmp_path / "worker-2.out"
    screen = Screen(*streams)
    output = worker_output(2, screen, path, lambda *each: failures.append(each))
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
    output.file.close()
    screen.close()
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
    screen = Screen(*streams)
    output = SupervisorOutput("supervisor-0", screen, clock=lambda: now[0])
    for second in range(12):
        now[0] = float(second)
        output.on_line(f"step {second}", False)
    screen.close()
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


def test_a_terminal_that_is_gone_loses_lines_and_raises_nothing(monkeypatch, tmp_path):
    class Gone(Terminal):
        def fileno(self):
            raise OSError(errno.EIO, "Input/output error")

        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

    screen = Screen(Gone(), io.StringIO())
    output = worker_output(1, screen, tmp_path / "worker-1.out", lambda *each: None)
    screen.show("step 1")
    output.on_line("a line", False)
    screen.close()
    output.file.close()
    assert (tmp_path / "worker-1.out").read_text() == "a line\n"
    assert [copy.report() for copy in screen.copies] == [
        "stdout: 1 line (37 bytes) not written (Input/output error): 1 line (37 bytes) of worker 1",
        "",
    ]


def test_streams_of_one_pipe_keep_the_order_of_their_lines():
    reader, writer = os.pipe()
    with open(writer, "w") as out, open(os.dup(writer), "w") as error, open(reader) as read:
        screen = Screen(out, error)
        for number in range(100):
            screen.write(str(number), is_error=number % 3 == 0)
        screen.close()
        out.close()
        error.close()
        assert read.read().split() == [str(number) for number in range(100)]


def test_an_encoding_that_lacks_a_letter_loses_no_line():
    reader, writer = os.pipe()
    with open(writer, "w", encoding="ascii") as out, open(reader, "rb") as read:
        screen = Screen(out, io.StringIO())
        screen.write("loss \N{GREEK SMALL LETTER MU}")
        screen.close()
        out.close()
        assert read.read() == b"loss \\u03bc\n"


def test_a_node_is_read_to_its_end_whatever_happens_to_its_lines():
    seen = []

    def on_line(line):
        seen.append(line)
        if line != "last":
            raise ValueError(line)

    chunks = iter([b"one\ntwo\n", b"three\nlast\n", b""])
    follow(lambda: next(chunks), on_line)
    assert seen == ["one", "two", "three", "last"]
