"""The parameters of torch modules that workers share, as flat vectors."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from thinwire.ops.types import ConfigurationError, ModelSpec, TensorSpec

if TYPE_CHECKING:
    from thinwire.ops.types import Float32, Int64

#: Prefix that `torch.compile` puts before the names of a compiled module.
_COMPILED = "_orig_mod."
#: Names of the buffers with the moving statistics of torch's normalization layers.
_STATISTICS = ("running_mean", "running_var")
#: Classes of torch that exchange gradients or parameters themselves.
_OTHER_EXCHANGES = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


class FlatParameters:
    """View of a list of parameters or buffers of torch (may be empty) as one float32 vector.

    Attributes:
        size: Number of float32 values in the flat vector of all tensors.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors = list(tensors)
        self._sizes = [tensor.numel() for tensor in self._tensors]
        self.size = sum(self._sizes)

    @property
    def values(self) -> list[Any]:
        """The tensors' values, which share memory with the tensors."""
        return [tensor.detach() for tensor in self._tensors]

    def read(self) -> Float32:
        """Return a copy of all tensors' values as one vector, [size] float32."""
        return self.joined(self.values)

    def joined(self, values: Sequence[Any]) -> Float32:
        """Return a copy of tensors of the same sizes as one vector, [size] float32.

        Args:
            values: A tensor for each tensor of the view; None for zeros.
        """
        flat = np.empty(self.size, np.float32)
        for part, value in zip(torch.from_numpy(flat).split(self._sizes), values, strict=True):
            if value is None:
                part.zero_()
            else:
                part.copy_(value.reshape(-1))
        return flat

    def assign(self, flat: Any, stepped: Container[int] = ()) -> None:
        """Overwrite the tensors with the values of `flat`, an array [size] float32.

        Args:
            flat: The new values.
            stepped: Ids of the parameters whose optimizer steps. Autograd notices only these
                changes: a loop of a GAN steps the discriminator between the generator's forward and
                backward passes, and torch refuses a graph whose weights have changed.
        """
        with torch.no_grad():
            for tensor, value in self.parts(flat):
                (tensor if id(tensor) in stepped else tensor.data).copy_(value)

    def parts(self, flat: Any) -> list[tuple[Any, Any]]:
        """Return pairs (tensor, its values in `flat`), which share the memory of `flat`."""
        values = torch.as_tensor(flat)
        if self._tensors:
            # one transfer to a GPU instead of one for each tensor
            values = values.to(self._tensors[0].device)
        pairs = zip(self._tensors, values.split(self._sizes), strict=True)
        return [(tensor, part.view(tensor.shape)) for tensor, part in pairs]


class SharedModule:
    """The parameters of one or several modules that all workers train.

    Args:
        named: Names and parameters, in the order in which the optimizers have them.
        statistics: Buffers with moving statistics, in the order of the modules.

    Raises:
        ConfigurationError: A parameter is not float32.
    """

    def __init__(self, named: Sequence[tuple[str, Any]], statistics: Sequence[Any]) -> None:
        for name, parameter in named:
            if parameter.dtype != torch.float32:
                raise ConfigurationError(
                    f"parameter {name} has the dtype {parameter.dtype}; expected torch.float32, "
                    "the only shared dtype. Keep float32 parameters and compute in lower precision "
                    "with torch.autocast, or freeze the parameter: requires_grad_(False)."
                )
        self.variables = [parameter for _, parameter in named]
        self.spec = ModelSpec(
            tuple(TensorSpec(name, tuple(parameter.shape)) for name, parameter in named)
        )
        self.statistics = list(statistics)

    def view(self, variables: Sequence[Any]) -> FlatParameters:
        """Return a flat view of some parameters or buffers."""
        return FlatParameters(variables)

    def assign(self, flat: Float32) -> None:
        """Overwrite the shared parameters with `flat`, [num_parameters] float32."""
        self.view(self.variables).assign(flat)


def modules_of(model: Any, optimizer: str) -> list[Any]:
    """Return the modules that an optimizer updates as a list, after a check of their types.

    Args:
        model: One module, or a list or tuple of modules.
        optimizer: Name of the optimizer's class, for error messages.

    Raises:
        ConfigurationError: No module is given, an object is no module, or a module exchanges
            gradients or parameters itself.
    """
    modules = list(model) if isinstance(model, list | tuple) else [model]
    if model is None or not modules:
        raise ConfigurationError(
            f"distribute() received {optimizer} without a module; expected the module, or the "
            "modules, whose parameters it trains: thinwire.distribute(optimizer, model=module)."
        )
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise ConfigurationError(
                f"distribute() received model= with a {type(module).__name__}; expected a "
                "torch.nn.Module, or a list of them."
            )
        for inner in module.modules():
            kinds = [kind.__name__ for kind in type(inner).__mro__]
            if other := next((name for name in _OTHER_EXCHANGES if name in kinds), None):
                raise ConfigurationError(
                    f"the model is wrapped in torch's {other}, which exchanges gradients itself; "
                    "expected the plain module. Leave the wrapper and init_process_group out: "
                    "thinwire.distribute(optimizer, model=module)."
                )
    return modules


def named_parameters(modules: Sequence[Any]) -> dict[int, tuple[str, Any]]:
    """Return id -> (name, parameter) of all parameters, of tied ones once, in a fixed order.

    The names of several modules begin with the module's number, because two modules of a script
    often have equal names of parameters.
    """
    found: dict[int, tuple[str, Any]] = {}
    for prefix, module in _numbered(modules):
        for name, parameter in module.named_parameters():
            found.setdefault(id(parameter), (prefix + name.replace(_COMPILED, ""), parameter))
    return found


def check_members(optimizer: Any, modules: Sequence[Any]) -> None:
    """Reject an optimizer with a parameter that is in none of its modules.

    Raises:
        ConfigurationError: A parameter is in no module, so that it has no name.
    """
    known = named_parameters(modules)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} "
                    "that the module has not; expected the module, or a list of the modules, whose "
                    "parameters the optimizer trains: thinwire.distribute(optimizer, model=module)."
                )


def moving_buffers(modules: Iterable[Any]) -> list[Any]:
    """Return the buffers with moving statistics of normalization layers, each buffer once."""
    buffers = {
        id(buffer): buffer
        for module in modules
        for name, buffer in module.named_buffers()
        if name.rpartition(".")[2] in _STATISTICS and buffer.is_floating_point()
    }
    return list(buffers.values())


def gradients_of(
    view: FlatParameters, variables: Sequence[Any]
) -> tuple[Float32, list[int], dict[int, Int64]]:
    """Return the parameters' gradients, and where there are none.

    Args:
        view: View of the parameters.
        variables: The parameters, whose `grad` is read.

    Returns:
        The gradients [num_parameters] float32, with zeros for parameters without one; the numbers
        of these parameters; and for each sparse gradient, its row numbers, ascending.
    """
    gradients = [variable.grad for variable in variables]
    without = [number for number, gradient in enumerate(gradients) if gradient is None]
    touched = {
        number: np.unique(gradient.coalesce().indices()[0].cpu().numpy())
        for number, gradient in enumerate(gradients)
        if gradient is not None and gradient.layout == torch.sparse_coo
    }
    dense = [
        gradient.to_dense() if number in touched else gradient
        for number, gradient in enumerate(gradients)
    ]
    return view.joined(dense), without, touched


def _numbered(modules: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for number, module in enumerate(modules):
        yield (f"{number}." if len(modules) > 1 else ""), module
