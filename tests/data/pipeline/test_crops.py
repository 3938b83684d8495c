"""Random crops of images: sizes from the header, and boxes within the specified bounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.data.pipeline.cursor import uniforms
from thinwire.data.pipeline.decode import WIDTH, image_size, is_mirrored, random_box


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 2**40))
def test_a_box_is_within_the_image(height: int, width: int, place: int) -> None:
    draws = uniforms(1, place, 1, WIDTH)[0].tolist()
    top, left, high, wide = random_box(height, width, draws)
    assert 0 <= top <= top + high <= height and 0 <= left <= left + wide <= width
    assert high >= 1 and wide >= 1


def test_areas_ratios_and_places_are_even() -> None:
    draws = uniforms(2, 0, 2000, WIDTH)
    boxes = np.array([random_box(400, 400, row.tolist()) for row in draws])
    areas = boxes[:, 2] * boxes[:, 3] / 160_000
    assert areas.min() == pytest.approx(0.08, abs=0.005) and areas.max() > 0.97
    # Uniform from 0.08 to 1, except for the largest, which fit less often.
    assert np.mean(areas) == pytest.approx(0.51, abs=0.03)
    ratios = np.log(boxes[:, 3] / boxes[:, 2])
    assert np.abs(ratios).max() <= np.log(4 / 3) + 0.02
    assert np.mean(ratios) == pytest.approx(0, abs=0.02)
    assert ratios.std() == pytest.approx(np.log(4 / 3) / np.sqrt(3), abs=0.02)
    free = 400 - boxes[:, 2]
    assert np.mean(boxes[free > 50, 0] / free[free > 50]) == pytest.approx(0.5, abs=0.03)
    mirrored = [is_mirrored(row.tolist()) for row in draws]
    assert np.mean(mirrored) == pytest.approx(0.5, abs=0.04)


def test_the_first_attempt_that_fits_counts() -> None:
    draws = [0.999] * WIDTH  # as wide as can be, which does not fit
    draws[4:8] = [0.0, 0.5, 0.0, 0.999]
    assert random_box(100, 100, draws) == (0, 72, 28, 28)


@pytest.mark.parametrize(
    ("size", "box"), [((100, 400), (0, 133, 100, 133)), ((400, 100), (133, 0, 133, 100))]
)
def test_where_none_fits_the_middle_is_taken(size: tuple[int, int], box: tuple) -> None:
    assert random_box(*size, [0.999] * WIDTH) == box


JPEG = bytes.fromhex("ffd8 ffe0 0004 aabb ffff c2 000b 08 012c 0190 00")
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (300).to_bytes(4, "big") + (7).to_bytes(4, "big")


def test_sizes_of_headers() -> None:
    assert image_size(JPEG) == (300, 400)
    assert image_size(PNG) == (7, 300)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "none"),
        (b"GIF89a", "47 49 46 38"),
        (JPEG[:-5], "ends after 14 bytes"),
        (JPEG[:3], "ends after 3 bytes"),
        (JPEG[:8] + b"\0", "damaged"),
        (JPEG.replace(b"\x01\x2c", b"\0\0"), "0 x 400"),
        (PNG[:18], "ends after 18"),
    ],
)
def test_headers_that_say_nothing(content: bytes, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        image_size(content)
