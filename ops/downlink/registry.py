"""The down codecs by name, and the settings that each of them heeds.

``dense``, ``delta`` and ``relay`` are exact: after applying the reply the worker's floats equal
the shard's bit for bit. ``sparse`` leaves the smaller part of what a worker lacks for later;
``auto`` is ``delta`` until ``sparse`` pays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from thinwire.ops.downlink.base import DownCodec
from thinwire.ops.downlink.exact import DownDelta, DownDense
from thinwire.ops.downlink.relay import DownRelay
from thinwire.ops.downlink.sparse import DownAuto, DownSparse
from thinwire.ops.types import ConfigurationError

#: --down_codec value -> policy.
DOWN_CODECS: dict[str, type[DownCodec]] = {
    "dense": DownDense,
    "delta": DownDelta,
    "relay": DownRelay,
    "sparse": DownSparse,
    "auto": DownAuto,
}


def refuse_idle(name: str, given: Mapping[str, object]) -> None:
    """Refuse settings of sparse replies for a down codec that sends none.

    Raises:
        ConfigurationError: Naming the setting.
    """
    if issubclass(DOWN_CODECS[name], DownSparse):
        return
    defaults = {field.name: field.default for field in dataclasses.fields(DownSparse)}
    for setting in ("down_ratio", "down_value_dtype", "resync_every", "max_staleness"):
        if given[setting] != defaults[setting]:
            raise ConfigurationError(
                f"--{setting}={given[setting]} is for --down_codec=sparse and auto, and this is "
                f"--down_codec={name}; change one."
            )
