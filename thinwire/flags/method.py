"""The flags of the method, the same on every node: policies, hyper-parameters, guards."""

from __future__ import annotations

from thinwire.ops import collectives
from thinwire.ops.aggregation import AGGREGATES
from thinwire.ops.aggregation.aggregates import Mean
from thinwire.ops.aggregation.outliers import Guards
from thinwire.ops.codecs import top_k, wrappers
from thinwire.ops.codecs.registry import CODECS
from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.downlink.registry import DOWN_CODECS
from thinwire.ops.methods.method import METHODS, of_methods
from thinwire.ops.offer import CLOCKS
from thinwire.ops.optimizers.local import LOCAL_OPTIMIZERS, SLOT_FATES
from thinwire.ops.optimizers.outer import SERVER_OPTIMIZERS, STARTS
from thinwire.ops.optimizers.server import SCRIPT
from thinwire.ops.pacing import PACERS
from thinwire.ops.routing.registry import ROUTERS
from thinwire.ops.sync.rule import SYNC_RULES
from thinwire.ops.types import CHUNK_ENTRIES, FEW_BITS, VALUE_DTYPES
from thinwire.ops.weighting import WEIGHTINGS
from thinwire.ops.weighting.dc_asgd import BACKUPS, DEFAULT_LAMBDAS
from thinwire.runtime.run.flags import (
    FlagRule,
    Topic,
    above_zero,
    advanced,
    choice,
    integer,
    number,
    switch,
    words,
)

#: What holds where a policy is not given.
_OF_METHOD = "the method's"

_ADVANCED = (
    number(
        "down_ratio",
        None,
        "Entries that --down_codec=sparse and auto KEEP.",
        "fraction",
        rule=above_zero("1 or more is all"),
        unset="--compression_rate",
    ),
    choice("down_value_dtype", "float32", "Type of the values that these send.", VALUE_DTYPES),
    integer(
        "resync_every",
        0,
        "Steps of worker 1 between two snapshots that all receive; 0: none.",
        "steps",
        low=0,
    ),
    integer(
        "max_staleness",
        0,
        "With these a worker whose model is staler gets the whole one; 0: no limit.",
        "updates",
        low=0,
    ),
    words("esync_eps", "auto", "Safety margin of --pacer=esync.", "seconds, or auto"),
    choice(
        "esync_query",
        "blocking",
        "Wait for the state server, or go on training meanwhile.",
        ("blocking", "delayed"),
    ),
    words(
        "esync_smoothing", "ema:0.5", "How --pacer=esync smooths step times.", "ema:A|max:M|none"
    ),
    integer(
        "max_local_steps", 0, "Limit of a round of --pacer=esync; 0: no limit.", "steps", low=0
    ),
    words(
        "draws",
        None,
        "Workers of each round, one round a line, in place of those that --fraction draws.",
        "file",
        unset="drawn by --seed",
    ),
    words("groups_file", None, "The same as --groups, one group a line.", "file", unset="none"),
    integer(
        "groups_warmup_updates",
        None,
        "Updates before --groups=auto first forms groups.",
        "updates",
        low=1,
        unset="10 per worker",
    ),
    number(
        "regroup_interval_seconds",
        None,
        "Least time between two changes of --groups=auto; 0: form them once.",
        "seconds",
        low=0.0,
        unset="60",
    ),
    integer(
        "staleness_window", 1024, "Updates that --weighting=per_entry remembers.", "updates", low=1
    ),
    choice(
        "beyond_window",
        "count",
        "What --weighting=per_entry does with an older update.",
        ("count", "reject"),
    ),
    number(
        "dcasgd_lambda",
        None,
        "Strength of --weighting=dc_asgd.",
        "factor",
        low=0.0,
        unset="0.04, or 2 if adaptive",
    ),
    choice(
        "dcasgd_variant",
        "constant",
        "The same strength for every entry, or by its running mean square.",
        DEFAULT_LAMBDAS,
    ),
    number(
        "dcasgd_decay",
        None,
        "Decay of that mean.",
        "factor",
        low=0.0,
        high=0.9999,
        unset="0.95",
    ),
    choice(
        "dcasgd_backup",
        "per_worker",
        "Compensate from the weights the worker received, or from those before the latest step.",
        BACKUPS,
    ),
    number("weight_decay", 0.0, "Decoupled weight decay on the server.", "factor", low=0.0),
    number(
        "global_lr",
        None,
        "Outer rate: of changes of weights (pacer esync; fixed with H > 1; codecs dgs, dgc, gd).",
        "factor",
        low=0.0,
        unset=f"{of_methods('global_lr')}0.7 with --server_optimizer=nesterov, 0.01 with adaptive "
        "ones, else 1",
    ),
    words(
        "global_lr_schedule",
        None,
        "Changes of the outer rate over the run, such as 0.5:0.5; --lr_schedule is of local steps.",
        "as --lr_schedule",
        unset="constant",
    ),
    number(
        "server_beta_1",
        None,
        "Decay of the mean of --server_optimizer=adam, adagrad and yogi of changes of weights.",
        "factor",
        low=0.0,
        high=0.9999,
        unset="0.9, or 0 with adagrad",
    ),
    number(
        "server_beta_2",
        None,
        "Decay of the mean square of adam and yogi of changes of weights.",
        "factor",
        low=0.0,
        high=0.999999,
        unset="0.99",
    ),
    number(
        "server_tau",
        None,
        "What these three add to the root of the mean square.",
        "change of weights",
        rule=above_zero(),
        unset="0.001",
    ),
    choice(
        "server_v_start",
        None,
        "What their mean square begins with: zero, or the square of --server_tau.",
        STARTS,
        unset="zero",
    ),
    switch(
        "bias_correction",
        "Let --server_optimizer=adam of changes of weights correct its means, as Flower does.",
        default=None,
        unset="off",
    ),
    choice(
        "local_optimizer",
        None,
        "Optimizer of a worker's own steps; script: the one that a script has compiled.",
        LOCAL_OPTIMIZERS,
        unset=f"{of_methods('local_optimizer')}else sgd",
    ),
    number(
        "local_momentum",
        None,
        "Momentum of local steps with SGD.",
        "factor",
        low=0.0,
        high=0.9999,
        unset="0.9 with --local_optimizer=momentum, else 0",
    ),
    number(
        "local_weight_decay",
        None,
        "Decoupled weight decay of local steps.",
        "factor",
        low=0.0,
        unset=f"{of_methods('local_weight_decay')}else as Keras' --local_optimizer has it",
    ),
    number(
        "prox_mu",
        None,
        "FedProx' mu: pulls local steps to the weights that their round began at.",
        "factor",
        low=0.0,
        unset=f"{of_methods('prox_mu')}else 0",
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
        "Initial rate of local steps, which --lr_schedule scales too.",
        "factor",
        rule=above_zero(),
        unset="--learning_rate",
    ),
    choice(
        "schedule_clock",
        "batches",
        "What a schedule of a script's optimizer is read at: the number of the script's own "
        "batches that the run has consumed, or the optimizer's own steps.",
        CLOCKS,
    ),
    switch(
        "bn_sync",
        "Average BatchNorm's moving statistics over the workers.",
        default=True,
    ),
)

METHOD = Topic(
    "Method",
    (
        choice("method", "adacomp", "A named composition of policies.", METHODS),
        integer(
            "batch_size",
            10,
            "Size of a mini-batch; on a Supervisor, of an evaluation batch.",
            "examples",
            low=1,
        ),
        number("learning_rate", 0.02, "Initial learning rate.", "factor", rule=above_zero()),
        words(
            "lr_schedule",
            "",
            "Changes of the rate over the run, such as 0.6:0.2,0.8:0.2, or a curve, such as "
            "cosine:warmup=0.02,floor=0.1 or linear.",
            "fraction of the budget:factor,... or a curve",
            unset="constant",
        ),
        number(
            "momentum",
            None,
            "Momentum of the server's SGD.",
            "factor",
            low=0.0,
            high=0.9999,
            unset=f"{of_methods('momentum')}0.9 with --server_optimizer=momentum, else 0",
        ),
        number(
            "compression_rate",
            0.01,
            "Entries that sparsifying codecs KEEP; 0.1 for scripts.",
            "fraction",
            rule=above_zero("1 or more is dense"),
        ),
        choice(
            "value_dtype",
            None,
            "Type of the values on the uplink; int4, int2, means2 and sign have a scale per chunk.",
            (*VALUE_DTYPES, *FEW_BITS),
            unset=f"{of_methods('value_dtype')}else float32",
        ),
        words(
            "groups",
            None,
            "Groups of --sync=gsp, such as '1,2|3,4'; auto: by measured speed.",
            "groups of workers",
            unset="none",
        ),
        integer(
            "staleness_bound",
            None,
            "How far a worker may run ahead of the slowest.",
            "updates",
            low=0,
            unset="3 for ssp, none for gsp",
        ),
        integer(
            "local_epochs",
            0,
            "In place of --local_steps: passes over its own examples that a worker takes in a "
            "round; 0: it counts steps.",
            "epochs",
            low=0,
        ),
        integer(
            "local_steps",
            None,
            "H of --pacer=fixed.",
            "steps",
            low=1,
            unset=f"{of_methods('local_steps')}else 1",
        ),
        number(
            "fraction",
            1.0,
            "Live workers that take part in each round of --sync=bsp, drawn by --seed.",
            "fraction",
            rule=FlagRule(lambda value: 0 < value <= 1, "must be above 0 and at most 1"),
        ),
        choice(
            "collective",
            THROUGH_PS,
            "What sums a round of bsp or esync: the PS, or the workers among themselves.",
            (THROUGH_PS, *collectives.REGISTRY),
        ),
        switch(
            "overlap",
            "Compute the next gradient during an exchange, which makes it a step staler.",
            default=None,
            unset="on where a script's own optimizer steps on its worker",
        ),
        *advanced(*_ADVANCED),
    ),
)

POLICIES = Topic(
    "Policies: an explicit value overrides the method's",
    (
        choice("pacer", None, "Push now, or one more local step.", PACERS, unset=_OF_METHOD),
        choice("codec", None, "What of an update is sent.", CODECS, unset=_OF_METHOD),
        choice(
            "down_codec", None, "What of the model is sent back.", DOWN_CODECS, unset=_OF_METHOD
        ),
        choice(
            "router", None, "Which class of service carries a block.", ROUTERS, unset=_OF_METHOD
        ),
        choice(
            "sync",
            None,
            "When an update is released, and which worker may proceed.",
            SYNC_RULES,
            unset=_OF_METHOD,
        ),
        choice("weighting", None, "Weight of a stale update.", WEIGHTINGS, unset=_OF_METHOD),
        choice(
            "server_optimizer",
            None,
            "How a released update becomes weights.",
            (*SERVER_OPTIMIZERS, SCRIPT),
            unset=_OF_METHOD,
        ),
    ),
)

CODEC = Topic(
    "What workers send",
    (
        switch(
            "error_feedback",
            "Keep what the codec drops or rounds off for the next step.",
            default=None,
            unset="on with sparseloco, else off",
        ),
        *advanced(
            words(
                "selection",
                "exact",
                "How the largest entries are found; carried: by the threshold of the step before.",
                "exact|carried",
                rule=FlagRule(
                    lambda value: value in top_k.SELECTIONS,
                    "must be exact or carried. sampled has been removed: carried selects as many, "
                    "for less work.",
                ),
            ),
            words(
                "threshold_scope",
                "tensor",
                "Obsolete: the largest entries are those of each tensor.",
                "tensor",
                rule=FlagRule(
                    lambda value: value == "tensor",
                    "must be tensor. global has been removed: leave it out, and keep small "
                    "tensors whole by --dense_below.",
                ),
            ),
            integer(
                "dense_below",
                0,
                "Tensors with fewer entries are sent whole; 0: none.",
                "entries",
                low=0,
            ),
            words(
                "ratio_schedule",
                "constant",
                "Obsolete: the fraction that is sent does not follow the learning rate.",
                "constant",
                rule=FlagRule(
                    lambda value: value == "constant",
                    "must be constant. lr has been removed: leave it out; --warmup_epochs sends "
                    "more in the first epochs.",
                ),
            ),
            integer(
                "warmup_epochs",
                None,
                "First epochs, in which sparsifying codecs send more.",
                "epochs",
                low=0,
                unset="4 for dgc, else 0",
            ),
            number(
                "dgs_momentum",
                None,
                "Momentum of --codec=dgs, on the worker.",
                "factor",
                low=0.0,
                high=0.9999,
                unset="0.7; with --local_optimizer=script that of its SGD",
            ),
            number(
                "dgc_momentum",
                None,
                "Momentum of --codec=dgc, on the worker.",
                "factor",
                low=0.0,
                high=0.9999,
                unset="0.9; with --local_optimizer=script that of its SGD",
            ),
            integer(
                "chunk",
                CHUNK_ENTRIES,
                "Consecutive entries of a tensor that --codec=chunked_topk selects among.",
                "entries",
                low=1,
            ),
            integer(
                "chunk_k",
                None,
                "Of each chunk the entries that it sends.",
                "entries",
                low=1,
                unset=f"{of_methods('chunk_k')}else --compression_rate of a chunk",
            ),
            number(
                "error_decay",
                None,
                "Each step multiplies what --error_feedback has kept by this.",
                "factor",
                low=0.0,
                high=1.0,
                unset=f"{of_methods('error_decay')}else 1",
            ),
            number(
                "error_ahead",
                0.0,
                "Local steps begin at the shards' model and this part of what was not sent.",
                "factor",
                low=0.0,
                high=1.0,
            ),
            switch("dgc_nesterov", "Nesterov's momentum in --codec=dgc."),
            switch(
                "dgc_masking", "Zero the velocity of --codec=dgc where it is sent.", default=True
            ),
            number(
                "dgc_clip_norm",
                0.0,
                "--codec=dgc first clips gradients to this / sqrt(workers); 0: off.",
                "L2 norm",
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
                "Rank of the two factors that --codec=powersgd sends of a matrix.",
                "columns",
                low=1,
            ),
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
            "A shard refuses its part of a push if its norm is larger; 0: off.",
            "L2 norm",
            low=0.0,
        ),
        choice(
            "aggregate",
            Mean.name,
            "How the updates of a synchronous group are merged, entry by entry.",
            AGGREGATES,
        ),
        *advanced(
            number(
                "update_peak_factor",
                Guards.update_peak_factor,
                "A shard refuses a push whose largest magnitude is above this multiple of that of "
                "the newest accepted ones (of 1, if those are smaller); 0: off.",
                "factor",
                low=0.0,
                rule=_IS_FACTOR,
            ),
            number(
                "update_norm_factor",
                Guards.update_norm_factor,
                "A shard refuses norms above this multiple of the median of the newest accepted "
                "norms of all workers; 0: off.",
                "factor",
                low=0.0,
                rule=_IS_FACTOR,
            ),
            integer(
                "quarantine_after",
                Guards.quarantine_after,
                "Offences (not finite, too large, malformed) within --quarantine_seconds after "
                "which a worker is quarantined; 0: off.",
                "offences",
                low=0,
            ),
            number(
                "quarantine_seconds",
                Guards.quarantine_seconds,
                "Length of a worker's first quarantine; each further one is twice as long.",
                "seconds",
                low=0.1,
            ),
            number(
                "trim_fraction",
                None,
                "Values that --aggregate=trimmed_mean leaves out on either side, at least one.",
                "fraction of the group",
                rule=_IS_FRACTION,
                unset="0.25",
            ),
        ),
    ),
)
