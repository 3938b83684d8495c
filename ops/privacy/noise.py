"""Gaussian noise from a secret key: only a holder of the key can draw the same noise again."""

from __future__ import annotations

import hashlib
import hmac
import struct

import numpy as np

from thinwire.ops.types import Update, where_of


def noised(mean: Update, size: int, deviation: float, version: int, key: bytes) -> Update:
    """Return the mean of workers' updates plus Gaussian noise in every entry.

    The seed of the random noise is a keyed hash of the weights' version, the standard deviation and
    the mean of the updates. A replay of a training round with the same updates draws the same
    noise, bit for bit. A training round that is repeated after a crash with other updates draws
    different noise. If two released means of different updates had the same noise, their difference
    would reveal differences of updates without noise.

    Args:
        mean: Mean of the workers' updates of the round, with positions in the shard server's
            weights.
        size: Number of weights of the shard server.
        deviation: Standard deviation of the noise in each entry of the mean.
        version: Version of the shard server's weights before the round.
        key: Secret random bytes of the shard server, the key of its noise.
    """
    values = np.zeros(size, np.float32)
    values[where_of(mean.indices)] += mean.values
    digest = hmac.new(key, struct.pack("<qd", version, deviation), hashlib.sha256)
    digest.update(values.data)
    seed = int.from_bytes(digest.digest()[:16], "little")
    generator = np.random.Generator(np.random.Philox(key=seed))
    values += np.float32(deviation) * generator.standard_normal(size, np.float32)
    return Update(None, values)
