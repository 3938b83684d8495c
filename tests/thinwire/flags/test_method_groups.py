"""Flags of groups by speed and of the shards' placement."""

import pytest

from tests.command_line import run_of
from thinwire.ops.sharding.placement import ByHash, BySpeed
from thinwire.ops.sync.groups import AutoGroups
from thinwire.ops.types import ConfigurationError


def test_groups_by_speed():
    rule = run_of("--method=gsp", "--groups=auto", "--nb_workers=3").method.sync
    assert rule.auto == AutoGroups(30, 60.0)
    assert rule.groups == ((1,), (2,), (3,))
    rule = run_of(
        "--method=gsp",
        "--groups=auto",
        "--groups_warmup_updates=7",
        "--regroup_interval_seconds=0",
        "--staleness_bound=2",
    ).method.sync
    assert (rule.auto, rule.bound) == (AutoGroups(7, 0.0), 2)


def test_given_groups_are_not_by_speed():
    for arguments in (["--method=gsp"], ["--method=bsp"], ["--method=gsp", "--groups=1,2|3,4"]):
        assert run_of(*arguments).method.sync.auto is None


def test_groups_by_speed_are_part_of_the_fingerprint():
    rows = [
        dict(run_of("--method=gsp", f"--groups={groups}").method.fingerprint())
        for groups in ("auto", "1|2|3|4")
    ]
    assert rows[0]["sync.groups"] == rows[1]["sync.groups"]
    assert rows[0]["sync.auto"] != rows[1]["sync.auto"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--method=bsp", "--groups=auto"],
            "--groups=auto is for a rule with --groups",
        ),
        (["--method=gsp", "--groups_warmup_updates=5"], "--groups_warmup_updates=5 is for"),
        (
            ["--method=gsp", "--groups=1,2|3,4", "--regroup_interval_seconds=5"],
            "is for --groups=auto, but this run has --groups=1,2|3,4",
        ),
        (["--ps_speeds=2,1", "--nb_ps=2"], "--ps_speeds is for --placement=speed"),
        (["--placement=speed", "--ps_speeds=2,1"], "--ps_speeds has 2 values for 1 PS shards"),
        (["--placement=speed", "--ps_speeds=1,2", "--nb_ps=2"], "--ps_speeds=1,2: expected"),
        (["--placement=speed", "--ps_speeds=0", "--nb_ps=1"], "finite numbers above 0"),
    ],
)
def test_what_cannot_be(arguments, words):
    with pytest.raises(ConfigurationError) as caught:
        run_of(*arguments)
    assert words in str(caught.value)


def test_placement():
    assert run_of().method.placement == ByHash()
    assert run_of("--placement=speed").method.placement == BySpeed()
    given = run_of("--placement=speed", "--ps_speeds=4,2,1", "--nb_ps=3").method.placement
    assert given == BySpeed((4.0, 2.0, 1.0))
