"""What a method does for the privacy of its workers: nothing, or clipping and Gaussian noise."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Protocol

from thinwire.ops.codecs.base import Codec
from thinwire.ops.codecs.wrappers import Clip
from thinwire.ops.privacy.contribution import BoundedContribution
from thinwire.ops.types import ConfigurationError, Policy, State, Update


class Privacy(Policy, Protocol):
    """What bounds each worker's part of a round, and hides it in what is released."""

    @property
    def clip(self) -> float:
        """Largest L2 norm of what a worker sends of a round; 0: any."""

    @property
    def adds_noise(self) -> bool:
        """Whether releases are noised."""

    def around(self, codec: Codec) -> Codec:
        """Return the codec with the bound around it."""

    def init(self, secret: bytes) -> State:
        """Return the state: what the noise of a shard is drawn with."""

    def release(self, mean: Update, count: int, size: int, version: int, state: State) -> Update:
        """Return what may be applied of the mean of `count` updates.

        Args:
            mean: Of a round, in the coordinates of one shard.
            count: Updates that it is the mean of.
            size: Entries of the shard.
            version: Of the shard, before the round.
            state: Of the shard.
        """


@dataclasses.dataclass(frozen=True)
class NoPrivacy:
    """Releases are the means themselves."""

    clip: ClassVar[float] = 0.0
    adds_noise: ClassVar[bool] = False

    def around(self, codec: Codec) -> Codec:
        """Return the codec."""
        return codec

    def init(self, secret: bytes) -> State:
        """Return nothing."""
        del secret
        return {}

    def release(self, mean: Update, count: int, size: int, version: int, state: State) -> Update:
        """Return the mean."""
        del count, size, version, state
        return mean


@dataclasses.dataclass(frozen=True)
class CentralPrivacy:
    """Clip each worker's change of a round to a norm; add Gaussian noise to their mean.

    With the clipped changes D_k of n workers, ``mean D + N(0, (noise * clip / n)^2)`` per entry.
    If one worker had sent zeros instead, the mean would differ by at most ``clip / n``, so that
    each release is a Gaussian mechanism with noise multiplier `noise`, whatever n is.

    Attributes:
        clip: Largest L2 norm of a change, over the whole model; above 0.
        noise: Standard deviation over `clip`, of the sum; 0: none.

    Source: McMahan et al., "Learning differentially private recurrent language models", ICLR 2018,
    algorithm 1 (DP-FedAvg) with flat clipping and equal weights.
    """

    clip: float
    noise: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a norm that clips everything, and a noise that cannot be drawn."""
        if not 0 < self.clip < math.inf:
            raise ConfigurationError(
                f"--dp_clip={self.clip}: expected a finite L2 norm above 0 (0 on the command line "
                "is off)."
            )
        if not 0 <= self.noise < math.inf:
            raise ConfigurationError(
                f"--dp_noise={self.noise}: expected a finite multiple of --dp_clip; 0 is off."
            )

    @property
    def adds_noise(self) -> bool:
        """Whether releases are noised."""
        return self.noise > 0

    def around(self, codec: Codec) -> Codec:
        """Return the codec that codes clipped changes, and sends no more than the clip."""
        return BoundedContribution(Clip(codec, self.clip), self.clip)

    def init(self, secret: bytes) -> State:
        """Return the key of the shard's noise, which nobody else may know."""
        import numpy as np

        return {"key": np.frombuffer(secret, np.uint8).copy()}

    def release(self, mean: Update, count: int, size: int, version: int, state: State) -> Update:
        """Return the mean of `count` updates with noise in every entry of the shard."""
        if not self.adds_noise:
            return mean
        from thinwire.ops.privacy.noise import noised

        deviation = self.noise * self.clip / count
        return noised(mean, size, deviation, version, state["key"].tobytes())


def privacy_of(clip: float, noise: float) -> Privacy:
    """Return what --dp_clip and --dp_noise stand for.

    Raises:
        ConfigurationError: Noise without a clip, or values out of range.
    """
    if clip:
        return CentralPrivacy(clip, noise)
    if noise:
        raise ConfigurationError(
            f"--dp_noise={noise:g} without --dp_clip: the noise is a multiple of the norm that "
            "each worker's change is clipped to. Give --dp_clip too, or leave both out."
        )
    return NoPrivacy()
