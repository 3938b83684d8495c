"""W_global: registry of the model variables that are shared through the parameter server.

User code adds variables to the registry W_global inside ``build_model()``. If the registry W_global
is empty, workers share every trainable variable of the model. A variable's key is
``variable.path``, which is equal on every node that builds the same model. The module `w_global`
does not import TensorFlow. `w_global` reads the graph collection W_global of TensorFlow's compat.v1
only if other code has loaded TensorFlow.

Source: the collection W_global of AdaComp's published code. Differences: shared variables may have
any shape; the original requires one-dimensional variables.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Container, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from thinwire.ops.types import ConfigurationError, ModelSpec, TensorSpec

if TYPE_CHECKING:
    import keras

NAME = "W_global"


class SharedVariables:
    """An ordered registry of the variables that workers share through the PS."""

    def __init__(self) -> None:
        self._variables: list[keras.Variable] = []
        self._frozen = False

    def add(self, variable: keras.Variable) -> None:
        """Share one variable.

        Raises:
            ConfigurationError: The variable is already shared, or the registry of shared variables
                is frozen.
        """
        path = _path(variable)
        if self._frozen:
            raise ConfigurationError(
                f"{NAME}.add({path}) was called after the shared variables were fixed; expected "
                "the call inside build_model()."
            )
        if any(variable is known for known in self._variables):
            raise ConfigurationError(
                f"the variable {path} was added to {NAME} twice; expected each variable once. "
                "Remove one of the calls."
            )
        self._variables.append(variable)

    def extend(self, variables: Iterable[keras.Variable]) -> None:
        """Share several variables, in the given order; raise the errors that ``add`` raises."""
        for variable in variables:
            self.add(variable)

    def freeze(self) -> None:
        """Make the registry reject further variables until ``clear`` is called."""
        self._frozen = True

    def clear(self) -> None:
        """Empty the registry of shared variables, and the compat.v1 collection W_global."""
        self._variables.clear()
        self._frozen = False
        if (graph := _graph()) is not None:
            graph.clear_collection(NAME)

    def __iter__(self) -> Iterator[keras.Variable]:
        return iter(tuple(self._variables))

    def __len__(self) -> int:
        return len(self._variables)


#: The registry of shared variables of the model that user code builds now; ``from thinwire import
#: W_global``.
W_global = SharedVariables()


def shared_variables(
    model: keras.Model, stepped: Iterable[keras.Variable] | None = None, numbers_paths: bool = False
) -> list[keras.Variable]:
    """Return the variables to share, in W_global order, and freeze the registry.

    Args:
        model: The Keras model that was built last, with its variables created.
        stepped: The variables that a training step passes to the optimizer; None if unknown.
        numbers_paths: True if variables may have equal paths, to which `model_spec` appends
            numbers.

    Returns:
        The variables in W_global and in the ``tf.compat.v1`` collection of the same name; if both
        are empty, the trainable variables in `stepped` (all if None), followed by the other
        variables in `stepped`.

    Raises:
        ConfigurationError: There is no variable to share; or a shared variable is listed twice,
            does not belong to the model, is not trainable, or is not float32.
    """
    trainable = list(model.trainable_variables)
    listed = [*W_global, *_graph_collection(model)]
    chosen = listed or trainable
    if not listed and stepped is not None:
        by_id = {id(variable): variable for variable in stepped}
        chosen = [variable for variable in trainable if by_id.pop(id(variable), None) is not None]
        chosen += by_id.values()
    if not chosen:
        raise ConfigurationError(
            f"Model {model.name!r} has no trainable variables to share; expected at least one. "
            "Give the model a keras.Input, so that its layers create their variables immediately."
        )
    for variable in listed:
        _check_member(variable, model, trainable)
    model_spec(chosen, numbers_paths)
    W_global.freeze()
    return chosen


def model_spec(variables: Iterable[keras.Variable], numbers_paths: bool = False) -> ModelSpec:
    """Return the signature of the shared variables: path, shape and dtype, in order.

    Args:
        variables: Model variables that all workers share, in order.
        numbers_paths: True if a repeated path gets a number; False if a repeated path is an error.

    Raises:
        ConfigurationError: There are no shared variables, two variables have the same path, or a
            variable is not float32.
    """
    tensors: dict[str, TensorSpec] = {}
    for variable in variables:
        path = _path(variable)
        if numbers_paths:
            path = _unused(path, tensors)
        if path in tensors:
            raise ConfigurationError(
                f"{NAME} has two variables with the path {path!r}; expected each path once. Give "
                "the layers different names, or list the variable once."
            )
        if str(variable.dtype) != "float32":
            raise ConfigurationError(
                f"variable {path} has dtype {variable.dtype}; expected float32, the only shared "
                f"dtype. Build the layer with dtype='float32', or leave the variable out of {NAME}."
            )
        tensors[path] = TensorSpec(path, tuple(int(size) for size in variable.shape))
    if not tensors:
        raise ConfigurationError(f"{NAME} is empty; expected at least one variable to share.")
    return ModelSpec(tuple(tensors.values()))


def _unused(path: str, known: Container[str]) -> str:
    """Return a variable's path, with a number appended if `known` contains the path already."""
    numbered = (f"{path}_{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([path], numbered) if name not in known)


def _check_member(
    variable: keras.Variable, model: keras.Model, trainable: list[keras.Variable]
) -> None:
    if any(variable is known for known in trainable):
        return
    path = _path(variable)
    if any(variable is known for known in model.variables):
        raise ConfigurationError(
            f"variable {path} in {NAME} is not trainable, so it has no gradient to share; expected "
            f"trainable variables. Leave it out of {NAME}; it then stays local."
        )
    raise ConfigurationError(
        f"the variable {path} is in {NAME} but is not a variable of the model {model.name!r}; "
        "expected only variables of the model that build_model() returns."
    )


def _path(variable: Any) -> str:
    path = getattr(variable, "path", None)
    if path is None:
        raise ConfigurationError(
            f"{NAME} received {variable!r:.80} of type {type(variable).__name__}; expected a "
            "keras.Variable, for example layer.kernel or an element of model.trainable_variables."
        )
    return str(path)


def _graph() -> Any:
    """Return TensorFlow's default graph, or None if TensorFlow is not loaded."""
    tensorflow = sys.modules.get("tensorflow")
    compat = getattr(tensorflow, "compat", None)
    return None if compat is None else compat.v1.get_default_graph()


def _graph_collection(model: keras.Model) -> list[keras.Variable]:
    """Return the Keras variables in TensorFlow's compat.v1 graph collection W_global."""
    graph = _graph()
    items = [] if graph is None else graph.get_collection(NAME)
    return [_keras_variable(item, model) for item in items]


def _keras_variable(item: Any, model: keras.Model) -> keras.Variable:
    if hasattr(item, "path"):
        return item
    for variable in model.variables:
        if variable.value is item:
            return variable
    raise ConfigurationError(
        f"The collection {NAME} holds {getattr(item, 'name', item)!r:.80}, which is not a variable "
        f"of the model {model.name!r}; expected variables of the model that build_model() returns."
    )
