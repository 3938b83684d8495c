"""Copies of output: every state of the backlog, and sinks that fail, are slow, or block."""

import errno
import os
import re
import threading
import time

import pytest

from thinwire.runtime.output_copy import (
    BacklogState,
    DescriptorSink,
    LineBacklog,
    Offered,
    OutputCopy,
    OutputFile,
    StreamSink,
)

LINE = b"x" * 99 + b"\n"


def write_all(backlog, now=0.0):
    """Write all lines of a backlog; return the bytes."""
    written = b""
    while data := backlog.take():
        written += data
        backlog.wrote(len(data), now)
    return written


def offer(backlog, data, source, now=0.0, since=None):
    return backlog.offer(data, source, now if since is None else since, now)


def fill(backlog, now=0.0):
    """Offer lines until one is not taken; return how many were, and the answer to the last."""
    count = 0
    while (answer := offer(backlog, LINE, "worker 1", now)) is Offered.TAKEN:
        count += 1
    return count, answer


def lost(backlog):
    return {source: (loss.lines, loss.num_bytes) for source, loss in backlog.losses.items()}


def test_lines_are_written_in_their_order_and_in_any_pieces():
    backlog = LineBacklog()
    lines = [f"{number}\n".encode() * 50 for number in range(100)]
    written = b""
    for line in lines:
        assert offer(backlog, line, "worker 1", 0.0) is Offered.TAKEN
        written += backlog.take()[:7]
        backlog.wrote(min(7, len(backlog.take())), 0.0)
    assert written + write_all(backlog) == b"".join(lines)
    assert backlog.state is BacklogState.WRITING and not backlog.losses and backlog.is_empty


def test_lines_are_written_whole_unless_they_are_long():
    backlog = LineBacklog()
    for _ in range(100):
        offer(backlog, LINE, "worker 1")
    assert backlog.take() == 40 * LINE
    backlog.wrote(150, 0.0)
    assert backlog.take() == LINE[50:] + 40 * LINE
    backlog.failed("Broken pipe")
    offer(backlog, b"y" * 5000 + b"\n", "worker 1")
    assert b"yyy" not in backlog.take() and len(backlog.take()) < 200, "the line that shows the gap"
    backlog.wrote(len(backlog.take()), 0.0)
    assert backlog.take() == b"y" * 4096


def test_a_write_that_fails_loses_the_backlog_and_the_next_one_tells_how_much():
    backlog = LineBacklog()
    offer(backlog, b"first\n", "worker 1", 0.0)
    write_all(backlog)
    for source in ("worker 1", "worker 2", "worker 2"):
        offer(backlog, b"12345\n", source, 0.0)
    backlog.failed("No space left on device")
    assert backlog.state is BacklogState.FAILING and backlog.is_empty
    assert lost(backlog) == {"worker 1": (1, 6), "worker 2": (2, 12)}
    offer(backlog, b"still\n", "worker 1", 0.0)  # with the line that shows the gap, which is lost
    backlog.failed("No space left on device")
    offer(backlog, b"there\n", "worker 1", 0.0)
    assert write_all(backlog) == (
        b"[thinwire: 4 lines (24 bytes) are missing here: No space left on device]\nthere\n"
    )
    assert backlog.state is BacklogState.WRITING
    assert lost(backlog) == {"worker 1": (2, 12), "worker 2": (2, 12)}


def test_a_line_that_was_written_in_part_is_lost_and_ends_before_the_gap_is_shown():
    backlog = LineBacklog()
    offer(backlog, b"whole\npart", "", 0.0)
    offer(backlog, b"ial\n", "worker 1", 0.0)
    backlog.wrote(12, 0.0)  # "whole\npartia"
    backlog.failed("No space left on device")
    offer(backlog, b"next\n", "worker 1", 0.0)
    shown = write_all(backlog)
    assert shown.startswith(b"\n[thinwire: 1 line (2 bytes) is missing here: No space")
    assert shown.endswith(b"]\nnext\n")


def test_a_line_waits_for_space_and_then_lines_are_lost_until_half_of_it_is_free():
    backlog = LineBacklog(patience_seconds=10.0, most_bytes=1000)
    count, answer = fill(backlog)
    assert answer is Offered.FULL and count == 4
    backlog.wrote(1, 9.0)  # a slow reader has read a byte
    assert offer(backlog, LINE, "worker 1", 9.9, since=0.0) is Offered.FULL
    assert offer(backlog, LINE, "worker 1", 10.0, since=0.0) is Offered.LOST
    assert backlog.state is BacklogState.STALLED
    assert offer(backlog, LINE, "worker 2", 10.0) is Offered.LOST, "without another wait"
    backlog.wrote(100, 11.0)
    assert backlog.state is BacklogState.STALLED
    backlog.wrote(0, 11.0)  # a terminal that is not ready
    backlog.wrote(99, 12.0)
    assert backlog.state is BacklogState.WRITING and backlog.patience_ends_at == 22.0
    assert lost(backlog) == {"worker 1": (1, 100), "worker 2": (1, 100)}
    assert offer(backlog, LINE, "worker 1", 12.0) is Offered.TAKEN
    assert write_all(backlog) == (
        2 * LINE
        + b"[thinwire: 2 lines (200 bytes) are missing here: "
        + b"a line waited for its reader for 10 s]\n"
        + LINE
    )


def test_a_place_that_fails_slowly_is_not_waited_for():
    backlog = LineBacklog(patience_seconds=10.0, most_bytes=1000)
    fill(backlog)
    backlog.failed("Input/output error")
    fill(backlog, 5.0)
    assert (
        offer(backlog, LINE, "worker 1", 5.0) is Offered.LOST
        and backlog.state is BacklogState.FAILING
    )


def test_progress_that_is_drawn_is_no_line():
    backlog = LineBacklog()
    offer(backlog, b"step 1", "", 0.0)
    backlog.failed("Broken pipe")
    assert not backlog.losses


@pytest.mark.parametrize(
    "before", [BacklogState.WRITING, BacklogState.FAILING, BacklogState.STALLED]
)
def test_what_is_left_at_the_end_is_written_or_counted(before):
    backlog = LineBacklog(patience_seconds=10.0, most_bytes=1000)
    if before is BacklogState.FAILING:
        offer(backlog, LINE, "worker 1", 0.0)
        backlog.failed("Broken pipe")
        offer(backlog, LINE, "worker 1", 0.0)
    else:
        fill(backlog)
    if before is BacklogState.STALLED:
        assert offer(backlog, LINE, "worker 1", 10.0, since=0.0) is Offered.LOST
    assert backlog.state is before
    backlog.close()
    assert backlog.state is BacklogState.CLOSING
    assert backlog.patience_ends_at == 10.0, (
        "after the last progress; that of a stalled one is over"
    )
    assert offer(backlog, LINE, "late", 0.0) is Offered.LOST
    backlog.give_up()
    assert backlog.state is BacklogState.CLOSED and backlog.is_empty
    backlog.wrote(10, 0.0)  # a write that was given up returns
    backlog.failed("Broken pipe")
    count = {BacklogState.WRITING: 4, BacklogState.FAILING: 2, BacklogState.STALLED: 5}[before]
    assert lost(backlog) == {"worker 1": (count, 100 * count), "late": (1, 100)}


# -- with a thread -------------------------------------------------------------------------------


class Sink:
    encoding = "utf-8"

    def __init__(self):
        self.written, self.error = b"", None

    def write(self, data):
        if self.error is not None:
            raise self.error
        self.written += data
        return len(data)


class BlockedSink(Sink):
    def __init__(self):
        super().__init__()
        self.is_read = threading.Event()

    def write(self, data):
        assert self.is_read.wait(60)
        return super().write(data)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EIO, "Input/output error"),
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        ValueError("I/O operation on closed file"),
        RuntimeError(),
    ],
)
def test_an_error_of_the_sink_is_counted_and_the_copy_recovers(error):
    sink, sentences = Sink(), []
    copy = OutputCopy("the log", sink, on_first_loss=sentences.append)
    sink.error = error
    count, deadline = 0, time.monotonic() + 60
    while not sentences and time.monotonic() < deadline:
        copy.put("a line\n", "worker 1")
        count += 1
    assert len(sentences) == 1 and str(getattr(error, "strerror", None) or error) in sentences[0]
    sink.error = None
    copy.put("again\n", "worker 1")
    copy.close()
    assert sink.written.endswith(b"again\n") and b"missing here: " in sink.written
    (counted,) = re.findall(r"the log: ([\d,]+) line", copy.report())
    assert int(counted.replace(",", "")) + sink.written.count(b"a line\n") == count


def test_a_line_waits_for_space_without_looking_again_and_again(monkeypatch):
    copy = OutputCopy("stdout", BlockedSink(), 0.2, 10_000, on_first_loss=lambda _: None)
    offer, offered = copy._backlog.offer, []
    monkeypatch.setattr(copy._backlog, "offer", lambda *args: offered.append(1) or offer(*args))
    while not copy.is_stalled:
        copy.put(LINE, "worker 1")
        assert len(offered) <= 3, "once, and when its patience ends"
        offered.clear()


def test_a_sink_that_never_returns_stops_nobody():
    sink = BlockedSink()
    copy = OutputCopy("stdout", sink, 0.2, 10_000, on_first_loss=lambda _: None)
    for _ in range(5000):
        copy.put(LINE, "worker 1")
    assert copy.is_stalled
    copy.close()
    assert copy.is_stalled and copy.report().startswith("stdout: 5,000 lines (500,000 bytes)")
    sink.is_read.set()


def test_a_slow_sink_loses_nothing():
    sink, turns = Sink(), threading.Semaphore(0)
    write = sink.write

    def write_a_little(data):
        turns.acquire()
        return write(data[:100])

    sink.write = write_a_little
    copy = OutputCopy("stdout", sink, 30.0, 2000)
    threads = [
        threading.Thread(target=lambda: [copy.put(LINE, "worker 1") for _ in range(100)])
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    turns.release(300)
    for thread in threads:
        thread.join(60)
    copy.close()
    assert sink.written == LINE * 200 and not copy.report()


def test_a_pipe_without_a_reader_and_one_whose_reader_does_not_read():
    reader, writer = os.pipe()
    try:
        copy = OutputCopy("stdout", DescriptorSink(writer), 0.2, 10_000, lambda _: None)
        for _ in range(3000):
            copy.put(LINE, "worker 1")
        assert copy.is_stalled
        os.close(reader)  # the write that waits fails, and the thread ends
        copy.put(LINE, "worker 1")
        copy.close()
        assert "lines" in copy.report()
    finally:
        os.close(writer)


def test_a_terminal_that_another_program_has_made_non_blocking():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    copy = OutputCopy("stdout", DescriptorSink(writer), 30.0)
    for _ in range(2000):
        copy.put(LINE, "worker 1")
    received = b""
    while len(received) < 2000 * len(LINE):
        received += os.read(reader, 1 << 16)
    copy.close()
    os.close(reader)
    os.close(writer)
    assert received == LINE * 2000 and not copy.report()


def test_a_file_on_a_full_disk(tmp_path):
    path = tmp_path / "worker-1.out"
    path.symlink_to("/dev/full")
    copy = OutputFile(path)
    for _ in range(10):
        copy.put("a line\n", "worker 1")
    copy.close()
    copy.close()
    assert copy.report() == (
        f"{path}: 10 lines (70 bytes) not written (No space left on device): "
        "10 lines (70 bytes) of worker 1"
    )


def test_a_process_without_stdout():
    copy = OutputCopy("stdout", StreamSink(None))
    copy.put("a line\n", "worker 1")
    copy.close()
    assert "started without" in copy.report()


def test_a_line_from_a_signal_s_handler_while_the_same_thread_writes_one():
    sink = Sink()
    copy = OutputCopy("stderr", sink)
    with copy._changed:
        copy.put("from the handler\n", "thinwire")
    copy.close()
    assert sink.written == b"from the handler\n"
