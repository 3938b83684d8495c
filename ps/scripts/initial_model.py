"""A PS shard's initial model as arrays, made from the run's flags or a worker's description."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.methods.builder import adopt
from thinwire.ops.methods.method import Method
from thinwire.ops.offer import Offer
from thinwire.ops.optimizers.script import ScriptUpdate, ScriptUpdates
from thinwire.ops.optimizers.slots import Slot, divide, num_values, slot_places
from thinwire.ops.types import ConfigurationError, ModelSpec, ShardLayout
from thinwire.runtime.keras_backend import choose_backend_on_processor
from thinwire.runtime.run.settings import Run

if TYPE_CHECKING:
    from thinwire.models.flat_model import SharedModel
    from thinwire.ops.types import Float32

#: Size limit of the values that a worker offers to a shard: a payload's length has 32 bits in a
#: message.
_MOST_SHARD_BYTES = (1 << 32) - 1


@dataclasses.dataclass(frozen=True)
class InitialModel:
    """A parameter server shard's model before the first update of the weights.

    Attributes:
        spec: Names and shapes of the variables of the whole model.
        layouts: Layouts of all shards (the slices of variables that each shard holds), in the order
            of their ids.
        weights: Initial weights [n] float32 of this shard, in the order of its layout.
        statistics: Initial moving statistics [m] float32, which shard 0 averages over the workers;
            may be empty.
        method: The run's training method, with the optimizer that updates this model.
        num_examples: Size of the training set; None if the run does not limit the epochs
            (--epochs).
        offer: Description of the model that a worker has sent; None if the flags name the model.
    """

    spec: ModelSpec
    layouts: tuple[ShardLayout, ...]
    weights: Float32
    statistics: Float32
    method: Method
    num_examples: int | None = None
    offer: Offer | None = None


def model_of_flags(
    run: Run, id_ps: int, shared: SharedModel | None = None, num_examples: int | None = None
) -> InitialModel:
    """Return a shard's initial model for a run whose flags name the model.

    Args:
        run: Settings of the training run.
        id_ps: Id of the parameter server shard, from 0.
        shared: The whole model, from which `model_of_flags` takes the shard's slices of variables;
            None to build the model from the run's settings.
        num_examples: Size of the training set; None to count the examples if --epochs needs their
            number.

    Raises:
        ConfigurationError: The model cannot be built or split over the shards, or --device names a
            missing GPU.
    """
    from thinwire.data.loading import num_train
    from thinwire.models.flat_model import SharedModel, has_gpu
    from thinwire.models.flat_variables import FlatVariables

    has_gpu(run)  # the call raises ConfigurationError if --device names a missing GPU
    shared = shared or SharedModel(run.model, run.seed)
    layouts = run.method.place(shared.spec, run.nb_ps)
    if run.epochs is None:
        num_examples = None
    elif num_examples is None:
        num_examples = num_train(run.data, run.model, shared.user_module, run.seed)
    return InitialModel(
        spec=shared.spec,
        layouts=layouts,
        weights=shared.part(layouts[id_ps]),
        statistics=FlatVariables(shared.statistics if run.method.bn_sync else []).read(),
        method=run.method,
        num_examples=num_examples,
    )


def offered_layouts(run: Run, offer: Offer) -> tuple[ShardLayout, ...]:
    """Return all shards' layouts for the model that a worker offers; all nodes compute equal
    layouts.

    Raises:
        ConfigurationError: The model cannot be split over the run's shards.
    """
    return _method_of(run, offer).place(offer.spec, run.nb_ps)


def _method_of(run: Run, offer: Offer, initial: Sequence[Sequence[Slot]] = ()) -> Method:
    """Return the run's training method with the optimizer of the model that a worker offers.

    If the optimizer needs Keras, `_method_of` chooses Keras' backend, before Keras is imported.

    Raises:
        ConfigurationError: The offer does not fit the run's settings, or the optimizer needs Keras
            and Keras has no backend here.
    """
    if offer.optimizers and not run.method.awaits_offer:
        name = offer.optimizers[0].optimizer.name
        raise ConfigurationError(
            f"the script's optimizer is {name}, but the PS of this run has "
            f"--server_optimizer={run.method.choices['server_optimizer']}; give all nodes the same "
            "--method and --server_optimizer."
        )
    method = adopt(run.method, offer, initial)
    if method.server.traits.needs_keras:
        choose_backend_on_processor()
    return method


def offered_bytes(run: Run, id_ps: int, offer: Offer) -> int:
    """Return the length in bytes of the weights that a worker sends to a shard with its offer.

    Raises:
        ConfigurationError: The model cannot be split over the run's shards.
    """
    layout = offered_layouts(run, offer)[id_ps]
    num_statistics = offer.statistics if id_ps == 0 else 0
    num_slots = sum(num_values(places) for places in slot_places(offer, layout))
    num_bytes = 4 * (layout.size + num_statistics + num_slots)
    if not layout.size or num_bytes > _MOST_SHARD_BYTES:
        raise ConfigurationError(
            f"PS shard {id_ps} would store {num_bytes:,} bytes of the script's model; expected 4 "
            f"to {_MOST_SHARD_BYTES:,} bytes. Set another --nb_ps."
        )
    return num_bytes


def model_of_offer(run: Run, id_ps: int, offer: Offer, payload: memoryview | None) -> InitialModel:
    """Return a shard's initial model, made from the model that a worker offers.

    Args:
        run: Settings of the training run.
        id_ps: Id of the parameter server shard, from 0.
        offer: A worker's description of its model, read from a document that has been checked.
        payload: [n] float32 bytes: weights, then statistics and optimizer slots, `offered_bytes`
            long. None if a checkpoint holds the weights.

    Raises:
        ConfigurationError: The model does not fit the run's settings, or its values hold NaN or
            infinity.
    """
    layouts = offered_layouts(run, offer)
    size = layouts[id_ps].size
    num_statistics = offer.statistics if id_ps == 0 else 0
    start = size + num_statistics
    if payload is None:
        values = np.zeros(start, np.float32)
    else:
        values = np.frombuffer(payload, np.dtype("<f4"))
        _check_finite(values)
    initial, first = [], start
    if len(values) > start:
        for places in slot_places(offer, layouts[id_ps]):
            last = first + num_values(places)
            initial.append(divide(values[first:last], places))
            first = last
    method = _method_of(run, offer, initial)
    if bool(offer.statistics) and not run.method.bn_sync:
        raise ConfigurationError(
            f"the script's model has {offer.statistics} values of moving statistics (BatchNorm), "
            "but the PS of this run averages no statistics; give all nodes the same --bn_sync."
        )
    if run.epochs is not None and not offer.num_examples:
        raise ConfigurationError(
            f"--epochs={run.epochs:g}: the worker does not know the size of its training set; give "
            "its data in a form that has a length, or set --iter_max instead."
        )
    _check_rates(run, method, offer)
    return InitialModel(
        spec=offer.spec,
        layouts=layouts,
        weights=values[:size],
        statistics=values[size:start],
        method=method,
        num_examples=offer.num_examples if run.epochs is not None else None,
        offer=offer,
    )


def _check_rates(run: Run, method: Method, offer: Offer) -> None:
    """Reject a learning rate schedule that returns NaN or infinity for any training step of the
    run.
    """
    if not isinstance(method.server, ScriptUpdate | ScriptUpdates):
        return
    # Upper bounds of the schedule's steps: an update merges at least one push (exactly one with
    # --method=asgd), and a push contains at most one batch of the script.
    most_updates = None if run.iter_max is None else run.iter_max * run.nb_workers
    most_batches = most_updates
    if run.epochs is not None and offer.num_batches:
        epoch_batches = math.ceil(run.epochs) * offer.num_batches
        most_batches = epoch_batches if most_batches is None else min(most_batches, epoch_batches)
    method.server.check_rates(offer.schedule_starts(), most_updates, most_batches)


def _check_finite(values: Float32) -> None:
    """Reject offered weights that contain NaN or infinity. The check for NaN and infinity runs
    piecewise, to need little memory.
    """
    for start in range(0, len(values), 1 << 20):
        if not np.isfinite(values[start : start + (1 << 20)]).all():
            raise ConfigurationError(
                "the script's initial weights contain NaN or infinity; expected finite numbers. "
                "Look at the model's initializers, or the file that its weights are loaded from."
            )
