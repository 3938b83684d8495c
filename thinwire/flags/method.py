"""The flags of the method: what its policies are, and their hyper-parameters; one line a flag.

The flags of what a worker sends: one line a flag.

The flags of guards against faulty devices: one line a flag.
"""

from __future__ import annotations

from thinwire.ops import collectives
from thinwire.ops.aggregation.base import AGGREGATES, Mean
from thinwire.ops.aggregation.outliers import Guards
from thinwire.ops.codecs import top_k, wrappers
from thinwire.ops.codecs.registry import CODECS, RATIO_SCHEDULES
from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.downlink.registry import DOWN_CODECS
from thinwire.ops.methods.method import METHODS
from thinwire.ops.optimizers.local import SLOT_FATES
from thinwire.ops.optimizers.server import OPTIMIZERS
from thinwire.ops.pacing import pacers
from thinwire.ops.routing.registry import ROUTERS
from thinwire.ops.run.flags import (
    FlagRule,
    Topic,
    above_zero,
    choice,
    integer,
    number,
    switch,
    words,
)
from thinwire.ops.sync.rule import SYNC_RULES
from thinwire.ops.types import VALUE_DTYPES
from thinwire.ops.weighting.base import WEIGHTINGS
from thinwire.ops.weighting.dc_asgd import BACKUPS, DEFAULT_LAMBDAS

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

POLICIES = Topic(
    "Seams: an explicit value overrides the method's",
    (
        choice("pacer", None, "Push now, or one more local step?", pacers.PACERS),
        choice("codec", None, "What of an update is sent.", CODECS),
        choice("down_codec", None, "What of the model is sent back.", DOWN_CODECS),
        choice("router", None, "Which class of service carries a block.", ROUTERS),
        choice("sync", None, "When an update is released, and who may go on.", SYNC_RULES),
        choice("weighting", None, "What a stale update is worth.", WEIGHTINGS),
        choice("server_optimizer", None, "How a released update becomes weights.", OPTIMIZERS),
    ),
)


CODEC = Topic(
    "What workers send",
    (
        choice(
            "selection",
            "exact",
            "How the largest entries are found: exactly, or by a threshold that is estimated from "
            "a sample, or carried over from the step before.",
            top_k.SELECTIONS,
        ),
        choice(
            "threshold_scope",
            "tensor",
            "The largest of each tensor, or of all together.",
            top_k.SCOPES,
        ),
        switch("error_feedback", "Keep what the codec drops or rounds off for the next step."),
        integer("dense_below", 0, "Tensors with fewer entries are sent whole; 0: none.", low=0),
        choice(
            "ratio_schedule",
            "constant",
            "lr: send --compression_rate times learning rate / initial rate.",
            RATIO_SCHEDULES,
        ),
        integer(
            "warmup_epochs",
            None,
            "First epochs, in which sparsifying codecs send more; dgc: 4 if not given, else 0.",
            low=0,
        ),
        number("dgs_momentum", 0.7, "Of --codec=dgs, on the worker.", low=0.0, high=0.9999),
        number("dgc_momentum", 0.9, "Of --codec=dgc, on the worker.", low=0.0, high=0.9999),
        switch("dgc_nesterov", "Nesterov's momentum in --codec=dgc."),
        switch("dgc_masking", "Zero the velocity of --codec=dgc where it is sent.", default=True),
        number(
            "dgc_clip_norm",
            0.0,
            "Of --codec=dgc: clip gradients to this L2 norm / sqrt(workers) first; 0: off.",
            low=0.0,
        ),
        choice(
            "dgc_clip_scope",
            "model",
            "What --dgc_clip_norm is the norm of: the whole gradient, or each tensor.",
            wrappers.CLIP_SCOPES,
        ),
        integer(
            "powersgd_rank",
            2,
            "Of --codec=powersgd: columns of each of the two factors that a matrix travels as.",
            low=1,
        ),
    ),
)


_IS_FRACTION = FlagRule(lambda value: 0 < value < 0.5, "must be above 0 and below 0.5")
_IS_FACTOR = FlagRule(lambda value: value == 0 or value > 1, "must be 0 (off) or above 1")

GUARDS = Topic(
    "Guards against faulty devices",
    (
        number(
            "max_update_norm",
            Guards.max_update_norm,
            "A shard refuses its part of a push if its L2 norm is larger; 0: off.",
            low=0.0,
        ),
        number(
            "update_norm_factor",
            Guards.update_norm_factor,
            "It refuses what exceeds so many times the median of the newest accepted norms of all "
            "workers; 0: off.",
            low=0.0,
            rule=_IS_FACTOR,
        ),
        integer(
            "quarantine_after",
            Guards.quarantine_after,
            "Offences (not finite, too large, malformed) within --quarantine_seconds after which a "
            "worker is put out; 0: off.",
            low=0,
        ),
        number(
            "quarantine_seconds",
            Guards.quarantine_seconds,
            "How long it is put out for the first time; each further time doubles it.",
            low=0.1,
        ),
        choice(
            "aggregate",
            Mean.name,
            "What the updates of a synchronous group are merged into, entry by entry.",
            AGGREGATES,
        ),
        number(
            "trim_fraction",
            None,
            "Of a group's values that --aggregate=trimmed_mean leaves out on either side; 0.25 if "
            "not given, at least one value.",
            rule=_IS_FRACTION,
        ),
    ),
)
