"""Computes exact metrics of the central model over the whole test set.

The class `ModelFetcher` fetches the whole model from all shards. The class `Evaluator` computes the
metrics that the model's task defines, for example accuracy.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from thinwire.data.pipeline.lazy import Lazy
from thinwire.models.tasks import CLASSIFICATION, TASKS, Task
from thinwire.ops.kernels.numpy_ops import dequantise
from thinwire.ops.types import ConfigurationError, ModelSpec, ShardLayout
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.supervisor.shard_stream import ShardStream

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

#: Approximate limit of the memory for the activations of one evaluation batch.
_MEMORY_BYTES = 256 * 2**20
#: Batch size if the output shapes of the model's layers are unknown.
_UNKNOWN_MODEL_BATCH = 1024
#: Time limit, in seconds, for repeated pulls of shards that apply updates in rounds. A pull in the
#: middle of a round returns parts of the model that have different versions.
_SAME_VERSION_SECONDS = 2.0

Weights = Sequence[Any] | Callable[[], None]


class Evaluator:
    """Evaluates one model repeatedly with different weights; compiles the evaluation step only
    once.

    Args:
        model: Built Keras model to evaluate.
        loss: Keras loss, or a function of (labels, outputs) that returns a mean or one value per
            example.
        images: Model inputs of the test set, [n, ...]; an array or a
            thinwire.data.pipeline.lazy.Lazy.
        labels: Labels of the test set, [n, ...], in the form of the task.
        batch_size: Upper limit of the batch size. The batch size is reduced to the size of the test
            set and to a memory limit, so even AdaComp's batch size of 100000 works.
        task: Task of the model, which defines the metrics.
        variables: Variables to which ``evaluate`` assigns a list of weights, in order; None for the
            model's trainable variables.
        extras: Names of optional metrics of the model's task to compute, for example the top-5
            accuracy.

    Raises:
        ConfigurationError: The images or labels are empty or differ in number, or the batch size is
            below 1. The method ``evaluate`` raises ConfigurationError if the task's metrics do not
            fit the outputs.
    """

    def __init__(
        self,
        model: Any,
        loss: Any,
        images: np.ndarray | Lazy,
        labels: np.ndarray,
        batch_size: int,
        task: Task = TASKS[CLASSIFICATION],
        variables: Sequence[Any] | None = None,
        extras: Sequence[str] = (),
    ) -> None:
        if len(images) != len(labels) or not len(images):
            raise ConfigurationError(
                f"The test set has {len(images)} images and {len(labels)} labels; expected equal "
                "numbers of images and labels, at least one. Check the data files."
            )
        if batch_size < 1:
            raise ConfigurationError(f"--batch_size is {batch_size}; expected at least 1.")
        self.batch_size = min(batch_size, len(images), _batch_that_fits(model))
        self._model = model
        self._loss, self._own_loss = loss, task.loss(model)
        self._label_form = task.labels
        self._groups = (task.scores, *(task.extras[name] for name in extras))
        self._images = images
        labels = np.asarray(labels)
        self._labels = labels.reshape(len(labels)) if task.labels.number_classes else labels
        self._variables = list(model.trainable_variables if variables is None else variables)
        self._run_batch = self._compile()

    def evaluate(self, weights: Weights) -> dict[str, float]:
        """Set the model's weights; return the model's metrics on all test examples, the loss last.

        Args:
            weights: One array for each variable of the model, or a function that assigns the
                weights.

        Raises:
            ValueError: The number of weight arrays differs from the number of variables.
        """
        if callable(weights):
            weights()
        else:
            for variable, value in zip(self._variables, weights, strict=True):
                variable.assign(value)
        total = len(self._images)
        sums: list[dict[str, Any]] = [{} for _ in self._groups]
        losses = []
        for start, (images, labels) in zip(self._starts(), self._batches(), strict=True):
            num_valid = min(self.batch_size, total - start)
            batch_sums, batch_loss = self._run_batch(images, labels, np.int32(num_valid))
            for total_of, batch_sum in zip(sums, batch_sums, strict=True):
                for name, value in batch_sum.items():
                    total_of[name] = total_of.get(name, 0.0) + np.asarray(value)
            losses.append(float(batch_loss) * num_valid)
        metrics: dict[str, float] = {}
        for group, total_of in zip(self._groups, sums, strict=True):
            metrics |= group.values(total_of)
        return metrics | {"loss": math.fsum(losses) / total}

    def _starts(self) -> range:
        return range(0, len(self._images), self.batch_size)

    def _batches(self) -> Iterator[tuple[Any, np.ndarray]]:
        """Yield test batches of one shape; the last batch is filled up with the first examples."""
        total = len(self._images)
        chosen = [np.arange(start, start + self.batch_size) % total for start in self._starts()]
        if isinstance(self._images, Lazy):
            yield from zip(
                self._images.walk(chosen), (self._labels[batch] for batch in chosen), strict=True
            )
            return
        for batch in chosen:
            # A slice of an array needs no copy, but a slice cannot continue with the first example
            # after the last.
            whole = slice(batch[0], batch[-1] + 1) if batch[0] <= batch[-1] else batch
            yield self._images[whole], self._labels[whole]

    def _compile(self) -> Any:
        """Return the evaluation step, a function of (images, labels, number of valid examples).

        The evaluation step returns the float64 sums of every metric group by name, and the mean
        loss.
        """
        import tensorflow as tf

        def run_batch(images: Any, labels: Any, num_valid: Any) -> Any:
            outputs = self._model(images, training=False)[:num_valid]
            labels = labels[:num_valid]
            self._label_form.check_outputs(self._model, labels, outputs)
            sums = [dict(group.sums(labels, outputs, self._own_loss)) for group in self._groups]
            return sums, tf.reduce_mean(_loss_values(self._loss, labels, outputs))

        def signature(array: NDArray[Any] | Lazy) -> Any:
            return tf.TensorSpec((self.batch_size, *array.shape[1:]), array.dtype)

        shapes = [signature(self._images), signature(self._labels), tf.TensorSpec((), tf.int32)]
        return tf.function(run_batch, input_signature=shapes, autograph=False)


def _loss_values(loss: Any, labels: Any, outputs: Any) -> Any:
    """Return the loss of each example, without the reduction that a Keras loss applies."""
    import keras

    if isinstance(loss, keras.losses.Loss):
        return loss.call(labels, outputs)
    return loss(labels, outputs)


def _batch_that_fits(model: Any) -> int:
    """Return how many examples a batch may have so that all layer outputs fit in
    ``_MEMORY_BYTES``.
    """
    try:
        shapes = [layer.output.shape for layer in model.layers]
        num_values = sum(math.prod(shape[1:]) for shape in shapes)
    # The model is subclassed, or has several outputs or an unknown dimension.
    except (AttributeError, TypeError):
        return _UNKNOWN_MODEL_BATCH
    return int(max(1, _MEMORY_BYTES // (4 * max(1, num_values))))


@dataclasses.dataclass(frozen=True)
class ModelView:
    """The weights and moving statistics of the whole model, pulled from all shards."""

    weights: Float32  # weights of the whole model, [num_parameters] float32
    # Moving statistics [m]; None if shard 0 averages no moving statistics.
    statistics: Float32 | None
    versions: list[int]  # version (number of applied updates) of each shard's weights


class ModelFetcher:
    """Fetches the central model from the shards of the parameter server.

    Args:
        spec: Names and shapes of the whole model's variables.
        layouts: Layout (the parameters that a shard stores) of every shard, in the order of shard
            ids.
        num_statistics: Number of values in the model's moving statistics.
        in_step: True if the shards apply updates in rounds, so that all shards can have the same
            model version.
    """

    def __init__(
        self, spec: ModelSpec, layouts: Sequence[ShardLayout], num_statistics: int, in_step: bool
    ) -> None:
        self._spec, self._layouts = spec, layouts
        self._num_statistics, self._in_step = num_statistics, in_step

    def fetch(self, shards: Sequence[ShardStream]) -> ModelView | None:
        """Pull the central model from all shards; return None if a shard does not answer.

        If the shards apply updates in rounds, the Supervisor repeats the pull for a limited time
        until all shards reply with the same model version.

        Raises:
            ConfigurationError: A shard's reply does not contain the variable slices that the shard
                stores.
        """
        deadline = time.monotonic() + _SAME_VERSION_SECONDS
        while True:
            view = self._fetch_once(shards)
            mixed = view is not None and len(set(view.versions)) > 1
            if not (mixed and self._in_step and time.monotonic() < deadline):
                return view

    def _fetch_once(self, shards: Sequence[ShardStream]) -> ModelView | None:
        weights = np.empty(self._spec.num_parameters, np.float32)
        versions, statistics = [], None
        for shard in shards:
            # Empty the queue of replies. If an earlier pull stopped because a shard was silent, a
            # late reply in the queue would be taken for the answer to the new pull.
            while not shard.replies.empty():
                if shard.replies.get() is None:
                    return None
            shard.session.send_control(pb.ToServer(pull=pb.Pull(observe=True)))
        for shard, layout in zip(shards, self._layouts, strict=True):
            # The pull has no time limit, because a large model takes minutes over a slow link. If
            # the shard is silent, the stream ends and puts None into the queue.
            answer = shard.replies.get(timeout=None)
            if answer is None:
                return None
            try:
                aux = self._place(layout, *answer, weights)
            except Malformed as error:
                raise ConfigurationError(
                    f"the PS shard {shard.session.address} sent a model that cannot be read "
                    f"({error}); install the same Thinwire on all nodes."
                ) from error
            statistics = aux if aux is not None else statistics
            versions.append(answer[0].version)
        return ModelView(weights, statistics, versions)

    def _place(
        self, layout: ShardLayout, reply: pb.Reply, payload: memoryview, weights: Float32
    ) -> Float32 | None:
        """Write a shard's weights into the model; return the moving statistics in its reply, or
        None.

        Raises:
            Malformed: The shard's reply does not contain all variable slices that the shard stores.
        """
        payload, aux = messages.carve_aux(payload, reply.aux_count, (0, self._num_statistics))
        sizes = [piece.size for piece in layout.slices]
        blocks = messages.blocks_from_message(reply.blocks, payload, sizes)
        if len(blocks) < len(sizes) or any(block.indices is not None for block in blocks):
            raise Malformed(f"the PS sent {len(blocks)} blocks; expected {len(sizes)} dense blocks")
        for block, piece in zip(blocks, layout.slices, strict=True):
            start = self._spec.offsets[piece.tensor] + piece.start
            weights[start : start + piece.size] = dequantise(block.values)
        return aux
