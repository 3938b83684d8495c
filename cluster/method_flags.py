"""The flags of the method: what its policies are, and their hyper-parameters; one line a flag."""

from __future__ import annotations

from ops import codecs, collectives, down_codecs, pacing, routing, sync, weighting
from ops.collectives import THROUGH_PS
from ops.dc_asgd import BACKUPS, DEFAULT_LAMBDAS
from ops.local_update import SLOT_FATES
from ops.methods import METHODS
from ops.options import (
    Topic,
    above_zero,
    choice,
    integer,
    number,
    switch,
    words,
)
from ops.server_update import OPTIMIZERS
from ops.types import VALUE_DTYPES

METHOD = Topic(
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

SEAMS = Topic(
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
