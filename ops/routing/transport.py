"""How datagrams travel, where that makes no difference to what the method computes."""

from __future__ import annotations

import dataclasses
import math

from ops.types import ConfigurationError

TRANSPORTS = ("udp", "grpc")
CLASSES = ("cs", "compact", "off")
_RANGES: dict[str, tuple[float, float]] = {
    "dgt_mtu": (128, 65_507),  # the least leaves 12 values; the largest is UDP's
    "dgt_pace_mbps": (0, 1_000_000),
    "dgt_drop_rate": (0, 1),
    "dgt_drop_seed": (0, 2**31 - 1),
    "dgt_fallback_steps": (0, 1_000_000),
    "dgt_fallback_fill": (0, 1),
}


@dataclasses.dataclass(frozen=True)
class Transport:
    """What need not be the same on every node.

    Attributes:
        dgt_mtu: Most bytes of UDP payload in a datagram.
        dgt_transport: udp, or grpc: the unreliable part follows on the reliable stream.
        dgt_dscp: How priorities are marked: cs, the class selectors, 32 (C - i) as TOS byte of
            channel i; compact, none above CS5; off.
        dgt_pace_mbps: Rate to which a worker limits its datagrams; 0: none.
        dgt_drop_rate: Fraction of arriving datagrams that a shard throws away, for tests.
        dgt_drop_seed: Seeds which.
        dgt_info: Whether workers and shards log a line for each step.
        dgt_fallback_steps: Steps in a row with a fill ratio below `dgt_fallback_fill` after which
            a worker sends everything reliably; 0: never.
        dgt_fallback_fill: Fraction of announced datagrams. Small: a firewall lets none through,
            while a crowded link that lets a tenth through is what DGT is for.
    """

    dgt_mtu: int = 1472
    dgt_transport: str = "udp"
    dgt_dscp: str = "cs"
    dgt_pace_mbps: float = 0.0
    dgt_drop_rate: float = 0.0
    dgt_drop_seed: int = 0
    dgt_info: bool = False
    dgt_fallback_steps: int = 20
    dgt_fallback_fill: float = 0.01

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high or not math.isfinite(value):
                raise ConfigurationError(f"--{name}={value}: expected {low:g} to {high:g}.")
        for name, values in (("dgt_transport", TRANSPORTS), ("dgt_dscp", CLASSES)):
            if getattr(self, name) not in values:
                raise ConfigurationError(
                    f"--{name}={getattr(self, name)!r}: expected one of {', '.join(values)}."
                )
