"""Lines that all workers print are shown once; no line is lost or delayed for long."""

import collections
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.launcher import line_merger
from thinwire.launcher.line_merger import LineMerger, LineState, MergedLines, WrittenLine

SUMMARY = [
    'Model: "sequential"',
    "\u250f\u2501\u2501\u2533\u2501\u2501\u2513",
    "\u2502 dense (Dense) \u2502 5 \u2502",
    "\u2514\u2500\u2500\u2534\u2500\u2500\u2518",
    " Total params: 5 (20.00 B)",
    " Optimizer params: 2 (8.00 B)",
]


class World:
    """A merger, the time, and the shown lines."""

    def __init__(self, num_workers=3, patience=5.0):
        self.merger = LineMerger(range(1, num_workers + 1), patience)
        self.now, self.shown = 0.0, []

    def line(self, worker, text, is_error=True):
        self._show(self.merger.line(WrittenLine(worker, text, is_error), self.now))

    def wait(self, seconds):
        self.now += seconds
        self._show(self.merger.look(self.now))
        for worker in self.merger._workers.values():
            assert all(entry.until > self.now for entry in worker.waiting), "a line is late"

    def end(self, worker):
        self._show(self.merger.ended(worker))

    def _show(self, lines):
        self.shown += [(line.worker, line.text) for line in lines]

    @property
    def states(self):
        return [self.merger.state_of(worker) for worker in self.merger._workers]


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 1, 3)])
def test_what_all_write_is_the_leader_s(order):
    world = World()
    for worker in order:
        for text in SUMMARY:
            world.line(worker, text, is_error=False)
        world.line(worker, "train.py:9: UserWarning: take care")
        world.line(worker, "  warnings.warn('take care')")
    assert {worker for worker, _ in world.shown} == {1}
    assert [text for _, text in world.shown][: len(SUMMARY)] == SUMMARY
    assert len(world.shown) == len(SUMMARY) + 2
    assert world.states == [LineState.LEADING, LineState.SHOWING, LineState.SHOWING]


def test_results_and_progress_are_each_worker_s_own():
    world = World(2)
    for worker in (2, 1):
        world.line(worker, "RESULT 3.5", is_error=False)
        world.line(worker, "4/4 - 0s - loss: 2.4", is_error=False)
    assert collections.Counter(world.shown).most_common(1)[0][1] == 1 and len(world.shown) == 4


def test_a_line_that_differs_is_shown_after_the_patience_in_its_worker_s_order():
    world = World(2)
    world.line(2, "only here")
    world.line(2, "RESULT 1", is_error=False)
    world.wait(4.9)
    assert world.shown == [] and world.states[1] is LineState.HOLDING
    world.line(1, "only there")
    world.wait(0.1)
    assert world.shown == [(1, "only there"), (2, "only here"), (2, "RESULT 1")]
    assert world.states[1] is LineState.SHOWING


def test_as_often_as_the_leader_has_written_it():
    world = World(2)
    for worker, times in ((1, 2), (2, 3)):
        for _ in range(times):
            world.line(worker, "again")
    world.wait(5)
    assert world.shown == [(1, "again"), (1, "again"), (2, "again")]


def test_a_leader_that_ends_loses_nothing_and_another_one_leads():
    world = World(3)
    world.line(1, "first")
    for worker in (3, 2):
        world.line(worker, "first")
        world.line(worker, "second")  # the leader is killed before it writes this
    world.end(1)
    assert world.states == [LineState.ENDED, LineState.LEADING, LineState.SHOWING]
    assert world.shown == [(1, "first"), (2, "second")]
    world.line(2, "third")
    world.line(3, "third")
    world.end(2)
    world.line(3, "fourth")
    assert world.shown[2:] == [(2, "third"), (3, "fourth")]


def test_what_a_former_leader_has_written_is_not_repeated():
    world = World(2)
    world.line(1, "bye")
    world.end(1)
    world.line(2, "bye")
    assert world.shown == [(1, "bye")]


def test_a_worker_that_has_ended_waits_for_nobody():
    world = World(2)
    world.line(2, "late")
    world.end(2)
    world.line(2, "the last of its pipe")
    world.line(2, "of its next start")
    assert [text for _, text in world.shown] == [
        "late",
        "the last of its pipe",
        "of its next start",
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("W1128 14:31:19.134438 139866 a.py:3] x", "W1128 14:31:20.000001 99 a.py:3] x"),
        ("I0000 00:00:1795875559.76   16896 p.cc:1] x", "I0000 00:00:1795875560.00   7 p.cc:1] x"),
        ("2026-11-28 14:15:00,123 WARNING x", "2026-11-28 14:15:09,999 WARNING x"),
        ("2026-11-28 14:15:00.123456: W x", "2026-11-28 14:16:00.000000: W x"),
        ("\x1b[1mx\x1b[0m", "x"),
    ],
)
def test_the_time_of_a_log_s_line_makes_no_difference(one, other):
    assert WrittenLine(1, one, True).key == WrittenLine(2, other, True).key
    assert WrittenLine(1, one, True).key != WrittenLine(2, f"{other}y", True).key
    assert (
        WrittenLine(1, "W1128 14:31:19.1 1 x", True).key
        != WrittenLine(1, "E1128 14:31:19.1 1 x", True).key
    )


def test_memory_is_bounded_and_what_is_beyond_is_shown(monkeypatch):
    monkeypatch.setattr(line_merger, "MOST_WAITING", 10)
    monkeypatch.setattr(line_merger, "MOST_NOTED", 10)
    world = World(2)
    for number in range(100):
        world.line(2, f"other {number}")
        world.line(1, f"mine {number}")
    follower = world.merger._workers[2]
    assert len(follower.waiting) == 10 and len(follower._noted) == 10
    assert [text for worker, text in world.shown if worker == 2][-1] == "other 89"
    world.wait(5)
    assert len(world.shown) == 200


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("line"), st.integers(1, 3), st.sampled_from("abc"), st.booleans()),
        st.tuples(st.just("wait"), st.floats(0, 3)),
        st.tuples(st.just("end"), st.integers(1, 3)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(EVENTS)
def test_in_every_interleaving_nothing_is_lost_or_late_and_orders_stay(events):
    world, written = World(3, patience=5.0), []
    for event in events:
        if event[0] == "line":
            _, worker, text, is_error = event
            written.append((worker, text if is_error else f"own {len(written)}"))
            world.line(*written[-1], is_error)
        else:
            (world.wait if event[0] == "wait" else world.end)(event[1])
    world.wait(5.0)
    shown = collections.Counter(world.shown)
    total = collections.Counter(written)
    assert shown <= total, "a line was shown that nobody wrote"
    for worker in (1, 2, 3):
        own = [text for number, text in world.shown if number == worker]
        every = iter(text for number, text in written if number == worker)
        assert all(text in every for text in own), "a worker's order has changed"
        assert [text for text in own if text.startswith("own")] == [
            text for number, text in written if number == worker and text.startswith("own")
        ]
        for text in "abc":  # for dropped lines, another worker has shown as many
            most = max(shown[number, text] for number in (1, 2, 3))
            assert total[worker, text] <= shown[worker, text] + sum(
                shown[number, text] for number in (1, 2, 3) if number != worker
            ), (text, most)
    assert not any(worker.waiting for worker in world.merger._workers.values())


def test_the_shell_shows_what_the_merger_returns():
    shown, now = [], [0.0]
    merged = MergedLines([1, 2], shown.append, clock=lambda: now[0])
    merged.line(2, "care", True)
    merged.look()
    assert shown == []
    now[0] = 5.0
    merged.look()
    merged.line(2, "more", True)
    merged.release(2)
    merged.line(1, "x", True)
    merged.ended(1)
    assert [(line.worker, line.text) for line in shown] == [(2, "care"), (2, "more"), (1, "x")]


def test_the_main_thread_does_not_wait_for_a_screen_that_is_not_read():
    shown, is_full, is_read = [], threading.Event(), threading.Event()

    def show(line):
        is_full.set()
        assert is_read.wait(30)
        shown.append(line.text)

    merged = MergedLines([1, 2], show)
    reader = threading.Thread(target=merged.line, args=(1, "one", True))
    reader.start()
    assert is_full.wait(30)
    merged.look()
    merged.ended(2)
    merged.ended(1)
    second = threading.Thread(target=merged.line, args=(2, "two", True))
    second.start()
    is_read.set()
    for thread in (reader, second):
        thread.join(30)
    assert shown == ["one", "two"]


def test_lines_that_were_taken_make_no_others_forgotten(monkeypatch):
    monkeypatch.setattr(line_merger, "MOST_NOTED", 2)
    lines = line_merger._WorkerLines()
    for key in (b"one", b"two"):
        lines.note(key)
    assert lines.take_noted(b"two") and not lines.take_noted(b"two")
    lines.note(b"three")
    assert lines.take_noted(b"one")
