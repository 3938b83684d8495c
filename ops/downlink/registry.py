"""Registry of downlink codecs, and a check for settings that have no effect on a downlink codec.

The downlink codecs ``dense``, ``delta`` and ``relay`` are exact: after the worker has applied the
reply, its weights equal the shard server's weights bit for bit. The downlink codec ``sparse`` first
sends the largest differences between a worker's weights and the shard server's weights, and smaller
differences in later replies. The downlink codec ``auto`` works like ``relay`` for a worker until
the worker's replies are large, and then like ``sparse``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from thinwire.ops.downlink.base import DownCodec
from thinwire.ops.downlink.exact import DownDelta, DownDense
from thinwire.ops.downlink.relay import DownRelay
from thinwire.ops.downlink.sparse import DownAuto, DownSparse
from thinwire.ops.types import ConfigurationError

#: Value of the flag --down_codec -> class of the downlink codec.
DOWN_CODECS: dict[str, type[DownCodec]] = {
    "dense": DownDense,
    "delta": DownDelta,
    "relay": DownRelay,
    "sparse": DownSparse,
    "auto": DownAuto,
}


def refuse_idle(name: str, given: Mapping[str, object]) -> None:
    """Raise an error if settings of sparse replies are given with a codec without sparse replies.

    Args:
        name: Name of the downlink codec, a key of DOWN_CODECS.
        given: Name of a setting of sparse replies (a flag without dashes) -> its value.

    Raises:
        ConfigurationError: A setting has no effect with the downlink codec.
    """
    if issubclass(DOWN_CODECS[name], DownSparse):
        return
    defaults = {field.name: field.default for field in dataclasses.fields(DownSparse)}
    for setting in ("down_ratio", "down_value_dtype", "resync_every", "max_staleness"):
        if given[setting] != defaults[setting]:
            raise ConfigurationError(
                f"--{setting}={given[setting]} has no effect with --down_codec={name}, only with "
                f"sparse and auto. Leave out --{setting}, or change --down_codec."
            )
