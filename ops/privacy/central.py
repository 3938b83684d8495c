"""Privacy policies: none, or clipped updates of workers and Gaussian noise on their mean."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from thinwire.ops.aggregation.outliers import norm_of
from thinwire.ops.codecs.base import Codec, EncodeContext
from thinwire.ops.codecs.error_feedback import CodecWrapper
from thinwire.ops.codecs.packets import decoded, rescaled
from thinwire.ops.codecs.wrappers import Clip
from thinwire.ops.options import number
from thinwire.ops.policy import Policy, setting
from thinwire.ops.types import ConfigurationError, Float32, Packet, State, Update

#: Rounding of scaled values to float32 may increase the values' norm. So the codec wrapper scales
#: values to this fraction of the bound, and the norm of the rounded values is still at most the
#: bound.
_ROUNDING = 1 - 2.0**-20


@dataclasses.dataclass(frozen=True)
class BoundedContribution(CodecWrapper):
    """Codec wrapper that bounds the L2 norm of each decoded packet, over all tensors.

    The wrapper `BoundedContribution` must be the outermost one, so that the norm bound holds for
    the packets that the worker sends. Packets of the wrapped codecs may exceed the norm bound,
    because these codecs round values up, and error feedback adds values that earlier rounds did not
    send. `BoundedContribution` drops the excess of an update over the norm bound. If error feedback
    stored the excess of updates over the norm bound, the residual (the values not sent yet) would
    grow from round to round.

    Attributes:
        inner: The gradient codec whose packets the wrapper bounds.
        norm: Largest L2 norm of a decoded packet; above 0.
    """

    norm: float = 1.0

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return the wrapped codec's packet, scaled down if its decoded L2 norm exceeds `norm`.

        Raises:
            NonFiniteUpdate: A gradient tensor holds NaN or infinity.
        """
        packet, state = super().encode(tensors, state, ctx)
        norm = math.hypot(*(norm_of(decoded(block)[1]) for block in packet.blocks))
        if norm <= self.norm:
            return packet, state
        factor = self.norm / norm * _ROUNDING
        blocks = tuple(rescaled(block, factor) for block in packet.blocks)
        return dataclasses.replace(packet, blocks=blocks), state


@dataclasses.dataclass(frozen=True)
class Privacy(Policy):
    """Policy that bounds each worker's update, and adds noise to the mean of the updates.

    This class itself is the policy without privacy: no bound, and no noise.
    """

    @property
    def clip(self) -> float:
        """Largest allowed L2 norm of a worker's update in a round; 0 means no bound."""
        return 0.0

    @property
    def adds_noise(self) -> bool:
        """True if the privacy policy adds noise to each mean of the workers' updates."""
        return False

    def around(self, codec: Codec) -> Codec:
        """Return the gradient codec, wrapped so that each packet's L2 norm is at most `clip`."""
        return codec

    def init(self, secret: bytes) -> State:
        """Return the policy's state on a shard server: the secret key of its random noise.

        Args:
            secret: Secret random bytes of the shard server, the key of its noise.
        """
        return {}

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
        return mean


@dataclasses.dataclass(frozen=True)
class CentralPrivacy(Privacy):
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
        )
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
    return Privacy()
