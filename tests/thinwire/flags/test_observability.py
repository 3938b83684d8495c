"""Flags of logs and metrics: log levels of nodes, and metrics ports."""

import logging as standard_logging

import pytest
from absl import flags, logging

from tests.command_line import given
from thinwire.cli import node as playing
from thinwire.flags import observability
from thinwire.flags.run import read_run
from thinwire.ops.types import ConfigurationError


@pytest.fixture(autouse=True)
def as_before():
    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)


@pytest.mark.parametrize(
    ("asked", "node", "level"),
    [
        ((), ("--type_node=PS",), "INFO"),
        (("--log_level=error",), ("--type_node=PS",), "ERROR"),
        (("--log_level=warning,ps=debug",), ("--type_node=PS", "--id_ps=3"), "DEBUG"),
        (("--log_level=warning,ps=debug",), ("--type_node=Worker",), "WARNING"),
        (("--log_level=Worker-2=debug",), ("--type_node=Worker", "--id_worker=2"), "DEBUG"),
        (("--log_level=Worker-2=debug",), ("--type_node=Worker", "--id_worker=1"), "INFO"),
        (("--verbosity=-1",), ("--type_node=PS",), "WARNING"),
        (("--verbosity=1", "--log_level=error"), ("--type_node=PS",), "DEBUG"),
    ],
)
def test_a_nodes_own_level_comes_before_its_roles_and_that_before_all(asked, node, level):
    with given("--nb_workers=2", *node, *asked):
        playing._set_level()
        assert logging.get_absl_logger().getEffectiveLevel() == getattr(standard_logging, level)


@pytest.mark.parametrize("text", ["loud", "ps=loud", "boss=info", "ps-x=info", "=info", "info="])
def test_levels_that_are_none(text):
    with (
        pytest.raises(flags.Error, match="debug, info, warning, error"),
        given(f"--log_level={text}"),
    ):
        pass


@pytest.mark.parametrize("who", ["worker-3", "worker-0", "ps-1", "supervisor-1"])
def test_a_level_of_a_node_that_the_run_does_not_have_is_refused(who):
    with (
        given("--type_node=Cluster", "--nb_workers=2", f"--log_level=info,{who}=debug") as values,
        pytest.raises(ConfigurationError, match=f"this run has no node {who}; expected a"),
    ):
        observability.check(read_run(), values)


def test_levels_of_nodes_that_the_run_has_are_taken():
    levels = "--log_level=ps-0=debug,worker-1=debug,worker-2=info,supervisor-0=error,cluster=info"
    with given("--type_node=Cluster", "--nb_workers=2", levels) as values:
        observability.check(read_run(), values)


def test_each_node_of_a_cluster_has_a_port_of_its_own():
    nodes = [("PS", 0), ("PS", 1), *(("Worker", n) for n in range(1, 5)), ("Supervisor", 0)]
    ports = [observability.port_of(9400, *node, 2, 4) for node in nodes]
    assert ports == list(range(9400, 9407))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("--type_node=Simulator", "--metrics_port=9400"), "--metrics_port=9400"),
        (("--type_node=PS", "--metrics_host=0.0.0.0"), "without --metrics_port"),
        (
            ("--type_node=PS", "--metrics_login=x"),
            "--metrics_login=x without --metrics_port",
        ),
        (("--type_node=PS", "--metrics_host=::", "--metrics_port=9400"), "--metrics_login"),
        (("--type_node=Cluster", "--metrics_port=65534", "--nb_workers=2"), "65537"),
    ],
)
def test_ports_that_nobody_would_open_are_refused(command, words):
    with given(*command) as values:
        run = read_run()
        with pytest.raises(ConfigurationError, match=words):
            observability.check(run, values)
