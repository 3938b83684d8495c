"""Flags of a run as a whole, the same on every node; read into one ops.run.Run."""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Sequence

from absl import flags

import data
import models
from ops import codecs, down_codecs, pacing, routing, sync, weighting
from ops.methods import METHODS, SEAMS, Choices, Method, compose
from ops.run import DataChoice, ModelChoice, Run
from ops.schedule import Schedule, parse_drops
from ops.server_update import OPTIMIZERS
from ops.types import VALUE_DTYPES, ConfigurationError

FLAGS = flags.FLAGS


def define(roles: Sequence[str]) -> None:
    """Register the flags that every role reads; `roles` are the values of --type_node."""
    _define_run_flags("Run", roles)
    _define_method_flags("Method")
    _define_seam_flags("Seams: an explicit value overrides the method's")
    _define_data_flags("Model and data")
    _define_stop_flags("When to stop")


def refuse_non_finite_values() -> None:
    """Let no flag of a number be NaN or infinite; a bound lets NaN through. Call it last."""
    for name in FLAGS:
        if FLAGS[name].flag_type() == "float":
            flags.register_validator(
                name,
                lambda value: value is None or math.isfinite(value),
                message=f"--{name} must be a finite number",
            )


def _define_run_flags(topic: str, roles: Sequence[str]) -> None:
    flags.DEFINE_enum("type_node", "Worker", roles, "What to be.", module_name=topic)
    flags.DEFINE_integer(
        "nb_workers", 4, "Workers of the run.", lower_bound=1, upper_bound=65535, module_name=topic
    )
    flags.DEFINE_integer(
        "nb_ps", 1, "PS shards of the run.", lower_bound=1, upper_bound=256, module_name=topic
    )
    flags.DEFINE_string(
        "ip_PS", "127.0.0.1", "Where the PS is; on a PS the address to bind.", module_name=topic
    )
    flags.DEFINE_integer(
        "port",
        2223,
        "Port of shard 0; shard j has port + j.",
        lower_bound=0,
        upper_bound=65535,
        module_name=topic,
    )
    flags.DEFINE_list(
        "ps_hosts",
        [],
        "host:port of every shard, instead of --ip_PS and --port.",
        module_name=topic,
    )
    flags.DEFINE_string(
        "run_dir",
        None,
        "Folder of everything the run writes; the same command "
        "again resumes. Default: runs/METHOD-DATASET.",
        module_name=topic,
    )
    flags.DEFINE_boolean("overwrite", False, "Start anew in a used --run_dir.", module_name=topic)
    flags.DEFINE_integer(
        "seed",
        1,
        "Of weights, data order and codecs.",
        lower_bound=0,
        upper_bound=2**31 - 1,
        module_name=topic,
    )
    flags.DEFINE_float(
        "lease_seconds",
        10.0,
        "A worker silent for longer is out.",
        lower_bound=0.5,
        module_name=topic,
    )
    flags.DEFINE_float(
        "checkpoint_interval_seconds",
        10.0,
        "Between two checkpoints.",
        lower_bound=0.1,
        module_name=topic,
    )
    flags.DEFINE_integer(
        "keep_checkpoints", 3, "How many a PS keeps.", lower_bound=1, module_name=topic
    )
    flags.DEFINE_float(
        "reconnect_timeout_seconds",
        60.0,
        "How long to look for the PS before giving up with exit code 3.",
        lower_bound=0.5,
        module_name=topic,
    )
    flags.DEFINE_enum(
        "kernels",
        "auto",
        ["auto", "tf", "numpy"],
        "Bodies of the kernels; auto takes numpy on a CPU.",
        module_name=topic,
    )
    flags.DEFINE_string(
        "device",
        "auto",
        "auto: the first GPU if there is one; cpu; or gpu:N, the N-th GPU from 0.",
        module_name=topic,
    )
    flags.register_validator(
        "device",
        lambda device: re.fullmatch(r"auto|cpu|gpu:\d+", device) is not None,
        message="--device must be auto, cpu or gpu:N",
    )
    flags.DEFINE_boolean(
        "quiet",
        False,
        "Show warnings only; the log file in --run_dir has everything.",
        module_name=topic,
    )


def _define_method_flags(topic: str) -> None:
    flags.DEFINE_enum(
        "method", "adacomp", list(METHODS), "A named composition of the seams.", module_name=topic
    )
    flags.DEFINE_float(
        "compression_rate",
        0.01,
        "Fraction of entries KEPT by sparsifying codecs.",
        module_name=topic,
    )
    flags.register_validator(
        "compression_rate",
        lambda rate: rate > 0,
        message="--compression_rate must be above 0; 1 or more is dense",
    )
    flags.DEFINE_enum(
        "value_dtype", "float32", list(VALUE_DTYPES), "Of values sent up.", module_name=topic
    )
    flags.DEFINE_integer("local_steps", 1, "H of --pacer=fixed.", lower_bound=1, module_name=topic)
    flags.DEFINE_string(
        "groups", None, "Groups of --sync=gsp, such as '1,2|3,4'.", module_name=topic
    )
    flags.DEFINE_string("groups_file", None, "The same, one group a line.", module_name=topic)
    flags.DEFINE_integer(
        "staleness_bound",
        None,
        "How far a worker may run ahead of the slowest (ssp: 3 if not given; gsp: none).",
        lower_bound=0,
        module_name=topic,
    )
    flags.DEFINE_integer(
        "staleness_window",
        1024,
        "Updates that per_entry remembers.",
        lower_bound=1,
        module_name=topic,
    )
    flags.DEFINE_enum(
        "beyond_window",
        "count",
        ["count", "reject"],
        "What per_entry does with an older update.",
        module_name=topic,
    )
    flags.DEFINE_float("learning_rate", 0.02, "Initial rate.", module_name=topic)
    flags.register_validator(
        "learning_rate",
        lambda rate: rate > 0,
        message="--learning_rate must be above 0",
    )
    flags.DEFINE_string(
        "lr_schedule",
        "",
        "fraction of the budget:factor, such as 0.6:0.2,0.8:0.2.",
        module_name=topic,
    )
    flags.DEFINE_float(
        "momentum",
        None,
        "Of the server's SGD.",
        lower_bound=0.0,
        upper_bound=0.9999,
        module_name=topic,
    )
    flags.DEFINE_float(
        "weight_decay", 0.0, "Decoupled, on the server.", lower_bound=0.0, module_name=topic
    )
    flags.DEFINE_float(
        "global_lr",
        1.0,
        "Factor on changes of weights (pacer fixed, H > 1).",
        lower_bound=0.0,
        module_name=topic,
    )
    flags.DEFINE_integer("batch_size", 10, "Examples of a mini-batch; on a Supervisor of an "
                         "evaluation batch.", lower_bound=1, module_name=topic)  # fmt: skip


def _define_seam_flags(topic: str) -> None:
    choices = (
        ("pacer", pacing.REGISTRY, "Push now, or one more local step?"),
        ("codec", codecs.REGISTRY, "What of an update is sent."),
        ("down_codec", down_codecs.REGISTRY, "What of the model is sent back."),
        ("router", routing.REGISTRY, "Which class of service carries a block."),
        ("sync", sync.REGISTRY, "When an update is released, and who may go on."),
        ("weighting", weighting.REGISTRY, "What a stale update is worth."),
        ("server_optimizer", OPTIMIZERS, "How a released update becomes weights."),
    )
    for name, registry, text in choices:
        flags.DEFINE_enum(name, None, list(registry), text, module_name=topic)


def _define_data_flags(topic: str) -> None:
    flags.DEFINE_enum(
        "network", "cnn", list(models.NETWORKS), "A built-in model.", module_name=topic
    )
    flags.DEFINE_string(
        "model", None, "Your own: a .py file with build_model() and load_data().", module_name=topic
    )
    flags.DEFINE_integer("image_size", 28, "Height and width.", lower_bound=1, module_name=topic)
    flags.DEFINE_integer("image_depth", 1, "Channels.", lower_bound=1, module_name=topic)
    flags.DEFINE_integer("nb_classes", 10, "Classes.", lower_bound=2, module_name=topic)
    flags.DEFINE_enum(
        "dataset",
        "fashion_mnist_sample",
        list(data.DATASETS),
        "Training and test examples.",
        module_name=topic,
    )
    flags.DEFINE_string("data_dir", None, "Folder with the data set's files.", module_name=topic)
    flags.DEFINE_enum(
        "scaling", "standardize", list(data.SCALINGS), "Of images.", module_name=topic
    )
    flags.DEFINE_enum(
        "partition", "iid", list(data.PARTITIONS), "Who gets which examples.", module_name=topic
    )
    flags.DEFINE_string("data_sharding_file", None, "start and end fraction per worker, for "
                        "--partition=file.", module_name=topic)  # fmt: skip


def _define_stop_flags(topic: str) -> None:
    flags.DEFINE_integer(
        "iter_max",
        100_000,
        "Applied updates.",
        lower_bound=1,
        upper_bound=2**31 - 2,
        module_name=topic,
    )
    flags.DEFINE_float(
        "epochs", None, "Examples consumed / size of the training set.", module_name=topic
    )
    flags.DEFINE_float("max_seconds", None, "Seconds of training.", module_name=topic)
    for name in ("epochs", "max_seconds"):
        flags.register_validator(
            name,
            lambda limit: limit is None or limit > 0,
            message=f"--{name} must be above 0; leave it out for no limit",
        )
    flags.DEFINE_float("target_accuracy", None, "Stop when an evaluation reaches it, 0 to 1.",
                       lower_bound=0.0, upper_bound=1.0, module_name=topic)  # fmt: skip


def read_run() -> Run:
    """Return the common settings as the command line has them.

    Raises:
        ConfigurationError: Values that exclude each other or name nothing.
    """
    method = _method()
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
    if (FLAGS.data_sharding_file is not None) != (FLAGS.partition == "file"):
        raise ConfigurationError("--data_sharding_file and --partition=file go together.")
    _check_files()
    default_dir = f"runs/{FLAGS.method}-{FLAGS.dataset}"
    return Run(
        type_node=FLAGS.type_node,
        method=method,
        nb_workers=FLAGS.nb_workers,
        addresses=addresses,
        seed=FLAGS.seed,
        run_dir=pathlib.Path(FLAGS.run_dir or default_dir),
        overwrite=FLAGS.overwrite,
        model=ModelChoice(
            FLAGS.network, FLAGS.model, FLAGS.image_size, FLAGS.image_depth, FLAGS.nb_classes
        ),
        data=DataChoice(
            FLAGS.dataset, FLAGS.data_dir, FLAGS.scaling, FLAGS.partition, FLAGS.data_sharding_file
        ),
        batch_size=FLAGS.batch_size,
        schedule=Schedule(FLAGS.learning_rate, parse_drops(FLAGS.lr_schedule)),
        iter_max=FLAGS.iter_max,
        epochs=FLAGS.epochs,
        max_seconds=FLAGS.max_seconds,
        target_accuracy=FLAGS.target_accuracy,
        kernels=FLAGS.kernels,
        device=FLAGS.device,
        lease_seconds=FLAGS.lease_seconds,
        checkpoint_interval_seconds=FLAGS.checkpoint_interval_seconds,
        keep_checkpoints=FLAGS.keep_checkpoints,
        reconnect_timeout_seconds=FLAGS.reconnect_timeout_seconds,
    )


def _check_files() -> None:
    """Look at once for what takes long to be missed."""
    if FLAGS.data_dir is not None and not pathlib.Path(FLAGS.data_dir).is_dir():
        raise ConfigurationError(
            f"--data_dir={FLAGS.data_dir} is no folder; name the one that holds the data set's "
            "files, or leave it out to use the data set's usual places."
        )
    if FLAGS.model is not None and not pathlib.Path(FLAGS.model).is_file():
        raise ConfigurationError(
            f"--model={FLAGS.model} is no file; name the .py file with your build_model()."
        )


def _method() -> Method:
    return compose(
        Choices(
            method=FLAGS.method,
            nb_workers=FLAGS.nb_workers,
            overrides={seam: FLAGS[seam].value for seam in SEAMS},
            compression_rate=FLAGS.compression_rate,
            value_dtype=FLAGS.value_dtype,
            local_steps=FLAGS.local_steps,
            groups=_groups(),
            bound=FLAGS.staleness_bound,
            window=FLAGS.staleness_window,
            beyond_window=FLAGS.beyond_window,
            momentum=FLAGS.momentum,
            weight_decay=FLAGS.weight_decay,
            global_lr=FLAGS.global_lr,
        )
    )


def _groups() -> tuple[tuple[int, ...], ...] | None:
    if FLAGS.groups is not None and FLAGS.groups_file is not None:
        raise ConfigurationError("--groups and --groups_file were both given; leave one out.")
    if FLAGS.groups is not None:
        return sync.parse_groups(FLAGS.groups)
    if FLAGS.groups_file is None:
        return None
    try:
        text = pathlib.Path(FLAGS.groups_file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--groups_file={FLAGS.groups_file}: {error}.") from error
    return sync.parse_groups_file(text, FLAGS.groups_file)
