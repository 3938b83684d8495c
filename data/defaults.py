"""Defaults and legal values of --scaling and --augment for each data set.

Pure Python, so that flags can be checked before TensorFlow or numpy is imported.
"""

from __future__ import annotations

from thinwire.data.choices import AUGMENTATIONS, SCALINGS
from thinwire.ops.types import ConfigurationError

#: Data set -> its scaling and augmentation if none is given; of others the first of each.
DEFAULTS = {
    "cifar10": ("cifar10", "crop_flip"),
    "imagenet": ("imagenet", "resized_crop_flip"),
    "imagenet_synthetic": ("imagenet", "none"),
}
#: Data set -> the augmentations it takes; others take the first two.
_TAKES = {"imagenet": ("none", "resized_crop_flip"), "imagenet_synthetic": ("none",)}
#: Data set -> --network and --nb_classes if none is given; of others those of the task.
MODELS = {"stdlib": ("decoder", 256)}
#: Data sets whose accuracy is usually reported with the best five answers, too.
REPORTED_WITH_TOP5 = ("imagenet", "imagenet_synthetic")


def default_preprocessing(
    dataset: str, scaling: str | None, augment: str | None
) -> tuple[str, str]:
    """Return scaling and augmentation, those of the data set where None was chosen.

    >>> default_preprocessing("cifar10", "unit", None)
    ('unit', 'crop_flip')
    """
    own_scaling, own_augment = DEFAULTS.get(dataset, (SCALINGS[0], AUGMENTATIONS[0]))
    return scaling or own_scaling, augment or own_augment


def reports_top5(wanted: bool, dataset: str, nb_classes: int | None) -> bool:
    """Return whether evaluations count the best five answers too.

    Args:
        wanted: The value of --top5.
        dataset: The data set; for some it is the default.
        nb_classes: None where only the user's model knows.

    Raises:
        ConfigurationError: It is wanted, and there are no more than five answers.
    """
    is_sensible = nb_classes is None or nb_classes > 5
    if wanted and not is_sensible:
        raise ConfigurationError(
            f"--top5 and --nb_classes={nb_classes}: expected more than 5 classes. Leave it out."
        )
    return wanted or (is_sensible and dataset in REPORTED_WITH_TOP5)


def check_augmentation(dataset: str, augment: str | None) -> None:
    """Reject an augmentation that a data set does not have.

    Raises:
        ConfigurationError: It cannot be augmented that way.
    """
    taken = _TAKES.get(dataset, AUGMENTATIONS[:2])
    if augment is not None and augment not in taken:
        raise ConfigurationError(
            f"--augment={augment} is not for --dataset={dataset}; expected {' or '.join(taken)}."
        )
