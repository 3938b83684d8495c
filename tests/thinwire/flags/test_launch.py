"""Flags of a Cluster take effect or are rejected."""

import pytest

from tests.command_line import given
from thinwire.flags import launch
from thinwire.flags.run import read_run
from thinwire.ops.types import ConfigurationError


@pytest.mark.parametrize("role", ["PS", "Worker", "Supervisor", "Standalone", "Simulator"])
@pytest.mark.parametrize(
    "flag", ["--hosts_file=hosts", "--launcher=ssh", "--interface=eth1", "--ssh_options=-v"]
)
def test_nodes_that_start_no_others_refuse_them(role, flag):
    words = f"{flag} is for a Cluster, .*={role};"
    with given(f"--type_node={role}", flag), pytest.raises(ConfigurationError, match=words):
        launch.refuse_elsewhere(read_run())


def test_a_flagfile_of_all_flags_repeats_the_run(tmp_path):
    """The flagfile also names defaults, which do not count as given flags."""
    for role in ("Cluster", "Worker"):
        with given(f"--type_node={role}", "--nb_workers=3") as values:
            (tmp_path / role).write_text(values.flags_into_string())
        with given(f"--flagfile={tmp_path / role}"):
            run = read_run()
            assert (run.type_node, run.nb_workers) == (role, 3)
            assert launch.check() == "local"
            launch.refuse_elsewhere(run)
            launch.refuse_chosen_addresses()
