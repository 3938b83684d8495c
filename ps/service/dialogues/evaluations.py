"""Checks of the results of evaluations, which evaluators and scripts send."""

from __future__ import annotations

import math
from typing import Any

from thinwire.proto import framing
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.service.dialogues.base import LONGEST_MESSAGE
from thinwire.ps.wire.claims import MOST_COUNTED

#: Upper limit for the numbers of calls of fit and of epochs in a script's messages.
_MOST_FITS = 1 << 31
#: Limits on the number of metrics of one message, and on the values of one evaluation.
MOST_METRICS, _MOST_VALUES = 1000, 100_000
#: Limit on the characters of a metric's name. The names of a metric's entries may be slightly
#: longer than the metric's name.
_LONGEST_METRIC = 900
#: Size limit, in bytes, of a message that the shard relays to other clients. The relayed message
#: must fit into a message of the maximum size together with a few additional bytes.
_MOST_RELAYED_BYTES = framing.MAX_MESSAGE_BYTES - 1024


def check_place(fit: int, epoch: int) -> None:
    """Reject numbers of a call of fit and of an epoch that no script reaches.

    Raises:
        Malformed: A number is out of range.
    """
    if not (0 < fit < _MOST_FITS and epoch < _MOST_FITS):
        raise Malformed(f"epoch {epoch} of call {fit} of fit: a number is out of range")


def check_relayed(message: Any) -> None:
    """Reject a message that is too long to be relayed in a message to another client.

    Raises:
        Malformed: The message is too long.
    """
    if message.ByteSize() > _MOST_RELAYED_BYTES:
        raise Malformed(
            f"a message of {message.ByteSize()} bytes is to be sent to other nodes; expected at "
            f"most {_MOST_RELAYED_BYTES} bytes"
        )


def check_evaluated(evaluated: pb.Evaluated, names_versions: bool = True) -> None:
    """Reject the result of an evaluation that no evaluator can have made.

    The metrics of an evaluation become lines of metrics.jsonl and of the summary, tags of
    TensorBoard and labels of Prometheus. The value of an evaluation's metric may be NaN or infinite
    and is then written as null.

    Args:
        evaluated: Message with the result of the evaluation.
        names_versions: True if an evaluation with metrics must name the versions of the shards'
            weights.

    Raises:
        Malformed: A value of the evaluation is out of range, too long or not printable.
    """
    check_place(evaluated.fit, evaluated.epoch)
    check_relayed(evaluated)
    versions = evaluated.versions
    if names_versions and evaluated.metrics and not versions:
        raise Malformed("the evaluation has no model versions; expected at least one")
    if len(versions) > MOST_METRICS or max(versions, default=0) > MOST_COUNTED:
        raise Malformed(f"{len(versions)} versions up to {max(versions)}; limit {MOST_COUNTED}")
    if not evaluated.nobody.isprintable():
        raise Malformed("the message has an evaluation whose explanation is not printable")
    if len(evaluated.metrics) > MOST_METRICS or len(evaluated.nobody) > LONGEST_MESSAGE:
        raise Malformed(f"{len(evaluated.metrics)} metrics of an evaluation, or a long explanation")
    if sum(len(metric.values) for metric in evaluated.metrics) > _MOST_VALUES:
        raise Malformed("the metrics of an evaluation have too many values")
    for metric in evaluated.metrics:
        if math.prod(metric.shape) != len(metric.values):
            raise Malformed(
                f"evaluation's metric {metric.name!a:.80}: its values do not fit the shape"
            )
        if not (metric.name.isprintable() and 0 < len(metric.name) <= _LONGEST_METRIC):
            raise Malformed(
                f"the evaluation has a metric named {metric.name!a:.80}; expected 1 to "
                f"{_LONGEST_METRIC} printable characters"
            )
