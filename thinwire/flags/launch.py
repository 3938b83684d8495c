"""Flags of the Cluster role: its launcher, the hosts of its nodes, and the nodes' restarts."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence

from absl import flags

from thinwire.flags.slurm import SlurmStep, step_of
from thinwire.ops.options import (
    NOT_EMPTY,
    FlagRule,
    Topic,
    advanced,
    choice,
    comma_list,
    file,
    integer,
    number,
    switch,
    words,
)
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.keras_backend import EXTRAS
from thinwire.runtime.run.settings import Run, per_worker

FLAGS = flags.FLAGS


def amounts(given: Sequence[str]) -> dict[str, float]:
    """Parse ``name=amount`` words, for example ``cpus=4``, into resource -> amount.

    Raises:
        ValueError: A word is malformed, or an amount is not a finite number above 0.
    """
    pairs = [word.split("=") for word in given]
    resources = {name.strip(): float(amount) for name, amount in pairs}
    if not resources or not all(
        name and 0 < amount < math.inf for name, amount in resources.items()
    ):
        raise ValueError(given)
    return resources


def _are_amounts(given: Sequence[str]) -> bool:
    try:
        return bool(amounts(given))
    except ValueError:
        return False


_ARE_RESOURCES = FlagRule(_are_amounts, "must be amounts above 0, such as cpus=4,gpus=1")

#: Keras backends that a script may use. Thinwire does not run on Keras' other backends.
KERAS_BACKENDS = tuple(EXTRAS)
_ARE_BACKENDS = FlagRule(
    lambda names: not names or set(names) <= {*KERAS_BACKENDS},
    f"takes {', '.join(KERAS_BACKENDS[:-1])} and {KERAS_BACKENDS[-1]}, such as torch or jax,torch",
)
_SCRIPT = Topic(
    "Scripts (thinwire run)",
    (
        switch(
            "dry_run",
            "Print each node's command, the method and the messages' contents; start nothing.",
        ),
        words(
            "like",
            None,
            "Repeat the run of this directory: use its flags, seed, script and arguments unless "
            "the command line gives others.",
            "run directory",
            rule=NOT_EMPTY,
            unset="no run",
        ),
        *advanced(
            comma_list(
                "keras_backend",
                "",
                "Keras backend of the workers, which the environment variable KERAS_BACKEND names "
                "otherwise; the workers of a run may have different backends.",
                "tensorflow|jax|torch, one for all or one per worker",
                rule=_ARE_BACKENDS,
                unset="the environment's",
            ),
        ),
    ),
)
TOPICS = (
    _SCRIPT,
    Topic(
        "Cluster: hosts of the nodes",
        (
            choice(
                "launcher",
                None,
                "How a Cluster starts its nodes: on this host, over ssh, with Ray or with Slurm.",
                ("local", "ssh", "ray", "slurm"),
                unset="ssh with --hosts_file, slurm in a step of several tasks, else local",
            ),
            file(
                "hosts_file",
                "File of hosts, one per line from fast to slow: [user@]host[:port] [slots=nodes].",
            ),
            words(
                "sync_dst_dir",
                None,
                "Folder on every host to which the code is copied and in which the nodes run.",
                "folder",
                rule=NOT_EMPTY,
                unset="each host has the code, at the same path or installed",
            ),
            *advanced(
                integer(
                    "gpus_per_worker",
                    None,
                    "Number of NVIDIA GPUs of its machine that a worker sees; if there are too few "
                    "for all workers, several workers share a GPU. 0: workers compute on the CPU.",
                    "count",
                    low=0,
                    unset="all GPUs of a machine, divided evenly among its workers",
                ),
                words(
                    "interface",
                    None,
                    "Network interface, or address, on which a PS listens on its host.",
                    "name or address",
                    rule=NOT_EMPTY,
                    unset="the address that the hosts file names",
                ),
                words(
                    "ssh_options",
                    "",
                    "Additional options for ssh, such as '-i key -J gateway'.",
                    "options",
                    unset="none",
                ),
                words(
                    "remote_python",
                    None,
                    "Python interpreter that nodes on other hosts run.",
                    "path or name",
                    unset="the launcher's path",
                ),
                words(
                    "ray_address",
                    None,
                    "Address of the Ray cluster; 'local' starts a new Ray cluster on this machine.",
                    "address",
                    unset="RAY_ADDRESS, else the Ray cluster of this machine, else local",
                ),
                comma_list(
                    "ray_ps_resources",
                    "cpus=1",
                    "Resources that each PS requests from Ray: cpus, gpus, or a custom resource.",
                    "name=amount,...",
                    rule=_ARE_RESOURCES,
                ),
                comma_list(
                    "ray_worker_resources",
                    "cpus=1",
                    "Resources that each worker requests from Ray, such as cpus=4,gpus=1.",
                    "name=amount,...",
                    rule=_ARE_RESOURCES,
                ),
                file(
                    "ray_runtime_env",
                    "JSON file with Ray's runtime environment for the nodes: pip, env_vars, "
                    "py_modules.",
                    unset="the Python that runs Ray, with the code of this process",
                ),
            ),
        ),
    ),
    Topic(
        "Cluster: restarts of nodes",
        (
            integer(
                "restart_workers",
                0,
                "Largest number of restarts of a worker that dies, within "
                "--restart_window_seconds; each restart waits 1 s to 30 s; 0: never. A worker that "
                "finished, diverged, was interrupted or was rejected by the PS is not restarted.",
                "restarts",
                low=0,
            ),
            *advanced(
                integer(
                    "restart_ps",
                    0,
                    "Largest number of restarts of a PS that is killed, within "
                    "--restart_window_seconds; the PS resumes from its checkpoint. On Ray the PS "
                    "may move to another node, which needs a shared disk for the checkpoint.",
                    "restarts",
                    low=0,
                ),
                number(
                    "restart_window_seconds",
                    600.0,
                    "Time after which a restart of a node no longer counts toward the limits "
                    "--restart_workers and --restart_ps.",
                    "seconds",
                    low=1.0,
                ),
            ),
        ),
    ),
)
#: Formats of log messages about a node that has died. The arguments of AGAIN are the node, its exit
#: code and the seconds until the restart. The arguments of NOT_AGAIN are the node, its exit code
#: and the name of the restart flag.
AGAIN = "%s died (code %d); starting it again in %g s"
NOT_AGAIN = (
    "%s ended with code %d and is not started again: the node has reached the limit of %s "
    "within --restart_window_seconds, or a restart cannot correct this exit code"
)
#: Names of the flags that only a Cluster reads. The Cluster does not pass these flags to nodes.
NAMES = tuple(option.name for topic in TOPICS for option in topic.options)
#: Flags that `thinwire run` inserts before the user's flags.
SCRIPT_DEFAULTS = (
    "--type_node=Cluster",
    "--model_from=worker",
    "--nb_workers=2",
    "--method=bsp",  # only bsp trains exactly as the script without Thinwire trains
)
_SLURM = "slurm"
#: Name of a flag -> values of --launcher for which the flag has an effect.
_HEEDED_BY = {
    "gpus_per_worker": ("local", "ssh"),
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
#: Names of the flags that only `thinwire run` reads.
SCRIPT_NAMES = tuple(option.name for option in _SCRIPT.options)


def check(runs_script: bool = False) -> str:
    """Reject flags that contradict the launcher; return the launcher's name, for example "ssh".

    Args:
        runs_script: True if the workers run a user's script, False if they run the Worker role.

    Raises:
        ConfigurationError: A given flag has no effect with this launcher, or the launcher lacks a
            required flag.
    """
    for name in () if runs_script else SCRIPT_NAMES:
        if _is_set(name):
            raise ConfigurationError(
                f"--{name} is for `thinwire run`, which runs a script, but this command has "
                f"--type_node=Cluster and no script; leave --{name} out."
            )
    launcher = launcher_here()
    for name, heeding in _HEEDED_BY.items():
        if _is_set(name) and launcher not in heeding:
            raise ConfigurationError(
                f"--{name}={FLAGS[name].value} has no effect with --launcher={launcher}; leave "
                f"--{name} out, or choose --launcher={' or '.join(heeding)}."
            )
    restarts = FLAGS.restart_workers or FLAGS.restart_ps
    if _is_set("restart_window_seconds") and not restarts:
        raise ConfigurationError(
            f"--restart_window_seconds={FLAGS.restart_window_seconds:g} has no effect without "
            "--restart_workers or --restart_ps; give one of these two flags, or leave it out."
        )
    if launcher == "ssh" and not FLAGS.hosts_file:
        raise ConfigurationError(
            "--launcher=ssh needs --hosts_file, a file with one host per line."
        )
    return launcher


def launcher_here() -> str:
    """Return the launcher's name from --launcher; without this flag, return "slurm" or "local".

    Raises:
        ConfigurationError: Slurm's environment variables cannot be parsed.
    """
    if FLAGS.launcher or FLAGS.hosts_file:
        return str(FLAGS.launcher or "ssh")
    is_task = FLAGS.type_node == "Cluster" and step_of(os.environ) is not None
    return _SLURM if is_task else "local"


def keras_backends(nb_workers: int) -> tuple[str, ...]:
    """Return the Keras backend of every worker from --keras_backend; empty without the flag.

    Raises:
        ConfigurationError: --keras_backend has neither one value nor one value per worker.
    """
    names: list[str] = FLAGS.keras_backend
    return per_worker(names, nb_workers, "keras_backend") if names else ()


def step_here() -> SlurmStep:
    """Return the Slurm step in which this process is a task.

    Raises:
        ConfigurationError: This process is not a task of a Slurm step with several tasks.
    """
    step = step_of(os.environ)
    if step is None:
        raise ConfigurationError(
            "--launcher=slurm: this process is not in a Slurm step of several tasks; expected "
            "`srun --ntasks=4 thinwire run ...`. Without --launcher, all nodes start on this host."
        )
    return step


def part_here() -> SlurmStep | None:
    """Return the Slurm step whose tasks start nodes; None if this process starts all nodes."""
    return step_here() if FLAGS.type_node == "Cluster" and launcher_here() == _SLURM else None


def fill_from_slurm(runs_script: bool) -> None:
    """Set --nb_workers and --ps_hosts from the Slurm step; do nothing outside a Slurm step.

    Args:
        runs_script: True if `SCRIPT_DEFAULTS` were inserted before the user's flags.

    Raises:
        ConfigurationError: A given flag contradicts the Slurm step, for example --nb_workers.
    """
    step = part_here()
    if step is None:
        return
    workers = FLAGS["nb_workers"]
    if workers.present > int(runs_script) and workers.value != step.num_tasks:
        raise ConfigurationError(
            f"--nb_workers={workers.value} in a Slurm step of {step.num_tasks} tasks, each a "
            f"worker; leave --nb_workers out, or start with srun --ntasks={workers.value}."
        )
    if FLAGS["ip_PS"].present:
        raise ConfigurationError(
            f"--ip_PS={FLAGS.ip_PS}: Slurm chooses the host of each PS; leave --ip_PS out."
        )
    if FLAGS.like and not FLAGS["run_dir"].present:
        raise ConfigurationError(
            "--like in several Slurm tasks needs --run_dir, so that all tasks use the same folder."
        )
    workers.value, workers.present = step.num_tasks, 1
    if not FLAGS["ps_hosts"].present:
        port = FLAGS.port if FLAGS["port"].present else None
        FLAGS.set_default("ps_hosts", list(step.addresses(FLAGS.nb_ps, port)))


def refuse_elsewhere(run: Run) -> None:
    """Reject flags of launchers on a node whose role starts no other nodes.

    Raises:
        ConfigurationError: A flag of a launcher differs from the flag's default.
    """
    for name in NAMES:
        if _is_set(name):
            raise ConfigurationError(
                f"--{name}={FLAGS[name].value} is for a Cluster, which starts nodes; this node has "
                f"--type_node={run.type_node}; leave --{name} out, or give --type_node=Cluster."
            )


def _is_set(name: str) -> bool:
    """Return True if a flag's value differs from the flag's default."""
    return bool(FLAGS[name].value != FLAGS[name].default)


def remote_python() -> str:
    """Return the path of the Python interpreter that runs nodes on other hosts.

    Raises:
        ConfigurationError: The path of --remote_python is relative, so it depends on the current
            folder.
    """
    python: str = FLAGS.remote_python or sys.executable
    if "/" in python and not python.startswith("/"):
        raise ConfigurationError(
            f"--remote_python={python}: expected an absolute path, or a name such as python3."
        )
    return python


def refuse_chosen_addresses() -> None:
    """Reject --ip_PS and --port=0, which only PS shards on the launching host can use.

    Raises:
        ConfigurationError: --ip_PS is set, or --port is 0, although other hosts run PS shards.
    """
    if _is_set("ip_PS"):
        raise ConfigurationError(
            f"--ip_PS={FLAGS.ip_PS}: the launcher chooses the address of each PS; leave --ip_PS "
            "out, and set --interface if a PS must not listen on the address in the hosts file."
        )
    if FLAGS.port == 0 and not FLAGS.ps_hosts:
        raise ConfigurationError(
            "--port=0: this process cannot find a free port of another host; give the first of "
            "--nb_ps consecutive free ports."
        )
