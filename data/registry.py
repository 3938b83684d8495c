"""Loads, checks and scales data sets, on which workers train and Supervisors evaluate models.

The function `load` loads a data set by name, and `from_user_module` loads the data of a user's
function ``load_data()``. The data sets in `LARGE` (ImageNet, and a synthetic substitute without
files) do not fit into memory. The images of an ImageNet training batch are decoded when the batch
is needed.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from absl import logging
from numpy.typing import NDArray

from thinwire.data import sources
from thinwire.data.choices import AUGMENTATIONS, DATASETS, PARTS, SCALINGS, TEXTS
from thinwire.data.defaults import check_augmentation, default_preprocessing
from thinwire.data.pipeline.decode import Decoded
from thinwire.data.pipeline.lazy import Augmented, Lazy, Repeated, check_scaling, scale
from thinwire.data.readers import imagenet, source_text, synthetic
from thinwire.data.sources import DatasetPart
from thinwire.models.tasks import CLASSIFICATION, TASKS, Task
from thinwire.ops.types import ConfigurationError

#: Part of imagenet_synthetic -> its number of images, as in ImageNet. Only ``_NUM_DIFFERENT``
#: images of the set differ, and the set repeats these images.
NUM_SYNTHETIC = {"train": 1_281_167, "test": 1_000}
_NUM_DIFFERENT = 256


@dataclasses.dataclass(frozen=True)
class DatasetRequest:
    """The arguments of the function `load`, with defaults in place of None."""

    name: str
    data_dir: str | None
    image_size: int = 28
    image_depth: int = 1
    nb_classes: int = 10
    scaling: str = SCALINGS[0]
    augment: str = AUGMENTATIONS[0]
    seed: int = 0
    task: Task = TASKS[CLASSIFICATION]


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Training and test examples of a data set; a part that was not requested has no examples.

    The labels for classification are [N] int32 classes; the labels for another task (for example
    text) have the form that the task defines.
    """

    # Inputs of the training examples, [N, ...], mostly images [N, height, width, channels] float32.
    train_images: NDArray[Any] | Lazy
    train_labels: NDArray[Any]  # labels of the training examples, [N, ...], the targets of the loss
    # Inputs of the test examples, [M, ...], in the form of train_images.
    test_images: NDArray[Any] | Lazy
    test_labels: NDArray[Any]  # labels of the test examples, [M, ...], in the form of train_labels
    # Number of the first training example of each data file, [files + 1] int64; None if unknown.
    train_file_offsets: NDArray[np.int64] | None = None
    # Classes of the examples, [N] int32; None except for autoencoders.
    train_classes: NDArray[np.int32] | None = None

    @property
    def classes(self) -> NDArray[Any]:
        """Classes by which the training set is split among workers; the labels if ``train_classes``
        is None.
        """
        return self.train_labels if self.train_classes is None else self.train_classes


def _imagenet(wanted: DatasetRequest, part: str) -> DatasetPart:
    if wanted.image_depth != imagenet.DEPTH:
        raise ConfigurationError(
            f"Data set imagenet has images of {imagenet.DEPTH} channels, but --image_depth is "
            f"{wanted.image_depth}. Set --image_depth {imagenet.DEPTH}, and --image_size and "
            "--nb_classes, usually 224 and 1000."
        )
    check_scaling(wanted.scaling, wanted.image_depth)
    source = imagenet.find(wanted.data_dir, part, wanted.nb_classes)
    images = Decoded(
        source,
        np.arange(len(source.labels)),
        wanted.image_size,
        wanted.scaling,
        wanted.augment,
    )
    return DatasetPart(images, source.labels, source.file_offsets)


def _imagenet_synthetic(wanted: DatasetRequest, part: str) -> DatasetPart:
    """Return 256 generated images, repeated to ImageNet's size so that an epoch is as long as on
    ImageNet.
    """
    _check_no_folder(wanted, "choose --dataset imagenet.")
    images, labels = synthetic.generate(
        part,
        wanted.image_size,
        wanted.image_depth,
        wanted.nb_classes,
        wanted.seed,
        num_examples=_NUM_DIFFERENT,
    )
    positions = np.arange(NUM_SYNTHETIC[part])
    logging.info("data: %d different images, repeated as %d images", len(labels), len(positions))
    repeated = Repeated(scale(images, wanted.scaling), positions)
    return DatasetPart(repeated, labels[positions % len(labels)])


#: Data set that does not fit into memory -> function that returns one part, without decoding.
LARGE: Mapping[str, Callable[[DatasetRequest, str], DatasetPart]] = {
    "imagenet": _imagenet,
    "imagenet_synthetic": _imagenet_synthetic,
}


def load(
    name: str,
    data_dir: str | None,
    image_size: int,
    image_depth: int,
    nb_classes: int,
    scaling: str | None,
    seed: int,
    *,
    parts: Sequence[str] = PARTS,
    augment: str | None = None,
    task: Task = TASKS[CLASSIFICATION],
) -> Dataset:
    """Load, check and scale the data set with the given name.

    Args:
        name: Name of the data set, one of ``data.DATASETS``.
        data_dir: Folder of the files (--data_dir); None for the data set's usual folders.
        image_size: Height and width of the network's input, in pixels.
        image_depth: Number of channels of the network's input.
        nb_classes: Number of classes of the network; for a task without classes, the number of
            values, labels or words.
        scaling: Scaling of the pixels, one of ``data.SCALINGS``; None for the data set's default.
        seed: Seed of the random numbers of generated data.
        parts: Parts of the data set to load, for example ("train",) on a worker.
        augment: Augmentation of the training images, one of ``data.AUGMENTATIONS``; None for the
            data set's default.
        task: Task of the model, which defines the form of the labels.

    Raises:
        ConfigurationError: The name, scaling or augmentation of the data set is unknown, files are
            missing or damaged, or the images and labels do not fit the requested sizes.
    """
    _check_name(name)
    check_augmentation(name, augment)
    request = DatasetRequest(
        name,
        data_dir,
        image_size,
        image_depth,
        nb_classes,
        *default_preprocessing(name, scaling, augment),
        seed,
        task,
    )
    load_part = LARGE.get(name, _in_memory)
    images = np.zeros((0, image_size, image_size, image_depth), np.float32)
    nothing = DatasetPart(images, np.zeros(0, np.int32))
    train, test = (load_part(request, part) if part in parts else nothing for part in PARTS)
    return Dataset(
        train.images,
        train.labels,
        test.images,
        test.labels,
        train.file_offsets,
        train.classes,
    )


def _in_memory(wanted: DatasetRequest, part: str) -> DatasetPart:
    """Return the scaled training or test part; images to augment stay uint8 until a batch needs
    them.
    """
    raw = load_raw(wanted, part)
    check_scaling(wanted.scaling, wanted.image_depth)
    is_changed = part == "train" and wanted.augment != AUGMENTATIONS[0]
    form = wanted.task.labels
    if is_changed and form.are_inputs:
        raise ConfigurationError(
            f"--augment={wanted.augment}: the labels of this task are the unchanged images; "
            f"expected --augment={AUGMENTATIONS[0]}."
        )
    if is_changed:
        return DatasetPart(Augmented(raw.images, wanted.scaling), raw.labels, raw.file_offsets)
    images = scale(raw.images, wanted.scaling) if raw.images.dtype == np.uint8 else raw.images
    if form.are_inputs:
        return DatasetPart(images, images, raw.file_offsets, raw.labels)
    return DatasetPart(images, raw.labels, raw.file_offsets)


def load_raw(wanted: DatasetRequest, part: str) -> DatasetPart:
    """Load the training or test part without scaling: uint8 images need a quarter of the memory of
    scaled images.

    The docstring of `load` describes the errors; ``part`` is "train" or "test".
    """
    name, data_dir, nb_classes = wanted.name, wanted.data_dir, wanted.nb_classes
    _check_name(name, part)
    if name in LARGE:
        raise ConfigurationError(
            f"Data set {name} does not fit into memory, but must be loaded as one array; choose "
            "another data set."
        )
    if name == "synthetic":
        _check_no_folder(wanted, "choose another --dataset.")
        generate = synthetic.GENERATORS[wanted.task.name]
        return DatasetPart(
            *generate(part, wanted.image_size, wanted.image_depth, nb_classes, wanted.seed)
        )
    if name in TEXTS:
        raw = DatasetPart(*source_text.read(part, data_dir))
    else:
        raw = sources.find(name, part, data_dir, wanted.image_size, wanted.image_depth)
        _check_fit(name, raw, (wanted.image_size, wanted.image_size, wanted.image_depth))
    if (highest := int(raw.labels.max())) >= nb_classes:
        raise ConfigurationError(
            f"Data set {name} has the label {highest}; expected 0 to {nb_classes - 1}. Set "
            f"--nb_classes {highest + 1} or more."
        )
    return raw


def _check_no_folder(wanted: DatasetRequest, instead: str) -> None:
    """Raise an error if --data_dir is given for a data set that is generated."""
    if wanted.data_dir is not None:
        raise ConfigurationError(
            f"--data_dir {wanted.data_dir} was given, but --dataset {wanted.name} is generated and "
            f"reads no files. Leave --data_dir out, or {instead}"
        )


def from_user_module(module: ModuleType, seed: int, task: Task = TASKS[CLASSIFICATION]) -> Dataset:
    """Return the data of a user's ``load_data()`` without scaling: the user scales the images.

    Args:
        module: User's module, as ``models.load_user_model`` returned it.
        seed: Seed of the global random generators of Python and numpy for the call of
            ``load_data``, so that every process of a run gets equal data.
        task: Task of the model, which defines the form of the labels.

    Raises:
        ConfigurationError: ``load_data`` is missing, fails, or does not return
            ((x_train, y_train), (x_test, y_test)) with labels in the task's form.
    """
    where = getattr(module, "__file__", None) or module.__name__
    if not callable(getattr(module, "load_data", None)):
        raise ConfigurationError(
            f"{where} has no function load_data(). Expected a function that returns ((x_train, "
            "y_train), (x_test, y_test)); add the function, or choose a --dataset."
        )
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        returned = module.load_data()
        (x_train, y_train), (x_test, y_test) = returned
    except Exception as error:
        raise ConfigurationError(
            f"load_data() of {where} failed: {type(error).__name__}: {error}. Expected "
            "load_data() to return ((x_train, y_train), (x_test, y_test))."
        ) from error
    train = _check_user_part(where, "train", x_train, y_train, task)
    test = _check_user_part(where, "test", x_test, y_test, task)
    for what, train_array, test_array in zip(("examples", "labels"), train, test, strict=False):
        if train_array.shape[1:] != test_array.shape[1:]:
            raise ConfigurationError(
                f"load_data() of {where} returned training {what} of shape {train_array.shape[1:]} "
                f"and test {what} of shape {test_array.shape[1:]}; expected the same shape."
            )
    return Dataset(*train, *test, train_classes=_classes_of(y_train, task))


def _classes_of(labels: Any, task: Task) -> NDArray[np.int32] | None:
    """Return the classes of examples whose labels are copies of their inputs; None without
    classes.
    """
    if not task.labels.are_inputs or labels is None:
        return None
    classes = np.asarray(labels)
    is_class = classes.ndim == 1 and np.issubdtype(classes.dtype, np.integer)
    return classes.astype(np.int32) if is_class else None


def _check_name(name: str, part: str = PARTS[0]) -> None:
    if name not in DATASETS or part not in PARTS:
        raise ConfigurationError(
            f"Data set {name!r}, part {part!r} is not known; expected --dataset "
            f"{', '.join(DATASETS)} and part {', '.join(PARTS)}."
        )


def _check_fit(name: str, raw: DatasetPart, shape: tuple[int, ...]) -> None:
    if not len(raw.labels):
        raise ConfigurationError(f"Data set {name} holds no examples; expected one or more.")
    if raw.images.shape[1:] != shape:
        height, width, depth = raw.images.shape[1:]
        raise ConfigurationError(
            f"Data set {name} has images of {height} x {width} pixels and {depth} channels; "
            f"expected {shape[0]} x {shape[1]} and {shape[2]}. Set --image_size {height} "
            f"--image_depth {depth}, or choose another --dataset."
        )


def _check_user_part(
    where: str, part: str, images: Any, labels: Any, task: Task
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Check the user's training or test data; return inputs and labels in the task's form."""
    problem = f"load_data() of {where} returned x_{part} and y_{part} that cannot be used: "
    try:
        examples = np.asarray(images)
        inputs = np.ascontiguousarray(examples, dtype=task.inputs)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{problem}{error}. Expected arrays of numbers.") from error
    if not np.issubdtype(task.inputs, np.floating) and not (
        np.issubdtype(examples.dtype, np.integer) and examples.size and examples.min() >= 0
    ):
        raise ConfigurationError(
            f"{problem}x_{part} is {examples.dtype} {examples.shape}. Expected integers from 0."
        )
    try:
        targets = task.labels.read(labels, inputs)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{problem}y_{part} {error}.") from error
    if inputs.ndim < 2 or len(inputs) != len(targets) or not len(inputs):
        raise ConfigurationError(
            f"{problem}their shapes are {inputs.shape} and {targets.shape}. Expected "
            "[N, ...] for both, with the same N of at least 1."
        )
    if not np.isfinite(inputs).all():
        raise ConfigurationError(
            f"{problem}x_{part} has a value that is NaN or infinite. Expected finite values."
        )
    return inputs, targets
