"""`GradientSGD`: DGS's optimizer for scripts whose training loop does not use Keras' `fit`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import logging

from thinwire.models.flat_model import SharedModel
from thinwire.models.flat_variables import FlatVariables
from thinwire.ops.methods.validation import refuse_local_epochs, refuse_script_steps
from thinwire.ops.types import ConfigurationError
from thinwire.script.session import LeavesOnExit, Session
from thinwire.script.settings import read_settings
from thinwire.script.steps import StepInfo
from thinwire.worker.core.worker_round import MiniBatch

if TYPE_CHECKING:
    from thinwire.ops.kernels.base import Kernels
    from thinwire.ops.types import Float32

#: Largest relative difference between two learning rates that count as equal.
RATE_TOLERANCE = 1e-6


class GradientSGD(LeavesOnExit):
    """Replaces the optimizer of a training loop: `step` sends gradients and receives weights.

    The constructor of `GradientSGD` joins the run and writes the server's weights into the model,
    so that the server can apply the first gradient. A worker with `GradientSGD` leaves the run at
    `close`, at the end of a `with` block, or at the end of the process.

    Args:
        model: A Keras model. The workers share the variables in the model's attribute W_global, or
            all trainable variables if W_global is empty.
        lr: Learning rate, used in mode msgd only. In all other modes the server's learning rate
            counts, and a warning reports an lr that differs from the server's.
        momentum: Momentum that the worker applies: SAMomentum in mode dgs, momentum correction in
            mode dgc, plain momentum in mode msgd. All other modes have no momentum on the worker.
        weight_decay: Coupled weight decay on the worker, in every mode:
            h <- h + weight_decay * theta, with the gradient h and the weights theta.
        mode: Method of training, in upper or lower case: dgs (or gradient_sgd), asgd, gd (or aji),
            dgc, msgd (or sgd; without a server), or any value of ``--method``.
        args: Settings of this worker, in any form that the module `thinwire.script.settings` reads.
        num_train: Number of examples in the whole training set, which the warm-up of the method dgc
            needs.
        **settings: Further flags of the worker by name, for example ``id_worker=2``.

    Raises:
        ConfigurationError: The settings are invalid. Or the model is compiled with an optimizer
            other than plain SGD, and neither lr nor momentum is given.
        Unreachable: No parameter server answers this worker.
        Refused: The server has a different model or training method than this script.

    Source: the published program of DGS. Differences: DGS's program discards its first gradient.
    """

    def __init__(
        self,
        model: Any,
        lr: float | None = None,
        momentum: float | None = None,
        weight_decay: float | None = None,
        mode: str | None = None,
        args: Any = None,
        num_train: int | None = None,
        **settings: Any,
    ) -> None:
        keywords = settings | {"mode": mode, "worker_weight_decay": weight_decay}
        if lr is None and momentum is None:
            _check_compiled(getattr(model, "optimizer", None))
        chosen = read_settings(args, keywords, type_node="Worker", momentum=momentum)
        refuse_script_steps(chosen.run.method, "a script with GradientSGD")
        refuse_local_epochs(chosen.run.method, "a script with GradientSGD")
        self._shared = SharedModel.of(model)
        self._variables = FlatVariables(self._shared.variables)
        self._numbers = {id(v): n for n, v in enumerate(self._shared.variables)}
        self._numbers |= {id(v.value): n for n, v in enumerate(self._shared.variables)}
        self._batch_size = chosen.run.batch_size
        if chosen.local:
            self._stepper: _Momentum | Session = _Momentum(
                self._variables.read(), lr, momentum, chosen.values.worker_weight_decay
            )
            return
        self._stepper = session = Session(chosen, self._shared, num_train)
        session.open()
        session.assign()
        warn_of_other_rate("lr", lr, session)

    @property
    def stopped(self) -> bool:
        """True if the run has ended and the training loop must end."""
        return self._stepper.stopped

    @property
    def stop_reason(self) -> str:
        """Reason why the run ended; an empty text while the run continues."""
        return self._stepper.stop_reason

    def step(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        loss: float | None = None,
        samples: int | None = None,
    ) -> StepInfo:
        """Send the gradients of one mini-batch and write the server's new weights into the model.

        Args:
            grads_and_vars: Pairs (gradient, variable) of the shared variables, in any order. A
                gradient is a tensor, an array, IndexedSlices, or None for a variable that the loss
                does not depend on.
            loss: Mean loss of the mini-batch, for reports and curves; None: report no loss.
            samples: Number of examples in the mini-batch; None: the value of the flag batch_size.

        Raises:
            RunOver: The run ended before this training step was sent to the servers.
            ConfigurationError: A variable is not shared by the workers, or a gradient has the wrong
                shape.
            Diverged, Unreachable, Refused: Gradients stay non-finite, no server answers, or the
                server rejects this worker.
        """
        gradient = self._flatten(grads_and_vars)
        if isinstance(self._stepper, _Momentum):
            info = self._stepper.step(gradient)
            self._variables.assign(self._stepper.weights)
            return info
        session = self._stepper
        count = self._batch_size if samples is None else int(samples)
        mean_loss = None if loss is None else float(loss)
        batch = MiniBatch(gradient, count, mean_loss, session.statistics.read())
        info = session.part.step(batch)
        session.assign()
        return info

    def shard(self, *arrays: Any) -> Any:
        """Return this worker's part of a training set; in mode msgd (no server) the whole set."""
        if isinstance(self._stepper, Session):
            return self._stepper.shard(*arrays)
        return arrays[0] if len(arrays) == 1 else arrays

    def close(self, cause: str = "done") -> None:
        """Leave the run; the model keeps its current weights."""
        if isinstance(self._stepper, Session):
            self._stepper.close(cause)

    def _flatten(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> Float32:
        """Return the gradients of all shared variables as one vector; 0 replaces missing ones.

        With --kernels=jax on Keras' backend JAX, and with --kernels=torch on its backend torch, the
        vector stays on the device that computed the gradients. Else it is a numpy array.
        """
        from keras.ops import convert_to_numpy

        spec, kernels = self._shared.spec, self._kernels_of_gradients()
        found: list[Any] = [None] * len(spec.tensors)
        for gradient, variable in grads_and_vars:
            number = self._numbers.get(id(variable))
            if number is None:
                raise ConfigurationError(
                    f"{getattr(variable, 'path', variable)!s:.80} is not shared with the "
                    "parameter server; expected variables in W_global (all trainable variables if "
                    "W_global is empty). Train this variable with a separate optimizer."
                )
            if gradient is None:
                continue
            tensor = spec.tensors[number]
            values = convert_to_numpy(gradient) if kernels is None else gradient
            if tuple(values.shape) != tensor.shape:
                raise ConfigurationError(
                    f"the gradient of variable {tensor.path} has the shape {tuple(values.shape)}; "
                    f"expected the variable's shape, {tensor.shape}."
                )
            found[number] = values
        if kernels is None:
            flat = np.zeros(spec.num_parameters, np.float32)
            for number, values in enumerate(found):
                if values is not None:
                    flat[spec.offsets[number] : spec.offsets[number + 1]] = values.ravel()
            return flat
        parts = zip(found, spec.tensors, strict=True)
        return kernels.joined(
            [kernels.zeros([each.size])[0] if part is None else part for part, each in parts]
        )

    def _kernels_of_gradients(self) -> Kernels | None:
        """Return the kernels that take Keras' gradients on their device; None to copy them."""
        import keras

        if not isinstance(self._stepper, Session):
            return None
        core = self._stepper.part.core
        is_same = core.kernels.name == keras.backend.backend()
        return core.kernels if is_same and core.on_device else None


class _Momentum:
    """Momentum SGD in mode msgd, without a server: u <- m u + h + wd theta; theta <- theta - lr u.

    In the formulas of momentum SGD, u is the velocity, m the momentum, h the gradient, wd the
    weight decay and theta the weights. The velocity of mode msgd does not contain the learning rate
    lr, so a new lr acts immediately on the whole velocity. In Keras' SGD, by contrast, the velocity
    contains the learning rates of past steps.
    """

    def __init__(
        self, weights: Float32, lr: float | None, momentum: float | None, weight_decay: float
    ) -> None:
        self.rate = 0.02 if lr is None else lr
        self.momentum = 0.0 if momentum is None else momentum
        if not (0 < self.rate < float("inf") and 0 <= self.momentum < 1):
            raise ConfigurationError(
                f"GradientSGD with lr={self.rate}, momentum={self.momentum}: expected lr above 0 "
                "and 0 <= momentum < 1."
            )
        self.weights, self.stopped, self.stop_reason = weights, False, ""
        self._weight_decay = np.float32(weight_decay)
        self._velocity = np.zeros_like(weights)
        self._version = 0

    def step(self, gradient: Float32) -> StepInfo:
        """Update the weights by one step of momentum SGD; skip a gradient with NaN or infinity."""
        gradient += self._weight_decay * self.weights
        if np.isfinite(gradient).all():
            self._velocity *= np.float32(self.momentum)
            self._velocity += gradient
            self.weights -= np.float32(self.rate) * self._velocity
            self._version += 1
        else:
            logging.warning("skipping a mini-batch with a gradient that is not finite")
        return StepInfo(self._version, self.rate)


def differing_settings(compiled: dict[str, Any], known: dict[str, Any]) -> list[str]:
    """Return the names of an optimizer's settings that differ; its name and rate may differ."""
    return [
        name
        for name in compiled
        if name not in ("name", "learning_rate") and compiled[name] != known.get(name)
    ]


def _check_compiled(optimizer: Any) -> None:
    """Reject a compiled optimizer that `GradientSGD` would replace, unless it is plain SGD.

    Raises:
        ConfigurationError: The model's compiled optimizer is not SGD with default settings (apart
            from the learning rate).
    """
    if optimizer is None:
        return
    from keras.optimizers import SGD

    differing = differing_settings(optimizer.get_config(), SGD().get_config())
    if type(optimizer) is not SGD or differing:
        description = type(optimizer).__name__ + (
            f" with {differing[0]}" if type(optimizer) is SGD else ""
        )
        raise ConfigurationError(
            f"the model is compiled with {description}, which GradientSGD ignores; expected "
            "plain SGD. Give GradientSGD lr and momentum if plain steps are meant, or train by "
            "thinwire.distribute(model) and model.fit(...), which keep the compiled optimizer."
        )


def warn_of_other_rate(name: str, rate: float | None, session: Session) -> None:
    """Warn if the script's learning rate differs from the server's rate, which the run uses."""
    server = session.part.core.learning_rate
    if rate is not None and abs(rate - server) > RATE_TOLERANCE * server:
        logging.warning(
            "%s=%g in the script has no effect: the parameter server determines the learning "
            "rate, which is now %g (--learning_rate and --lr_schedule of the server)",
            name,
            rate,
            server,
        )
