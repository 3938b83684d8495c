"""Flags of the Cluster role: where its nodes run."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence

from absl import flags

from thinwire.flags.slurm import SlurmStep, step_of
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.flags import (
    FlagRule,
    Topic,
    advanced,
    choice,
    comma_list,
    integer,
    number,
    switch,
    words,
)
from thinwire.runtime.run.settings import Run

FLAGS = flags.FLAGS

_IS_NAME = FlagRule(lambda text: bool(text.strip()), "must not be empty")


def amounts(given: Sequence[str]) -> dict[str, float]:
    """Return resource -> amount; raises ValueError for what is none, or no amount above 0."""
    pairs = [each.split("=") for each in given]
    found = {name.strip(): float(amount) for name, amount in pairs}
    if not found or not all(name and 0 < amount < math.inf for name, amount in found.items()):
        raise ValueError(given)
    return found


def _are_amounts(given: Sequence[str]) -> bool:
    try:
        return bool(amounts(given))
    except ValueError:
        return False


_ARE_RESOURCES = FlagRule(_are_amounts, "must be amounts above 0, such as cpus=4,gpus=1")

_SCRIPT = Topic(
    "Scripts (thinwire run)",
    (
        switch("dry_run", "Show the nodes' commands, the method and what travels; start nothing."),
        words(
            "like",
            None,
            "Repeat a run: its flags, seed, script and arguments, where no others are given.",
            "run directory",
            rule=_IS_NAME,
            unset="no run",
        ),
    ),
)
TOPICS = (
    _SCRIPT,
    Topic(
        "Cluster: where nodes run",
        (
            choice(
                "launcher",
                None,
                "How a Cluster starts its nodes.",
                ("local", "ssh", "ray", "slurm"),
                unset="ssh with --hosts_file, slurm in a step of several tasks, else local",
            ),
            words(
                "hosts_file",
                None,
                "A host a line, fast to slow: [user@]host[:port] [slots=q].",
                "file",
                rule=_IS_NAME,
                unset="none",
            ),
            words(
                "sync_dst_dir",
                None,
                "Copy the code to this folder of every host and run it there.",
                "folder",
                rule=_IS_NAME,
                unset="each host has it, at the same path or installed",
            ),
            *advanced(
                words(
                    "interface",
                    None,
                    "Where a PS listens: the name of an interface of its host, or an address.",
                    "name or address",
                    rule=_IS_NAME,
                    unset="the address that the hosts file names",
                ),
                words(
                    "ssh_options",
                    "",
                    "More options for ssh, such as '-i key -J gateway'.",
                    "options",
                    unset="none",
                ),
                words(
                    "remote_python",
                    None,
                    "Python of the hosts.",
                    "path or name",
                    unset="the launcher's path",
                ),
                words(
                    "ray_address",
                    None,
                    "Ray cluster to use; 'local': one of its own on this machine.",
                    "address",
                    unset="RAY_ADDRESS, else that of this machine, else local",
                ),
                comma_list(
                    "ray_ps_resources",
                    "cpus=1",
                    "What each PS requests of Ray: cpus, gpus, or a custom resource.",
                    "name=amount,...",
                    rule=_ARE_RESOURCES,
                ),
                comma_list(
                    "ray_worker_resources",
                    "cpus=1",
                    "What each worker requests of Ray, such as cpus=4,gpus=1.",
                    "name=amount,...",
                    rule=_ARE_RESOURCES,
                ),
                words(
                    "ray_runtime_env",
                    None,
                    "Ray's runtime environment of the nodes, as JSON: pip, env_vars, py_modules.",
                    "file",
                    rule=_IS_NAME,
                    unset="the Python that Ray runs on, with the code of this one",
                ),
            ),
        ),
    ),
    Topic(
        "Cluster: nodes that die",
        (
            integer(
                "restart_workers",
                0,
                "Start a worker that dies again, at most so often within "
                "--restart_window_seconds, after 1 s to 30 s; 0: never. One that ended well, was "
                "refused, interrupted or diverged is left alone.",
                "restarts",
                low=0,
            ),
            *advanced(
                integer(
                    "restart_ps",
                    0,
                    "Start a PS that is killed again, from its checkpoint, likewise; on Ray also "
                    "on another node, which needs the checkpoint on a disk that all have.",
                    "restarts",
                    low=0,
                ),
                number(
                    "restart_window_seconds",
                    600.0,
                    "Time without a death after which restarts are counted anew.",
                    "seconds",
                    low=1.0,
                ),
            ),
        ),
    ),
)
#: What is logged of a worker's end with --restart_workers.
AGAIN = "%s died (code %d); starting it again in %g s"
NOT_AGAIN = (
    "%s ended with code %d and is not started again: it has been as often as %s "
    "allows within --restart_window_seconds, or another start would not mend it"
)
#: What only a Cluster heeds; nodes do not need it.
NAMES = tuple(option.name for topic in TOPICS for option in topic.options)
#: What `thinwire run` is given before the user's own flags.
SCRIPT_DEFAULTS = (
    "--type_node=Cluster",
    "--model_from=worker",
    "--nb_workers=2",
    "--method=bsp",  # of all methods the one that trains as the script does alone
)
_SLURM = "slurm"
#: Flag -> the launchers that heed it.
_HEEDED_BY = {
    "hosts_file": ("ssh",),
    "sync_dst_dir": ("ssh",),
    "interface": ("ssh",),
    "ssh_options": ("ssh",),
    "remote_python": ("ssh", "ray"),
    "ray_address": ("ray",),
    "ray_ps_resources": ("ray",),
    "ray_worker_resources": ("ray",),
    "ray_runtime_env": ("ray",),
}
#: What `thinwire run` alone heeds.
SCRIPT_NAMES = tuple(option.name for option in _SCRIPT.options)


def check(runs_script: bool = False) -> str:
    """Return the launcher's name.

    Args:
        runs_script: Whether workers run a script, and do not play their role.

    Raises:
        ConfigurationError: A flag that this launcher would not heed, or one that it lacks.
    """
    for name in () if runs_script else SCRIPT_NAMES:
        if _is_set(name):
            raise ConfigurationError(
                f"--{name} is for `thinwire run`, which runs a script, and this is "
                "--type_node=Cluster; leave it out."
            )
    launcher = launcher_here()
    for name, heeding in _HEEDED_BY.items():
        if _is_set(name) and launcher not in heeding:
            raise ConfigurationError(
                f"--{name}={FLAGS[name].value} means nothing to --launcher={launcher}; leave it "
                f"out, or choose --launcher={' or '.join(heeding)}."
            )
    restarts = FLAGS.restart_workers or FLAGS.restart_ps
    if _is_set("restart_window_seconds") and not restarts:
        raise ConfigurationError(
            f"--restart_window_seconds={FLAGS.restart_window_seconds:g} without --restart_workers "
            "or --restart_ps does nothing; give one of these, or leave it out."
        )
    if launcher == "ssh" and not FLAGS.hosts_file:
        raise ConfigurationError("--launcher=ssh needs --hosts_file, with a host a line.")
    return launcher


def launcher_here() -> str:
    """Return the launcher's name, chosen by its flags and where this process runs.

    Raises:
        ConfigurationError: Slurm's variables cannot be read.
    """
    if FLAGS.launcher or FLAGS.hosts_file:
        return str(FLAGS.launcher or "ssh")
    is_task = FLAGS.type_node == "Cluster" and step_of(os.environ) is not None
    return _SLURM if is_task else "local"


def step_here() -> SlurmStep:
    """Return the step of Slurm that this process is a task of.

    Raises:
        ConfigurationError: It is none.
    """
    step = step_of(os.environ)
    if step is None:
        raise ConfigurationError(
            "--launcher=slurm: this is no step of several tasks; expected `srun --ntasks=4 "
            "thinwire run ...`. Leave it out to start all nodes here."
        )
    return step


def part_here() -> SlurmStep | None:
    """Return the step whose other tasks start the rest of the run; None: all nodes start here."""
    return step_here() if FLAGS.type_node == "Cluster" and launcher_here() == _SLURM else None


def fill_from_slurm(runs_script: bool) -> None:
    """Set workers and addresses to those of the step that this process is a task of, if any.

    Args:
        runs_script: Whether SCRIPT_DEFAULTS were given before the user's own flags.

    Raises:
        ConfigurationError: Flags that do not fit the step.
    """
    step = part_here()
    if step is None:
        return
    workers = FLAGS["nb_workers"]
    if workers.present > int(runs_script) and workers.value != step.num_tasks:
        raise ConfigurationError(
            f"--nb_workers={workers.value} in a step of {step.num_tasks} tasks, each of which is a "
            f"worker; leave it out, or take srun --ntasks={workers.value}."
        )
    if FLAGS["ip_PS"].present:
        raise ConfigurationError(
            f"--ip_PS={FLAGS.ip_PS}: Slurm gives each PS its host; leave it out."
        )
    if FLAGS.like and not FLAGS["run_dir"].present:
        raise ConfigurationError(
            "--like in several tasks needs --run_dir, so that all of them take the same folder."
        )
    workers.value, workers.present = step.num_tasks, 1
    if not FLAGS["ps_hosts"].present:
        port = FLAGS.port if FLAGS["port"].present else None
        FLAGS.set_default("ps_hosts", list(step.addresses(FLAGS.nb_ps, port)))


def refuse_elsewhere(run: Run) -> None:
    """Refuse the launcher's flags on a node that starts no others.

    Raises:
        ConfigurationError: One is set.
    """
    for name in NAMES:
        if _is_set(name):
            raise ConfigurationError(
                f"--{name}={FLAGS[name].value} is for a Cluster, which starts nodes, and this is "
                f"--type_node={run.type_node}; leave it out, or take --type_node=Cluster."
            )


def _is_set(name: str) -> bool:
    """Whether a flag has another value than by default; a --flagfile may give all of them."""
    return bool(FLAGS[name].value != FLAGS[name].default)


def remote_python() -> str:
    """Return which Python the nodes of other hosts run.

    Raises:
        ConfigurationError: A path that means something else in each folder.
    """
    python: str = FLAGS.remote_python or sys.executable
    if "/" in python and not python.startswith("/"):
        raise ConfigurationError(
            f"--remote_python={python}: expected an absolute path, or a name such as python3."
        )
    return python


def refuse_chosen_addresses() -> None:
    """Refuse addresses that only shards of this host could have.

    Raises:
        ConfigurationError: --ip_PS, or --port=0.
    """
    if _is_set("ip_PS"):
        raise ConfigurationError(
            f"--ip_PS={FLAGS.ip_PS}: the launcher gives each PS its address; leave this out, and "
            "set --interface where the PS shall not listen at the hosts file's address."
        )
    if FLAGS.port == 0 and not FLAGS.ps_hosts:
        raise ConfigurationError(
            "--port=0: a free port of another host cannot be looked up from here; give the first "
            "of --nb_ps free ports."
        )
