"""The flags of a run as a whole, the same on every node, and the `Run` that they make.

A `Run` (thinwire.runtime.run.settings) is what roles see: nothing after it reads these flags.
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
from thinwire.flags.method import CODEC, GUARDS, METHOD, POLICIES
from thinwire.flags.privacy import PRIVACY
from thinwire.models.registry import NETWORKS
from thinwire.models.tasks import CLASSIFICATION, TASKS, check_choice
from thinwire.ops.aggregation.outliers import Guards
from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.methods.builder import Choices, compose
from thinwire.ops.methods.method import INTERFACES, METHODS, Method
from thinwire.ops.methods.validation import check_guards, check_shards, why_no_overlap
from thinwire.ops.offer import FROM_FLAGS, FROM_WORKER
from thinwire.ops.optimizers.schedule import MOST_UPDATES, parse_schedule
from thinwire.ops.optimizers.server import SCRIPT
from thinwire.ops.privacy import accountant
from thinwire.ops.sharding import placement
from thinwire.ops.sharding.placement import BySpeed
from thinwire.ops.sync.groups import AutoGroups, Groups, parse_groups, parse_groups_file
from thinwire.ops.types import ConfigurationError, Kind
from thinwire.runtime.run.draws_file import read_draws
from thinwire.runtime.run.files import read_bounded
from thinwire.runtime.run.flags import (
    ARE_NUMBERS_OR_NONE,
    FlagRule,
    Topic,
    above_zero,
    advanced,
    choice,
    comma_list,
    integer,
    number,
    switch,
    words,
)
from thinwire.runtime.run.settings import DataChoice, ModelChoice, Run
from thinwire.runtime.run.target import Target, is_target
from thinwire.runtime.telemetry import predictions

FLAGS = flags.FLAGS
#: Roles that deal out the training set; elsewhere the data-sharding file may be missing.
_ROLES_THAT_DRAW = ("PS", "Simulator")
_ROLES_THAT_SPLIT = ("Worker", "Cluster", "Simulator")
#: Roles that write a summary, and the one that starts them; others may lack --advice's file.
_ROLES_THAT_RECORD = ("Supervisor", "Cluster", "Simulator", "Standalone")

#: Roles that begin each time.
_NEVER_RESUMED = ("Simulator", "Advisor")
#: Roles that run where nobody needs an epsilon to be computed.
_ROLES_WITHOUT_ACCOUNT = ("Worker", "Supervisor")

_IS_DEVICE = FlagRule(
    lambda device: re.fullmatch(r"auto|cpu|gpu:\d+", device) is not None,
    "must be auto, cpu or gpu:N",
)
#: Default of --iter_max where the flags name the model; scripts end by themselves.
_ITER_MAX = 100_000
#: Why scripts are not drawn for rounds.
ALL_FIT = "scripts begin and end fit together, which one that is not drawn would have to wait for"
#: Default of --compression_rate where the model is a script's: its few epochs are too short for a
#: hundredth of the entries (docs/guide/examples.md).
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
        integer("nb_ps", 1, "Number of PS shards.", "count", low=1, high=256),
        words("ip_PS", "127.0.0.1", "Host of the PS; on a PS, the address to bind.", "host"),
        integer(
            "port",
            2223,
            "Port of shard 0; shard j has port + j. A local Cluster takes free ports with 0.",
            "port",
            low=0,
            high=65535,
        ),
        comma_list(
            "ps_hosts",
            "",
            "Every shard, fast to slow, in place of --ip_PS and --port.",
            "host:port,...",
            unset="as --ip_PS and --port",
        ),
        words(
            "run_dir",
            None,
            "Folder of everything the run writes; the same command again resumes it.",
            "folder",
            unset="runs/METHOD-DATASET, or runs/METHOD-MODEL with --model",
        ),
        switch("overwrite", "Discard what a used --run_dir holds and start anew."),
        switch(
            "resume",
            "Continue what --run_dir holds although the code or a setting has changed, or the "
            "script has failed; weights and counts stay.",
        ),
        integer(
            "seed", 1, "Seed of weights, data order and codecs.", "number", low=0, high=2**31 - 1
        ),
        number(
            "lease_seconds",
            10.0,
            "Silence after which a worker is out of the run.",
            "seconds",
            low=0.5,
        ),
        number(
            "checkpoint_interval_seconds",
            10.0,
            "Time between two checkpoints.",
            "seconds",
            low=0.1,
        ),
        words(
            "device",
            "auto",
            "auto: the first GPU if there is one; cpu; or gpu:N, the N-th GPU from 0.",
            "auto|cpu|gpu:N",
            rule=_IS_DEVICE,
        ),
        switch("quiet", "Show warnings only; the log file in --run_dir has everything."),
        *advanced(
            words(
                "checkpoint_dir",
                None,
                "Where PS keep their checkpoints, so that another machine can go on from them: a "
                "shared folder, or s3://bucket/folder.",
                "address",
                unset="in --run_dir",
            ),
            integer("keep_checkpoints", 3, "Checkpoints that a PS keeps.", "count", low=1),
            number(
                "reconnect_timeout_seconds",
                60.0,
                "Time to look for the PS before giving up with exit code 3.",
                "seconds",
                low=0.5,
            ),
            choice(
                "placement",
                "hash",
                "Tensors to the least loaded shard, or blocks of layers by the shards' speed.",
                placement.REGISTRY,
            ),
            comma_list(
                "ps_speeds",
                "",
                "Speeds of the shards relative to each other for --placement=speed: 4,2,1.",
                "numbers, one per shard",
                ARE_NUMBERS_OR_NONE,
                unset="equal",
            ),
            choice(
                "kernels",
                "auto",
                "Implementation of the kernels; auto takes numpy on a CPU.",
                ("auto", "tf", "numpy"),
            ),
        ),
    ),
)

_MODEL_AND_DATA = Topic(
    "Model and data",
    (
        choice(
            "model_from",
            FROM_FLAGS,
            "Where a PS has its model from: its own flags, or the first worker that it admits.",
            (FROM_FLAGS, FROM_WORKER),
        ),
        choice(
            "task",
            CLASSIFICATION,
            "What the model is for; other tasks have a network and a data set of their own.",
            TASKS,
        ),
        choice("network", "cnn", "A built-in model.", NETWORKS),
        words(
            "model",
            None,
            "Your own: a .py file with build_model() and load_data().",
            "file",
            unset="--network",
        ),
        choice("dataset", "fashion_mnist_sample", "Training and test examples.", DATASETS),
        words(
            "data_dir",
            None,
            "Folder with the data set's files.",
            "folder",
            unset="the data set's usual places",
        ),
        choice("partition", "iid", "Which worker gets which examples.", PARTITIONS),
        *advanced(
            choice(
                "batch",
                None,
                "Whose a script's batch size is: the whole run's, or each worker's.",
                BATCHES,
                unset="global where all workers step together, else worker",
            ),
            choice(
                "shard",
                "auto",
                "auto: a script's workers share what each gives to fit; off: each brings its own.",
                SHARDS,
            ),
            integer("image_size", 28, "Height and width of an image.", "pixels", low=1),
            integer("image_depth", 1, "Channels of an image.", "count", low=1),
            integer(
                "nb_classes",
                10,
                "Number of classes; of numbers, labels or words of other tasks.",
                "count",
                low=1,
            ),
            choice(
                "scaling",
                None,
                "Scaling of images.",
                SCALINGS,
                unset="the set's channels for cifar10 and imagenet, else standardize",
            ),
            choice(
                "augment",
                None,
                "Augmentation of training images.",
                AUGMENTATIONS,
                unset="crop_flip for cifar10, resized_crop_flip for imagenet, else none",
            ),
            switch(
                "top5",
                "Evaluations also report how often the label is among the best five answers; "
                "always on for imagenet.",
            ),
            words(
                "partition_file",
                None,
                "Positions of each worker's examples in the training set, a line per worker, for "
                "--partition=positions.",
                "file",
                unset="none",
            ),
            words(
                "data_sharding_file",
                None,
                "Start and end fraction per worker, for --partition=file.",
                "file",
                unset="none",
            ),
            number(
                "dirichlet_alpha",
                None,
                "Evenness of --partition=dirichlet; the smaller, the more uneven.",
                "number",
                low=1e-3,
                high=1e6,
                unset="0.5",
            ),
            switch(
                "no_block_shuffle", "--partition=class in the order by label, the same each epoch."
            ),
        ),
    ),
)

_STOP = Topic(
    "When to stop",
    (
        integer(
            "iter_max",
            None,
            "Applied updates.",
            "updates",
            low=1,
            high=MOST_UPDATES,
            unset=f"{_ITER_MAX}, or no limit with --model_from={FROM_WORKER}",
        ),
        number(
            "epochs",
            None,
            "Examples consumed / size of the training set.",
            "epochs",
            rule=_IS_LIMIT,
            unset="no limit",
        ),
        number(
            "max_seconds",
            None,
            "Time of training.",
            "seconds",
            rule=_IS_LIMIT,
            unset="no limit",
        ),
        number(
            "target_accuracy",
            None,
            "Stop when an evaluation reaches it; short for --target='accuracy>=...'.",
            "fraction",
            low=0.0,
            high=1.0,
            unset="none",
        ),
        words(
            "target",
            None,
            "Stop when a metric of the evaluations reaches a bound, in quotes: 'val_mae<=0.3'.",
            "'NAME<=NUMBER' or 'NAME>=NUMBER'",
            rule=_IS_TARGET,
            unset="none",
        ),
    ),
)

TOPICS = (
    _RUN,
    METHOD,
    CODEC,
    POLICIES,
    dgt.TOPIC,
    GUARDS,
    PRIVACY,
    _MODEL_AND_DATA,
    _STOP,
)
#: Topics that matter only where gradients are exchanged.
OF_EXCHANGES = (CODEC, dgt.TOPIC, GUARDS, PRIVACY)


def read_run(given: flags.FlagValues = FLAGS) -> Run:
    """Return the common settings, as the command line has them unless others are given.

    Raises:
        ConfigurationError: Values that exclude each other or name nothing.
    """
    if given.overwrite and given.resume:
        raise ConfigurationError(
            "--overwrite and --resume were both given: one discards what --run_dir holds, and the "
            "other continues it. Leave one out."
        )
    if given.resume and given.type_node in _NEVER_RESUMED:
        raise ConfigurationError(
            f"--type_node={given.type_node} --resume: it is never continued. Leave it out."
        )
    router = given.router or METHODS[given.method]["router"]
    if router == "dgt":
        dgt.fill(given, os.environ)
    _fill_task(given)
    _check_partition(given)
    _check_files(given)
    _check_model_from(given)
    if given.model_from == FROM_WORKER:
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
        "iter_max": _iter_max(given),
        "target": _target(given),
        "data": DataChoice(
            sharding_file=given.data_sharding_file,
            whole_epochs=given.local_epochs > 0,
            **_named_like_fields(given, DataChoice),
        ),
        "top5": _reports_top5(given),
        "transport": dgt.transport(given, router),
        "guards": _guards(given, method),
        "schedule": parse_schedule(given.learning_rate, given.lr_schedule),
        "credentials": security.credentials(given),
    }
    return Run(**settings)


def _fill_task(given: flags.FlagValues) -> None:
    """Make the defaults those of the task and the data set."""
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
            f"--top5 is for --task={CLASSIFICATION}, and this is --task={given.task}; leave it out."
        )
    return False


def _named_like_fields(given: flags.FlagValues, settings: type) -> dict[str, Any]:
    """Return the flags that are named like the fields of a dataclass: a new one needs no line."""
    names = [field.name for field in dataclasses.fields(settings)]
    return {name: given[name].value for name in names if name in given}


def _iter_max(given: flags.FlagValues) -> int | None:
    if given.iter_max is None and given.model_from == FROM_FLAGS:
        return _ITER_MAX
    limit: int | None = given.iter_max
    return limit


def _target(given: flags.FlagValues) -> Target | None:
    """Return the target of --target or --target_accuracy."""
    if given.target is None:
        bound = given.target_accuracy
        return None if bound is None else Target.of_accuracy(bound)
    if given.target_accuracy is not None:
        raise ConfigurationError(
            f"--target={given.target} and --target_accuracy={given.target_accuracy:g}: a run has "
            "one target; leave one out."
        )
    return Target.parse(given.target)


def _run_dir(given: flags.FlagValues) -> pathlib.Path:
    """Return --run_dir; by default a run of one's own model does not meet one of a data set."""
    what = pathlib.Path(given.model).stem if given.model else given.dataset
    words = [given.method, what, *([given.task] if given.task != CLASSIFICATION else [])]
    return pathlib.Path(given.run_dir or f"runs/{'-'.join(words)}")


def _addresses(given: flags.FlagValues) -> tuple[str, ...]:
    addresses = tuple(given.ps_hosts) or tuple(
        f"{given.ip_PS}:{given.port + shard}" for shard in range(given.nb_ps)
    )
    for address in addresses:
        host, colon, port = address.rpartition(":")
        if not host or not colon or not port.isdigit() or int(port) > 65535:
            raise ConfigurationError(
                f"--ps_hosts, or --ip_PS and --port: {address!r} is not host:port with a port "
                "up to 65535."
            )
    if given.nb_ps not in (given["nb_ps"].default, len(addresses)):
        raise ConfigurationError(
            f"--ps_hosts names {len(addresses)} shards, --nb_ps={given.nb_ps}; leave one out."
        )
    return addresses


def _check_partition(given: flags.FlagValues) -> None:
    """Refuse what another partition than the chosen one would heed."""
    path = given.data_sharding_file
    if (path is not None) != (given.partition == "file"):
        raise ConfigurationError(
            f"--data_sharding_file={path} and --partition={given.partition}: expected both the "
            "file and --partition=file, or neither."
        )
    positions = given.partition_file
    if (positions is not None) != (given.partition == "positions"):
        raise ConfigurationError(
            f"--partition_file={positions} and --partition={given.partition}: expected both the "
            "file and --partition=positions, or neither."
        )
    if given.dirichlet_alpha is not None and given.partition != "dirichlet":
        raise ConfigurationError(
            f"--dirichlet_alpha={given.dirichlet_alpha:g} is for --partition=dirichlet, and this "
            f"is --partition={given.partition}; change one."
        )
    if given.partition in BY_CLASS and not TASKS[given.task].has_classes:
        others = "|".join(each for each in PARTITIONS if each not in BY_CLASS)
        raise ConfigurationError(
            f"--partition={given.partition} splits examples by their classes, and those of "
            f"--task={given.task} have none; expected --partition={others}."
        )
    if given.no_block_shuffle and given.partition != "class":
        raise ConfigurationError(
            "--no_block_shuffle is for --partition=class, and this is "
            f"--partition={given.partition}; change one."
        )
    if path is not None and given.type_node in _ROLES_THAT_SPLIT:
        read_fractions(path, given.nb_workers)


def _check_files(given: flags.FlagValues) -> None:
    """Refuse missing files now: a run would miss them late."""
    folder = None if given.data_dir is None else pathlib.Path(given.data_dir)
    if folder is not None and not (folder.is_dir() and any(folder.iterdir())):
        raise ConfigurationError(
            f"--data_dir={given.data_dir} is {'empty' if folder.is_dir() else 'no folder'}; name "
            "the folder that holds the data set's files, or leave it out to use the data set's "
            "usual places."
        )
    if given.model is not None and not pathlib.Path(given.model).is_file():
        raise ConfigurationError(
            f"--model={given.model} is no file; name the .py file with your build_model()."
        )
    if "advice" in given and given.advice and given.type_node in _ROLES_THAT_RECORD:
        predictions.load(pathlib.Path(given.advice))


def _check_model_from(given: flags.FlagValues) -> None:
    """Refuse names of a model where a worker's counts, and rounds that its fit cannot share."""
    if given.model_from == FROM_FLAGS:
        if given.schedule_clock != given["schedule_clock"].default:
            raise ConfigurationError(
                f"--schedule_clock={given.schedule_clock} is for schedules of a script's "
                f"optimizer, and this is --model_from={FROM_FLAGS}, whose schedule is "
                "--lr_schedule. Leave --schedule_clock out."
            )
        return
    for name in ("model", "network"):
        if given[name].present and given[name].value is not None:
            raise ConfigurationError(
                f"--{name}={given[name].value} and --model_from={FROM_WORKER}: the model is that "
                f"of the first worker; leave --{name} out, or take --model_from={FROM_FLAGS}."
            )
    for name in ("fraction", "draws"):
        if given[name].value != given[name].default:
            raise ConfigurationError(
                f"--{name}={given[name].value} and --model_from={FROM_WORKER}: {ALL_FIT}. Leave "
                f"--{name} out, or take --model_from={FROM_FLAGS}."
            )


def _method(given: flags.FlagValues, nb_ps: int) -> Method:
    choices = _named_like_fields(given, Choices) | {
        "overrides": {name: given[name].value for name in INTERFACES},
        "overlap": bool(given.overlap),
        **_groups(given),
        "draws": _draws(given),
        "bound": given.staleness_bound,
        "window": given.staleness_window,
        "eps": given.esync_eps,
        "query": given.esync_query,
        "smoothing": given.esync_smoothing,
        "ps_speeds": tuple(float(speed) for speed in given.ps_speeds),
    }
    method = compose(Choices(**choices))
    if given.model_from == FROM_WORKER:
        method = compose(_with_script_optimizer(Choices(**choices), method.kind, given))
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
    """Return the choices with the script's compiled optimizer where none is given.

    It steps on the PS where gradients travel, and on the workers where changes of weights do.
    """
    if kind is Kind.GRADIENT and choices.overrides["server_optimizer"] is None:
        return dataclasses.replace(
            choices, overrides={**choices.overrides, "server_optimizer": SCRIPT}
        )
    if kind is Kind.DELTA and not given["local_optimizer"].present:
        return dataclasses.replace(choices, local_optimizer=SCRIPT)
    return choices


def _check_collective(given: flags.FlagValues, method: Method, nb_ps: int) -> None:
    """Refuse shards that would idle, and settings of collectives where there is none."""
    check_shards(method, nb_ps)
    for name in ("worker_port", "collective_sync_every"):
        if method.collective == THROUGH_PS and given[name].value != given[name].default:
            raise ConfigurationError(
                f"--{name}={given[name].value} is for workers that sum among themselves, and this "
                f"is --collective={THROUGH_PS}; change one."
            )


def _draws(given: flags.FlagValues) -> tuple[tuple[int, ...], ...] | None:
    """Read the file of --draws where a rule runs; other nodes may not have the file."""
    if given.draws is None:
        return None
    return read_draws(given.draws, given.nb_workers) if given.type_node in _ROLES_THAT_DRAW else ()


def _guards(given: flags.FlagValues, method: Method) -> Guards:
    guards = Guards(**_named_like_fields(given, Guards))
    check_guards(method, guards)
    if guards.active and given.collective != THROUGH_PS:
        raise ConfigurationError(
            f"--collective={given.collective}: the PS sees no updates that it could guard against; "
            "leave out --max_update_norm, --update_norm_factor and --quarantine_after, or take "
            f"--collective={THROUGH_PS}."
        )
    return guards


def _groups(given: flags.FlagValues) -> dict[str, Any]:
    """Return groups, or what forms them, named like fields of Choices."""
    if given.groups is not None and given.groups_file is not None:
        raise ConfigurationError("--groups and --groups_file were both given; leave one out.")
    if given.groups == "auto":
        return {"groups": None, "auto_groups": _auto_groups(given)}
    for name in ("groups_warmup_updates", "regroup_interval_seconds"):
        if given[name].value is not None:
            raise ConfigurationError(
                f"--{name}={given[name].value} is for --groups=auto, and this is "
                f"--groups={given.groups}; change one."
            )
    if given.groups is not None:
        return {"groups": parse_groups(given.groups)}
    return {"groups": None if given.groups_file is None else _groups_of_file(given)}


def _auto_groups(given: flags.FlagValues) -> AutoGroups:
    """Ten updates a worker and a minute, unless given."""
    updates, seconds = given.groups_warmup_updates, given.regroup_interval_seconds
    return AutoGroups(
        10 * given.nb_workers if updates is None else updates, 60.0 if seconds is None else seconds
    )


def _groups_of_file(given: flags.FlagValues) -> Groups:
    try:
        text = read_bounded(given.groups_file).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--groups_file={given.groups_file}: {error}.") from error
    return parse_groups_file(text, given.groups_file)
