"""Watch a run of Thinwire that trains a torch module, from its server; see `thinwire_watch`."""

from __future__ import annotations

import os

from bench.peers import torch_model, work
from bench.peers.thinwire_watch import watch
from thinwire.ops.types import ModelSpec, TensorSpec


def main() -> None:
    options = work.parser(__doc__)
    options.add_argument("--address", required=True, help="host:port of the shard")
    arguments = options.parse_args()
    task = work.from_arguments(arguments)
    layout = torch_model.TorchLayout(task)
    spec = ModelSpec(tuple(TensorSpec(name, shape) for name, shape in layout.named))
    # the shard counts each mini-batch of a torch loop as one sample
    watch(task, arguments.address, spec, layout.to_keras, 1)
    os._exit(0)  # the stream's reader would wait for the shard


if __name__ == "__main__":
    main()
