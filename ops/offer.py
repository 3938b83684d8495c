"""What a script's model is, in plain data: the document that a worker offers to a PS without model.

A PS runs no user code. It learns from this document, and from nothing else of a worker, what to
hold and how to step it; it builds only what `thinwire.ops.optimizers.described` allows by name.

Source: design, section 10, "The PS runs no user code".
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thinwire.ops.types import ConfigurationError, ModelSpec, TensorSpec

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

FORMAT = 5
#: Begins the names of an offer's rows in a fingerprint.
OFFER_PREFIX = "script."
#: A longer document is not read: it must fit into one message of the wire. A thousand variables
#: take about 100 KiB.
MAX_DOCUMENT_BYTES = 1000 << 10
#: Most variables of a model, entries along one axis, and characters of a path or a class.
MAX_VARIABLES, MAX_AXIS, MAX_NAME = 8192, (1 << 31) - 1, 1000
#: Most optimizers of a script.
MAX_OPTIMIZERS = 64
#: Of a loss scale: what float32 can hold.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**127
_DIGEST = re.compile(r"(?:[0-9a-f]{64})?", re.ASCII)
#: Batches of the script that one mini-batch of a worker may stand for, at the end of its data.
MOST_BATCHES = 2
#: --schedule_clock values.
CLOCKS = ("batches", "steps")
#: --model_from values: a node's own flags, or the first worker that is let in.
FROM_FLAGS, FROM_WORKER = "flags", "worker"


@dataclasses.dataclass(frozen=True)
class Described:
    """An object of Keras by its class and plain arguments, as `get_config` gives them."""

    name: str  # of its class
    config: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class OptimizerOffer:
    """An optimizer that the PS steps with.

    Attributes:
        optimizer: Its class and arguments; without the loss scaling around it.
        without_decay: Paths that its weight decay leaves alone (`exclude_from_weight_decay`).
        clock: "batches": its schedule is read at the number of the script's batches that the run
            has consumed; "steps": at its own count.
        by_adamw: Paths that a Muon leaves to AdamW, by its rules about paths.
        iterations: Steps that it had taken before the phase.
        paths: Of the variables that it steps; empty: all, of the only optimizer.
        has_slots: Whether its slots come with the weights; without them it begins as a new one.
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
    """The dynamic loss scale, which the PS keeps.

    Attributes:
        initial: The scale that the phase begins with.
        growth_steps: Updates without an overflow after which the scale is doubled.
        streak: Updates without an overflow that the script had counted before the phase.
    """

    initial: float
    growth_steps: int
    streak: int = 0


@dataclasses.dataclass(frozen=True)
class Offer:
    """A script's model.

    Attributes:
        spec: The shared variables, in order.
        statistics: Values of moving statistics that are averaged over the workers.
        optimizers: What the PS steps with, each its own variables, all together every one; none:
            the workers step, and send changes of weights.
        constraints: Path -> constraint of that variable.
        unused: Paths of shared variables that get no gradient; nothing steps or decays them.
        loss_scale: None: losses are not scaled.
        num_examples: Of the whole training set; 0: unknown.
        num_batches: Batches in an epoch of the script alone; 0: unknown.
        first_batches: Of each optimizer of the script, wherever it steps: the batches that its
            schedule has counted before the phase; empty: as many as it has taken steps.
        weights_digest: SHA-256, in hexadecimal, of the initial weights; shards compare it.
        script_optimizer: The compiled optimizers wherever they step, to compare scripts by.
        succession: How often the script has gone on from one of its models to another before.
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
        """Return the document."""
        rows = dataclasses.asdict(self)
        rows["spec"] = [[each.path, list(each.shape), each.dtype] for each in self.spec.tensors]
        return json.dumps({"format": FORMAT, **rows}, sort_keys=True)

    def fingerprint(self) -> list[tuple[str, str]]:
        """Return (name, value) of what all scripts of a run must have alike.

        Left out are the variables, which Hello names by themselves, and what training changes: the
        initial weights, the optimizer's state, the loss scale, and a learning rate that is a
        number. Those of the first worker count; one that comes back may have others.
        """
        document = json.loads(self.to_json())
        for name in ("format", "spec", "weights_digest", "first_batches"):
            del document[name]
        for row in document["optimizers"]:
            del row["iterations"], row["has_slots"]
            config = row["optimizer"]["config"]
            if isinstance(config.get("learning_rate"), int | float):
                del config["learning_rate"]
        if document["loss_scale"] is not None:
            del document["loss_scale"]["initial"], document["loss_scale"]["streak"]
        return [(f"{OFFER_PREFIX}{name}", json.dumps(document[name])) for name in sorted(document)]

    def schedule_starts(self) -> tuple[int, ...]:
        """Return the count that the schedule of each optimizer begins the phase with."""
        return self.first_batches or tuple(each.iterations for each in self.optimizers)

    def groups(self) -> list[tuple[int, ...]]:
        """Return the numbers of the variables that each of the optimizers steps, ascending."""
        numbers = {tensor.path: number for number, tensor in enumerate(self.spec.tensors)}
        return [
            tuple(sorted(numbers[path] for path in each.paths)) or tuple(range(len(numbers)))
            for each in self.optimizers
        ]


def offer_difference(name: str, expected: str, given: str) -> str:
    """Return the first place where two rows of `Offer.fingerprint` differ, and both values.

    >>> offer_difference("optimizers", '[{"config": {"momentum": 0.9}}]', '[{"config": {}}]')
    'optimizers.0.config.momentum: expected 0.9, got nothing'
    """
    try:
        one, other = json.loads(expected), json.loads(given)
    except (ValueError, RecursionError):  # a client may send anything
        return f"{name}: expected {expected:.100}, got {given:.100}"
    place = name
    while isinstance(one, dict | list) and type(one) is type(other):
        ours = one if isinstance(one, dict) else dict(enumerate(one))
        theirs = other if isinstance(other, dict) else dict(enumerate(other))
        keys = [*ours, *(key for key in theirs if key not in ours)]
        key = next((key for key in keys if ours.get(key) != theirs.get(key)), None)
        if key is None:
            break
        place, one, other = f"{place}.{key}", ours.get(key), theirs.get(key)
    shown = ("nothing" if value is None else f"{json.dumps(value):.100}" for value in (one, other))
    return f"{place}: expected {next(shown)}, got {next(shown)}"


def weights_digest(flat: Float32) -> str:
    """Return the digest of initial weights [num_parameters] float32."""
    return hashlib.sha256(flat.data).hexdigest()


def read_offer(document: str | bytes, max_model_bytes: int) -> Offer:
    """Read a document that a worker has sent; nothing is built and little allocated.

    Args:
        document: As `Offer.to_json` makes it, of anybody.
        max_model_bytes: The most that all shared variables may take as float32.

    Raises:
        ConfigurationError: Not such a document, or a model that is larger.
    """
    if len(document) > MAX_DOCUMENT_BYTES:
        raise ConfigurationError(
            f"the offer has {len(document)} bytes; expected at most {MAX_DOCUMENT_BYTES}."
        )
    try:
        return _offer_of(json.loads(document), max_model_bytes)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise ConfigurationError(
            f"the offer cannot be read ({type(error).__name__}: {error!s:.200}); expected the "
            "document of a worker of the same version."
        ) from error


def _offer_of(found: Any, max_model_bytes: int) -> Offer:
    if found["format"] != FORMAT:
        raise ValueError(f"format {found['format']!r}; expected {FORMAT}")
    if len(found["spec"]) > MAX_VARIABLES:
        raise ValueError(f"{len(found['spec'])} variables; expected at most {MAX_VARIABLES}")
    tensors = tuple(_tensor(row) for row in found["spec"])
    paths = {tensor.path for tensor in tensors}
    if not tensors or len(paths) < len(tensors):
        raise ValueError("expected at least one variable, and each path once")
    spec = ModelSpec(tensors)
    if not spec.num_parameters:
        raise ValueError("expected at least one trainable value")
    num_bytes = 4 * (spec.num_parameters + _count(found["statistics"]))
    if num_bytes > max_model_bytes:
        raise ConfigurationError(
            f"the offered model takes {num_bytes:,} bytes; expected at most {max_model_bytes:,}. "
            "Give the PS a larger --max_model_bytes if that is right."
        )
    named = {*found["constraints"], *found["unused"]}
    if len(found["optimizers"]) > MAX_OPTIMIZERS:
        count = len(found["optimizers"])
        raise ValueError(f"{count} optimizers; expected at most {MAX_OPTIMIZERS}")
    optimizers = tuple(_optimizer(row) for row in found["optimizers"])
    for each in optimizers:
        named |= {*each.without_decay, *each.by_adamw, *each.paths}
    if unknown := sorted(named - paths):
        raise ValueError(f"{unknown[0]!r:.100} is no variable of the model")
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
    """Refuse optimizers of which not exactly one steps each variable."""
    stepped = [path for each in optimizers for path in each.paths]
    if len(optimizers) == 1 and not stepped:
        return
    if not all(each.paths for each in optimizers):
        raise ValueError("an optimizer without variables")
    if optimizers and (len(set(stepped)) < len(stepped) or len(stepped) < len(paths)):
        raise ValueError("expected each variable to be stepped by exactly one optimizer")


def _tensor(row: Any) -> TensorSpec:
    path, shape, dtype = row
    if dtype != "float32":
        raise ValueError(f"{path!r:.100} is {dtype!r:.20}; expected float32")
    sizes = tuple(_count(size) for size in shape)
    if len(sizes) > 32 or max(sizes, default=0) > MAX_AXIS or math.prod(sizes) > 1 << 40:
        raise ValueError(f"{path!r:.100} has the shape {sizes!r:.100}")
    return TensorSpec(_name(path), sizes)


def _described(row: Any) -> Described:
    config = row["config"]
    if not isinstance(config, dict):
        raise ValueError(f"config is {config!r:.50}; expected named arguments")
    return Described(_name(row["name"]), config)


def _loss_scale(row: Any) -> LossScale:
    initial, steps = row["initial"], _count(row["growth_steps"])
    is_number = isinstance(initial, int | float) and not isinstance(initial, bool)
    if not is_number or not SMALLEST_SCALE <= initial <= LARGEST_SCALE or not steps:
        raise ValueError(
            f"loss_scale {row!r:.100}; expected a number from {SMALLEST_SCALE:g} to "
            f"{LARGEST_SCALE:g}, and at least one step"
        )
    return LossScale(float(initial), steps, _count(row["streak"]))


def _digest(value: Any) -> str:
    """Return a digest of weights, which every client gets with its Welcome."""
    if not _DIGEST.fullmatch(_word(value)):
        raise ValueError(f"weights_digest {value!r:.100}; expected 64 hexadecimal digits, or none")
    return str(value)


def _classes(value: Any) -> str:
    """Return the names of the script's optimizers, which refusals quote."""
    text = _word(value)
    if not text.isprintable() or len(text) > MAX_OPTIMIZERS * MAX_NAME:
        raise ValueError(f"script_optimizer {text!r:.100}; expected names of classes")
    return text


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.50}; expected a whole number from 0 on")
    return value


def _counts(values: Any, num_optimizers: int) -> tuple[int, ...]:
    """Return counts of optimizers; the offer does not hold those that step on workers."""
    if not isinstance(values, list) or len(values) > MAX_OPTIMIZERS:
        raise ValueError(f"{values!r:.50}; expected at most {MAX_OPTIMIZERS} counts")
    if values and num_optimizers and len(values) != num_optimizers:
        raise ValueError(f"{len(values)} counts; expected one for each of {num_optimizers}")
    return tuple(_count(value) for value in values)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r:.50}; expected true or false")
    return value


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.50}; expected text")
    value.encode()  # half a surrogate pair is no text on the wire
    return value


def _name(value: Any) -> str:
    """Return a path or a class, which logs and messages quote."""
    name = _word(value)
    if not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"{name!r:.100}; expected 1 to {MAX_NAME} printable characters")
    return name


def _words(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{values!r:.50}; expected a list")
    return tuple(_word(value) for value in values)


def _one_of(value: Any, legal: tuple[str, ...]) -> str:
    if value not in legal:
        raise ValueError(f"{value!r:.50}; expected one of {', '.join(legal)}")
    return str(value)
