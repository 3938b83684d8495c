"""Defaults and legal values of the flags --scaling and --augment for each data set.

The module `defaults` imports neither TensorFlow nor numpy, so that flags can be checked before such
slow imports.
"""

from __future__ import annotations

from thinwire.data.choices import AUGMENTATIONS, SCALINGS
from thinwire.ops.types import ConfigurationError

#: Data set -> its default scaling and augmentation. A data set that is not listed has the first of
#: ``SCALINGS`` and the first of ``AUGMENTATIONS``.
DEFAULTS = {
    "cifar10": ("cifar10", "crop_flip"),
    "imagenet": ("imagenet", "resized_crop_flip"),
    "imagenet_synthetic": ("imagenet", "none"),
}
#: Data set -> its legal augmentations. A data set that is not listed permits the first two
#: ``AUGMENTATIONS``.
_TAKES = {"imagenet": ("none", "resized_crop_flip"), "imagenet_synthetic": ("none",)}
#: Data set -> its defaults of --network and --nb_classes. The task defines the defaults for an
#: unlisted data set.
MODELS = {"stdlib": ("decoder", 256)}
#: Data sets for which evaluations report the top-5 accuracy by default.
REPORTED_WITH_TOP5 = ("imagenet", "imagenet_synthetic")


def default_preprocessing(
    dataset: str, scaling: str | None, augment: str | None
) -> tuple[str, str]:
    """Return the scaling and augmentation to use; None means the data set's default.

    >>> default_preprocessing("cifar10", "unit", None)
    ('unit', 'crop_flip')
    """
    own_scaling, own_augment = DEFAULTS.get(dataset, (SCALINGS[0], AUGMENTATIONS[0]))
    return scaling or own_scaling, augment or own_augment


def reports_top5(wanted: bool, dataset: str, nb_classes: int | None) -> bool:
    """Return True if evaluations report the top-5 accuracy in addition to the accuracy.

    Args:
        wanted: Value of the flag --top5, True to report the top-5 accuracy.
        dataset: Name of the data set; ``REPORTED_WITH_TOP5`` lists the sets with top-5 by default.
        nb_classes: Number of classes of the model; None if only the user's model defines the
            number.

    Raises:
        ConfigurationError: ``wanted`` is true and the model has five classes or fewer.
    """
    is_sensible = nb_classes is None or nb_classes > 5
    if wanted and not is_sensible:
        raise ConfigurationError(
            f"--top5 and --nb_classes={nb_classes}: expected more than 5 classes. Leave --top5 out."
        )
    return wanted or (is_sensible and dataset in REPORTED_WITH_TOP5)


def check_augmentation(dataset: str, augment: str | None) -> None:
    """Raise an error for an augmentation that the data set does not support.

    Raises:
        ConfigurationError: The data set does not support the augmentation.
    """
    taken = _TAKES.get(dataset, AUGMENTATIONS[:2])
    if augment is not None and augment not in taken:
        raise ConfigurationError(
            f"--augment={augment} is not for --dataset={dataset}; expected {' or '.join(taken)}."
        )
