"""Gaussian noise that only the holder of a key can draw again."""

from __future__ import annotations

import hashlib
import hmac
import struct

import numpy as np

from thinwire.ops.types import Update, where_of


def noised(mean: Update, size: int, deviation: float, version: int, key: bytes) -> Update:
    """Return a dense update: the mean, and noise of one standard deviation in every entry.

    The generator's seed is a keyed hash of the version and of the mean itself. So a replay of the
    same round draws the same noise, bit for bit, and a round that is repeated after a crash with
    other updates draws another one: the difference of the two would else be without noise.

    Args:
        mean: Of a round.
        size: Entries of the shard.
        deviation: Of the noise.
        version: Of the shard, before the round.
        key: Secret bytes.
    """
    values = np.zeros(size, np.float32)
    values[where_of(mean.indices)] += mean.values
    digest = hmac.new(key, struct.pack("<qd", version, deviation), hashlib.sha256)
    digest.update(values.data)
    seed = int.from_bytes(digest.digest()[:16], "little")
    generator = np.random.Generator(np.random.Philox(key=seed))
    values += np.float32(deviation) * generator.standard_normal(size, np.float32)
    return Update(None, values)
