"""A worker's local computation: a tf.function that turns weights into a flat gradient.

The model's shared variables use the memory of one flat buffer, as far as alignment allows. The
gradients are written to a second flat buffer, not to the buffer of the weights. BUILD_NOTES.md
compares measured alternatives to the flat buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from thinwire.models.fast_bias import plain_bias_sums
from thinwire.models.flat_model import SharedModel
from thinwire.models.loss import ensure_compiled_loss
from thinwire.models.seeds import seed_apart
from thinwire.ops.kernels.device import DeviceArray
from thinwire.ops.types import State

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

#: Alignment, in bytes, that an array's memory needs so that TensorFlow can use the array without a
#: copy.
_BORDER_BYTES = 64


class TrainStep:
    """A Keras model whose shared variables (W_global) form one flat float32 vector."""

    def __init__(self, shared: SharedModel) -> None:
        """Prepare the training step's tf.functions; TensorFlow traces them at the first step."""
        self.model = shared.model
        self.loss = ensure_compiled_loss(self.model, shared.task)
        self._labels = shared.task.labels
        self.variables = shared.variables
        self.spec = shared.spec
        self._shapes = [tensor.shape for tensor in self.spec.tensors]
        self._offsets = self.spec.offsets
        shared_ids = {id(variable) for variable in self.variables}
        self.local = [v for v in self.model.variables if id(v) not in shared_ids]
        trained = self.model.trainable_variables
        self.personal = [v for v in trained if id(v) not in shared_ids]
        self._stepped = [*self.variables, *self.personal]
        self._gradient_step = tf.function(self.compute, reduce_retracing=True)
        self._flat_step = tf.function(self.compute_flat, reduce_retracing=True)
        self._assign_all = self._assigner(range(len(self.variables)))
        # Buffer that holds the memory of the model's shared variables; None before `set_weights`.
        self._lies_in: Float32 | None = None
        # Numbers of the variables whose memory is outside of the flat buffer.
        self._copied: list[int] = []

    def set_weights(self, flat: Float32 | DeviceArray) -> None:
        """Set the shared variables to the values in `flat`.

        A CPU variable uses the memory of `flat` itself if its part of `flat` is 64-byte aligned:
        later writes to `flat` change the variable. Variables whose part of `flat` is not 64-byte
        aligned get copies of the values. The caller of `set_weights` should pass the same buffer in
        each call, and write to the buffer only between two steps. If `flat` is a DeviceArray, its
        values are copied to all variables, on their device.

        Args:
            flat: [num_parameters] float32 weights; a NumPy array must be 64-byte aligned.
        """
        if isinstance(flat, DeviceArray):
            self._assign_all(flat.value)
            return
        if self._lies_in is not flat:
            self._take_over(flat)
        if self._copied:
            self._assign(as_tensor(flat))

    def gradients(
        self, images: Any, labels: Any, out: Float32, personal: Float32 | None = None
    ) -> float:
        """Compute the mean gradient of one mini-batch.

        Args:
            images: [B, ...] inputs in the task's dtype, usually float32.
            labels: [B, ...] labels in the task's dtype; int32 [B] for classes.
            out: [num_parameters] float32, overwritten with the gradient of the shared variables.
            personal: [n] float32, overwritten with the gradient of the personal (unshared
                trainable) variables; None skips the copy.

        Returns:
            The mean loss of the mini-batch.
        """
        loss, gradients = self._gradient_step(images, labels)
        for start, stop, gradient in zip(self._offsets, self._offsets[1:], gradients, strict=False):
            out[start:stop] = np.asarray(memoryview(gradient)).ravel()
        if personal is not None:
            _fill(personal, gradients[len(self.variables) :])
        return float(loss)

    def gradients_on_device(
        self, images: Any, labels: Any, personal: Float32
    ) -> tuple[DeviceArray, float]:
        """Compute the mean gradient of one mini-batch, and leave it in device memory.

        Args:
            images: [B, ...] inputs of the mini-batch in the task's dtype.
            labels: [B, ...] labels of the mini-batch in the task's dtype.
            personal: [n] float32, overwritten with the gradient of the personal (unshared
                trainable) variables.

        Returns:
            The gradient [num_parameters] float32, and the mean loss of the mini-batch.
        """
        loss, flat, personal_gradients = self._flat_step(images, labels)
        _fill(personal, personal_gradients)
        return DeviceArray(flat), float(loss)

    def vary_local_randomness(self, number: int) -> None:
        """Give dropout layers a separate random stream on worker `number` (counted from 1)."""
        seed_apart(self.local, number)

    def save_local(self) -> State:
        """Return the values of the variables that are not shared (statistics, dropout seeds)."""
        return {str(number): v.numpy() for number, v in enumerate(self.local)}

    def restore_local(self, state: State) -> None:
        """Restore the values of variables that are not shared, which `save_local` returned."""
        for number, variable in enumerate(self.local):
            variable.assign(state[str(number)])

    def compute(self, images: Any, labels: Any) -> tuple[Any, list[Any]]:
        """Return (mean loss, gradients of all trainable variables), inside a tf.function.

        The returned gradients begin with the shared variables, followed by the personal variables.
        """
        with plain_bias_sums(), tf.GradientTape(watch_accessed_variables=False) as tape:
            for variable in self._stepped:
                tape.watch(variable.value)
            outputs = self.model(images, training=True)
            self._labels.check_outputs(self.model, labels, outputs)
            loss = tf.reduce_mean(self.loss(labels, outputs)) + sum(self.model.losses)
        gradients = tape.gradient(loss, [variable.value for variable in self._stepped])
        dense = [
            tf.zeros(variable.shape) if gradient is None else tf.convert_to_tensor(gradient)
            for variable, gradient in zip(self._stepped, gradients, strict=True)
        ]
        return loss, dense

    def compute_flat(self, images: Any, labels: Any) -> tuple[Any, Any, list[Any]]:
        """Return (mean loss, shared gradients as one vector, list of personal gradients)."""
        loss, gradients = self.compute(images, labels)
        shared = [tf.reshape(gradient, [-1]) for gradient in gradients[: len(self.variables)]]
        return loss, tf.concat(shared, 0), gradients[len(self.variables) :]

    def _take_over(self, flat: Float32) -> None:
        """Make each variable with a 64-byte-aligned part of `flat` use the memory of that part."""
        self._lies_in, self._copied = flat, []
        for number, variable in enumerate(self.variables):
            part = self._part(flat, number)
            if part.size and not part.ctypes.data % _BORDER_BYTES:
                variable.value.assign(tf.reshape(as_tensor(part), self._shapes[number]))
            value = np.asarray(memoryview(variable.value.read_value()))
            # A variable on a GPU, or with an unaligned part of `flat`, has separate memory, so
            # `set_weights` must copy its values each time.
            if not np.may_share_memory(value, part):
                self._copied.append(number)
        self._assign = self._assigner(self._copied)

    def _assigner(self, numbers: Sequence[int]) -> Any:
        """Return a tf.function that assigns the parts of a flat vector to variables."""

        def assign(flat: Any) -> None:
            for number in numbers:
                values = tf.reshape(self._part(flat, number), self._shapes[number])
                self.variables[number].value.assign(values)

        return tf.function(assign, autograph=False)

    def _part(self, flat: Any, number: int) -> Any:
        """Return the part of a flat vector that belongs to shared variable `number`."""
        return flat[self._offsets[number] : self._offsets[number + 1]]


def as_tensor(flat: Float32) -> Any:
    """Return weights [n] as a tensor in the same memory, which must be 64-byte aligned."""
    if flat.ctypes.data % _BORDER_BYTES:
        raise ValueError("weights must be 64-byte aligned; use thinwire.worker.core.core.aligned")
    return tf.experimental.dlpack.from_dlpack(flat.__dlpack__())


def _fill(flat: Float32, gradients: list[Any]) -> None:
    """Write gradients with n entries in total, one after the other, to a float32 vector [n]."""
    start = 0
    for gradient in gradients:
        values = gradient.numpy().ravel()
        flat[start : start + values.size] = values
        start += values.size
