"""Thinwire's model file for the decoder's work: the built-in decoder with the initial weights."""

from __future__ import annotations

import keras

from bench.peers import decoder_work, work
from thinwire.models.registry import build_network

_SEED = 1


def build_model() -> keras.Model:
    """Return the network: tokens [N, 64] int32 to logits [N, 64, 256] of the next tokens."""
    model = build_network("decoder", 1, 1, decoder_work.VOCABULARY, seed=_SEED)
    model.set_weights(work.unflatten(decoder_work.initial(_SEED), decoder_work.TENSORS))
    return model
