"""Generates artificial training examples for every task of a model, without files.

A generated image is a coarse pattern under strong noise. The pattern of a generated image belongs
to a class, is a sum of patterns of labels, or consists of random patches. A generated sequence of
tokens follows one of two artificial grammars.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_EXAMPLES = {"train": 4000, "test": 1000}
_COARSE = 4  # number of patches per side of an image's pattern, which has 4 x 4 patches
_NOISE = 80.0  # standard deviation of the noise added to images, in gray levels
_CHUNK = 256  # number of images that are generated together, to limit the memory
_LENGTH = 32  # number of tokens in a generated sequence
_GRAMMARS = 2
#: Probabilities of the four tokens that a grammar allows after each token.
_NEXT = (0.65, 0.2, 0.1, 0.05)
_SHARE_OF_LABELS = 0.3  # probability that an example has a given label
_STREAMS = {"train": 1, "test": 2}


def generate(
    part: str,
    image_size: int,
    image_depth: int,
    nb_classes: int,
    seed: int,
    num_examples: int | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Return generated images and labels of the training or test part; equal arguments give equal
    data.

    Args:
        part: Part of the data, "train" or "test"; both parts have the same patterns under different
            noise.
        image_size: Height and width of an image in pixels.
        image_depth: Number of channels of an image.
        nb_classes: Number of classes; the classes are equally frequent.
        seed: Seed of the patterns, the labels and the noise.
        num_examples: Number of examples to generate; None for the part's number in
            ``NUM_EXAMPLES``.

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

    The docstring of `generate` describes the arguments; ``nb_values`` is the number of values per
    example.

    Returns:
        Images uint8 [N, image_size, image_size, image_depth], and numbers float32 [N, nb_values]
        with values around 0.
    """
    num_patches = _COARSE * _COARSE * image_depth
    first, second = np.random.default_rng([seed, 0]).normal(
        0, num_patches**-0.5, size=(2, num_patches, nb_values)
    )
    rng = np.random.default_rng([seed, _STREAMS[part]])
    count = NUM_EXAMPLES[part]
    coarse = rng.uniform(40, 216, size=(count, _COARSE, _COARSE, image_depth))
    patches = coarse.reshape(count, -1)
    # The target numbers are computed from standardized patches, because --scaling standardizes each
    # image by default, so that the network does not receive the mean and the contrast of the
    # patches.
    patches = (patches - patches.mean(1, keepdims=True)) / patches.std(1, keepdims=True)
    numbers = 0.8 * patches @ first + np.tanh(2 * patches @ second) * 0.7
    images = _noisy(lambda rows: _enlarged(coarse[rows], image_size), count, rng)
    return images, numbers.astype(np.float32)


def generate_label_sets(
    part: str, image_size: int, image_depth: int, nb_labels: int, seed: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return images that are sums of patterns, one pattern for each label of the image.

    The docstring of `generate` describes the arguments; ``nb_labels`` is the number of labels.

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
    """Return generated sequences of tokens, and the token that follows each token.

    Each generated sequence of tokens follows one of two grammars. In each grammar of generated
    sequences, one of four tokens follows a given token, with fixed probabilities. The best possible
    perplexity of a language model on a generated sequence is about 2.7 if the sequence's grammar is
    known.

    The docstring of `generate` describes the arguments. ``nb_words`` is the number of tokens;
    ``image_size`` and ``image_depth`` are ignored.

    Returns:
        Tokens int32 [N, 32], and the next tokens int32 [N, 32].
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
#: --task -> function (part, image_size, image_depth, nb_classes, seed) -> examples and labels.
GENERATORS: Mapping[str, Generator] = {
    "classification": generate,
    "autoencoder": generate,
    "regression": generate_numbers,
    "multilabel": generate_label_sets,
    "tokens": generate_tokens,
}


def _enlarged(coarse: NDArray[Any], image_size: int) -> NDArray[np.float32]:
    """Enlarge patterns [B, 4, 4, channels] to images [B, image_size, image_size, channels]."""
    patch = np.arange(image_size) * _COARSE // image_size
    return coarse[:, patch][:, :, patch].astype(np.float32)


def _noisy(
    drawn: Callable[[slice], NDArray[np.float32]],
    count: int,
    rng: np.random.Generator,
    noise: float = _NOISE,
) -> NDArray[np.uint8]:
    """Return ``count`` images: each is a pattern that ``drawn`` returns, plus random noise."""
    chunks = []
    for start in range(0, count, _CHUNK):
        chunk = drawn(slice(start, min(count, start + _CHUNK)))
        chunk += noise * rng.standard_normal(chunk.shape, dtype=np.float32)
        chunks.append(np.clip(chunk, 0, 255).astype(np.uint8))
    return np.concatenate(chunks)
