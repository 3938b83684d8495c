"""The flags of a run as a whole, the same on every node: one line a flag."""

from __future__ import annotations

import re

import data
import models
from cluster import codec_flags, dgt_flags, guard_flags, method_flags
from ops import placement
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
    method_flags.METHOD,
    codec_flags.TOPIC,
    method_flags.SEAMS,
    dgt_flags.TOPIC,
    guard_flags.TOPIC,
    _MODEL_AND_DATA,
    _STOP,
)
