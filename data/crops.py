"""Which part of an encoded image a training step sees, from its header and its draws alone.

Source: random area and aspect ratio of Szegedy et al., "Going deeper with convolutions",
arXiv:1409.4842, section 6: area 0.08 to 1, ratio 3/4 to 4/3, ten attempts. Where none fits, the
largest part in the middle that keeps the ratio.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

_ATTEMPTS = 10
#: Draws of one example: area, ratio, row and column of each attempt, then mirroring.
WIDTH = 4 * _ATTEMPTS + 1
_LEAST_AREA, _RATIO = 0.08, 4 / 3

_PNG = b"\x89PNG\r\n\x1a\n"
#: Markers that say the size: baseline, progressive and so on; the three others hold tables.
_SIZE_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_BARE_MARKERS = frozenset({0x01, *range(0xD0, 0xD9)})

#: Top, left, height and width, in pixels.
Box = tuple[int, int, int, int]


def image_size(encoded: bytes) -> tuple[int, int]:
    """Return height and width of a JPEG or PNG, in pixels.

    Raises:
        ValueError: It is neither, or ends before it says so.
    """
    try:
        if encoded.startswith(_PNG):
            width, height = struct.unpack_from(">II", encoded, 16)
        else:
            height, width = _jpeg_size(encoded)
    except (struct.error, IndexError) as error:
        raise ValueError(f"it ends after {len(encoded)} bytes, in its header") from error
    if not height or not width:
        raise ValueError(f"its header says {height} x {width} pixels")
    return height, width


def _jpeg_size(encoded: bytes) -> tuple[int, int]:
    if not encoded.startswith(b"\xff\xd8"):
        raise ValueError(f"it starts with the bytes {encoded[:4].hex(' ') or '(none)'}")
    at = 2
    while True:
        if encoded[at] != 0xFF:
            raise ValueError("its header is damaged")
        while encoded[at] == 0xFF:  # any number of them may stand before a marker
            at += 1
        marker = encoded[at]
        at += 1
        if marker in _SIZE_MARKERS:
            height, width = struct.unpack_from(">HH", encoded, at + 3)
            return height, width
        if marker not in _BARE_MARKERS:
            at += struct.unpack_from(">H", encoded, at)[0]


def random_box(height: int, width: int, draws: Sequence[float]) -> Box:
    """Return a random part of an image.

    Args:
        height: Of the image.
        width: Of the image.
        draws: At least WIDTH - 1 numbers in [0, 1).
    """
    for attempt in range(_ATTEMPTS):
        area, ratio, row, column = draws[4 * attempt : 4 * attempt + 4]
        pixels = (_LEAST_AREA + (1 - _LEAST_AREA) * area) * height * width
        shape = math.exp((2 * ratio - 1) * math.log(_RATIO))  # width / height
        high, wide = round(math.sqrt(pixels / shape)), round(math.sqrt(pixels * shape))
        if 1 <= high <= height and 1 <= wide <= width:
            return int(row * (height - high + 1)), int(column * (width - wide + 1)), high, wide
    high, wide = min(height, round(width * _RATIO)), min(width, round(height * _RATIO))
    return (height - high) // 2, (width - wide) // 2, high, wide


def is_mirrored(draws: Sequence[float]) -> bool:
    """Return whether left and right are swapped: half of the time."""
    return draws[WIDTH - 1] < 0.5
