"""Who takes part: what processes each contender is, and where they run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from bench.peers import thinwire, work
from bench.peers.lab import SERVER, Lab, worker

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
_TORCH = FOLDER / ".venv-torch" / "bin" / "python"
_MXNET = FOLDER / ".venv-mxnet" / "bin" / "python"
_FLOWER = FOLDER / ".venv-flower" / "bin" / "python"
_PROJECT = Path(sys.executable)
Sort = Literal["ours", "parameter server", "among workers", "federated"]


@dataclasses.dataclass(frozen=True)
class PeerNode:
    """One process. The run ends when the one that leads does."""

    place: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    leads: bool = False


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        sort: Whose, and how its processes work together.
        dense: It sends the whole model for each mini-batch, so that a slow link holds it up.
        python: Interpreter that must be there.
        nodes: Its processes for a piece of work at the places of a lab.
    """

    name: str
    sort: Sort
    dense: bool
    python: Path
    nodes: Callable[[work.Work, Lab], list[PeerNode]]


def _module(python: Path, name: str, task: work.Work, *options: str) -> tuple[str, ...]:
    return (str(python), "-m", f"bench.peers.{name}", *work.to_arguments(task), *options)


def _ours(*flags: str, link_mbps: float | None = None) -> Callable[..., list[PeerNode]]:
    """PS and watcher at the server, workers at theirs; `link_mbps` emulates links."""

    def nodes(task: work.Work, lab: Lab) -> list[PeerNode]:
        address, port = lab.places[SERVER].address, lab.ports[0]
        common = (
            str(_PROJECT),
            str(ROOT / "main.py"),
            f"--model={FOLDER / 'thinwire_model.py'}",
            *thinwire.training_flags(task),
            "--insecure",
            f"--ip_PS={address}",
            f"--port={port}",
            f"--run_dir={task.folder}/run",
            *([f"--link_mbps={link_mbps:g}"] if link_mbps else []),
            *flags,
        )
        watch = _module(_PROJECT, "thinwire_watch", task, f"--address={address}:{port}")
        workers = [
            PeerNode(worker(number), (*common, "--type_node=Worker", f"--id_worker={number + 1}"))
            for number in range(task.workers)
        ]
        server = PeerNode(SERVER, (*common, "--type_node=PS"))
        return [server, *workers, PeerNode(SERVER, watch, leads=True)]

    return nodes


def _tensorflow(task: work.Work, lab: Lab) -> list[PeerNode]:
    """Coordinator and ps at the server."""
    server = lab.places[SERVER].address
    addresses = [f"{lab.places[worker(n)].address}:{lab.ports[2 + n]}" for n in range(task.workers)]
    cluster = {
        "chief": [f"{server}:{lab.ports[0]}"],
        "ps": [f"{server}:{lab.ports[1]}"],
        "worker": addresses,
    }

    def node(place: str, job: str, index: int = 0) -> PeerNode:
        options = (f"--cluster={json.dumps(cluster)}", f"--job={job}", f"--index={index}")
        command = _module(_PROJECT, "tf_parameter_server", task, *options)
        return PeerNode(place, command, leads=job == "chief")

    workers = [node(worker(number), "worker", number) for number in range(task.workers)]
    return [node(SERVER, "ps"), *workers, node(SERVER, "chief")]


def _torch(hook: str) -> Callable[[work.Work, Lab], list[PeerNode]]:
    """Workers alone, the first of which leads."""

    def nodes(task: work.Work, lab: Lab) -> list[PeerNode]:
        first = lab.places[worker(0)]
        common = (f"--hook={hook}", f"--address={first.address}:{lab.ports[0]}")
        return [
            PeerNode(
                worker(rank),
                _module(
                    _TORCH,
                    "torch_ddp",
                    task,
                    *common,
                    f"--rank={rank}",
                    f"--interface={lab.places[worker(rank)].interface}",
                ),
                leads=rank == 0,
            )
            for rank in range(task.workers)
        ]

    return nodes


def _mxnet(kvstore: str) -> Callable[[work.Work, Lab], list[PeerNode]]:
    """Scheduler and server at the server."""

    def nodes(task: work.Work, lab: Lab) -> list[PeerNode]:
        common = {
            "DMLC_PS_ROOT_URI": lab.places[SERVER].address,
            "DMLC_PS_ROOT_PORT": str(lab.ports[0]),
            "DMLC_NUM_SERVER": "1",
            "DMLC_NUM_WORKER": str(task.workers),
            "OMP_NUM_THREADS": "1",
            "MXNET_CPU_WORKER_NTHREADS": "1",
        }

        def node(place: str, role: str, command: tuple[str, ...], leads: bool = False) -> PeerNode:
            where = lab.places[place]
            own = {
                "DMLC_ROLE": role,
                "DMLC_NODE_HOST": where.address,
                "DMLC_INTERFACE": where.interface,
            }
            return PeerNode(place, command, common | own, leads)

        serve = (str(_MXNET), "-c", "import mxnet")
        workers = []
        for rank in range(task.workers):
            options = (f"--kvstore={kvstore}", f"--rank={rank}")
            command = _module(_MXNET, "mxnet_kvstore", task, *options)
            workers.append(node(worker(rank), "worker", command, rank == 0))
        return [node(SERVER, "scheduler", serve), node(SERVER, "server", serve), *workers]

    return nodes


def _flower(local_steps: int) -> Callable[[work.Work, Lab], list[PeerNode]]:
    """Server and clients."""

    def nodes(task: work.Work, lab: Lab) -> list[PeerNode]:
        options = (
            f"--address={lab.places[SERVER].address}:{lab.ports[0]}",
            f"--local_steps={local_steps}",
        )
        clients = [
            PeerNode(
                worker(rank), _module(_FLOWER, "flower_fedavg", task, *options, f"--rank={rank}")
            )
            for rank in range(task.workers)
        ]
        server = PeerNode(SERVER, _module(_FLOWER, "flower_fedavg", task, *options), leads=True)
        return [server, *clients]

    return nodes


# Methods that send changes of weights or drop entries have a momentum of their own, or none; with
# one on the server their replies would be dense.
_PLAIN = "--momentum=0"
_BFLOAT16 = ("--value_dtype=bfloat16", "--down_codec=sparse", "--down_value_dtype=bfloat16")
_LOCAL_STEPS, _FEW_LOCAL_STEPS = 50, 10
_EPOCH_STEPS = 469  # mini-batches of 64 in half of 60,000 examples


def _local_steps(count: int) -> tuple[str, ...]:
    pacing = ("--pacer=fixed", f"--local_steps={count}", "--local_optimizer=momentum")
    return ("--method=bsp", *pacing, _PLAIN)


#: Name -> our flags, and whether the method is dense.
OURS: Mapping[str, tuple[tuple[str, ...], bool]] = {
    "thinwire asgd": (("--method=asgd",), True),
    "thinwire bsp": (("--method=bsp",), True),
    "thinwire adacomp": (("--method=adacomp", _PLAIN), False),
    "thinwire dgs": (("--method=dgs", _PLAIN), False),
    "thinwire dgs, bfloat16": (("--method=dgs", _PLAIN, *_BFLOAT16), False),
    "thinwire gd": (("--method=gd", _PLAIN), False),
    "thinwire dgc": (("--method=dgc", _PLAIN), False),
    f"thinwire bsp, {_LOCAL_STEPS} local steps": (_local_steps(_LOCAL_STEPS), False),
    f"thinwire bsp, {_FEW_LOCAL_STEPS} local steps": (_local_steps(_FEW_LOCAL_STEPS), False),
    "thinwire asgd, overlap": (("--method=asgd", "--overlap"), True),
    "thinwire bsp, overlap": (("--method=bsp", "--overlap"), True),
    "thinwire dgs, overlap": (("--method=dgs", "--overlap", _PLAIN), False),
}


def _listed() -> Sequence[Contender]:
    ours = {
        name: Contender(name, "ours", dense, _PROJECT, _ours(*flags))
        for name, (flags, dense) in OURS.items()
    }
    peers = [
        Contender("TF ParameterServerStrategy", "parameter server", True, _PROJECT, _tensorflow),
        Contender("MXNet dist_sync", "parameter server", True, _MXNET, _mxnet("dist_sync")),
        Contender("MXNet dist_async", "parameter server", True, _MXNET, _mxnet("dist_async")),
        Contender("torch DDP", "among workers", True, _TORCH, _torch("none")),
        Contender("torch DDP, fp16", "among workers", True, _TORCH, _torch("fp16")),
        Contender("torch DDP, PowerSGD", "among workers", False, _TORCH, _torch("powersgd")),
        Contender(
            f"Flower, {_LOCAL_STEPS} local steps",
            "federated",
            False,
            _FLOWER,
            _flower(_LOCAL_STEPS),
        ),
        Contender("Flower, one local epoch", "federated", False, _FLOWER, _flower(_EPOCH_STEPS)),
    ]
    # In turn, so that a disturbance of the machine hits ours and peers alike.
    mixed: list[Contender] = []
    for pair in itertools.zip_longest(ours.values(), peers):
        mixed += [each for each in pair if each is not None]
    return mixed


CONTENDERS: Mapping[str, Contender] = {each.name: each for each in _listed()}


def over_emulated_link(name: str, mbps: float) -> Contender:
    """Return one of ours that keeps to a rate by itself, where there is no root.

    Raises:
        KeyError: It is none of ours.
    """
    flags, dense = OURS[name]
    return Contender(name, "ours", dense, _PROJECT, _ours(*flags, link_mbps=mbps))


def environment_of(node: PeerNode) -> dict[str, str]:
    """Return what a node's process finds in its environment."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "GRPC_VERBOSITY": "ERROR"}
    # Each start would compile a peer's modules anew where they may not be kept.
    left_out = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    return inherited | quiet | {"PYTHONUNBUFFERED": "1"} | dict(node.environment)
