"""Offer: JSON document in which a worker describes its script's model to a parameter server.

A parameter server does not run the user's script. The parameter server learns from the offer (a
worker's description of its script's model) the model's variables, and the optimizers that step
these variables. The parameter server builds only optimizers and constraints that
`thinwire.ops.optimizers.described` allows by name.

Source: design, section 10, "The PS runs no user code".
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from thinwire.ops.types import ConfigurationError, Float32, ModelSpec, TensorSpec

FORMAT = 5
#: Prefix of the names of entries from an offer (a worker's description of its model) in the run's
#: fingerprint.
OFFER_PREFIX = "script."
#: Largest size of an offer (a worker's description of its model) that a parameter server reads, in
#: bytes: an offer must fit into one message of the wire. A thousand variables take about 100 KiB.
MAX_DOCUMENT_BYTES = 1000 << 10
#: Limits of an offer (a worker's description of its model): most variables, most entries along one
#: axis, most characters of a path or class name.
MAX_VARIABLES, MAX_AXIS, MAX_NAME = 8192, (1 << 31) - 1, 1000
#: Largest number of optimizers that the offer (a worker's description) of a script may list.
MAX_OPTIMIZERS = 64
#: Smallest and largest allowed loss scale: the smallest and largest powers of two that are normal
#: float32 numbers.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**127
_DIGEST = re.compile(r"(?:[0-9a-f]{64})?", re.ASCII)
#: Largest number of the script's batches that a worker's last mini-batch of an epoch may count as.
MOST_BATCHES = 2
#: Values of the flag --schedule_clock: counts at which a learning rate schedule is read.
CLOCKS = ("batches", "steps")
#: Values of the flag --model_from: the parameter server takes the model from its own flags, or from
#: the offer (description) of the first admitted worker.
FROM_FLAGS, FROM_WORKER = "flags", "worker"


@dataclasses.dataclass(frozen=True)
class Described:
    """Description of a Keras object (optimizer, schedule, constraint) by its class and arguments.

    Attributes:
        name: Class name of the described Keras object.
        config: Arguments of the Keras class, as returned by the object's `get_config`.
    """

    name: str
    config: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class OptimizerOffer:
    """Description of a script's optimizer with which the parameter server steps variables.

    Attributes:
        optimizer: Class and arguments of the script's optimizer, without a wrapper for loss
            scaling.
        without_decay: Paths of the variables that weight decay excludes
            (`exclude_from_weight_decay`).
        clock: Argument of the optimizer's learning rate schedule: "batches" for the number of the
            script's batches that the run has consumed, "steps" for the number of the optimizer's
            steps.
        by_adamw: Paths of the variables that the optimizer, if it is Muon, steps with AdamW's rule.
        iterations: Number of steps that the optimizer took before the phase (the time in which the
            run trains this model).
        paths: Paths of the variables that the optimizer steps. Empty if the only optimizer steps
            all variables.
        has_slots: True if the worker sends the optimizer's slots (state arrays) with the weights.
            If False, the parameter server's optimizer starts with the slots of a new optimizer.
    """

    optimizer: Described
    without_decay: tuple[str, ...] = ()
    clock: str = "batches"
    by_adamw: tuple[str, ...] = ()
    iterations: int = 0
    paths: tuple[str, ...] = ()
    has_slots: bool = False


@dataclasses.dataclass(frozen=True)
class LossScale:
    """Initial state of a dynamic loss scale (factor on the loss against float16 underflow).

    The parameter server adjusts the dynamic loss scale during the run.

    Attributes:
        initial: Loss scale at the start of the phase (the time in which the run trains this model).
        growth_steps: Number of consecutive updates without overflow after which the loss scale
            doubles.
        streak: Number of consecutive updates without overflow at the end of the script's steps
            before the phase (the time in which the run trains this model).
    """

    initial: float
    growth_steps: int
    streak: int = 0


@dataclasses.dataclass(frozen=True)
class Offer:
    """Description of a script's model, which a worker sends to a PS without a model.

    Attributes:
        spec: Paths, shapes and dtypes of the shared variables of the model, in order.
        statistics: Number of values of moving statistics that shard 0 averages over the workers.
        optimizers: Optimizers with which the parameter server steps. Each variable belongs to
            exactly one optimizer. Empty if workers step and send changes of weights.
        constraints: Variable's path -> Keras constraint that the parameter server applies to the
            variable.
        unused: Paths of shared variables without a gradient, which no optimizer steps or decays.
        loss_scale: Initial state of the dynamic loss scale. None if the script does not scale
            losses.
        num_examples: Number of examples of the whole training set; 0 if unknown.
        num_batches: Number of batches per training epoch when the script runs without Thinwire; 0
            if unknown.
        first_batches: For each optimizer of the script, on the parameter server or on workers:
            number of batches that its learning rate schedule counted before the phase (the time in
            which the run trains this model). Empty if the counts equal the optimizers' steps.
        weights_digest: SHA-256 of the initial weights, in hexadecimal. Shard servers compare the
            digests to detect that workers sent different weights.
        script_optimizer: Class names of the script's compiled optimizers. The parameter server
            compares the names of all workers' scripts.
        succession: Number of times that the script has replaced the trained model by a new model.
    """

    spec: ModelSpec
    statistics: int = 0
    optimizers: tuple[OptimizerOffer, ...] = ()
    constraints: Mapping[str, Described] = dataclasses.field(default_factory=dict)
    unused: tuple[str, ...] = ()
    loss_scale: LossScale | None = None
    num_examples: int = 0
    num_batches: int = 0
    first_batches: tuple[int, ...] = ()
    weights_digest: str = ""
    script_optimizer: str = ""
    succession: int = 0

    def to_json(self) -> str:
        """Return the offer's document (the worker's description of its model), as JSON text."""
        rows = dataclasses.asdict(self)
        rows["spec"] = [
            [tensor.path, list(tensor.shape), tensor.dtype] for tensor in self.spec.tensors
        ]
        return json.dumps({"format": FORMAT, **rows}, sort_keys=True)

    def fingerprint(self) -> list[tuple[str, str]]:
        """Return (name, value) of each property that must be equal in all workers' scripts.

        The fingerprint of an offer leaves out the variables, which a Hello message lists
        separately. The fingerprint of an offer also leaves out the values that training changes:
        the initial weights, the optimizers' state, the loss scale, and learning rates that are
        numbers. A run takes initial weights, optimizer state and learning rates from the first
        worker; a worker that rejoins may have other values of its own.
        """
        document = json.loads(self.to_json())
        for name in ("format", "spec", "weights_digest", "first_batches"):
            del document[name]
        for row in document["optimizers"]:
            del row["iterations"], row["has_slots"]
            config = row["optimizer"]["config"]
            if isinstance(config.get("learning_rate"), int | float):
                del config["learning_rate"]
            config.pop("steps", None)
            groups = config.get("groups")
            for group in groups if isinstance(groups, list) else ():
                if isinstance(group, dict):  # a parameter group of a torch optimizer
                    group.pop("lr", None)
        if document["loss_scale"] is not None:
            del document["loss_scale"]["initial"], document["loss_scale"]["streak"]
        return [(f"{OFFER_PREFIX}{name}", json.dumps(document[name])) for name in sorted(document)]

    def schedule_starts(self) -> tuple[int, ...]:
        """Return the schedule count (batches or steps) of each optimizer at the model's start."""
        return self.first_batches or tuple(optimizer.iterations for optimizer in self.optimizers)

    def groups(self) -> list[tuple[int, ...]]:
        """Return, for each optimizer, the indices of the variables that it steps, ascending."""
        numbers = {tensor.path: number for number, tensor in enumerate(self.spec.tensors)}
        return [
            tuple(sorted(numbers[path] for path in optimizer.paths)) or tuple(range(len(numbers)))
            for optimizer in self.optimizers
        ]


def offer_difference(name: str, expected: str, given: str) -> str:
    """Return text about the first difference between two JSON values of a fingerprint's row.

    >>> offer_difference("optimizers", '[{"config": {"momentum": 0.9}}]', '[{"config": {}}]')
    'optimizers.0.config.momentum: expected 0.9, got nothing'
    """
    try:
        expected_value, given_value = json.loads(expected), json.loads(given)
    except (ValueError, RecursionError):  # the text is not JSON: a client may send any text
        return f"{name}: expected {expected:.100}, got {given:.100}"
    place = name
    while isinstance(expected_value, dict | list) and type(expected_value) is type(given_value):
        ours = (
            expected_value if isinstance(expected_value, dict) else dict(enumerate(expected_value))
        )
        theirs = given_value if isinstance(given_value, dict) else dict(enumerate(given_value))
        keys = [*ours, *(key for key in theirs if key not in ours)]
        key = next((key for key in keys if ours.get(key) != theirs.get(key)), None)
        if key is None:
            break
        place, expected_value, given_value = f"{place}.{key}", ours.get(key), theirs.get(key)
    shown = (
        "nothing" if value is None else f"{json.dumps(value):.100}"
        for value in (expected_value, given_value)
    )
    return f"{place}: expected {next(shown)}, got {next(shown)}"


def weights_digest(flat: Float32) -> str:
    """Return the SHA-256 of the initial weights [num_parameters] float32, in hexadecimal."""
    return hashlib.sha256(flat.data).hexdigest()


def read_offer(document: str | bytes, max_model_bytes: int) -> Offer:
    """Read and check an offer (description of a model), which comes from an untrusted worker.

    `read_offer` builds no Keras object, and allocates no memory for the model.

    Args:
        document: JSON text of the offer (a worker's description of its model), in the format of
            `Offer.to_json`.
        max_model_bytes: Largest size of all shared variables as float32, in bytes.

    Raises:
        ConfigurationError: The text is not an offer, or the offer's model is larger than
            `max_model_bytes`.
    """
    if len(document) > MAX_DOCUMENT_BYTES:
        raise ConfigurationError(
            f"a model description has {len(document)} bytes; expected at most {MAX_DOCUMENT_BYTES}."
        )
    try:
        return _offer_of(json.loads(document), max_model_bytes)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise ConfigurationError(
            f"the model description cannot be read ({type(error).__name__}: {error!s:.200}); "
            "expected the description from a worker with the same version of Thinwire."
        ) from error


def _offer_of(found: Any, max_model_bytes: int) -> Offer:
    if found["format"] != FORMAT:
        raise ValueError(f"the model description has format {found['format']!r}; expected {FORMAT}")
    if len(found["spec"]) > MAX_VARIABLES:
        raise ValueError(f"the model has {len(found['spec'])} variables, more than {MAX_VARIABLES}")
    tensors = tuple(_tensor(row) for row in found["spec"])
    paths = {tensor.path for tensor in tensors}
    if not tensors or len(paths) < len(tensors):
        raise ValueError("the model has no variables, or one path twice; expected each path once")
    spec = ModelSpec(tensors)
    if not spec.num_parameters:
        raise ValueError("the model's variables have no values; expected at least one value")
    num_bytes = 4 * (spec.num_parameters + _count(found["statistics"]))
    if num_bytes > max_model_bytes:
        raise ConfigurationError(
            f"a worker's model has {num_bytes:,} bytes; expected at most {max_model_bytes:,}. "
            "Give the PS a larger --max_model_bytes if this size is intended."
        )
    named = {*found["constraints"], *found["unused"]}
    if len(found["optimizers"]) > MAX_OPTIMIZERS:
        count = len(found["optimizers"])
        raise ValueError(f"the script has {count} optimizers; expected at most {MAX_OPTIMIZERS}")
    optimizers = tuple(_optimizer(row) for row in found["optimizers"])
    for optimizer in optimizers:
        named |= {*optimizer.without_decay, *optimizer.by_adamw, *optimizer.paths}
    if unknown := sorted(named - paths):
        raise ValueError(f"the path {unknown[0]!r:.100} is no variable of the script's model")
    _check_groups(optimizers, paths)
    scale = found["loss_scale"]
    return Offer(
        spec,
        _count(found["statistics"]),
        optimizers,
        {str(path): _described(row) for path, row in dict(found["constraints"]).items()},
        _words(found["unused"]),
        None if scale is None else _loss_scale(scale),
        _count(found["num_examples"]),
        _count(found["num_batches"]),
        _counts(found["first_batches"], len(found["optimizers"])),
        _digest(found["weights_digest"]),
        _classes(found["script_optimizer"]),
        _count(found["succession"]),
    )


def _optimizer(row: Any) -> OptimizerOffer:
    return OptimizerOffer(
        _described(row["optimizer"]),
        _words(row["without_decay"]),
        _one_of(row["clock"], CLOCKS),
        _words(row["by_adamw"]),
        _count(row["iterations"]),
        _words(row["paths"]),
        _truth(row["has_slots"]),
    )


def _check_groups(optimizers: Sequence[OptimizerOffer], paths: Collection[str]) -> None:
    """Raise ValueError unless exactly one of the offer's optimizers steps each variable."""
    stepped = [path for optimizer in optimizers for path in optimizer.paths]
    if len(optimizers) == 1 and not stepped:
        return
    if not all(optimizer.paths for optimizer in optimizers):
        raise ValueError("an optimizer of the script has no variables; expected at least one")
    if optimizers and (len(set(stepped)) < len(stepped) or len(stepped) < len(paths)):
        raise ValueError("a variable has no optimizer or several; expected one for each variable")


def _tensor(row: Any) -> TensorSpec:
    path, shape, dtype = row
    if dtype != "float32":
        raise ValueError(f"the variable {path!r:.100} has dtype {dtype!r:.20}; expected float32")
    sizes = tuple(_count(size) for size in shape)
    if len(sizes) > 32 or max(sizes, default=0) > MAX_AXIS or math.prod(sizes) > 1 << 40:
        raise ValueError(f"the variable {path!r:.100} has the invalid shape {sizes!r:.100}")
    return TensorSpec(_name(path), sizes)


def _described(row: Any) -> Described:
    config = row["config"]
    if not isinstance(config, dict):
        raise ValueError(f"the config of an optimizer is {config!r:.50}; expected named arguments")
    return Described(_name(row["name"]), config)


def _loss_scale(row: Any) -> LossScale:
    initial, steps = row["initial"], _count(row["growth_steps"])
    is_number = isinstance(initial, int | float) and not isinstance(initial, bool)
    if not is_number or not SMALLEST_SCALE <= initial <= LARGEST_SCALE or not steps:
        raise ValueError(
            f"the field loss_scale is {row!r:.100}; expected a number from {SMALLEST_SCALE:g} to "
            f"{LARGEST_SCALE:g}, and at least one step"
        )
    return LossScale(float(initial), steps, _count(row["streak"]))


def _digest(value: Any) -> str:
    """Check and return a digest of weights, which a PS sends to clients in Welcome messages."""
    if not _DIGEST.fullmatch(_word(value)):
        raise ValueError(f"weights_digest={value!r:.100}; expected 64 hexadecimal digits or none")
    return str(value)


def _classes(value: Any) -> str:
    """Check and return the names of a script's optimizers, which error messages quote."""
    text = _word(value)
    if not text.isprintable() or len(text) > MAX_OPTIMIZERS * MAX_NAME:
        raise ValueError(f"the field script_optimizer is {text!r:.100}; expected names of classes")
    return text


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError(f"a count of a model is {value!r:.50}; expected a whole number, 0 or more")
    return value


def _counts(values: Any, num_optimizers: int) -> tuple[int, ...]:
    """Check and return the batch counts in an offer (a model description), one per optimizer.

    If the script's optimizers step on workers, any number of batch counts is valid, because the
    offer lists no optimizers.
    """
    if not isinstance(values, list) or len(values) > MAX_OPTIMIZERS:
        raise ValueError(f"the batch counts are {values!r:.50}; expected at most {MAX_OPTIMIZERS}")
    if values and num_optimizers and len(values) != num_optimizers:
        raise ValueError(f"{len(values)} batch counts; expected {num_optimizers} (1 per optimizer)")
    return tuple(_count(value) for value in values)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"a field of the description is {value!r:.50}; expected true or false")
    return value


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a field of the model's description is {value!r:.50}; expected text")
    value.encode()  # `encode` raises an error for half a surrogate pair, which UTF-8 cannot encode
    return value


def _name(value: Any) -> str:
    """Check and return a variable's path or a class name, which logs and messages quote."""
    name = _word(value)
    if not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"a name is {name!r:.100}; expected 1 to {MAX_NAME} printable characters")
    return name


def _words(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise ValueError(f"a field of the model's description is {values!r:.50}; expected a list")
    return tuple(_word(value) for value in values)


def _one_of(value: Any, legal: tuple[str, ...]) -> str:
    if value not in legal:
        raise ValueError(f"a field of a model is {value!r:.50}; expected one of {', '.join(legal)}")
    return str(value)
