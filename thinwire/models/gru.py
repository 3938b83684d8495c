"""A recurrent token model (GRU); 25,024 parameters for a vocabulary of 64 tokens."""

from __future__ import annotations

import keras


def build_model(image_size: int, image_depth: int, nb_classes: int) -> keras.Model:
    """Return the network: tokens [N, T] int32 to logits [N, T, nb_classes] of the next tokens."""
    return keras.Sequential(
        [
            keras.Input((None,), dtype="int32", name="tokens"),
            keras.layers.Embedding(nb_classes, 32, name="embedding"),
            keras.layers.GRU(64, return_sequences=True, name="gru"),
            keras.layers.Dense(nb_classes, name="logits"),
        ],
        name="gru",
    )
