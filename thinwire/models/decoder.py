"""Decoder-only language models with causal attention and pre-normalization.

`build_decoder` returns a model that has 867,328 parameters with a vocabulary of 256 bytes. The
decoder's position embeddings are learned, for sequences of up to `CONTEXT` tokens.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019: layer
normalization before each attention and feed-forward part and after the last block, GELU, initial
weights from a normal distribution of deviation 0.02. Differences: the output layer does not share
the weights of the embedding; there is no dropout.
"""

from __future__ import annotations

from typing import Any

import keras

from thinwire.data.choices import CONTEXT

_DEVIATION = 0.02  # standard deviation of a decoder's initial weights
_HEAD_WIDTH = 32


def build_decoder(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return the network: tokens [N, T] int32 to logits [N, T, nb_classes] of the next tokens."""
    return _build("decoder", nb_classes, width=128, num_blocks=4)


def build_decoder_small(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return a decoder language model of 87,232 parameters, small enough for many CPU runs."""
    return _build("decoder-small", nb_classes, width=64, num_blocks=1)


def build_decoder_3m(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return a decoder of 2.8 million parameters: tokens [N, T] to logits of the next tokens."""
    return _build("decoder-3m", nb_classes, width=192, num_blocks=6)


def build_decoder_10m(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return a decoder of 10 million parameters: tokens [N, T] to logits of the next tokens."""
    return _build("decoder-10m", nb_classes, width=320, num_blocks=8)


def build_decoder_30m(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return a decoder of 29 million parameters: tokens [N, T] to logits of the next tokens."""
    return _build("decoder-30m", nb_classes, width=512, num_blocks=9)


def build_decoder_100m(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return a decoder of 100 million parameters: tokens [N, T] to logits of the next tokens."""
    return _build("decoder-100m", nb_classes, width=832, num_blocks=12)


def build_tiny(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return a decoder language model of 12,784 parameters, for quick tests."""
    return _build("decoder-tiny", nb_classes, width=16, num_blocks=1)


def _build(name: str, vocabulary: int, width: int, num_blocks: int) -> keras.Model:
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    # Positions of the tokens in their sequence, 0, 1, ... T - 1, as [N, T].
    places = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    hidden = _embedding(vocabulary, width, "token")(tokens)
    hidden = hidden + _embedding(CONTEXT, width, "position")(places)
    for number in range(1, num_blocks + 1):
        attention = keras.layers.MultiHeadAttention(
            max(1, width // _HEAD_WIDTH),
            min(width, _HEAD_WIDTH),
            kernel_initializer=_normal(),
            name=f"attention{number}",
        )
        normed = _norm(f"norm{number}a")(hidden)
        hidden = hidden + attention(normed, normed, use_causal_mask=True)
        normed = _norm(f"norm{number}b")(hidden)
        wide = _dense(4 * width, f"wide{number}", activation="gelu")(normed)
        hidden = hidden + _dense(width, f"narrow{number}")(wide)
    logits = _dense(vocabulary, "logits")(_norm("norm")(hidden))
    return keras.Model(tokens, logits, name=name)


def _dense(width: int, name: str, **keywords: Any) -> keras.layers.Dense:
    return keras.layers.Dense(width, kernel_initializer=_normal(), name=name, **keywords)


def _embedding(size: int, width: int, name: str) -> keras.layers.Embedding:
    return keras.layers.Embedding(size, width, embeddings_initializer=_normal(), name=name)


def _norm(name: str) -> keras.layers.LayerNormalization:
    return keras.layers.LayerNormalization(epsilon=1e-5, name=name)


def _normal() -> keras.initializers.Initializer:
    return keras.initializers.RandomNormal(stddev=_DEVIATION)
