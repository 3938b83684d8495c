"""The data set a run was asked for: by name, or from the user's model file."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from data import PARTS, datasets
from ops.run import DataChoice, ModelChoice


def load_chosen(
    data: DataChoice,
    model: ModelChoice,
    user_module: ModuleType | None,
    seed: int,
    parts: Sequence[str] = PARTS,
) -> datasets.Dataset:
    """Load what --dataset names, or what the user's `load_data()` returns.

    Raises:
        ConfigurationError: Missing or damaged files, or data that does not fit the model.
    """
    if user_module is not None and hasattr(user_module, "load_data"):
        return datasets.from_user_module(user_module, seed)
    return datasets.load(
        data.dataset,
        data.data_dir,
        model.image_size,
        model.image_depth,
        model.nb_classes,
        data.scaling,
        seed,
        parts=parts,
    )


def num_train(
    data: DataChoice, model: ModelChoice, user_module: ModuleType | None, seed: int
) -> int:
    """Return the size of the training set: what one of --epochs consumes."""
    return len(load_chosen(data, model, user_module, seed, parts=("train",)).train_labels)
