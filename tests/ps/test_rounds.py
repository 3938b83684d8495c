"""Rounds on their way: passed on at once, kept for a Supervisor that comes back, bounded."""

from ps.rounds import RoundsRelay


class Listener:
    def __init__(self):
        self.heard = []

    def say(self, message):
        self.heard.append((message.report.worker, message.report.rounds))


def test_a_listener_hears_at_once_and_a_late_one_what_is_kept():
    relay, first, late = RoundsRelay(), Listener(), Listener()
    relay.take(2, "a", [first])
    relay.take(1, "b", [first])
    relay.take(2, "c", [])
    relay.repeat(late)
    assert first.heard == [(2, "a"), (1, "b")]
    assert late.heard == [(2, "a"), (2, "c"), (1, "b")]


def test_the_oldest_go_first_and_the_newest_never():
    relay, late = RoundsRelay(kept_per_worker=5), Listener()
    for batch in ("aa", "bb", "cc", "dddddddd"):
        relay.take(1, batch, [])
    relay.take(2, "x", [])
    relay.repeat(late)
    assert late.heard == [(1, "dddddddd"), (2, "x")]
