"""``thinwire run --dry_run``: lists the nodes, the method and the traffic of a run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence

from thinwire.launcher import program
from thinwire.launcher.role import Node
from thinwire.ops.codecs.dense import Sparsifier
from thinwire.ops.codecs.error_feedback import coding_of
from thinwire.ops.downlink.exact import DownDense
from thinwire.ops.downlink.sizes import reply_bytes
from thinwire.ops.methods.method import INTERFACES
from thinwire.ops.types import VALUE_BITS, Kind
from thinwire.runtime.run.directory import summary_of
from thinwire.runtime.run.settings import Run

_TRAVELS = {
    Kind.GRADIENT: "gradients, which the script's compiled optimizer steps with on the PS",
    Kind.DELTA: "changes of weights, after steps of the script's compiled optimizer on the workers",
}


def describe_run(run: Run, nodes: Sequence[Node], hosts: Sequence[str]) -> Iterator[str]:
    """Yield the lines that describe a run: its method, traffic, run directory and nodes.

    Args:
        run: Settings of the training run, from the flags.
        nodes: Nodes (PS shards, workers, Supervisor) that the run would start.
        hosts: Name of each node's host, in the order of `nodes`; empty if all nodes run on this
            host.
    """
    method = run.method
    yield f"method: {method.name} ({_policies(run)})"
    yield f"sent: {_TRAVELS[method.kind]}"
    yield from _traffic(run)
    yield f"run directory: {run.run_dir}"
    places = list(hosts) or [""] * len(nodes)
    for node, host in zip(nodes, places, strict=True):
        words = [sys.executable, *node.words(program.HERE, ())]
        yield f"{node.name}{f' on {host}' if host else ''}: {shlex.join(words)}"


def _policies(run: Run) -> str:
    pairs = [f"{name} {run.method.choices[name]}" for name in INTERFACES]
    if run.method.kind is Kind.DELTA:
        pairs.append("local_optimizer script")
    if run.method.overlap:
        pairs.append("overlap")
    return ", ".join(pairs)


def _traffic(run: Run) -> Iterator[str]:
    """Yield lines of text: bytes that a worker sends and receives per exchange, without framing."""
    size = _last_size(run)
    codec = coding_of(run.method.codec)
    value_dtype = codec.value_dtype
    up = f"{run.method.choices['codec']}, {value_dtype}"
    bits = VALUE_BITS[value_dtype]
    width = f"{bits // 8} bytes" if bits >= 8 else f"{bits} bit{'s' * (bits > 1)}"
    if not isinstance(codec, Sparsifier):
        formula, num_bytes = f"at most {width} x N", bits * (size or 0) // 8
    else:
        rate = codec.kept_fraction
        formula = f"the {rate:.3g} N largest entries, {width} and a position each"
        num_bytes = int(reply_bytes(round(rate * (size or 0)), size or 1, value_dtype))
    yield f"up, per exchange and worker: {formula} ({up}){_figure(size, num_bytes)}"
    if isinstance(run.method.down_codec, DownDense):
        yield f"down: 4 bytes x N (dense){_figure(size, 4 * (size or 0))}"
    else:
        down = run.method.choices["down_codec"]
        yield f"down: the entries that have changed, at most 4 bytes x N ({down})"
    if size is None:
        yield "N: the model's trainable parameters, known once a worker has built it"


def _figure(size: int | None, num_bytes: int) -> str:
    return f": {num_bytes:,} bytes with N = {size:,}, as last time" if size else ""


def _last_size(run: Run) -> int | None:
    """Return the number of parameters of the run directory's last model; None without a model."""
    size = summary_of(run.run_dir).get("num_parameters")
    return size if isinstance(size, int) and size else None
