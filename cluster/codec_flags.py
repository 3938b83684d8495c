"""The flags of what a worker sends: one line a flag."""

from __future__ import annotations

from ops import codecs, top_k, wrappers
from ops.options import Topic, choice, integer, number, switch

TOPIC = Topic(
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
            codecs.RATIO_SCHEDULES,
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
