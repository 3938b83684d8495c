"""What a run's releases promise: (epsilon, delta), by Google's dp-accounting.

The library is an extra of the package, imported where an epsilon is first computed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Mapping
from typing import Any

from thinwire.ops.privacy.central import CentralPrivacy, Privacy
from thinwire.ops.types import ConfigurationError

#: The summary's block.
BLOCK = "privacy"


def check_installed() -> None:
    """Refuse noise whose promise cannot be computed.

    Raises:
        ConfigurationError: The accountant's library is missing.
    """
    if importlib.util.find_spec("dp_accounting") is None:
        raise ConfigurationError(
            "--dp_noise: the accountant of epsilon is the package dp-accounting, which is not "
            "installed here; expected it beside Thinwire: pip install 'thinwire[dp]'. Or leave "
            "--dp_noise out."
        )


@functools.lru_cache(maxsize=64)
def epsilon(noise: float, rounds: int, delta: float) -> float:
    """Return the epsilon of rounds that every worker may have taken part in.

    By Renyi differential privacy, whose cost does not grow with the rounds. Two data sets are
    neighbours if one has zeros in place of all that one worker sends.

    Args:
        noise: Noise multiplier, above 0.
        rounds: Releases so far.
        delta: Above 0 and below 1.
    """
    if not rounds:
        return 0.0
    from dp_accounting import GaussianDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    accountant.compose(GaussianDpEvent(noise), rounds)
    return float(accountant.get_epsilon(delta))


@dataclasses.dataclass(frozen=True)
class PrivacyLedger:
    """The accountant of one run.

    Attributes:
        privacy: The method's.
        delta: At which epsilon is given.
    """

    privacy: Privacy
    delta: float

    def block(self, rounds: int) -> dict[str, dict[str, Any]]:
        """Return the summary's block after so many releases; {} where nothing is bounded.

        Its ``epsilon`` is None without noise, which promises nothing.
        """
        if not isinstance(self.privacy, CentralPrivacy):
            return {}
        noise = self.privacy.noise
        found = epsilon(noise, rounds, self.delta) if noise else None
        own = {"clip": self.privacy.clip, "noise": noise, "delta": self.delta}
        return {BLOCK: {**own, "rounds": rounds, "epsilon": found}}


def in_words(policies: Mapping[str, Any]) -> str:
    """Return the block as one line, from a status' or a summary's blocks; "" without one."""
    block = policies.get(BLOCK)
    if not isinstance(block, dict):
        return ""
    of = f"clip {block['clip']:g}, noise {block['noise']:g}, {block['rounds']} rounds"
    if block["epsilon"] is None:
        return f"no promise without noise ({of})"
    return f"epsilon {block['epsilon']:.4g} at delta {block['delta']:g} ({of})"
