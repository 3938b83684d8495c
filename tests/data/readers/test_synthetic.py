"""The noise strength of generated images sets how hard the task is."""

import pytest

from thinwire.data.readers.synthetic import generate, generate_label_sets


def test_images_without_a_label_are_noise_of_40_grey_levels():
    images, labels = generate_label_sets("test", 8, 1, 4, seed=3)
    plain = images[labels.sum(1) == 0]
    assert len(plain) > 200
    assert plain.mean() == pytest.approx(128, abs=1)
    assert plain.std() == pytest.approx(40, rel=0.02)


def test_images_of_one_class_differ_by_noise_of_80_grey_levels():
    """A pixel with a medium pattern value is hardly ever cut off at 0 or 255."""
    images, labels = generate("test", 8, 1, 2, seed=3, num_examples=2000)
    pixels = images[labels == 0].reshape(1000, -1)
    middle = pixels[:, abs(pixels.mean(0) - 128).argmin()]
    assert middle.std() == pytest.approx(72, abs=4)  # 80 before the cut
