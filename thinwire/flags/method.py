"""Flags of the training method (policies, hyper-parameters, limits on updates) of all nodes."""

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

#: Text that the help shows as the default of a policy's flag, because --method chooses the policy.
_OF_METHOD = "the method's"

_ADVANCED = (
    number(
        "down_ratio",
        None,
        "Fraction of the model's entries that --down_codec=sparse and --down_codec=auto KEEP.",
        "fraction",
        rule=above_zero("1 or more is all"),
        unset="--compression_rate",
    ),
    choice(
        "down_value_dtype",
        "float32",
        "Data type of the values in a reply of the PS with --down_codec=sparse or auto.",
        VALUE_DTYPES,
    ),
    integer(
        "resync_every",
        0,
        "Number of steps of worker 1 after which all workers with sparse replies (--down_codec) "
        "receive a snapshot of the whole model; 0: no snapshots.",
        "steps",
        low=0,
    ),
    integer(
        "max_staleness",
        0,
        "Largest number of updates by which a worker's model may be outdated with sparse replies "
        "(--down_codec); a worker with an older model receives the whole model; 0: no limit.",
        "updates",
        low=0,
    ),
    words(
        "esync_eps",
        "auto",
        "Safety margin in seconds with which --pacer=esync decides whether a worker has time for "
        "another local step in the round.",
        "seconds, or auto",
    ),
    choice(
        "esync_query",
        "blocking",
        "With --pacer=esync: wait for the state server's answer, or continue training meanwhile.",
        ("blocking", "delayed"),
    ),
    words(
        "esync_smoothing",
        "ema:0.5",
        "Smoothing of step times by --pacer=esync: moving average, maximum of the last M, none.",
        "ema:A|max:M|none",
    ),
    integer(
        "max_local_steps",
        0,
        "Largest number of local steps in a round of --pacer=esync; 0: no limit.",
        "steps",
        low=0,
    ),
    words(
        "draws",
        None,
        "File with the ids of the workers that train in each round, one round per line; replaces "
        "the random choice of --fraction.",
        "file",
        unset="drawn by --seed",
    ),
    words(
        "groups_file",
        None,
        "File of the worker groups of --sync=gsp, one group of ids per line; replaces --groups.",
        "file",
        unset="none",
    ),
    integer(
        "groups_warmup_updates",
        None,
        "Number of updates after which --groups=auto first groups the workers by speed.",
        "updates",
        low=1,
        unset="10 per worker",
    ),
    number(
        "regroup_interval_seconds",
        None,
        "Shortest time between two changes of the groups by --groups=auto; 0: form groups once.",
        "seconds",
        low=0.0,
        unset="60",
    ),
    integer(
        "staleness_window",
        1024,
        "Largest number of past updates that --weighting=per_entry remembers to count changes.",
        "updates",
        low=1,
    ),
    choice(
        "beyond_window",
        "count",
        "Treatment by --weighting=per_entry of an update that is older than --staleness_window: "
        "count every forgotten update as a change of each weight, or reject the old update.",
        ("count", "reject"),
    ),
    number(
        "dcasgd_lambda",
        None,
        "Strength (lambda) of the delay compensation of --weighting=dc_asgd.",
        "factor",
        low=0.0,
        unset="0.04, or 2 if adaptive",
    ),
    choice(
        "dcasgd_variant",
        "constant",
        "Strength of --weighting=dc_asgd: the same for every entry, or scaled by the running mean "
        "square of the entry's gradient.",
        DEFAULT_LAMBDAS,
    ),
    number(
        "dcasgd_decay",
        None,
        "Decay of the running mean square of --dcasgd_variant=adaptive.",
        "factor",
        low=0.0,
        high=0.9999,
        unset="0.95",
    ),
    choice(
        "dcasgd_backup",
        "per_worker",
        "Weights with which --weighting=dc_asgd compares the current weights: those at which the "
        "worker computed its gradient, or the weights before the shard's latest update.",
        BACKUPS,
    ),
    number("weight_decay", 0.0, "Factor of decoupled weight decay on the PS.", "factor", low=0.0),
    number(
        "global_lr",
        None,
        "Outer learning rate: factor that the PS applies to changes of weights (--pacer=esync; "
        "--pacer=fixed with --local_steps above 1; --codec=dgs, dgc or gd).",
        "factor",
        low=0.0,
        unset=f"{of_methods('global_lr')}0.7 with --server_optimizer=nesterov, 0.01 with adaptive "
        "ones, else 1",
    ),
    words(
        "global_lr_schedule",
        None,
        "Schedule of --global_lr over the run: 0.5:0.5 halves the outer rate after half of the "
        "budget. --lr_schedule applies to local steps only.",
        "as --lr_schedule",
        unset="constant",
    ),
    number(
        "server_beta_1",
        None,
        "Decay of the running mean of --server_optimizer=adam, adagrad and yogi, in runs whose "
        "workers push changes of weights.",
        "factor",
        low=0.0,
        high=0.9999,
        unset="0.9, or 0 with adagrad",
    ),
    number(
        "server_beta_2",
        None,
        "Decay of the running mean square of --server_optimizer=adam and yogi, in runs whose "
        "workers push changes of weights.",
        "factor",
        low=0.0,
        high=0.999999,
        unset="0.99",
    ),
    number(
        "server_tau",
        None,
        "Constant that --server_optimizer=adam, adagrad and yogi add to the root of the mean "
        "square, in runs whose workers push changes of weights.",
        "change of weights",
        rule=above_zero(),
        unset="0.001",
    ),
    choice(
        "server_v_start",
        None,
        "Initial mean square of --server_optimizer=adam, adagrad and yogi, in runs whose workers "
        "push changes of weights: zero, or the square of --server_tau.",
        STARTS,
        unset="zero",
    ),
    switch(
        "bias_correction",
        "Correct the bias of both means of --server_optimizer=adam, as Flower does, in runs whose "
        "workers push changes of weights.",
        default=None,
        unset="off",
    ),
    choice(
        "local_optimizer",
        None,
        "Optimizer of a worker's local steps; script: the optimizer that the script compiles.",
        LOCAL_OPTIMIZERS,
        unset=f"{of_methods('local_optimizer')}else sgd",
    ),
    number(
        "local_momentum",
        None,
        "Momentum of a worker's local steps with --local_optimizer=sgd or momentum.",
        "factor",
        low=0.0,
        high=0.9999,
        unset="0.9 with --local_optimizer=momentum, else 0",
    ),
    number(
        "local_weight_decay",
        None,
        "Factor of the decoupled weight decay in a worker's local steps.",
        "factor",
        low=0.0,
        unset=f"{of_methods('local_weight_decay')}else as Keras' --local_optimizer has it",
    ),
    number(
        "prox_mu",
        None,
        "FedProx' mu: strength of the pull of local steps towards the weights at the start of the "
        "round.",
        "factor",
        low=0.0,
        unset=f"{of_methods('prox_mu')}else 0",
    ),
    choice(
        "local_opt_state",
        "keep",
        "Effect of an exchange on the slots (such as velocity and moments) of a worker's local "
        "optimizer: keep them, reset them, or average them over the workers.",
        SLOT_FATES,
    ),
    number(
        "local_lr",
        None,
        "Initial learning rate of a worker's local steps; --lr_schedule scales this rate too.",
        "factor",
        rule=above_zero(),
        unset="--learning_rate",
    ),
    choice(
        "schedule_clock",
        "batches",
        "Count that is the step of the learning-rate schedule in a script's optimizer: the "
        "script's batches that the run has consumed, or the optimizer's own steps.",
        CLOCKS,
    ),
    switch(
        "bn_sync",
        "Average the moving statistics of BatchNorm layers over the workers.",
        default=True,
    ),
)

METHOD = Topic(
    "Method",
    (
        choice("method", "adacomp", "Training method: a named combination of policies.", METHODS),
        integer(
            "batch_size",
            10,
            "Number of examples in a worker's mini-batch; on a Supervisor, in an evaluation batch.",
            "examples",
            low=1,
        ),
        number("learning_rate", 0.02, "Initial learning rate.", "factor", rule=above_zero()),
        words(
            "lr_schedule",
            "",
            "Schedule of the learning rate over the run: 0.6:0.2,0.8:0.2 multiplies the "
            "rate by 0.2 after 60 % and again after 80 % of the budget; or a curve, such as "
            "cosine:warmup=0.02,floor=0.1 or linear.",
            "fraction of the budget:factor,... or a curve",
            unset="constant",
        ),
        number(
            "momentum",
            None,
            "Momentum of SGD, if the PS applies updates by SGD.",
            "factor",
            low=0.0,
            high=0.9999,
            unset=f"{of_methods('momentum')}0.9 with --server_optimizer=momentum, else 0",
        ),
        number(
            "compression_rate",
            0.01,
            "Fraction of gradient entries that sparsifying codecs KEEP; default for scripts: 0.1.",
            "fraction",
            rule=above_zero("1 or more is dense"),
        ),
        choice(
            "value_dtype",
            None,
            "Data type of the values that workers push; int4, int2, means2 and sign use one scale "
            "per chunk of entries.",
            (*VALUE_DTYPES, *FEW_BITS),
            unset=f"{of_methods('value_dtype')}else float32",
        ),
        words(
            "groups",
            None,
            "Worker groups of --sync=gsp, such as '1,2|3,4'; auto: group workers by measured "
            "speed.",
            "groups of workers",
            unset="none",
        ),
        integer(
            "staleness_bound",
            None,
            "Largest number of iterations by which a worker may be ahead of the slowest worker.",
            "iterations",
            low=0,
            unset="3 for ssp, none for gsp",
        ),
        integer(
            "local_epochs",
            0,
            "Length of a round as the number of passes of a worker over its own examples; 0: the "
            "length is --local_steps.",
            "epochs",
            low=0,
        ),
        integer(
            "local_steps",
            None,
            "Number of local steps in a round of --pacer=fixed (H in papers).",
            "steps",
            low=1,
            unset=f"{of_methods('local_steps')}else 1",
        ),
        number(
            "fraction",
            1.0,
            "Fraction of the live workers that train in each round of --sync=bsp; --seed "
            "determines the random choice.",
            "fraction",
            rule=FlagRule(lambda value: 0 < value <= 1, "must be above 0 and at most 1"),
        ),
        choice(
            "collective",
            THROUGH_PS,
            "Nodes that sum the updates of a round of bsp or esync: the PS, or the workers by an "
            "all-reduce over a ring, a butterfly or blocks.",
            (THROUGH_PS, *collectives.REGISTRY),
        ),
        switch(
            "overlap",
            "Compute the next gradient during an exchange; the gradient is then one step staler.",
            default=None,
            unset="on where a script's own optimizer steps on its worker",
        ),
        *advanced(*_ADVANCED),
    ),
)

POLICIES = Topic(
    "Policies: a value given here overrides the policy of --method",
    (
        choice(
            "pacer",
            None,
            "Rule by which a worker decides whether to push now or to take one more local step.",
            PACERS,
            unset=_OF_METHOD,
        ),
        choice(
            "codec",
            None,
            "Encoding of a worker's update: the entries that are pushed, and their form.",
            CODECS,
            unset=_OF_METHOD,
        ),
        choice(
            "down_codec",
            None,
            "Encoding of a reply: the weights that the PS sends back to a worker.",
            DOWN_CODECS,
            unset=_OF_METHOD,
        ),
        choice(
            "router",
            None,
            "Rule that chooses the class of service (such as datagrams) for each block of a push.",
            ROUTERS,
            unset=_OF_METHOD,
        ),
        choice(
            "sync",
            None,
            "Synchronization rule: when the PS applies updates, and which workers may proceed.",
            SYNC_RULES,
            unset=_OF_METHOD,
        ),
        choice(
            "weighting",
            None,
            "Rule for the factor by which the PS scales an update, mostly by its staleness.",
            WEIGHTINGS,
            unset=_OF_METHOD,
        ),
        choice(
            "server_optimizer",
            None,
            "Optimizer with which the PS applies updates to the weights.",
            (*SERVER_OPTIMIZERS, SCRIPT),
            unset=_OF_METHOD,
        ),
    ),
)

CODEC = Topic(
    "Uplink codec",
    (
        switch(
            "error_feedback",
            "Add the part of an update that the codec drops or rounds off to the next update.",
            default=None,
            unset="on with sparseloco, else off",
        ),
        *advanced(
            words(
                "selection",
                "exact",
                "Search of a sparsifying codec for the largest entries of a tensor: exact, or "
                "carried, with the adapted threshold of the previous step.",
                "exact|carried",
                rule=FlagRule(
                    lambda value: value in top_k.SELECTIONS,
                    "must be exact or carried. sampled has been removed: carried selects about as "
                    "many entries for less work.",
                ),
            ),
            words(
                "threshold_scope",
                "tensor",
                "Obsolete, tensor is the only value: sparsifying codecs select the largest "
                "entries of each tensor separately.",
                "tensor",
                rule=FlagRule(
                    lambda value: value == "tensor",
                    "must be tensor. global has been removed: leave --threshold_scope out, and "
                    "set --dense_below to send small tensors whole.",
                ),
            ),
            integer(
                "dense_below",
                0,
                "Number of entries below which a codec sends all entries of a tensor; 0: sparsify "
                "all tensors.",
                "entries",
                low=0,
            ),
            words(
                "ratio_schedule",
                "constant",
                "Obsolete, constant is the only value: the fraction of entries that codecs send "
                "does not follow the learning rate.",
                "constant",
                rule=FlagRule(
                    lambda value: value == "constant",
                    "must be constant. lr has been removed: leave --ratio_schedule out, or set "
                    "--warmup_epochs to send more entries in the first epochs.",
                ),
            ),
            integer(
                "warmup_epochs",
                None,
                "Number of first epochs in which sparsifying codecs send more entries.",
                "epochs",
                low=0,
                unset="4 for dgc, else 0",
            ),
            number(
                "dgs_momentum",
                None,
                "Momentum that each worker applies to its gradients with --codec=dgs.",
                "factor",
                low=0.0,
                high=0.9999,
                unset="0.7; with --local_optimizer=script the momentum of the script's SGD",
            ),
            number(
                "dgc_momentum",
                None,
                "Momentum that each worker applies to its gradients with --codec=dgc.",
                "factor",
                low=0.0,
                high=0.9999,
                unset="0.9; with --local_optimizer=script the momentum of the script's SGD",
            ),
            integer(
                "chunk",
                CHUNK_ENTRIES,
                "Number of consecutive entries of a tensor in a chunk of --codec=chunked_topk.",
                "entries",
                low=1,
            ),
            integer(
                "chunk_k",
                None,
                "Number of entries of each chunk that --codec=chunked_topk sends.",
                "entries",
                low=1,
                unset=f"{of_methods('chunk_k')}else --compression_rate of a chunk",
            ),
            number(
                "error_decay",
                None,
                "Factor on the residual (unsent part) of --error_feedback, applied in each step.",
                "factor",
                low=0.0,
                high=1.0,
                unset=f"{of_methods('error_decay')}else 1",
            ),
            number(
                "error_ahead",
                0.0,
                "Fraction of the residual (the unsent part of earlier updates) that a worker "
                "applies to the shards' model before its local steps.",
                "factor",
                low=0.0,
                high=1.0,
            ),
            switch("dgc_nesterov", "Use Nesterov's form of momentum in --codec=dgc."),
            switch(
                "dgc_masking",
                "With --codec=dgc: set the velocity of the entries that are sent to zero.",
                default=True,
            ),
            number(
                "dgc_clip_norm",
                0.0,
                "With --codec=dgc: clip each gradient to this norm / sqrt(number of workers) "
                "before momentum; 0: off.",
                "L2 norm",
                low=0.0,
            ),
            choice(
                "dgc_clip_scope",
                "model",
                "Norm that --dgc_clip_norm limits: model, the norm of the whole gradient; tensor, "
                "the norm of each tensor.",
                wrappers.CLIP_SCOPES,
            ),
            integer(
                "powersgd_rank",
                2,
                "Rank of the two factors that --codec=powersgd sends for a gradient matrix.",
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
            "Largest L2 norm of a shard's part of a push; the shard rejects a larger part; 0: off.",
            "L2 norm",
            low=0.0,
        ),
        choice(
            "aggregate",
            Mean.name,
            "Statistic that merges the updates of a synchronous worker group, entry by entry.",
            AGGREGATES,
        ),
        *advanced(
            number(
                "update_peak_factor",
                Guards.update_peak_factor,
                "A shard rejects a push whose largest magnitude exceeds this factor times the "
                "largest magnitude of the newest accepted pushes (times 1, if that magnitude is "
                "smaller); 0: off.",
                "factor",
                low=0.0,
                rule=_IS_FACTOR,
            ),
            number(
                "update_norm_factor",
                Guards.update_norm_factor,
                "A shard rejects a push whose norm exceeds this factor times the median norm of "
                "the newest accepted pushes of all workers; 0: off.",
                "factor",
                low=0.0,
                rule=_IS_FACTOR,
            ),
            integer(
                "quarantine_after",
                Guards.quarantine_after,
                "Number of bad pushes (not finite, too large or malformed) within "
                "--quarantine_seconds after which the PS quarantines a worker; 0: off.",
                "offences",
                low=0,
            ),
            number(
                "quarantine_seconds",
                Guards.quarantine_seconds,
                "Length of a worker's first quarantine; each further quarantine of the worker is "
                "twice as long as the previous one.",
                "seconds",
                low=0.1,
            ),
            number(
                "trim_fraction",
                None,
                "Fraction of the workers' values of an entry that --aggregate=trimmed_mean leaves "
                "out at each end, at least one value.",
                "fraction of the group",
                rule=_IS_FRACTION,
                unset="0.25",
            ),
        ),
    ),
)
