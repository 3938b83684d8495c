"""The flags of emulated links with classes of service."""

import pytest

from tests.command_line import device_of, given, worker_of
from thinwire.flags.run import read_run
from thinwire.ops.types import ConfigurationError
from thinwire.simulator import flags as simulator_flags
from thinwire.worker import flags as worker_flags


def test_what_befalls_datagrams_is_of_one_worker():
    found = device_of(
        "--nb_workers=2",
        "--id_worker=2",
        "--link_mbps=100",
        "--link_queue_kb=0,50",
        "--link_reorder=0.1",
        "--link_duplicate=0,0.2",
        "--link_background_mbps=0,90",
        "--link_background_class=4",
    )
    names = ("queue_kb", "reorder", "duplicate", "background_mbps", "background_class")
    assert [found[name] for name in names] == [50, 0.1, 0.2, 90, 4]
    assert isinstance(found["background_class"], int)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--link_reorder=1.1"], "--link_reorder=1.1: expected a number from 0 to 1"),
        (["--link_duplicate=-1"], "--link_duplicate=-1: expected"),
        (["--link_background_class=8"], "--link_background_class=8: expected a number from 0 to 7"),
        (["--link_background_class=1.5"], "--link_background_class=1.5: expected a whole number"),
        (["--link_background_class=4"], "=4 .*--link_background_mbps"),
        (["--link_background_mbps=9"], "--link_background_mbps=9: expected less than"),
        (["--link_background_mbps=10", "--link_mbps=20,10,20"], "less than .*--link_mbps=10"),
        (["--link_queue_kb=100"], "--link_queue_kb=100 at --link_mbps=0: expected"),
        (["--link_queue_kb=1", "--link_mbps=20"], "--link_queue_kb=1 .* at least 2"),
        (["--link_reorder=0.1,0.2"], "link_reorder has 2 values"),
    ],
)
def test_links_that_cannot_be_emulated(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        worker_of("--nb_workers=3", *arguments)


@pytest.mark.parametrize("check", [worker_flags.check, simulator_flags.check])
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--link_mbps=9", "--link_queue_kb=50"], "link_queue_kb=50"),
        (["--link_reorder=0.1"], "link_reorder=0.1"),
        (["--link_duplicate=0,0.2"], "link_duplicate=0.2"),
    ],
)
def test_what_befalls_datagrams_is_refused_where_there_are_none(arguments, name, check):
    with (
        given("--nb_workers=2", "--router=reliable", *arguments),
        pytest.raises(ConfigurationError, match=f"{name} .*--router"),
    ):
        check(read_run())


@pytest.mark.parametrize("check", [worker_flags.check, simulator_flags.check])
def test_background_is_for_every_router(check):
    queued = ("--link_mbps=9", "--link_background_mbps=5", "--link_queue_kb=50")
    with given("--nb_workers=2", *queued):
        check(read_run())
