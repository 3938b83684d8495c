"""Table of the training tasks: labels, loss, metrics and defaults of each task.

`TASKS` has one row for each value of --task, and no other code distinguishes tasks. To add a task,
add a row to `TASKS`. If no existing network or generator of examples fits a new task, add a network
to `registry` and a generator to thinwire.data.readers.synthetic. Only functions of the module
`tasks` import Keras and numpy, because flags and ``--help`` read the table of tasks and must be
fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from thinwire.data.choices import IMAGES, IN_MEMORY_IMAGES, TEXTS
from thinwire.models import scores
from thinwire.models.registry import NETWORKS
from thinwire.models.scores import ScoreGroup
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.target import Target

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLASSIFICATION = "classification"


@dataclasses.dataclass(frozen=True)
class LabelForm:
    """Form (dtype and shape) of a task's labels, which the loss compares with a model's outputs."""

    text: str  # description of the expected labels, for error messages
    dtype: str  # dtype of the labels, int32 or float32
    ranks: tuple[int, ...]  # allowed numbers of a label array's axes, with the axis of examples
    number_classes: bool = False  # True: labels [N] are the class numbers of the examples
    as_outputs: bool = False  # True: labels have the same shape as the outputs
    are_inputs: bool = False  # True: the labels are the examples themselves
    highest: float | None = None  # each label is 0 or this number; None: any label is allowed

    def read(self, labels: Any, inputs: NDArray[Any]) -> NDArray[Any]:
        """Convert labels to the dtype and shape that the task's loss takes.

        Args:
            labels: Labels from the user or a data set, an array-like of one of the allowed ranks.
            inputs: Examples to which the labels belong, [N, ...].

        Raises:
            ValueError: The labels do not have the dtype or shape that the task requires. The
                message continues a sentence that starts with the labels' name.
        """
        import numpy as np

        if self.are_inputs:
            return inputs
        array = np.asarray(labels)
        if array.ndim == 2 and array.shape[1] == 1 and self.ranks == (1,):
            array = array[:, 0]
        is_whole = np.issubdtype(array.dtype, np.integer)
        is_number = is_whole or np.issubdtype(array.dtype, np.floating) or array.dtype == bool
        kind_fits = is_whole if self.dtype == "int32" else is_number
        if array.ndim not in self.ranks or not kind_fits:
            raise ValueError(f"is {array.dtype} of shape {array.shape}. Expected {self.text}")
        if self.dtype == "int32" and array.size and array.min() < 0:
            raise ValueError(f"has the negative value {array.min()}. Expected {self.text}")
        converted: NDArray[Any] = array.astype(self.dtype)
        if not np.isfinite(converted).all():
            raise ValueError(f"has a value that is NaN or infinite. Expected {self.text}")
        if self.highest is not None and not np.isin(converted, (0, self.highest)).all():
            raise ValueError(f"has values other than 0 and {self.highest:g}. Expected {self.text}")
        return converted[:, None] if converted.ndim < max(self.ranks) else converted

    def check_outputs(self, model: Any, labels: Any, outputs: Any) -> None:
        """Reject outputs whose shape differs from the labels, if the task requires equal shapes.

        Without `check_outputs`, a loss may broadcast labels and outputs of different shapes without
        an error.

        Args:
            model: Keras model that is trained for the task.
            labels: Labels of a mini-batch, [B, ...].
            outputs: The model's outputs for the mini-batch, [B, ...].

        Raises:
            ConfigurationError: Labels and outputs have different shapes, and the task requires
                equal shapes.
        """
        label_shape, output_shape = tuple(labels.shape[1:]), tuple(outputs.shape[1:])
        if self.as_outputs and label_shape != output_shape:
            raise ConfigurationError(
                f"Model {model.name!r} gives outputs of shape {output_shape} for each example, "
                f"but the labels of an example have the shape {label_shape}; expected equal "
                "shapes. With --network, set --nb_classes to the number of labels per example. "
                "With --model, correct build_model() or load_data()."
            )


@dataclasses.dataclass(frozen=True)
class Task:
    """A training task, for example classification, which a value of --task selects.

    Attributes:
        name: Value of --task that selects the task.
        about: Description of the task in one line, for docs and messages.
        labels: Form (dtype and shape) of the task's labels.
        inputs: dtype of the task's examples.
        loss: Function of a Keras model that returns the task's loss, for models compiled without a
            loss.
        scores: Metrics that an evaluation computes for the task.
        goal: Metric by which an evaluation finds the best model, and the metric's best possible
            value.
        networks: Names of built-in networks for the task; the first is the default.
        datasets: Names of built-in data sets for the task; the first is the default.
        nb_classes: Default of --nb_classes (number of classes, numbers, labels or words).
        least_classes: Smallest allowed value of --nb_classes.
        extras: Name of a flag -> metrics that the flag adds to the task's `scores`.
    """

    name: str
    about: str
    labels: LabelForm
    inputs: str
    loss: Callable[[Any], Any]
    scores: ScoreGroup
    goal: Target
    networks: tuple[str, ...]
    datasets: tuple[str, ...]
    nb_classes: int
    least_classes: int = 1
    extras: Mapping[str, ScoreGroup] = dataclasses.field(default_factory=dict)

    @property
    def has_classes(self) -> bool:
        """True if examples of the task may have a class, so that data can be split by class."""
        return self.labels.number_classes or self.labels.are_inputs


def _class_entropy(model: Any) -> Any:
    import keras

    from_logits = not _ends_in(model, "softmax")
    return keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)


def _label_entropy(model: Any) -> Any:
    import keras

    return keras.losses.BinaryCrossentropy(from_logits=not _ends_in(model, "sigmoid"))


def _squared_error(model: Any) -> Any:
    import keras

    return keras.losses.MeanSquaredError()


def _ends_in(model: Any, activation: str) -> bool:
    import keras

    last: Any = model
    while isinstance(last, keras.Model) and last.layers:
        last = last.layers[-1]
    if isinstance(last, keras.layers.Softmax):
        return activation == "softmax"
    return getattr(last, "activation", None) is getattr(keras.activations, activation)


_OF_INPUTS = "autoencoder"
_OF_TOKENS = tuple(name for name in NETWORKS if name.split("-")[0] in ("gru", "decoder"))
#: Networks that output a vector of --nb_classes values for each example.
_VECTORS = tuple(name for name in NETWORKS if name not in (_OF_INPUTS, *_OF_TOKENS))
#: Networks with a vector as output, for tasks with simple examples. The first, mlp, is the default.
_SIMPLE = ("mlp", *(name for name in _VECTORS if name != "mlp"))
_NUMBERS = LabelForm(
    "numbers of shape [N] or [N, values]", dtype="float32", ranks=(1, 2), as_outputs=True
)

_ROWS = (
    Task(
        CLASSIFICATION,
        "one class for each example",
        LabelForm(
            "integer class numbers of shape [N]; convert one-hot labels with argmax(axis=1)",
            dtype="int32",
            ranks=(1,),
            number_classes=True,
        ),
        "float32",
        _class_entropy,
        scores.CLASSES,
        Target.of_accuracy(1.0),
        _VECTORS,
        IMAGES,
        10,
        least_classes=2,
        extras={"top5": scores.TOP5},
    ),
    Task(
        "regression",
        "one or more numbers for each example",
        _NUMBERS,
        "float32",
        _squared_error,
        scores.NUMBERS,
        Target("rmse", "<=", 0.0),
        _SIMPLE,
        ("synthetic",),
        1,
    ),
    Task(
        "multilabel",
        "any number of labels for each example",
        LabelForm(
            "0 or 1 for each label, of shape [N, labels]",
            dtype="float32",
            ranks=(2,),
            as_outputs=True,
            highest=1,
        ),
        "float32",
        _label_entropy,
        scores.LABEL_SETS,
        Target("f1", ">=", 1.0),
        _SIMPLE,
        ("synthetic",),
        10,
    ),
    Task(
        "autoencoder",
        "a reconstruction of the example from the output of a narrow layer",
        dataclasses.replace(_NUMBERS, text="the examples", are_inputs=True),
        "float32",
        _squared_error,
        scores.NUMBERS,
        Target("rmse", "<=", 0.0),
        (_OF_INPUTS,),
        IN_MEMORY_IMAGES,
        10,
    ),
    Task(
        "tokens",
        "the next token at each position of a sequence",
        LabelForm("integer token numbers of shape [N, tokens]", dtype="int32", ranks=(2,)),
        "int32",
        _class_entropy,
        scores.TOKENS,
        Target("perplexity", "<=", 1.0),
        _OF_TOKENS,
        ("synthetic", *TEXTS),
        64,
        least_classes=2,
    ),
)
TASKS: Mapping[str, Task] = {row.name: row for row in _ROWS}


def check_choice(task: str, network: str | None, dataset: str, nb_classes: int) -> None:
    """Reject a built-in network, data set or number of classes that does not fit a task.

    Args:
        task: Name of the task, a key of `TASKS`.
        network: Name of a built-in network, a value of --network; None for the user's own model.
        dataset: Name of a built-in data set, a value of --dataset.
        nb_classes: Number of classes, a value of --nb_classes.

    Raises:
        ConfigurationError: An argument does not fit the task. The message lists the allowed values.
    """
    row = TASKS[task]
    if nb_classes < row.least_classes:
        raise ConfigurationError(
            f"--nb_classes={nb_classes}: expected at least {row.least_classes} for --task={task}."
        )
    fitting = {"network": (network, row.networks), "dataset": (dataset, row.datasets)}
    for name, (choice, allowed) in fitting.items():
        if choice is not None and choice not in allowed:
            tasks = [key for key, row in TASKS.items() if choice in getattr(row, f"{name}s")]
            raise ConfigurationError(
                f"--{name}={choice} fits --task={' or '.join(tasks)}, but this run has "
                f"--task={task}; expected --{name}={'|'.join(allowed)}, or --model with a file of "
                "your own."
            )
