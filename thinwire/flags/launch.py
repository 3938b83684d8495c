"""Flags of the Cluster role: where its nodes run."""

from __future__ import annotations

import sys

from absl import flags

from thinwire.ops.run.flags import FlagRule, Topic, choice, integer, number, words
from thinwire.ops.run.settings import Run
from thinwire.ops.types import ConfigurationError

FLAGS = flags.FLAGS

_IS_NAME = FlagRule(lambda text: bool(text.strip()), "must not be empty")

TOPICS = (
    Topic(
        "Cluster: where nodes run",
        (
            choice(
                "launcher",
                None,
                "How a Cluster starts its nodes. Default: ssh where "
                "--hosts_file is given, else local.",
                ("local", "ssh", "ray"),
            ),
            words(
                "hosts_file",
                None,
                "A host a line, fast to slow: [user@]host[:port] [slots=q].",
                rule=_IS_NAME,
            ),
            words(
                "sync_dst_dir",
                None,
                "Copy the code to this folder of every host and run it "
                "there; without it the code must be at the same path everywhere.",
                rule=_IS_NAME,
            ),
            words(
                "interface",
                None,
                "Where a PS listens: the name of an interface of its host, or "
                "an address. Default: the address that the hosts file names.",
                rule=_IS_NAME,
            ),
            words("ssh_options", "", "More options for ssh, such as '-i key -J gateway'."),
            words("remote_python", None, "Python of the hosts. Default: the launcher's path."),
            words(
                "ray_address",
                None,
                "Ray cluster to use, or 'local'. Default: RAY_ADDRESS, else a Ray of this machine.",
            ),
        ),
    ),
    Topic(
        "Cluster: workers that die",
        (
            integer(
                "restart_workers",
                0,
                "Start a worker that dies again, at most so often "
                "within --restart_window_seconds each; 0 never does. Pauses before it grow "
                "from 1 s to 30 s. One that ended well, was refused, interrupted or diverged "
                "is left alone.",
                low=0,
            ),
            number(
                "restart_window_seconds",
                600.0,
                "After so long without a death the restarts of a worker are counted anew.",
                low=1.0,
            ),
        ),
    ),
)
#: What is logged of a worker's end with --restart_workers.
AGAIN = "%s died (code %d); starting it again in %g s"
NOT_AGAIN = (
    "%s ended with code %d and is not started again: it has been as often as --restart_workers "
    "allows within --restart_window_seconds, or another start would not mend it"
)
#: What only a Cluster heeds; nodes do not need it.
NAMES = tuple(option.name for topic in TOPICS for option in topic.options)
#: Flag -> the launchers that heed it.
_HEEDED_BY = {
    "hosts_file": ("ssh",),
    "sync_dst_dir": ("ssh", "ray"),
    "interface": ("ssh",),
    "ssh_options": ("ssh",),
    "remote_python": ("ssh", "ray"),
    "ray_address": ("ray",),
}


def check() -> str:
    """Return the launcher's name.

    Raises:
        ConfigurationError: A flag that this launcher would not heed, or one that it lacks.
    """
    launcher = FLAGS.launcher or ("ssh" if FLAGS.hosts_file else "local")
    for name, heeding in _HEEDED_BY.items():
        if _is_set(name) and launcher not in heeding:
            raise ConfigurationError(
                f"--{name}={FLAGS[name].value} means nothing to --launcher={launcher}; leave it "
                f"out, or choose --launcher={' or '.join(heeding)}."
            )
    if _is_set("restart_window_seconds") and not FLAGS.restart_workers:
        raise ConfigurationError(
            f"--restart_window_seconds={FLAGS.restart_window_seconds:g} without --restart_workers "
            "does nothing; give both, or neither."
        )
    if launcher == "ssh" and not FLAGS.hosts_file:
        raise ConfigurationError("--launcher=ssh needs --hosts_file, with a host a line.")
    return launcher


def refuse_elsewhere(run: Run) -> None:
    """Refuse the launcher's flags on a node that starts no others.

    Raises:
        ConfigurationError: One is set.
    """
    for name in NAMES:
        if _is_set(name):
            raise ConfigurationError(
                f"--{name}={FLAGS[name].value} says how a Cluster starts its nodes, and this is "
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
    """Refuse what cannot be said of shards on other hosts.

    Raises:
        ConfigurationError: --ip_PS, or --port=0.
    """
    if _is_set("ip_PS"):
        raise ConfigurationError(
            f"--ip_PS={FLAGS.ip_PS}: the launcher gives each PS its address; leave this out, and "
            "set --interface where the PS shall listen elsewhere than the hosts file says."
        )
    if FLAGS.port == 0 and not FLAGS.ps_hosts:
        raise ConfigurationError(
            "--port=0: a free port of another host cannot be looked up from here; give the first "
            "of --nb_ps free ports."
        )
