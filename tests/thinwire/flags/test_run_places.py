"""Addresses of shards, and settings of each worker: one value, or one per worker."""

import pytest
from absl import flags

from tests.command_line import device_of, given, run_of, worker_of
from thinwire.flags.run import read_run
from thinwire.ops.types import ConfigurationError
from thinwire.ps import flags as ps_flags


@pytest.mark.parametrize(
    ("arguments", "addresses"),
    [
        (["--nb_ps=3", "--port=100"], ("127.0.0.1:100", "127.0.0.1:101", "127.0.0.1:102")),
        (["--ip_PS=10.0.0.9"], ("10.0.0.9:2223",)),
        (["--ps_hosts=a:1,b:2"], ("a:1", "b:2")),
        (["--ps_hosts=a:1, b:2", "--nb_ps=2"], ("a:1", "b:2")),
        (["--ps_hosts=[::1]:5"], ("[::1]:5",)),
    ],
)
def test_addresses(arguments, addresses):
    run = run_of(*arguments)
    assert run.addresses == addresses
    assert run.nb_ps == len(addresses)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ps_hosts=a:1,b:2", "--nb_ps=3"], "names 2 shards, --nb_ps=3"),
        (["--ps_hosts=a"], "'a' is not host:port"),
        (["--ps_hosts=a:1,b:x"], "'b:x' is not host:port"),
        (["--ps_hosts=:5"], "':5' is not host:port"),
        (["--ps_hosts=a:65536"], "up to 65535"),
        (["--port=65535", "--nb_ps=2"], "'127.0.0.1:65536' is not"),
        (["--ip_PS="], "':2223' is not host:port"),
    ],
)
def test_addresses_that_are_none(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        run_of(*arguments)


def test_a_shard_knows_its_place():
    def own(*arguments):
        with given("--type_node=PS", *arguments):
            run = read_run()
            ps_flags.check(run)
            return ps_flags.read(run.addresses)

    assert own("--ps_hosts=127.0.0.1:7,127.0.0.1:9", "--id_ps=1").port == 9
    assert own("--nb_ps=3", "--id_ps=2", "--port=50").port == 52
    with pytest.raises(ConfigurationError, match="--id_ps=3: this run has shards 0..2"):
        own("--nb_ps=3", "--id_ps=3")
    with pytest.raises(ConfigurationError, match="--insecure"):
        own("--ip_PS=0.0.0.0")
    assert own("--ip_PS=0.0.0.0", "--insecure").bind == "0.0.0.0"


@pytest.mark.parametrize(
    ("text", "worker", "mbps"),
    [
        ("100", 1, 100),
        ("100", 3, 100),
        ("100,10,1", 1, 100),
        ("100, 10 ,1", 2, 10),
        ("1,0,2", 3, 2),
    ],
)
def test_one_value_or_one_per_worker(text, worker, mbps):
    flag = f"--link_mbps={text}"
    assert device_of("--nb_workers=3", f"--id_worker={worker}", flag)["mbps"] == mbps


def test_each_list_is_a_setting_of_its_own():
    found = device_of(
        "--nb_workers=2",
        "--id_worker=2",
        "--link_mbps=5",
        "--link_delay_ms=1,2",
        "--link_loss=0.1",
        "--slowdown=1,4",
    )
    assert [found[name] for name in ("mbps", "delay_ms", "loss", "slowdown")] == [5, 2, 0.1, 4]


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--link_mbps=1,2", "has 2 values; expected one value, or one value for each of the 3"),
        ("--slowdown=1,1,1,1", "has 4 values"),
        ("--slowdown=0.5", "--slowdown=0.5: expected a number from 1"),
        ("--link_loss=0,0,1", "--link_loss=1: expected a number from 0 to 0.95"),
        ("--link_mbps=-1", "--link_mbps=-1"),
        ("--link_delay_ms=nan", "--link_delay_ms=nan"),
        ("--link_delay_ms=1e9", "--link_delay_ms=1e\\+09"),
        ("--id_worker=4", "--id_worker=4: expected 1..3"),
        ("--id_worker=0", "--id_worker=0: expected 1..3"),
    ],
)
def test_values_that_cannot_be_emulated(flag, words):
    with pytest.raises(ConfigurationError, match=words):
        worker_of("--nb_workers=3", flag)


@pytest.mark.parametrize("text", ["", "fast", "1,,2", "1;2", "1,x"])
def test_lists_that_hold_no_numbers(text):
    with pytest.raises(flags.Error, match="link_mbps"), given(f"--link_mbps={text}"):
        pass
