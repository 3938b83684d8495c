"""A step of Slurm: the nodes that each task starts, and their addresses."""

import pytest

from tests.command_line import given
from thinwire.flags import launch
from thinwire.flags.run import read_run
from thinwire.flags.slurm import expand_hosts, step_of
from thinwire.launcher.role import nodes_of
from thinwire.launcher.run_start import claim_run_directory
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.directory import lock_of
from thinwire.runtime.run.lock import LockOwner

#: Environment of a task of `srun -N2 -n3`, from Slurm 22.05; the nodes are tw1 and tw2.
RECORDED = {
    "SLURM_JOB_ID": "2",
    "SLURM_NTASKS": "3",
    "SLURM_JOB_NODELIST": "tw[1-2]",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "tw[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_CPUS_ON_NODE": "2",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
TASKS = [  # rank, node, rank on the node
    {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"},
    {"SLURM_PROCID": "1", "SLURM_NODEID": "0", "SLURM_LOCALID": "1"},
    {"SLURM_PROCID": "2", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"},
]


@pytest.fixture
def task(monkeypatch):
    """Make this process a task."""

    def become(number=0, **more):
        for name, value in {**RECORDED, **TASKS[number], **more}.items():
            monkeypatch.setenv(name, value)

    return become


def parts(task, *flags):
    """Return the names of the nodes that each task starts, with their flags."""
    found = []
    for number in range(len(TASKS)):
        task(number)
        with given("--type_node=Cluster", *flags):
            launch.fill_from_slurm(runs_script=False)
            run = read_run()
            found.append({node.name: node.flags for node in nodes_of(run, run.addresses)})
    return found


@pytest.mark.parametrize(
    ("nb_ps", "expected"),
    [
        (1, [{"ps-0", "worker-1", "supervisor-0"}, {"worker-2"}, {"worker-3"}]),
        (2, [{"ps-0", "worker-1", "supervisor-0"}, {"worker-2"}, {"ps-1", "worker-3"}]),
        (3, [{"ps-0", "ps-2", "worker-1", "supervisor-0"}, {"worker-2"}, {"ps-1", "worker-3"}]),
    ],
)
def test_every_node_is_started_once(task, nb_ps, expected):
    assert [set(part) for part in parts(task, f"--nb_ps={nb_ps}")] == expected


def test_all_tasks_know_the_same_addresses(task):
    found = [flags for part in parts(task, "--nb_ps=3") for flags in part.values()]
    words = {word for flags in found for word in flags if word.startswith("--ps_hosts=")}
    assert words == {"--ps_hosts=tw1:20128,tw2:20129,tw1:20130"}
    assert all("--nb_workers=3" in flags for flags in found)


@pytest.mark.parametrize(
    ("more", "nb_ps", "port", "expected"),
    [
        ({}, 1, 4000, ("tw1:4000",)),
        ({"SLURM_STEP_RESV_PORTS": "12000-12001"}, 2, None, ("tw1:12000", "tw2:12001")),
        ({"SLURM_JOB_ID": "187"}, 1, None, ("tw1:31968",)),
        ({"SLURM_JOB_ID": "188"}, 1, None, ("tw1:20032",)),
        (
            {"SLURM_STEP_NODELIST": "tw1", "SLURM_STEP_TASKS_PER_NODE": "3"},
            2,
            9,
            ("127.0.0.1:9", "127.0.0.1:10"),
        ),
    ],
)
def test_addresses(more, nb_ps, port, expected):
    assert step_of({**RECORDED, **more}).addresses(nb_ps, port) == expected


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("a", ("a",)),
        ("gpu[07-09,12],login1", ("gpu07", "gpu08", "gpu09", "gpu12", "login1")),
        ("r[0-1]n[8-10]-ib", ("r0n8-ib", "r0n9-ib", "r0n10-ib", "r1n8-ib", "r1n9-ib", "r1n10-ib")),
        ("127.0.0.[1-2]", ("127.0.0.1", "127.0.0.2")),
    ],
)
def test_lists_of_hosts(nodes, expected):
    assert expand_hosts(nodes) == expected


@pytest.mark.parametrize("count", ["3", "1(x3)", "2(x1),1"])
def test_counts_of_tasks(count):
    nodes = {"3": "tw1", "1(x3)": "tw[1-3]"}.get(count, "tw[1-2]")
    more = {"SLURM_STEP_NODELIST": nodes, "SLURM_STEP_TASKS_PER_NODE": count}
    assert step_of({**RECORDED, **more}).num_tasks == 3


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"SLURM_STEP_NODELIST": "tw[1-3]"}, "SLURM_STEP_NODELIST=tw"),
        ({"SLURM_STEP_NODELIST": "tw[x]"}, r"\[x\]"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2;1"}, "2;1"),
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID=3 "),
        ({"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID='x'"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not"),
    ],
)
def test_variables_that_cannot_be_read(more, words):
    with pytest.raises(ConfigurationError, match=words):
        step_of({**RECORDED, **more})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--nb_workers=2",), "--nb_workers=2 in a Slurm step of 3 tasks"),
        (("--ip_PS=10.0.0.1",), "--ip_PS=10.0.0.1"),
        (("--like=runs/before",), "needs --run_dir"),
    ],
)
def test_flags_that_do_not_fit_the_step(task, flags, words):
    task()
    with given("--type_node=Cluster", *flags), pytest.raises(ConfigurationError, match=words):
        launch.fill_from_slurm(runs_script=False)


def test_a_script_s_two_workers_are_no_wish_of_the_user(task):
    task()
    with given(*launch.SCRIPT_DEFAULTS):
        launch.fill_from_slurm(runs_script=True)
        assert read_run().nb_workers == 3
    with (
        given(*launch.SCRIPT_DEFAULTS, "--nb_workers=2"),
        pytest.raises(ConfigurationError, match="--nb_workers=2"),
    ):
        launch.fill_from_slurm(runs_script=True)


@pytest.mark.parametrize("flags", [("--launcher=local",), ("--hosts_file=hosts",)])
def test_other_launchers_start_everything(task, flags):
    task()
    with given("--type_node=Cluster", "--nb_workers=2", *flags):
        launch.fill_from_slurm(runs_script=False)
        assert (launch.part_here(), read_run().nb_workers) == (None, 2)


def test_without_a_step_there_is_nothing_to_take_part_in():
    with (
        given("--type_node=Cluster", "--launcher=slurm"),
        pytest.raises(ConfigurationError, match="srun"),
    ):
        launch.fill_from_slurm(runs_script=False)


def test_each_part_claims_its_own(task, tmp_path):
    """Another part's nodes may run already, and clear their own files."""
    theirs = tmp_path / "checkpoints" / "worker-3" / "kept"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("")
    task(1)
    with given("--type_node=Cluster", "--overwrite", f"--run_dir={tmp_path}"):
        launch.fill_from_slurm(runs_script=False)
        with lock_of(tmp_path, "Worker", 3).take(LockOwner.here("Worker", 3)):
            claim_run_directory(read_run(), launch.part_here(), patience_seconds=0.0)
    assert theirs.exists()
