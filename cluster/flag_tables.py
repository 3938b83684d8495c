"""The flags of a run as a whole, the same on every node: one line a flag."""

from __future__ import annotations

import re

import data
import models
from cluster import codec_flags, dgt_flags, guard_flags
from ops import codecs, collectives, down_codecs, pacing, placement, routing, sync, weighting
from ops.collectives import THROUGH_PS
from ops.dc_asgd import BACKUPS, DEFAULT_LAMBDAS
from ops.local_update import SLOT_FATES
from ops.methods import METHODS
from ops.options import (
    ARE_NUMBERS_OR_NONE,
    Rule,
    Topic,
    above_zero,
    choice,
    comma_list,
    integer,
    number,
    switch,
    words,
)
from ops.server_update import OPTIMIZERS
from ops.types import VALUE_DTYPES

_IS_DEVICE = Rule(
    lambda device: re.fullmatch(r"auto|cpu|gpu:\d+", device) is not None,
    "must be auto, cpu or gpu:N",
)
_IS_LIMIT = above_zero("leave it out for no limit")

_RUN = Topic(
    "Run",
    (
        integer("nb_workers", 4, "Workers of the run.", low=1, high=65535),
        integer("nb_ps", 1, "PS shards of the run.", low=1, high=256),
        words("ip_PS", "127.0.0.1", "Where the PS is; on a PS the address to bind."),
        integer("port", 2223, "Port of shard 0; shard j has port + j.", low=0, high=65535),
        comma_list(
            "ps_hosts",
            "",
            "host:port of every shard, fast to slow, instead of --ip_PS and --port.",
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
            "Speeds of the shards for --placement=speed, such as 4,2,1; all alike if not given.",
            ARE_NUMBERS_OR_NONE,
        ),
        words(
            "run_dir",
            None,
            "Folder of everything the run writes; the same command again resumes. Default: "
            "runs/METHOD-DATASET, or runs/METHOD-MODEL with --model.",
        ),
        switch("overwrite", "Start anew in a used --run_dir."),
        integer("seed", 1, "Of weights, data order and codecs.", low=0, high=2**31 - 1),
        number("lease_seconds", 10.0, "A worker silent for longer is out.", low=0.5),
        number("checkpoint_interval_seconds", 10.0, "Between two checkpoints.", low=0.1),
        integer("keep_checkpoints", 3, "How many a PS keeps.", low=1),
        number(
            "reconnect_timeout_seconds",
            60.0,
            "How long to look for the PS before giving up with exit code 3.",
            low=0.5,
        ),
        choice(
            "kernels",
            "auto",
            "Bodies of the kernels; auto takes numpy on a CPU.",
            ("auto", "tf", "numpy"),
        ),
        words(
            "device",
            "auto",
            "auto: the first GPU if there is one; cpu; or gpu:N, the N-th GPU from 0.",
            rule=_IS_DEVICE,
        ),
        switch("quiet", "Show warnings only; the log file in --run_dir has everything."),
    ),
)

_METHOD = Topic(
    "Method",
    (
        choice("method", "adacomp", "A named composition of the seams.", METHODS),
        number(
            "compression_rate",
            0.01,
            "Fraction of entries KEPT by sparsifying codecs.",
            rule=above_zero("1 or more is dense"),
        ),
        choice("value_dtype", "float32", "Of values sent up.", VALUE_DTYPES),
        number(
            "down_ratio",
            None,
            "Fraction of entries KEPT by --down_codec=sparse and auto; --compression_rate if not "
            "given.",
            rule=above_zero("1 or more is all"),
        ),
        choice("down_value_dtype", "float32", "Of values that these send down.", VALUE_DTYPES),
        integer(
            "resync_every", 0, "Every n-th of their replies is the whole model; 0: none.", low=0
        ),
        integer(
            "max_staleness",
            0,
            "With these a worker whose model is more updates old gets the whole one; 0: no limit.",
            low=0,
        ),
        integer("local_steps", 1, "H of --pacer=fixed.", low=1),
        choice(
            "collective",
            THROUGH_PS,
            "Who sums a round of bsp or esync: the PS, or the workers among themselves.",
            (THROUGH_PS, *collectives.REGISTRY),
        ),
        switch(
            "overlap",
            "Compute the next gradient while an exchange is under way: one step staler.",
        ),
        words("esync_eps", "auto", "Safety margin of --pacer=esync in seconds, or auto."),
        choice(
            "esync_query",
            "blocking",
            "Wait for the state server, or train on meanwhile.",
            ("blocking", "delayed"),
        ),
        words("esync_smoothing", "ema:0.5", "Of step times: ema:A, max:M, or none."),
        integer("max_local_steps", 0, "Of a round of --pacer=esync; 0 is no limit.", low=0),
        words("groups", None, "Groups of --sync=gsp, such as '1,2|3,4'; auto: by measured speeds."),
        words("groups_file", None, "The same, one group a line."),
        integer(
            "groups_warmup_updates",
            None,
            "Updates before --groups=auto first forms groups; ten a worker if not given.",
            low=1,
        ),
        number(
            "regroup_interval_seconds",
            None,
            "Least time between two changes of --groups=auto (60 if not given); 0: form them once.",
            low=0.0,
        ),
        integer(
            "staleness_bound",
            None,
            "How far a worker may run ahead of the slowest (ssp: 3 if not given; gsp: none).",
            low=0,
        ),
        integer("staleness_window", 1024, "Updates that per_entry remembers.", low=1),
        choice(
            "beyond_window",
            "count",
            "What per_entry does with an older update.",
            ("count", "reject"),
        ),
        number(
            "dcasgd_lambda",
            None,
            "Strength of --weighting=dc_asgd; if not given 0.04, or 2 if adaptive.",
            low=0.0,
        ),
        choice(
            "dcasgd_variant",
            "constant",
            "The same strength for every entry, or by its running mean square.",
            DEFAULT_LAMBDAS,
        ),
        number("dcasgd_decay", None, "Of that mean; 0.95 if not given.", low=0.0, high=0.9999),
        choice(
            "dcasgd_backup",
            "per_worker",
            "Compensate from what the worker was handed, or from before the latest step.",
            BACKUPS,
        ),
        number("learning_rate", 0.02, "Initial rate.", rule=above_zero()),
        words("lr_schedule", "", "fraction of the budget:factor, such as 0.6:0.2,0.8:0.2."),
        number("momentum", None, "Of the server's SGD.", low=0.0, high=0.9999),
        number("weight_decay", 0.0, "Decoupled, on the server.", low=0.0),
        number(
            "global_lr",
            1.0,
            "Factor on changes of weights (pacer esync; fixed with H > 1; codecs dgs, dgc, gd).",
            low=0.0,
        ),
        choice("local_optimizer", "sgd", "Of a worker's local steps.", OPTIMIZERS),
        number(
            "local_momentum",
            None,
            "Of local steps with SGD; 0.9 if not given and --local_optimizer=momentum.",
            low=0.0,
            high=0.9999,
        ),
        choice(
            "local_opt_state",
            "keep",
            "What an exchange does to the local optimizer's slots.",
            SLOT_FATES,
        ),
        number(
            "local_lr",
            None,
            "Initial rate of local steps, which --lr_schedule scales too; --learning_rate if not "
            "given.",
            rule=above_zero(),
        ),
        switch(
            "bn_sync",
            "Average BatchNorm's moving statistics over the workers.",
            default=True,
        ),
        integer(
            "batch_size",
            10,
            "Examples of a mini-batch; on a Supervisor of an evaluation batch.",
            low=1,
        ),
    ),
)

_SEAMS = Topic(
    "Seams: an explicit value overrides the method's",
    (
        choice("pacer", None, "Push now, or one more local step?", pacing.REGISTRY),
        choice("codec", None, "What of an update is sent.", codecs.REGISTRY),
        choice("down_codec", None, "What of the model is sent back.", down_codecs.REGISTRY),
        choice("router", None, "Which class of service carries a block.", routing.REGISTRY),
        choice("sync", None, "When an update is released, and who may go on.", sync.REGISTRY),
        choice("weighting", None, "What a stale update is worth.", weighting.REGISTRY),
        choice("server_optimizer", None, "How a released update becomes weights.", OPTIMIZERS),
    ),
)

_MODEL_AND_DATA = Topic(
    "Model and data",
    (
        choice("network", "cnn", "A built-in model.", models.NETWORKS),
        words("model", None, "Your own: a .py file with build_model() and load_data()."),
        integer("image_size", 28, "Height and width.", low=1),
        integer("image_depth", 1, "Channels.", low=1),
        integer("nb_classes", 10, "Classes.", low=2),
        choice("dataset", "fashion_mnist_sample", "Training and test examples.", data.DATASETS),
        words("data_dir", None, "Folder with the data set's files."),
        choice(
            "scaling",
            None,
            "Of images; of cifar10 and imagenet by the set's channels if not given, else "
            "standardize.",
            data.SCALINGS,
        ),
        choice(
            "augment",
            None,
            "Of training images; of cifar10 crop_flip, of imagenet resized_crop_flip if not "
            "given, else none.",
            data.AUGMENTATIONS,
        ),
        choice("input_pipeline", "tfdata", "Who decodes images of imagenet.", data.INPUT_PIPELINES),
        switch(
            "top5",
            "Evaluations also tell how often the label is among the best five answers; always on "
            "for imagenet.",
        ),
        choice("partition", "iid", "Who gets which examples.", data.PARTITIONS),
        words(
            "data_sharding_file", None, "start and end fraction per worker, for --partition=file."
        ),
        number(
            "dirichlet_alpha",
            None,
            "Of --partition=dirichlet, 0.5 if not given; the smaller, the more uneven.",
            low=1e-3,
            high=1e6,
        ),
        switch("no_block_shuffle", "--partition=class in the order by label, the same each epoch."),
    ),
)

_STOP = Topic(
    "When to stop",
    (
        integer("iter_max", 100_000, "Applied updates.", low=1, high=2**31 - 2),
        number("epochs", None, "Examples consumed / size of the training set.", rule=_IS_LIMIT),
        number("max_seconds", None, "Seconds of training.", rule=_IS_LIMIT),
        number(
            "target_accuracy",
            None,
            "Stop when an evaluation reaches it, 0 to 1.",
            low=0.0,
            high=1.0,
        ),
    ),
)

TOPICS = (
    _RUN,
    _METHOD,
    codec_flags.TOPIC,
    _SEAMS,
    dgt_flags.TOPIC,
    guard_flags.TOPIC,
    _MODEL_AND_DATA,
    _STOP,
)
