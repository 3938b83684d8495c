"""What a built-in model is trained for, as data: labels, loss, metrics and defaults of each task.

`TASKS` has a row for each value of --task; nothing else distinguishes tasks. A new one is a row,
with a network (`registry`) and a generator of examples (thinwire.data.readers.synthetic) if none
fits. Keras and numpy are imported where they are used: flags and ``--help`` read the table.
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
    """What the loss compares a model's outputs with."""

    text: str  # what messages expect
    dtype: str  # int32 or float32
    ranks: tuple[int, ...]  # of the array, examples included, as they may be given
    number_classes: bool = False  # [N]: the class of each example
    as_outputs: bool = False  # of the same shape as the outputs
    are_inputs: bool = False  # the examples themselves
    highest: float | None = None  # they are 0 or this

    def read(self, labels: Any, inputs: NDArray[Any]) -> NDArray[Any]:
        """Return labels as the loss takes them.

        Args:
            labels: Of `ranks`, as somebody gives them.
            inputs: [N, ...] the examples.

        Raises:
            ValueError: They are of another form.
        """
        import numpy as np

        if self.are_inputs:
            return inputs
        found = np.asarray(labels)
        if found.ndim == 2 and found.shape[1] == 1 and self.ranks == (1,):
            found = found[:, 0]
        is_whole = np.issubdtype(found.dtype, np.integer)
        is_number = is_whole or np.issubdtype(found.dtype, np.floating) or found.dtype == bool
        kind_fits = is_whole if self.dtype == "int32" else is_number
        if found.ndim not in self.ranks or not kind_fits:
            raise ValueError(f"is {found.dtype} {found.shape}. Expected {self.text}")
        if self.dtype == "int32" and found.size and found.min() < 0:
            raise ValueError(f"has a negative number, {found.min()}. Expected {self.text}")
        made: NDArray[Any] = found.astype(self.dtype)
        if not np.isfinite(made).all():
            raise ValueError(f"has a NaN or infinity. Expected {self.text}")
        if self.highest is not None and not np.isin(made, (0, self.highest)).all():
            raise ValueError(f"is not 0 or {self.highest:g} everywhere. Expected {self.text}")
        return made[:, None] if made.ndim < max(self.ranks) else made

    def check_outputs(self, model: Any, labels: Any, outputs: Any) -> None:
        """Refuse outputs that a loss would compare with labels of another shape.

        Args:
            model: Keras model.
            labels: [B, ...].
            outputs: [B, ...], of the model.

        Raises:
            ConfigurationError: They differ, and the task wants them alike.
        """
        theirs, ours = tuple(labels.shape[1:]), tuple(outputs.shape[1:])
        if self.as_outputs and theirs != ours:
            raise ConfigurationError(
                f"Model {model.name!r} gives outputs of shape {ours} for each example, and the "
                f"labels have {theirs}; expected the same. Of a --network, --nb_classes is their "
                "number; of --model, mend build_model() or load_data()."
            )


@dataclasses.dataclass(frozen=True)
class Task:
    """One value of --task.

    Attributes:
        name: The value.
        about: One line for docs and messages.
        labels: What the loss compares with.
        inputs: dtype of the examples.
        loss: A Keras model -> the loss where it was compiled with none.
        scores: The metrics.
        goal: By which of them the best model is found.
        networks: Built-in ones, the default first.
        datasets: Likewise.
        nb_classes: Default of --nb_classes: classes, numbers, labels or words.
        least_classes: The least of these.
        extras: Metrics that a flag adds, by its name.
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
        """Whether examples may have a class, by which they can be split."""
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

    del model
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
#: Networks that end in --nb_classes values for each example.
_VECTORS = tuple(name for name in NETWORKS if name not in (_OF_INPUTS, *_OF_TOKENS))
#: The same where examples are simple.
_SIMPLE = ("mlp", *(name for name in _VECTORS if name != "mlp"))
_NUMBERS = LabelForm(
    "numbers of shape [N] or [N, values]", dtype="float32", ranks=(1, 2), as_outputs=True
)

_ROWS = (
    Task(
        CLASSIFICATION,
        "one class for each example",
        LabelForm(
            "integer class numbers of shape [N]; of one-hot labels give their argmax(axis=1)",
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
        "the example itself, through a narrow layer",
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
        "the next token at each place of a sequence",
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
    """Refuse a built-in network or data set that a task cannot take.

    Args:
        task: A key of `TASKS`.
        network: A value of --network; None: the model is one's own.
        dataset: A value of --dataset.
        nb_classes: A value of --nb_classes.

    Raises:
        ConfigurationError: One of them; the message names what fits.
    """
    row = TASKS[task]
    if nb_classes < row.least_classes:
        raise ConfigurationError(
            f"--nb_classes={nb_classes}: expected at least {row.least_classes} for --task={task}."
        )
    fitting = {"network": (network, row.networks), "dataset": (dataset, row.datasets)}
    for name, (given, known) in fitting.items():
        if given is not None and given not in known:
            others = [each for each, row in TASKS.items() if given in getattr(row, f"{name}s")]
            raise ConfigurationError(
                f"--{name}={given} is of --task={' or '.join(others)}, and this is --task={task}; "
                f"expected --{name}={'|'.join(known)}, or --model with your own."
            )
