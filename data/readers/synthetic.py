"""Generated examples of every task; no files needed.

Images have a coarse pattern for each class, or of each label, or of random patches, under strong
noise; sequences of tokens follow one of a few grammars.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_EXAMPLES = {"train": 4000, "test": 1000}
_COARSE = 4  # a pattern has 4 x 4 patches
_NOISE = 80.0  # standard deviation, in grey levels
_CHUNK = 256
#: Of tokens: length of a sequence, grammars, and how likely each next token of one is.
_LENGTH = 32
_GRAMMARS = 2
_NEXT = (0.65, 0.2, 0.1, 0.05)
_SHARE_OF_LABELS = 0.3  # of them that an example has, on average
_STREAMS = {"train": 1, "test": 2}


def generate(
    part: str,
    image_size: int,
    image_depth: int,
    nb_classes: int,
    seed: int,
    num_examples: int | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Return the images and labels of one part; the same arguments give the same data anywhere.

    Args:
        part: "train" or "test"; both show the same patterns under different noise.
        image_size: Height and width in pixels.
        image_depth: Channels.
        nb_classes: Classes, equally frequent.
        seed: Seeds patterns, labels and noise.
        num_examples: How many; None for ``NUM_EXAMPLES`` of the part.

    Returns:
        Images uint8 [N, image_size, image_size, image_depth] and labels int32 [N].
    """
    coarse = np.random.default_rng([seed, 0]).uniform(
        40, 216, size=(nb_classes, _COARSE, _COARSE, image_depth)
    )
    patterns = _enlarged(coarse, image_size)
    rng = np.random.default_rng([seed, _STREAMS[part]])
    count = NUM_EXAMPLES[part] if num_examples is None else num_examples
    labels = rng.permutation(np.arange(count, dtype=np.int32) % nb_classes)
    return _noisy(lambda rows: patterns[labels[rows]], count, rng), labels


def generate_numbers(
    part: str, image_size: int, image_depth: int, nb_values: int, seed: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return images of random patches, and numbers that are smooth functions of the patches.

    Args and errors as of `generate`, with numbers in place of classes.

    Returns:
        Images uint8 [N, image_size, image_size, image_depth] and numbers float32 [N, nb_values],
        around 0.
    """
    num_patches = _COARSE * _COARSE * image_depth
    first, second = np.random.default_rng([seed, 0]).normal(
        0, num_patches**-0.5, size=(2, num_patches, nb_values)
    )
    rng = np.random.default_rng([seed, _STREAMS[part]])
    count = NUM_EXAMPLES[part]
    coarse = rng.uniform(40, 216, size=(count, _COARSE, _COARSE, image_depth))
    patches = coarse.reshape(count, -1)
    # Images are standardised: what is left of a patch is how it differs from the others.
    patches = (patches - patches.mean(1, keepdims=True)) / patches.std(1, keepdims=True)
    numbers = 0.8 * patches @ first + np.tanh(2 * patches @ second) * 0.7
    images = _noisy(lambda rows: _enlarged(coarse[rows], image_size), count, rng)
    return images, numbers.astype(np.float32)


def generate_label_sets(
    part: str, image_size: int, image_depth: int, nb_labels: int, seed: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return images with a pattern for each of their labels, several on top of each other.

    Args and errors as of `generate`, with labels in place of classes.

    Returns:
        Images uint8 [N, image_size, image_size, image_depth] and labels float32 [N, nb_labels],
        each 0 or 1.
    """
    coarse = np.random.default_rng([seed, 0]).choice(
        (-40.0, 40.0), size=(nb_labels, _COARSE * _COARSE * image_depth)
    )
    rng = np.random.default_rng([seed, _STREAMS[part]])
    count = NUM_EXAMPLES[part]
    labels = (rng.random((count, nb_labels)) < _SHARE_OF_LABELS).astype(np.float32)
    shape = (-1, _COARSE, _COARSE, image_depth)

    def drawn(rows: slice) -> NDArray[np.float32]:
        return _enlarged((128 + labels[rows] @ coarse).reshape(shape), image_size)

    return _noisy(drawn, count, rng, noise=_NOISE / 2), labels


def generate_tokens(
    part: str, image_size: int, image_depth: int, nb_words: int, seed: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return sequences of tokens, and at each place the token that follows.

    Each sequence follows one of two grammars: after a token come four others with fixed
    probabilities. The best perplexity is about 2.7, once the grammar is clear.

    Args and errors as of `generate`, with words in place of classes; images have no meaning.

    Returns:
        Tokens int32 [N, 32] and the next ones int32 [N, 32].
    """
    follow = np.random.default_rng([seed, 0]).integers(
        nb_words, size=(_GRAMMARS, nb_words, len(_NEXT))
    )
    rng = np.random.default_rng([seed, _STREAMS[part]])
    count = NUM_EXAMPLES[part]
    grammar = rng.integers(_GRAMMARS, size=count)
    choices = rng.choice(len(_NEXT), size=(count, _LENGTH), p=_NEXT)
    tokens = np.empty((count, _LENGTH + 1), np.int32)
    tokens[:, 0] = rng.integers(nb_words, size=count)
    for place in range(_LENGTH):
        tokens[:, place + 1] = follow[grammar, tokens[:, place], choices[:, place]]
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


Generator = Callable[[str, int, int, int, int], tuple[NDArray[Any], NDArray[Any]]]
#: --task -> (part, image_size, image_depth, nb_classes, seed) -> examples and labels.
GENERATORS: Mapping[str, Generator] = {
    "classification": generate,
    "autoencoder": generate,
    "regression": generate_numbers,
    "multilabel": generate_label_sets,
    "tokens": generate_tokens,
}


def _enlarged(coarse: NDArray[Any], image_size: int) -> NDArray[np.float32]:
    """Return patterns [B, 4, 4, channels] as images [B, image_size, image_size, channels]."""
    patch = np.arange(image_size) * _COARSE // image_size
    return coarse[:, patch][:, :, patch].astype(np.float32)


def _noisy(
    drawn: Callable[[slice], NDArray[np.float32]],
    count: int,
    rng: np.random.Generator,
    noise: float = _NOISE,
) -> NDArray[np.uint8]:
    """Return so many images, drawn a part at a time, under noise."""
    chunks = []
    for start in range(0, count, _CHUNK):
        chunk = drawn(slice(start, min(count, start + _CHUNK)))
        chunk += noise * rng.standard_normal(chunk.shape, dtype=np.float32)
        chunks.append(np.clip(chunk, 0, 255).astype(np.uint8))
    return np.concatenate(chunks)
