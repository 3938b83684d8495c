"""Counts the bytes that the kernels of JAX and torch copy between host and device.

`python -m bench.machine.crossings --backend jax` runs this module. It runs the codecs alone, then
rounds of worker cores with their local steps. Gradients, residuals and weights are on the device.
There is no model: gradients are random numbers that are put on the device before the count starts,
and replies are made up.

The program counts the bytes of `to_device` and `to_host`, by which the kernels make their copies,
and rejects other copies:

- JAX: the device is a GPU, or without one JAX's second processor. The transfer guard rejects each
  other copy to the device, even of a single number, and on a GPU each other copy to the host. On a
  processor, JAX lets numpy read its memory; there, numpy's conversions of JAX arrays and Python's
  conversions of JAX numbers are rejected instead.
- torch: the device is a GPU; without one, arrays are in the host's memory, and a copy is counted
  where the kernels would make it. Outside of the two functions, the methods by which a tensor
  becomes an array or a number are rejected, and the functions by which an array becomes a tensor. A
  number that is an argument of an operation is not counted, and neither is the number of selected
  entries (8 bytes), which torch copies by itself on a GPU.

Codecs and methods whose kernels compute on the host have no limit: PowerSGD, DGT. Local steps are
those of SGD: a Keras optimizer of local steps, such as DiLoCo's Adam, would compute on the host,
with a copy of each gradient.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.machine.crossings import (
    CODECS,
    DOWN,
    LOCAL_STEPS,
    RATE,
    SPEC,
    WARM,
    WORKERS,
    Counts,
    device_arrays,
    exceeds,
    line,
    made_up_reply,
)
from thinwire.ops.codecs.base import EncodeContext
from thinwire.ops.codecs.registry import build_codec
from thinwire.ops.kernels import load_kernels
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.methods.builder import Choices, compose
from thinwire.ops.types import Block, CodedValues
from thinwire.worker.core.core import WorkerCore

#: Codecs and methods whose kernels compute on the host.
ON_HOST = ("powersgd", "dgt", "dgt, 8 bits", "dgt, 4 bits", "dgt, dropped")
_TO_HOST = (
    *("cpu", "numpy", "tolist", "item", "__array__"),
    *("__bool__", "__float__", "__int__", "__index__"),
)
_TO_DEVICE = ("from_numpy", "tensor", "as_tensor", "asarray")


class StrayCopy(Exception):
    """Raised if an array is copied between host and device without being counted."""


class Crossings:
    """Counts the copies of a framework's kernels, and rejects others.

    Args:
        backend: Framework: "jax" or "torch".
    """

    def __init__(self, backend: str) -> None:
        self._module = importlib.import_module(f"thinwire.ops.kernels.{backend}_ops")
        self._backend = backend
        self._is_counted = False  # True within a copy that is counted
        self._tensor = type(self._module.KERNELS.zeros([1])[0].tensor)

    @contextlib.contextmanager
    def counted(self, counts: Counts) -> Iterator[None]:
        """Count the copies inside the block; raise StrayCopy, or JAX's own error, for others."""
        with contextlib.ExitStack() as patches:
            down = patches.enter_context(replaced(self._module, "to_host", self._counting))
            up = patches.enter_context(replaced(self._module, "to_device", self._counting))
            guards = self._jax_guards if self._backend == "jax" else self._torch_guards
            guards(patches)
            yield
        counts.down += sum(down)
        counts.up += sum(up)

    def _counting(self, copy: Callable[..., Any], found: list[int]) -> Callable[..., Any]:
        def counting(value: Any, *more: Any) -> Any:
            self._is_counted = True
            try:
                copied = copy(value, *more)
            finally:
                self._is_counted = False
            found.append(copied.nbytes)
            return copied

        return counting

    def _rejecting(self, convert: Callable[..., Any], _: list[int]) -> Callable[..., Any]:
        """Return a function that rejects a framework's tensor outside of a counted copy."""
        kind = self._module.jax.Array if self._backend == "jax" else object

        def rejecting(*given: Any, **named: Any) -> Any:
            if not self._is_counted and given and isinstance(given[0], kind):
                raise StrayCopy(f"{getattr(convert, '__name__', convert)} of {type(given[0])}")
            return convert(*given, **named)

        return rejecting

    def _jax_guards(self, patches: contextlib.ExitStack) -> None:
        patches.enter_context(self._module.jax.transfer_guard("disallow"))
        for name in ("array", "asarray"):
            patches.enter_context(replaced(np, name, self._rejecting))
        array: Any = self._tensor
        fetch = vars(array)["_value"].fget
        array._value = property(self._rejecting(fetch, []))
        patches.callback(setattr, array, "_value", property(fetch))

    def _torch_guards(self, patches: contextlib.ExitStack) -> None:
        torch = self._module.torch
        for name in _TO_HOST:
            patches.enter_context(replaced(torch.Tensor, name, self._rejecting))
        for name in _TO_DEVICE:
            patches.enter_context(replaced(torch, name, self._rejecting))


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[..., Any]) -> Iterator[list[int]]:
    """Replace a function within the block by one that `make` returns; yield its list."""
    found: list[int] = []
    function = getattr(owner, name)
    setattr(owner, name, make(function, found))
    try:
        yield found
    finally:
        setattr(owner, name, function)


def exchange(name: str, kernels: Kernels, crossings: Crossings) -> Counts:
    """Encode gradients on the device; return the counts of the last step."""
    rng = np.random.default_rng(0)
    codec = build_codec(name, dict(compression_rate=RATE, **CODECS[name]), nb_workers=4)
    counts, state = Counts(), codec.init(SPEC, kernels)
    for step in range(1, WARM + 2):
        drawn = [rng.standard_normal(tensor.size, np.float32) for tensor in SPEC.tensors]
        gradient = [kernels.joined([array]) for array in drawn]
        context = EncodeContext(step, 0.1, np.random.default_rng(step), kernels, epoch=1.0)
        with crossings.counted(counts) if step > WARM else contextlib.nullcontext():
            packet, state = codec.encode(gradient, state, context)
    if name not in ("gd", "powersgd") and not list(device_arrays(state, kind_of(kernels))):
        raise RuntimeError(f"no residual of {name} is on the device")
    counts.sent = sum(block.values.data.size for block in packet.blocks)
    return counts


def kind_of(kernels: Kernels) -> type:
    """Return the class of the kernels' arrays on the device."""
    return type(kernels.zeros([1])[0])


class CoreRounds:
    """A worker core on a device, without network and model; replies are made up."""

    def __init__(self, name: str, kernels: Kernels) -> None:
        case, self._kernels = WORKERS[name], kernels
        self._reply_size = case.reply
        more = {"local_optimizer": "sgd"} if "local_steps" in case.choices else {}
        method = compose(Choices.of(method=case.method, nb_workers=2, **case.choices | more))
        layouts = method.place(SPEC, 1)
        self.core = WorkerCore(SPEC, layouts, method, kernels, [0, 1], keeps_on_device=True)
        self._rng, self._version, offsets = np.random.default_rng(0), 0, layouts[0].offsets
        nothing = CodedValues("float32", np.zeros(0, np.float32))
        self._finish([Block(0, offsets[-1], None, nothing, slots=len(offsets) - 1)])

    def gradients(self) -> list[Any]:
        """Return random gradients on the device, one for each local step of a round."""
        size = SPEC.num_parameters
        drawn = [self._rng.standard_normal(size, np.float32) for _ in range(LOCAL_STEPS)]
        return [self._kernels.joined([array]) for array in drawn]

    def round(self, gradients: list[Any]) -> int:
        """Take the local steps and exchange; return the number of pushed entries."""
        request = None
        for gradient in gradients:
            request = self.core.begin(gradient, 4, 1.0)
            if request is not None:
                break
        # With some methods the shards decide when a round ends; this method plays the shards.
        request = request or self.core.end_round()
        blocks = request.shards[0]
        self._finish(blocks)
        return sum(block.values.data.size for block in blocks)

    def _finish(self, pushed: Any) -> None:
        """Apply a made-up reply to the pushed blocks, with different entries of sparse blocks."""
        self._version += 1
        self.core.finish([made_up_reply(pushed, self._reply_size, self._version, self._rng)])


def worker_round(name: str, kernels: Kernels, crossings: Crossings) -> Counts:
    """Run rounds of a worker core whose arrays are on the device; return the last counts."""
    counts, worker = Counts(), CoreRounds(name, kernels)
    for step in range(WARM + 1):
        gradients = worker.gradients()
        with crossings.counted(counts) if step == WARM else contextlib.nullcontext():
            counts.sent = worker.round(gradients)
    if not isinstance(worker.core.weights, kind_of(kernels)):
        raise RuntimeError(f"weights of {name} are not on the device")
    return counts


def on_device(backend: str) -> tuple[str, contextlib.AbstractContextManager[Any]]:
    """Return a device's name, and a context in which it is the default, before JAX starts."""
    if backend == "torch":
        from thinwire.ops.kernels.torch_ops import default_device

        return str(default_device()), contextlib.nullcontext()
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    )
    import jax

    device = jax.devices()[-1]
    return str(device), jax.default_device(device)


def count_on(backend: str) -> int:
    """Print the counts of a backend; return 1 if more bytes are copied than are sent."""
    os.environ.setdefault("KERAS_BACKEND", backend)
    name, default = on_device(backend)
    kernels, crossings, failed = load_kernels(backend), Crossings(backend), False
    sys.stdout.write(f"{name}; without a limit, because on the host: {', '.join(ON_HOST)}\n")
    with default:
        for codec in CODECS:
            counts = exchange(codec, kernels, crossings)
            failed |= codec not in ON_HOST and exceeds(counts, 0.0, DOWN, 1)
            sys.stdout.write(line(codec, counts, has_graphs=False))
        for method, case in WORKERS.items():
            counts = worker_round(method, kernels, crossings)
            over = exceeds(counts, case.reply, case.most_down, LOCAL_STEPS)
            failed |= method not in ON_HOST and over
            sys.stdout.write(line(method, counts, has_graphs=False))
    return 1 if failed else 0
