"""Registers the flags of all rooms, and reads those of a run as a whole into one ops.run.Run."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

from absl import flags

from data.fractions import read_fractions
from ops import among_workers, grouping
from ops.collectives import THROUGH_PS
from ops.methods import SEAMS, Choices, Method, compose
from ops.options import Option, Rule, Topic
from ops.placement import BySpeed
from ops.run import DataChoice, ModelChoice, Run
from ops.schedule import Schedule, parse_drops
from ops.types import ConfigurationError

FLAGS = flags.FLAGS
#: Roles that deal out the training set; elsewhere the data-sharding file may be missing.
_ROLES_THAT_SPLIT = ("Worker", "Cluster", "Simulator")
_IS_FINITE = Rule(math.isfinite, "must be a finite number")  # a bound lets NaN through


def define(*topics: Topic) -> None:
    """Register the flags of some topics."""
    for topic in topics:
        for option in topic.options:
            _define(topic.title, option)


def _define(topic: str, option: Option) -> None:
    """Register one flag and its rules."""
    common: dict[str, Any] = {"default": option.default, "help": option.text, "module_name": topic}
    bounds = {"lower_bound": option.low, "upper_bound": option.high}
    if option.kind == "switch":
        flags.DEFINE_boolean(option.name, **common)
    elif option.kind == "integer":
        flags.DEFINE_integer(option.name, **common, **bounds)
    elif option.kind == "number":
        flags.DEFINE_float(option.name, **common, **bounds)
        _enforce(option.name, _IS_FINITE)
    elif option.kind == "choice":
        flags.DEFINE_enum(option.name, enum_values=list(option.values), **common)
    elif option.kind == "list":
        flags.DEFINE_list(option.name, **common)
    else:
        flags.DEFINE_string(option.name, **common)
    if option.rule is not None:
        _enforce(option.name, option.rule)


def _enforce(name: str, rule: Rule) -> None:
    flags.register_validator(
        name,
        lambda value: value is None or rule.holds(value),
        message=f"--{name} {rule.sentence}",
    )


def read_run() -> Run:
    """Return the common settings as the command line has them.

    Raises:
        ConfigurationError: Values that exclude each other or name nothing.
    """
    _check_partition()
    _check_files()
    addresses = _addresses()
    settings = _named_like_fields(Run) | {
        "method": _method(len(addresses)),
        "addresses": addresses,
        "run_dir": _run_dir(),
        "model": ModelChoice(path=FLAGS.model, **_named_like_fields(ModelChoice)),
        "data": DataChoice(
            sharding_file=FLAGS.data_sharding_file, **_named_like_fields(DataChoice)
        ),
        "schedule": Schedule(FLAGS.learning_rate, parse_drops(FLAGS.lr_schedule)),
    }
    return Run(**settings)


def _named_like_fields(settings: type) -> dict[str, Any]:
    """Return the flags that are named like the fields of a dataclass: a new one needs no line."""
    names = [field.name for field in dataclasses.fields(settings)]
    return {name: FLAGS[name].value for name in names if name in FLAGS}


def _run_dir() -> pathlib.Path:
    """Return --run_dir; by default a run of one's own model does not meet one of a data set."""
    what = pathlib.Path(FLAGS.model).stem if FLAGS.model else FLAGS.dataset
    return pathlib.Path(FLAGS.run_dir or f"runs/{FLAGS.method}-{what}")


def _addresses() -> tuple[str, ...]:
    addresses = tuple(FLAGS.ps_hosts) or tuple(
        f"{FLAGS.ip_PS}:{FLAGS.port + shard}" for shard in range(FLAGS.nb_ps)
    )
    for address in addresses:
        host, colon, port = address.rpartition(":")
        if not host or not colon or not port.isdigit() or int(port) > 65535:
            raise ConfigurationError(
                f"--ps_hosts, or --ip_PS and --port: {address!r} is not host:port with a port "
                "up to 65535."
            )
    if FLAGS.nb_ps not in (FLAGS["nb_ps"].default, len(addresses)):
        raise ConfigurationError(
            f"--ps_hosts names {len(addresses)} shards, --nb_ps={FLAGS.nb_ps}; leave one out."
        )
    return addresses


def _check_partition() -> None:
    """Refuse what another partition than the chosen one would heed."""
    path = FLAGS.data_sharding_file
    if (path is not None) != (FLAGS.partition == "file"):
        raise ConfigurationError(
            f"--data_sharding_file={path} and --partition={FLAGS.partition}: expected both the "
            "file and --partition=file, or neither."
        )
    if FLAGS.dirichlet_alpha is not None and FLAGS.partition != "dirichlet":
        raise ConfigurationError(
            f"--dirichlet_alpha={FLAGS.dirichlet_alpha:g} is for --partition=dirichlet, and this "
            f"is --partition={FLAGS.partition}; change one."
        )
    if FLAGS.no_block_shuffle and FLAGS.partition != "class":
        raise ConfigurationError(
            "--no_block_shuffle is for --partition=class, and this is "
            f"--partition={FLAGS.partition}; change one."
        )
    if path is not None and FLAGS.type_node in _ROLES_THAT_SPLIT:
        read_fractions(path, FLAGS.nb_workers)


def _check_files() -> None:
    """Look at once for what takes long to be missed."""
    folder = None if FLAGS.data_dir is None else pathlib.Path(FLAGS.data_dir)
    if folder is not None and not (folder.is_dir() and any(folder.iterdir())):
        raise ConfigurationError(
            f"--data_dir={FLAGS.data_dir} is {'empty' if folder.is_dir() else 'no folder'}; name "
            "the folder that holds the data set's files, or leave it out to use the data set's "
            "usual places."
        )
    if FLAGS.model is not None and not pathlib.Path(FLAGS.model).is_file():
        raise ConfigurationError(
            f"--model={FLAGS.model} is no file; name the .py file with your build_model()."
        )


def _method(nb_ps: int) -> Method:
    choices = _named_like_fields(Choices) | {
        "overrides": {seam: FLAGS[seam].value for seam in SEAMS},
        **_groups(),
        "bound": FLAGS.staleness_bound,
        "window": FLAGS.staleness_window,
        "eps": FLAGS.esync_eps,
        "query": FLAGS.esync_query,
        "smoothing": FLAGS.esync_smoothing,
        "ps_speeds": tuple(float(speed) for speed in FLAGS.ps_speeds),
    }
    method = compose(Choices(**choices))
    if isinstance(method.placement, BySpeed):
        method.placement.speeds(nb_ps)
    _check_collective(method, nb_ps)
    return method


def _check_collective(method: Method, nb_ps: int) -> None:
    """Refuse shards that would idle, and settings of collectives where there is none."""
    among_workers.check_shards(method, nb_ps)
    for name in ("worker_port", "collective_sync_every"):
        if method.collective == THROUGH_PS and FLAGS[name].value != FLAGS[name].default:
            raise ConfigurationError(
                f"--{name}={FLAGS[name].value} is for workers that sum among themselves, and this "
                f"is --collective={THROUGH_PS}; change one."
            )


def _groups() -> dict[str, Any]:
    """Return groups, or what forms them, named like fields of Choices."""
    if FLAGS.groups is not None and FLAGS.groups_file is not None:
        raise ConfigurationError("--groups and --groups_file were both given; leave one out.")
    if FLAGS.groups == "auto":
        return {"groups": None, "auto_groups": _auto_groups()}
    for name in ("groups_warmup_updates", "regroup_interval_seconds"):
        if FLAGS[name].value is not None:
            raise ConfigurationError(
                f"--{name}={FLAGS[name].value} is for --groups=auto, and this is "
                f"--groups={FLAGS.groups}; change one."
            )
    if FLAGS.groups is not None:
        return {"groups": grouping.parse_groups(FLAGS.groups)}
    return {"groups": None if FLAGS.groups_file is None else _groups_of_file()}


def _auto_groups() -> grouping.AutoGroups:
    """Ten updates a worker and a minute, if nothing else is said."""
    updates, seconds = FLAGS.groups_warmup_updates, FLAGS.regroup_interval_seconds
    return grouping.AutoGroups(
        10 * FLAGS.nb_workers if updates is None else updates, 60.0 if seconds is None else seconds
    )


def _groups_of_file() -> grouping.Groups:
    try:
        text = pathlib.Path(FLAGS.groups_file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--groups_file={FLAGS.groups_file}: {error}.") from error
    return grouping.parse_groups_file(text, FLAGS.groups_file)
