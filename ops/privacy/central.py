"""Privacy policies: none, or clipped updates of workers and Gaussian noise on their mean."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Protocol

from thinwire.ops.codecs.base import Codec
from thinwire.ops.codecs.wrappers import Clip
from thinwire.ops.options import number
from thinwire.ops.policy import Policy, setting
from thinwire.ops.privacy.contribution import BoundedContribution
from thinwire.ops.types import ConfigurationError, State, Update


class Privacy(Policy, Protocol):
    """Policy that bounds each worker's update, and adds noise to the mean of the updates."""

    @property
    def clip(self) -> float:
        """Largest allowed L2 norm of a worker's update in a round; 0 means no bound."""

    @property
    def adds_noise(self) -> bool:
        """True if the privacy policy adds noise to each mean of the workers' updates."""

    def around(self, codec: Codec) -> Codec:
        """Return the gradient codec, wrapped so that each packet's L2 norm is at most `clip`."""

    def init(self, secret: bytes) -> State:
        """Return the policy's state on a shard server: the secret key of its random noise.

        Args:
            secret: Secret random bytes of the shard server, the key of its noise.
        """

    def release(self, mean: Update, count: int, size: int, version: int, state: State) -> Update:
        """Return the update, with the policy's noise, that the shard applies to its weights.

        Args:
            mean: Mean of the workers' updates of the round, with positions in the shard server's
                weights.
            count: Number of workers' updates in the mean.
            size: Number of weights of the shard server.
            version: Version of the shard server's weights before the round.
            state: The privacy policy's state on the shard server, from `init`.
        """


@dataclasses.dataclass(frozen=True)
class NoPrivacy(Policy):
    """Policy without privacy: it neither clips workers' updates nor adds noise to their mean."""

    clip: ClassVar[float] = 0.0
    adds_noise: ClassVar[bool] = False

    def around(self, codec: Codec) -> Codec:
        """Return the gradient codec unchanged, because the policy clips no updates."""
        return codec

    def init(self, secret: bytes) -> State:
        """Return an empty state, because the policy without privacy draws no noise."""
        return {}

    def release(self, mean: Update, count: int, size: int, version: int, state: State) -> Update:
        """Return the mean of the workers' updates unchanged, without noise."""
        return mean


@dataclasses.dataclass(frozen=True)
class CentralPrivacy(Policy):
    """Clip each worker's weight change to an L2 norm; add Gaussian noise to the mean change.

    Each entry of the released update is ``mean D + N(0, (noise * clip / n)^2)``, with N normally
    distributed noise and mean D the mean of the clipped weight changes of n workers. If one of n
    workers sent zeros instead of its clipped update, the L2 norm of the mean's change would be at
    most ``clip / n``. Each release of a noisy mean of workers' updates is a Gaussian mechanism with
    noise multiplier `noise`, for every number of workers.

    Attributes:
        clip: Largest L2 norm of a worker's weight change over the whole model; above 0.
        noise: Noise multiplier: standard deviation of the noise in the sum of updates, divided by
            `clip`. 0 means no noise.

    Source: McMahan et al., "Learning differentially private recurrent language models", ICLR 2018,
    algorithm 1 (DP-FedAvg) with flat clipping and equal weights.
    """

    clip: float = setting(
        number(
            "dp_clip",
            0.0,
            "Largest L2 norm of the change that a worker makes to the whole model in a round; a "
            "larger change is scaled down to this norm; 0: off.",
            "L2 norm",
            low=0.0,
        ),
        dataclasses.MISSING,
    )
    noise: float = setting(
        number(
            "dp_noise",
            0.0,
            "Standard deviation of the Gaussian noise that the PS adds to a round's mean, as a "
            "multiple of --dp_clip / number of workers in the round; 0: off.",
            "factor",
            low=0.0,
        )
    )

    def __post_init__(self) -> None:
        """Raise an error if `clip` is not above 0, or the noise multiplier negative or infinite."""
        super().__post_init__()
        if not self.clip:
            raise ConfigurationError(
                f"--dp_clip={self.clip}: expected a finite L2 norm above 0 (the flag's value 0 "
                "turns clipping off)."
            )

    @property
    def adds_noise(self) -> bool:
        """True if the privacy policy adds noise to each mean of the workers' updates."""
        return self.noise > 0

    def around(self, codec: Codec) -> Codec:
        """Return the gradient codec with clipped input, and packets of L2 norm at most `clip`."""
        return BoundedContribution(Clip(codec, self.clip), self.clip)

    def init(self, secret: bytes) -> State:
        """Return the secret key from which the shard server's noise is drawn."""
        import numpy as np

        return {"key": np.frombuffer(secret, np.uint8).copy()}

    def release(self, mean: Update, count: int, size: int, version: int, state: State) -> Update:
        """Return the mean of `count` workers' updates, plus noise in each of the `size` entries."""
        if not self.adds_noise:
            return mean
        from thinwire.ops.privacy.noise import noised

        deviation = self.noise * self.clip / count
        return noised(mean, size, deviation, version, state["key"].tobytes())


def privacy_of(clip: float, noise: float) -> Privacy:
    """Return the privacy policy for the values of --dp_clip and --dp_noise.

    Raises:
        ConfigurationError: --dp_noise is set without --dp_clip, or a value is out of range.
    """
    if clip:
        return CentralPrivacy(clip, noise)
    if noise:
        raise ConfigurationError(
            f"--dp_noise={noise:g} without --dp_clip: the noise is a multiple of the norm that "
            "each worker's change is clipped to. Give --dp_clip too, or leave --dp_noise out."
        )
    return NoPrivacy()
