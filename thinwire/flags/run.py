"""Flags of a training run as a whole, equal on every node; builds a `Run` from the flags.

The roles' main functions receive a `Run` (thinwire.runtime.run.settings) and do not read the flags
of the module `run` themselves.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from typing import Any

from absl import flags

from thinwire.data.choices import (
    AUGMENTATIONS,
    BATCHES,
    BY_CLASS,
    DATASETS,
    PARTITIONS,
    SCALINGS,
    SHARDS,
)
from thinwire.data.defaults import MODELS, check_augmentation, reports_top5
from thinwire.data.fractions import read_fractions
from thinwire.flags import dgt, security
from thinwire.flags.method import GUARDS, OF_METHODS, PRIVACY, placement
from thinwire.models.registry import NETWORKS
from thinwire.models.tasks import CLASSIFICATION, TASKS, check_choice
from thinwire.ops.aggregation.outliers import Guards
from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.methods.builder import Choices, compose, flags_of_policies
from thinwire.ops.methods.method import INTERFACES, METHODS, Method
from thinwire.ops.methods.settings import named
from thinwire.ops.methods.validation import check_guards, check_shards, why_no_overlap
from thinwire.ops.offer import FROM_FLAGS, FROM_WORKER
from thinwire.ops.optimizers.schedule import MOST_UPDATES, parse_schedule
from thinwire.ops.optimizers.server import SCRIPT
from thinwire.ops.options import (
    FlagRule,
    Topic,
    above_zero,
    advanced,
    choice,
    comma_list,
    file,
    integer,
    number,
    switch,
    words,
)
from thinwire.ops.policy import configured
from thinwire.ops.privacy import accountant
from thinwire.ops.sharding.placement import BySpeed
from thinwire.ops.sync.groups import AutoGroups, parse_groups, parse_groups_file
from thinwire.ops.types import ConfigurationError, Kind
from thinwire.runtime.run import own_policies
from thinwire.runtime.run.files import read_text
from thinwire.runtime.run.settings import DataChoice, ModelChoice, Run
from thinwire.runtime.run.sync_files import read_draws
from thinwire.runtime.run.target import Target, is_target

FLAGS = flags.FLAGS
#: Roles that run the synchronization rule and therefore read the file of --draws. Hosts of other
#: roles may lack the file.
_ROLES_THAT_DRAW = ("PS", "Simulator")
#: Roles that split the training set and check the file of --data_sharding_file. Hosts of other
#: roles may lack the file.
_ROLES_THAT_SPLIT = ("Worker", "Cluster", "Simulator")
#: Roles that write summary.json, or start the role that writes it, and therefore read the file of
#: --advice. Hosts of other roles may lack the file.
_ROLES_THAT_RECORD = ("Supervisor", "Cluster", "Simulator", "Standalone")

#: Roles that never resume an earlier run.
_NEVER_RESUMED = ("Simulator", "Advisor")
#: Roles that compute no epsilon of differential privacy and so do not need the package
#: dp-accounting.
_ROLES_WITHOUT_ACCOUNT = ("Worker", "Supervisor")

_IS_DEVICE = FlagRule(
    lambda device: re.fullmatch(r"auto|cpu|gpu:\d+", device) is not None,
    "must be auto, cpu or gpu:N",
)
#: Default of --iter_max if the flags name the model. A script's run has no default: it ends with
#: its fit.
_ITER_MAX = 100_000
#: Text of error messages with the reason why scripts cannot use --fraction and --draws.
ALL_FIT = "all workers of a script start and end fit together, so none may skip a round"
#: Default of --compression_rate for scripts, as a fraction of the gradient's entries: a script's
#: few epochs are too short to converge with 1 % of the entries (docs/guide/examples.md).
SCRIPT_COMPRESSION_RATE = 0.1
_IS_TARGET = FlagRule(
    is_target,
    "must be the name of a metric, <= or >=, and a number, in quotes because < and > are the "
    "shell's: --target='val_mae<=0.3'",
)
_IS_LIMIT = above_zero("leave it out for no limit")

_RUN = Topic(
    "Run",
    (
        integer("nb_workers", 4, "Number of workers.", "count", low=1, high=65535),
        integer("nb_ps", 1, "Number of PS (parameter server) shards.", "count", low=1, high=256),
        words(
            "ip_PS",
            "127.0.0.1",
            "Host of the PS; on a PS, the address on which it listens.",
            "host",
        ),
        integer(
            "port",
            2223,
            "Port of shard 0; shard j listens on port + j; 0: a local Cluster chooses free ports.",
            "port",
            low=0,
            high=65535,
        ),
        comma_list(
            "ps_hosts",
            "",
            "Addresses of all PS shards, from fast to slow; replaces --ip_PS and --port.",
            "host:port,...",
            unset="the addresses from --ip_PS and --port",
        ),
        words(
            "run_dir",
            None,
            "Folder of all files that the run writes; the same command and folder resume the run.",
            "folder",
            unset="runs/METHOD-DATASET, or runs/METHOD-MODEL with --model",
        ),
        switch("overwrite", "Discard the contents of an existing --run_dir and start a new run."),
        switch(
            "resume",
            "Continue the run in --run_dir although the code or a setting has changed, or the "
            "script has failed; the run keeps its weights and counts.",
        ),
        integer(
            "seed",
            1,
            "Seed of the initial weights, of the order of training examples and of random codecs.",
            "number",
            low=0,
            high=2**31 - 1,
        ),
        number(
            "lease_seconds",
            10.0,
            "Time after which the PS expels a worker that has sent no message.",
            "seconds",
            low=0.5,
        ),
        number(
            "checkpoint_interval_seconds",
            10.0,
            "Time between two checkpoints that a PS writes.",
            "seconds",
            low=0.1,
        ),
        words(
            "device",
            "auto",
            "Device for computations: auto, the first GPU if there is one, else the CPU; cpu; or "
            "gpu:N, the GPU with number N, from 0.",
            "auto|cpu|gpu:N",
            rule=_IS_DEVICE,
        ),
        switch(
            "quiet", "Print only warnings and errors; the log file in --run_dir has all messages."
        ),
        *advanced(
            words(
                "checkpoint_dir",
                None,
                "Storage of the PS checkpoints, so that a PS on another machine can resume: a "
                "shared folder, or s3://bucket/folder.",
                "address",
                unset="in --run_dir",
            ),
            integer(
                "keep_checkpoints",
                3,
                "Number of newest checkpoints that a PS keeps; older ones are deleted.",
                "count",
                low=1,
            ),
            number(
                "reconnect_timeout_seconds",
                60.0,
                "Time for which a node tries to reach the PS before it ends with exit code 3.",
                "seconds",
                low=0.5,
            ),
            *placement(),
            choice(
                "kernels",
                "auto",
                "Library of array operations in codecs and updates; auto chooses numpy on a CPU.",
                ("auto", "tf", "jax", "torch", "numpy"),
            ),
        ),
    ),
)

MODEL_AND_DATA = Topic(
    "Model and data",
    (
        choice(
            "model_from",
            FROM_FLAGS,
            "Source from which a PS takes its model: flags, the flags of the PS; worker, the "
            "first worker that registers.",
            (FROM_FLAGS, FROM_WORKER),
        ),
        choice(
            "task",
            CLASSIFICATION,
            "Task of the model, such as classification; each has its own networks and data sets.",
            TASKS,
        ),
        choice("network", "cnn", "Name of a built-in model.", NETWORKS),
        file(
            "model",
            "Python file of a user-defined model, with build_model() and optionally load_data(); "
            "replaces --network.",
            unset="--network",
        ),
        choice(
            "dataset",
            "fashion_mnist_sample",
            "Name of the data set with training and test examples.",
            DATASETS,
        ),
        words(
            "data_dir",
            None,
            "Folder with the data set's files.",
            "folder",
            unset="the data set's usual places",
        ),
        choice("partition", "iid", "Rule to divide training data among the workers.", PARTITIONS),
        *advanced(
            choice(
                "batch",
                None,
                "Meaning of the batch size in a script: the total over all workers (global), or "
                "the size on each worker (worker).",
                BATCHES,
                unset="global where all workers step together, else worker",
            ),
            choice(
                "shard",
                "auto",
                "Division of the data that a script passes to fit: auto, Thinwire divides the "
                "data among the workers; off, each worker trains on its own data.",
                SHARDS,
            ),
            integer("image_size", 28, "Height and width of an input image.", "pixels", low=1),
            integer("image_depth", 1, "Number of channels of an input image.", "count", low=1),
            integer(
                "nb_classes",
                10,
                "Number of classes in the data set; for other tasks, of outputs, labels or words.",
                "count",
                low=1,
            ),
            choice(
                "scaling",
                None,
                "Scaling of the pixel values of images.",
                SCALINGS,
                unset="by the data set's channels for cifar10 and imagenet, else standardize",
            ),
            choice(
                "augment",
                None,
                "Random augmentation of training images.",
                AUGMENTATIONS,
                unset="crop_flip for cifar10, resized_crop_flip for imagenet, else none",
            ),
            switch(
                "top5",
                "Report in evaluations how often the label is among the five best predictions; "
                "always on for imagenet.",
            ),
            file(
                "partition_file",
                "File for --partition=positions: positions of each worker's examples in the "
                "training set, with one line per worker.",
            ),
            file(
                "data_sharding_file",
                "File for --partition=file: start and end of each worker's part of the training "
                "set, as fractions, with one line per worker.",
            ),
            number(
                "dirichlet_alpha",
                None,
                "Concentration parameter of --partition=dirichlet; a smaller value makes the "
                "workers' classes more uneven.",
                "number",
                low=1e-3,
                high=1e6,
                unset="0.5",
            ),
            switch(
                "no_block_shuffle",
                "Keep training examples of --partition=class sorted by label in every epoch.",
            ),
        ),
    ),
)

STOP = Topic(
    "When to stop",
    (
        integer(
            "iter_max",
            None,
            "Number of applied updates after which the run stops.",
            "updates",
            low=1,
            high=MOST_UPDATES,
            unset=f"{_ITER_MAX}, or no limit with --model_from={FROM_WORKER}",
        ),
        number(
            "epochs",
            None,
            "Number of epochs (consumed examples / size of the training set) after which the run "
            "stops.",
            "epochs",
            rule=_IS_LIMIT,
            unset="no limit",
        ),
        number(
            "max_seconds",
            None,
            "Training time after which the run stops.",
            "seconds",
            rule=_IS_LIMIT,
            unset="no limit",
        ),
        number(
            "target_accuracy",
            None,
            "Test accuracy at which the run stops; short for --target='accuracy>=...'.",
            "fraction",
            low=0.0,
            high=1.0,
            unset="none",
        ),
        words(
            "target",
            None,
            "Bound of an evaluation metric at which the run stops, in quotes: 'val_mae<=0.3'.",
            "'NAME<=NUMBER' or 'NAME>=NUMBER'",
            rule=_IS_TARGET,
            unset="none",
        ),
    ),
)

TOPICS = (
    _RUN,
    *OF_METHODS,
    GUARDS,
    PRIVACY,
    MODEL_AND_DATA,
    STOP,
)
#: Topics of flags that have an effect only on nodes that exchange gradients.
OF_EXCHANGES = (*OF_METHODS[1:], GUARDS, PRIVACY)


def read_run(given: flags.FlagValues = FLAGS) -> Run:
    """Return a run's settings from flags, by default from the flags of the command line.

    Raises:
        ConfigurationError: Flags contradict each other, or a name or file that a flag gives does
            not exist.
    """
    if given.overwrite and given.resume:
        raise ConfigurationError(
            "--overwrite and --resume were both given: --overwrite discards the run in --run_dir, "
            "and --resume continues it. Leave one of the two flags out."
        )
    if given.resume and given.type_node in _NEVER_RESUMED:
        raise ConfigurationError(
            f"--type_node={given.type_node} --resume: a {given.type_node} cannot continue an "
            "earlier run. Leave --resume out."
        )
    router = given.router or METHODS[given.method]["router"]
    if dgt.is_dgt(router):
        dgt.fill(given, os.environ)
    _fill_task(given)
    _check_partition(given)
    _check_files(given)
    _check_model_from(given)
    is_offered = given.model_from == FROM_WORKER
    if is_offered:
        given.set_default("compression_rate", SCRIPT_COMPRESSION_RATE)
    if given.model is None:
        check_choice(given.task, given.network, given.dataset, given.nb_classes)
        check_augmentation(given.dataset, given.augment)
    addresses = _addresses(given)
    method = _method(given, len(addresses))
    settings = _named_like_fields(given, Run) | {
        "method": method,
        "addresses": addresses,
        "run_dir": _run_dir(given),
        "model": ModelChoice(path=given.model, **_named_like_fields(given, ModelChoice)),
        "iter_max": _ITER_MAX if given.iter_max is None and not is_offered else given.iter_max,
        "target": _target(given),
        "data": DataChoice(
            sharding_file=given.data_sharding_file,
            whole_epochs=given.local_epochs > 0,
            **_named_like_fields(given, DataChoice),
        ),
        "top5": _reports_top5(given),
        "transport": dgt.transport(given, router),
        "guards": _guards(given, method),
        # The file was loaded before the flags were registered
        "policy": None if given.policy is None else own_policies.load(given.policy),
        "schedule": parse_schedule(given.learning_rate, given.lr_schedule),
        "credentials": security.credentials(given),
    }
    return Run(**settings)


def _fill_task(given: flags.FlagValues) -> None:
    """Set the defaults of --dataset, --network and --nb_classes by the task and the data set."""
    task = TASKS[given.task]
    given.set_default("dataset", task.datasets[0])
    network, nb_classes = MODELS.get(given.dataset, (task.networks[0], task.nb_classes))
    given.set_default("network", network)
    given.set_default("nb_classes", nb_classes)


def _reports_top5(given: flags.FlagValues) -> bool:
    if "top5" in TASKS[given.task].extras:
        nb_classes = None if given.model else given.nb_classes
        return reports_top5(given.top5, given.dataset, nb_classes)
    if given.top5:
        raise ConfigurationError(
            f"--top5 is for --task={CLASSIFICATION}, but this run has --task={given.task}; leave "
            "--top5 out."
        )
    return False


def _named_like_fields(given: flags.FlagValues, settings: type) -> dict[str, Any]:
    """Return name -> value for the flags whose names are fields of a dataclass."""
    names = [field.name for field in dataclasses.fields(settings)]
    return {name: given[name].value for name in names if name in given}


def _target(given: flags.FlagValues) -> Target | None:
    """Return the target of the metric from --target or --target_accuracy; None without them."""
    if given.target is None:
        bound = given.target_accuracy
        return None if bound is None else Target.of_accuracy(bound)
    if given.target_accuracy is not None:
        raise ConfigurationError(
            f"--target={given.target} and --target_accuracy={given.target_accuracy:g}: a run has "
            "only one target; leave one of the two flags out."
        )
    return Target.parse(given.target)


def _run_dir(given: flags.FlagValues) -> pathlib.Path:
    """Return --run_dir; its default is named after the method and the model or data set."""
    subject = pathlib.Path(given.model).stem if given.model else given.dataset
    words = [given.method, subject, *([given.task] if given.task != CLASSIFICATION else [])]
    return pathlib.Path(given.run_dir or f"runs/{'-'.join(words)}")


def _addresses(given: flags.FlagValues) -> tuple[str, ...]:
    addresses = tuple(given.ps_hosts) or tuple(
        f"{given.ip_PS}:{given.port + shard}" for shard in range(given.nb_ps)
    )
    for address in addresses:
        host, colon, port = address.rpartition(":")
        if not host or not colon or not port.isdigit() or int(port) > 65535:
            raise ConfigurationError(
                f"--ps_hosts, or --ip_PS and --port: the PS address {address!r} is not host:port "
                "with a port up to 65535."
            )
    if given.nb_ps not in (given["nb_ps"].default, len(addresses)):
        raise ConfigurationError(
            f"--ps_hosts names {len(addresses)} shards, --nb_ps={given.nb_ps}; leave one flag out."
        )
    return addresses


def _check_partition(given: flags.FlagValues) -> None:
    """Reject flags that have no effect with the chosen --partition of the training set."""
    for flag, partition in (("data_sharding_file", "file"), ("partition_file", "positions")):
        path = given[flag].value
        if (path is not None) != (given.partition == partition):
            raise ConfigurationError(
                f"--{flag}={path} and --partition={given.partition}: expected both the file and "
                f"--partition={partition}, or neither."
            )
    if given.dirichlet_alpha is not None and given.partition != "dirichlet":
        raise ConfigurationError(
            f"--dirichlet_alpha={given.dirichlet_alpha:g} is for --partition=dirichlet, but this "
            f"run has --partition={given.partition}; change one of the two flags."
        )
    if given.partition in BY_CLASS and not TASKS[given.task].has_classes:
        expected = "|".join(name for name in PARTITIONS if name not in BY_CLASS)
        raise ConfigurationError(
            f"--partition={given.partition} splits examples by their classes, but the examples of "
            f"--task={given.task} have no classes; expected --partition={expected}."
        )
    if given.no_block_shuffle and given.partition != "class":
        raise ConfigurationError(
            "--no_block_shuffle is for --partition=class, but this run has "
            f"--partition={given.partition}; change one of the two flags."
        )
    if given.partition == "file" and given.type_node in _ROLES_THAT_SPLIT:
        read_fractions(given.data_sharding_file, given.nb_workers)


def _check_files(given: flags.FlagValues) -> None:
    """Reject flags that name a missing file, because the run would fail after its start."""
    folder = None if given.data_dir is None else pathlib.Path(given.data_dir)
    if folder is not None and not (folder.is_dir() and any(folder.iterdir())):
        raise ConfigurationError(
            f"--data_dir={given.data_dir} is {'empty' if folder.is_dir() else 'no folder'}; give "
            "the folder that holds the data set's files, or leave --data_dir out to use the data "
            "set's usual places."
        )
    if given.model is not None and not pathlib.Path(given.model).is_file():
        raise ConfigurationError(
            f"--model={given.model} is no file; expected a .py file that defines build_model()."
        )
    if "advice" in given and given.advice and given.type_node in _ROLES_THAT_RECORD:
        from thinwire.runtime.telemetry import predictions  # keeps --help fast

        predictions.load(pathlib.Path(given.advice))


def _check_model_from(given: flags.FlagValues) -> None:
    """If --model_from=worker, reject flags of a model and of rounds with some of the workers."""
    if given.model_from == FROM_FLAGS:
        if given.schedule_clock != given["schedule_clock"].default:
            raise ConfigurationError(
                f"--schedule_clock={given.schedule_clock} is for the schedule of a script's "
                f"optimizer, but with --model_from={FROM_FLAGS} the schedule is --lr_schedule. "
                "Leave --schedule_clock out."
            )
        return
    for name in ("model", "network"):
        if given[name].present and given[name].value is not None:
            raise ConfigurationError(
                f"--{name}={given[name].value} and --model_from={FROM_WORKER}: the first worker's "
                f"script defines the model; leave --{name} out, or take --model_from={FROM_FLAGS}."
            )
    for name in ("fraction", "draws"):
        if given[name].value != given[name].default:
            raise ConfigurationError(
                f"--{name}={given[name].value} and --model_from={FROM_WORKER}: {ALL_FIT}. Leave "
                f"--{name} out, or take --model_from={FROM_FLAGS}."
            )


def _method(given: flags.FlagValues, nb_ps: int) -> Method:
    values = {name: given[name].value for name in (*flags_of_policies(), *named(Choices))}
    values |= _groups(given) | {
        "draws": _draws(given),
        "ps_speeds": tuple(float(speed) for speed in given.ps_speeds) or None,
        "seed": given.seed,
    }
    overrides = {name: given[name].value for name in INTERFACES}
    choices = Choices.of(given.method, given.nb_workers, overrides, **values)
    method = compose(choices)
    if given.model_from == FROM_WORKER:
        method = compose(_with_script_optimizer(choices, method.kind, given))
        is_free = method.steps_on_workers and why_no_overlap(method) is None
        if given.overlap is None and is_free:
            method = dataclasses.replace(method, overlap=True)
    if isinstance(method.placement, BySpeed):
        method.placement.speeds(nb_ps)
    _check_collective(given, method, nb_ps)
    if method.privacy.adds_noise and given.type_node not in _ROLES_WITHOUT_ACCOUNT:
        accountant.check_installed()
    return method


def _with_script_optimizer(choices: Choices, kind: Kind, given: flags.FlagValues) -> Choices:
    """Return the training method's settings with the script's optimizer, unless flags choose one.

    The optimizer that the script compiled runs on the PS if workers push gradients, and on the
    workers if workers push changes of weights.
    """
    if kind is Kind.GRADIENT and choices.overrides["server_optimizer"] is None:
        return dataclasses.replace(
            choices, overrides={**choices.overrides, "server_optimizer": SCRIPT}
        )
    if kind is Kind.DELTA and not given["local_optimizer"].present:
        return dataclasses.replace(choices, values={**choices.values, "local_optimizer": SCRIPT})
    return choices


def _check_collective(given: flags.FlagValues, method: Method, nb_ps: int) -> None:
    """Reject several PS shards in an all-reduce run, and all-reduce flags in a run with a PS."""
    check_shards(method, nb_ps)
    for name in ("worker_port", "collective_sync_every"):
        if method.collective == THROUGH_PS and given[name].value != given[name].default:
            raise ConfigurationError(
                f"--{name}={given[name].value} is for an all-reduce among the workers, but this "
                f"run has --collective={THROUGH_PS}; change one of the two flags."
            )


def _draws(given: flags.FlagValues) -> tuple[tuple[int, ...], ...] | None:
    """Return each training round's workers from --draws; None without --draws, () if not needed."""
    if given.draws is None:
        return None
    return read_draws(given.draws, given.nb_workers) if given.type_node in _ROLES_THAT_DRAW else ()


def _guards(given: flags.FlagValues, method: Method) -> Guards:
    guards = Guards(**_named_like_fields(given, Guards))
    check_guards(method, guards)
    if guards.active and given.collective != THROUGH_PS:
        raise ConfigurationError(
            f"--collective={given.collective}: with an all-reduce among the workers, the PS "
            "receives no updates that it could check; leave out --max_update_norm, "
            f"--update_norm_factor and --quarantine_after, or take --collective={THROUGH_PS}."
        )
    return guards


def _groups(given: flags.FlagValues) -> dict[str, Any]:
    """Return the settings of worker groups (fixed or automatic) as fields of `Choices`."""
    if given.groups is not None and given.groups_file is not None:
        raise ConfigurationError("--groups and --groups_file were both given; leave one flag out.")
    if given.groups == "auto":
        values = {"regroup_interval_seconds": given.regroup_interval_seconds}
        # By default, the warm-up before the first automatic grouping is 10 updates per worker.
        updates = given.groups_warmup_updates or 10 * given.nb_workers
        return {"auto_groups": configured(AutoGroups, values, groups_warmup_updates=updates)}
    for name in ("groups_warmup_updates", "regroup_interval_seconds"):
        if given[name].value is not None:
            raise ConfigurationError(
                f"--{name}={given[name].value} is for --groups=auto, but this run has "
                f"--groups={given.groups}; change one of the two flags."
            )
    if given.groups is not None:
        return {"groups": parse_groups(given.groups)}
    if given.groups_file is None:
        return {"groups": None}
    return {
        "groups": parse_groups_file(read_text("groups_file", given.groups_file), given.groups_file)
    }
