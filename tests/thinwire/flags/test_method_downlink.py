"""Flags of the downlink: the replies to workers."""

import pytest
from absl import flags

from tests.command_line import given, run_of
from tests.virtual.toy import method
from thinwire.ops.downlink.exact import DownDelta
from thinwire.ops.downlink.sparse import DownAuto, DownSparse
from thinwire.ops.types import ConfigurationError


def test_sparse_replies_are_set():
    arguments = ("--down_codec=sparse", "--down_ratio=0.05", "--down_value_dtype=int8")
    codec = run_of(*arguments, "--resync_every=150", "--max_staleness=9").method.down_codec
    assert codec == DownSparse(0.01, 0.05, "int8", 150, 9)
    assert codec.ratio == 0.05


def test_as_much_down_as_up_if_nothing_else_is_said():
    codec = run_of("--down_codec=auto", "--compression_rate=0.2").method.down_codec
    assert codec == DownAuto(0.2)
    assert codec.ratio == 0.2
    assert run_of().method.down_codec == DownDelta()


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("down_ratio", "0"),
        ("down_ratio", "-0.1"),
        ("down_ratio", "nan"),
        ("down_value_dtype", "float8"),
        ("resync_every", "-1"),
        ("resync_every", "1.5"),
        ("max_staleness", "-1"),
        ("max_staleness", "nan"),
    ],
)
def test_nonsense_is_refused_at_start(flag, value):
    with pytest.raises(flags.Error, match=flag), given("--down_codec=auto", f"--{flag}={value}"):
        pass


@pytest.mark.parametrize("down_codec", ["dense", "delta"])
@pytest.mark.parametrize(
    "flag", ["down_ratio=0.1", "down_value_dtype=int8", "resync_every=9", "max_staleness=9"]
)
def test_what_nothing_would_use_is_refused(down_codec, flag):
    with pytest.raises(ConfigurationError) as caught:
        run_of("--method=asgd", f"--down_codec={down_codec}", f"--{flag}")
    assert f"--{flag}" in str(caught.value) and f"--down_codec={down_codec}" in str(caught.value)


def test_workers_that_sum_among_themselves_are_sent_nothing_in_parts():
    with pytest.raises(ConfigurationError, match="--down_codec=sparse"):
        method("bsp", collective="ring", overrides={"down_codec": "sparse"})


def test_both_sides_must_agree_on_it():
    rows = dict(run_of("--down_codec=sparse", "--down_ratio=0.5").method.fingerprint())
    assert (rows["down_codec"], rows["down_codec.down_ratio"]) == ("sparse", "0.5")
