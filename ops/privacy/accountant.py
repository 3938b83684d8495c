"""Privacy guarantee (epsilon, delta) of a run's noisy means, computed with Google's dp-accounting.

The library dp-accounting is an optional dependency, imported when an epsilon is first computed.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from typing import Any

from thinwire.ops.privacy.central import CentralPrivacy, Privacy
from thinwire.ops.types import ConfigurationError

#: Name of the privacy block in the run's summary.
BLOCK = "privacy"


def check_installed() -> None:
    """Raise an error if the package dp-accounting, which computes epsilon, is missing.

    Raises:
        ConfigurationError: The package dp-accounting is missing.
    """
    if importlib.util.find_spec("dp_accounting") is None:
        raise ConfigurationError(
            "--dp_noise: the package dp-accounting, which computes epsilon, is not installed. "
            "Install it next to Thinwire with pip install 'thinwire[dp]', or leave --dp_noise out."
        )


@functools.lru_cache(maxsize=64)
def epsilon(noise: float, rounds: int, delta: float) -> float:
    """Return epsilon after `rounds` training rounds in which every worker participated.

    The privacy accountant uses Renyi differential privacy; its computing time does not grow with
    the number of training rounds. The privacy guarantee holds for neighboring data sets: they
    differ in one worker, which sends only zeros with one of the two data sets.

    Args:
        noise: Noise multiplier: standard deviation of the noise in the sum of updates, divided by
            --dp_clip; above 0.
        rounds: Number of noisy means that the parameter server has released so far, one per round.
        delta: The delta of the privacy guarantee, above 0 and below 1.
    """
    if not rounds:
        return 0.0
    from dp_accounting import GaussianDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    accountant.compose(GaussianDpEvent(noise), rounds)
    return float(accountant.get_epsilon(delta))


def privacy_block(privacy: Privacy, delta: float, rounds: int) -> dict[str, dict[str, Any]]:
    """Return epsilon and settings for the summary after `rounds` rounds; {} without --dp_clip.

    In the privacy results, ``epsilon`` is None without noise, because clipping alone guarantees no
    privacy.

    Args:
        privacy: Privacy policy of the run's training method.
        delta: The value of delta for which epsilon is computed.
        rounds: Number of means that the parameter server has released so far, one per round.
    """
    if not isinstance(privacy, CentralPrivacy):
        return {}
    spent = epsilon(privacy.noise, rounds, delta) if privacy.noise else None
    settings = {"clip": privacy.clip, "noise": privacy.noise, "delta": delta}
    return {BLOCK: {**settings, "rounds": rounds, "epsilon": spent}}


def in_words(policies: Mapping[str, Any]) -> str:
    """Describe the privacy results in a run's status or summary in one line; "" without results."""
    block = policies.get(BLOCK)
    if not isinstance(block, dict):
        return ""
    parameters = f"clip {block['clip']:g}, noise {block['noise']:g}, {block['rounds']} rounds"
    if block["epsilon"] is None:
        return f"no privacy guarantee without noise ({parameters})"
    return f"epsilon {block['epsilon']:.4g} at delta {block['delta']:g} ({parameters})"
