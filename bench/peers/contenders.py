"""The contenders of the comparison: the processes of each system, and the places they run in."""

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
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
#: Folder of the peers' virtual environments, which setup.sh creates.
ENVIRONMENTS = Path(os.environ.get("THINWIRE_PEERS") or _CACHE / "thinwire" / "peers")
_TORCH, _MXNET, _FLOWER, _HIVEMIND = (
    ENVIRONMENTS / name / "bin" / "python" for name in ("torch", "mxnet", "flower", "hivemind")
)
_PROJECT = Path(sys.executable)
Sort = Literal["ours", "parameter server", "among workers", "federated"]


@dataclasses.dataclass(frozen=True)
class PeerNode:
    """One process of a contender. A run ends when the node with `leads` ends."""

    place: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    leads: bool = False


@dataclasses.dataclass(frozen=True)
class Contender:
    """One system and configuration that trains a model.

    Attributes:
        name: Name in the tables.
        sort: Kind of the system: Thinwire ("ours"), or how a peer's processes cooperate.
        dense: True if it sends the whole model for each mini-batch, so that a slow link limits it.
        python: Interpreter that must exist.
        nodes: Function that returns the processes for a work in a lab.
        model: Name of the model that it trains.
        round_steps: Local steps between two exchanges; 0 if it exchanges at every step.
    """

    name: str
    sort: Sort
    dense: bool
    python: Path
    nodes: Callable[[work.Work, Lab], list[PeerNode]]
    model: str = work.MNIST_CNN
    round_steps: int = 0


def _module(python: Path, name: str, task: work.Work, *options: str) -> tuple[str, ...]:
    return (str(python), "-m", f"bench.peers.{name}", *work.to_arguments(task), *options)


_MODEL_FILES = {
    work.MNIST_CNN: "thinwire_model.py",
    work.DECODER: "thinwire_decoder.py",
    work.WIDE: "thinwire_wide.py",
}


def _meeting(task: work.Work, lab: Lab, link_mbps: float | None) -> tuple[str, ...]:
    """Return the flags by which the nodes of a run of Thinwire find each other.

    `link_mbps` is the rate of emulated links; None means that no links are emulated.
    """
    return (
        "--insecure",
        f"--ip_PS={lab.places[SERVER].address}",
        f"--port={lab.ports[0]}",
        f"--run_dir={task.folder}/run",
        *([f"--link_mbps={link_mbps:g}"] if link_mbps else []),
    )


def _ours(*flags: str, link_mbps: float | None = None) -> Callable[..., list[PeerNode]]:
    """Return Thinwire's nodes: PS and watcher at the server, one worker at each worker's place.

    `link_mbps` is the rate of emulated links; None means that no links are emulated.
    """

    def nodes(task: work.Work, lab: Lab) -> list[PeerNode]:
        address, port = lab.places[SERVER].address, lab.ports[0]
        common = (
            str(_PROJECT),
            str(ROOT / "main.py"),
            f"--model={FOLDER / _MODEL_FILES[task.model]}",
            *thinwire.training_flags(task),
            *_meeting(task, lab, link_mbps),
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


def _ours_in_torch(
    *flags: str, momentum: float | None = None, link_mbps: float | None = None
) -> Callable[..., list[PeerNode]]:
    """Return Thinwire's nodes that train a torch module, in the places of `_ours`.

    `momentum` is the momentum of the script's SGD; None means the work's. `link_mbps` is the rate
    of emulated links; None means that no links are emulated.
    """

    def nodes(task: work.Work, lab: Lab) -> list[PeerNode]:
        address, port = lab.places[SERVER].address, lab.ports[0]
        own = task if momentum is None else dataclasses.replace(task, momentum=momentum)
        common = (
            *thinwire.script_flags(task),
            *_meeting(task, lab, link_mbps),
            *flags,
        )
        workers = [
            PeerNode(
                worker(rank),
                _module(
                    *(_TORCH, "thinwire_torch", own, f"--rank={rank}"),
                    *(*common, f"--id_worker={rank + 1}"),
                ),
            )
            for rank in range(task.workers)
        ]
        server = PeerNode(SERVER, (str(_TORCH), str(ROOT / "main.py"), *common, "--type_node=PS"))
        watch = _module(_TORCH, "thinwire_torch_watch", task, f"--address={address}:{port}")
        return [server, *workers, PeerNode(SERVER, watch, leads=True)]

    return nodes


def _tensorflow(task: work.Work, lab: Lab) -> list[PeerNode]:
    """Return TensorFlow's nodes: coordinator and ps run at the server's place."""
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
    """Return torch's nodes: workers without a server; the first worker leads."""

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
    """Return MXNet's nodes: scheduler and server run at the server's place."""

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
            variables = {
                "DMLC_ROLE": role,
                "DMLC_NODE_HOST": where.address,
                "DMLC_INTERFACE": where.interface,
            }
            return PeerNode(place, command, common | variables, leads)

        serve = (str(_MXNET), "-c", "import mxnet")
        workers = []
        for rank in range(task.workers):
            options = (f"--kvstore={kvstore}", f"--rank={rank}")
            command = _module(_MXNET, "mxnet_kvstore", task, *options)
            workers.append(node(worker(rank), "worker", command, rank == 0))
        return [node(SERVER, "scheduler", serve), node(SERVER, "server", serve), *workers]

    return nodes


def _flower(local_steps: int) -> Callable[[work.Work, Lab], list[PeerNode]]:
    """Return Flower's nodes: a server and clients. The first client leads: it counts its steps."""

    def nodes(task: work.Work, lab: Lab) -> list[PeerNode]:
        options = (
            f"--address={lab.places[SERVER].address}:{lab.ports[0]}",
            f"--local_steps={local_steps}",
        )
        clients = [
            PeerNode(
                worker(rank),
                _module(_FLOWER, "flower_fedavg", task, *options, f"--rank={rank}"),
                leads=rank == 0,
            )
            for rank in range(task.workers)
        ]
        server = PeerNode(SERVER, _module(_FLOWER, "flower_fedavg", task, *options))
        return [server, *clients]

    return nodes


def _torchft(method: str) -> Callable[[work.Work, Lab], list[PeerNode]]:
    """Return torchft's nodes: a lighthouse at the server, and workers; the first worker leads."""

    def nodes(task: work.Work, lab: Lab) -> list[PeerNode]:
        meeting = f"--lighthouse={lab.places[SERVER].address}:{lab.ports[0]}"

        def node(rank: int) -> PeerNode:
            place = lab.places[worker(rank)]
            options = (
                meeting,
                f"--method={method}",
                f"--local_steps={_LOCAL_STEPS}",
                f"--rank={rank}",
                f"--address={place.address}",
                f"--interface={place.interface}",
            )
            command = _module(_TORCH, "torchft_local", task, *options)
            return PeerNode(worker(rank), command, leads=rank == 0)

        lighthouse = PeerNode(SERVER, _module(_TORCH, "torchft_local", task, meeting))
        return [lighthouse, *map(node, range(task.workers))]

    return nodes


def _hivemind(task: work.Work, lab: Lab) -> list[PeerNode]:
    """Return hivemind's nodes: the DHT's first node, and workers; the first worker leads."""

    def node(place: str, port: int, *options: str, leads: bool = False) -> PeerNode:
        address = f"--address={lab.places[place].address}:{port}"
        command = _module(_HIVEMIND, "hivemind_local", task, address, *options)
        return PeerNode(place, command, leads=leads)

    steps = f"--local_steps={_LOCAL_STEPS}"
    workers = [
        node(worker(rank), lab.ports[2 + rank], steps, f"--rank={rank}", leads=rank == 0)
        for rank in range(task.workers)
    ]
    return [node(SERVER, lab.ports[0]), *workers]


# Methods that send weight changes or drop entries use their own momentum, or none. Momentum on the
# server would make their replies dense.
_PLAIN = "--momentum=0"
_BFLOAT16 = ("--value_dtype=bfloat16", "--down_codec=sparse", "--down_value_dtype=bfloat16")
_LOCAL_STEPS, _FEW_LOCAL_STEPS = 50, 10
_DECAY = (
    "--local_weight_decay=0.004"  # Keras' default, which all contenders use; the paper uses 0.1
)
_FOUR_BITS = ("--value_dtype=int4", "--error_feedback", "--down_codec=relay")
_FEW_ROUND_STEPS = 30  # sparseloco's default
_EPOCH_STEPS = 469  # mini-batches of 64 in half of 60,000 examples


def _local_steps(count: int) -> tuple[str, ...]:
    pacing = ("--pacer=fixed", f"--local_steps={count}", "--local_optimizer=momentum")
    return ("--method=bsp", *pacing, _PLAIN)


@dataclasses.dataclass(frozen=True)
class OwnWay:
    """A configuration of Thinwire: its flags, and further attributes as in `Contender`."""

    flags: tuple[str, ...]
    dense: bool = False
    model: str = work.MNIST_CNN
    round_steps: int = 0

    def contender(self, name: str, link_mbps: float | None = None) -> Contender:
        """Return the contender. `link_mbps` is the rate of emulated links; None: no emulation."""
        nodes = _ours(*self.flags, link_mbps=link_mbps)
        return Contender(name, "ours", self.dense, _PROJECT, nodes, self.model, self.round_steps)

    def shared_flags(self, task: work.Work) -> list[str]:
        """Return the flags of all nodes, without those by which the nodes find each other."""
        return [*thinwire.training_flags(task), *self.flags]


@dataclasses.dataclass(frozen=True)
class OwnTorchWay(OwnWay):
    """A configuration of Thinwire that trains the torch peers' module by their loop.

    Attributes:
        momentum: Momentum of the script's SGD; None for the work's.
    """

    momentum: float | None = None

    def contender(self, name: str, link_mbps: float | None = None) -> Contender:
        """Return the contender. `link_mbps` is the rate of emulated links; None: no emulation."""
        nodes = _ours_in_torch(*self.flags, momentum=self.momentum, link_mbps=link_mbps)
        return Contender(name, "ours", self.dense, _TORCH, nodes, self.model, self.round_steps)

    def shared_flags(self, task: work.Work) -> list[str]:
        """Return the flags of all nodes, without those by which the nodes find each other."""
        return [*thinwire.script_flags(task), *self.flags]


def _averaged(count: int, optimizer: str) -> tuple[str, ...]:
    local = (f"--local_steps={count}", f"--local_optimizer={optimizer}")
    return ("--method=fedavg", *local, *_FOUR_BITS)


def _rounds(count: int) -> OwnWay:
    return OwnWay(_local_steps(count), round_steps=count)


OURS: dict[str, OwnWay] = {
    "thinwire asgd": OwnWay(("--method=asgd",), True),
    "thinwire bsp": OwnWay(("--method=bsp",), True),
    "thinwire adacomp": OwnWay(("--method=adacomp", _PLAIN)),
    "thinwire dgs": OwnWay(("--method=dgs", _PLAIN)),
    "thinwire dgs, bfloat16": OwnWay(("--method=dgs", _PLAIN, *_BFLOAT16)),
    "thinwire gd": OwnWay(("--method=gd", _PLAIN)),
    "thinwire dgc": OwnWay(("--method=dgc", _PLAIN)),
    f"thinwire bsp, {_LOCAL_STEPS} local steps": _rounds(_LOCAL_STEPS),
    f"thinwire bsp, {_FEW_LOCAL_STEPS} local steps": _rounds(_FEW_LOCAL_STEPS),
    f"thinwire fedavg, 4 bits, {_FEW_LOCAL_STEPS} local steps": OwnWay(
        (*_averaged(_FEW_LOCAL_STEPS, "momentum"), _PLAIN), round_steps=_FEW_LOCAL_STEPS
    ),
    "thinwire asgd, overlap": OwnWay(("--method=asgd", "--overlap"), True),
    "thinwire bsp, overlap": OwnWay(("--method=bsp", "--overlap"), True),
    "thinwire dgs, overlap": OwnWay(("--method=dgs", "--overlap", _PLAIN)),
    "thinwire diloco": OwnWay(
        ("--method=diloco", f"--local_steps={_LOCAL_STEPS}", _DECAY),
        model=work.DECODER,
        round_steps=_LOCAL_STEPS,
    ),
    "thinwire fedavg, 4 bits": OwnWay(
        _averaged(_LOCAL_STEPS, "adamw"),
        model=work.DECODER,
        round_steps=_LOCAL_STEPS,
    ),
    "thinwire sparseloco": OwnWay(
        ("--method=sparseloco",), model=work.DECODER, round_steps=_FEW_ROUND_STEPS
    ),
}

_WITHOUT_OVERLAP = "--nooverlap"  # a script with dgs overlaps by default
_DGS_MOMENTUM = 0.7  # the method's default, which a script's SGD replaces
OURS |= {
    "thinwire torch asgd": OwnTorchWay(("--method=asgd",), True),
    "thinwire torch bsp": OwnTorchWay(("--method=bsp",), True),
    "thinwire torch dgs": OwnTorchWay(("--method=dgs", _WITHOUT_OVERLAP), momentum=_DGS_MOMENTUM),
    "thinwire torch dgs, overlap": OwnTorchWay(
        ("--method=dgs", "--overlap"), momentum=_DGS_MOMENTUM
    ),
    "thinwire torch bsp, decoder": OwnTorchWay(("--method=bsp",), True, work.DECODER),
    "thinwire torch dgs, decoder": OwnTorchWay(
        ("--method=dgs", _WITHOUT_OVERLAP), model=work.DECODER
    ),
    "thinwire torch diloco": OwnTorchWay(
        ("--method=diloco", f"--local_steps={_LOCAL_STEPS}"),
        model=work.DECODER,
        round_steps=_LOCAL_STEPS,
    ),
    "thinwire torch sparseloco": OwnTorchWay(
        ("--method=sparseloco",), model=work.DECODER, round_steps=_FEW_ROUND_STEPS
    ),
}


def _wide(name: str, known: Mapping[str, Contender]) -> Contender:
    """Return a copy of a known contender that trains the wide perceptron."""
    return dataclasses.replace(known[name], name=f"{name}, wide", model=work.WIDE)


_WIDE_OURS = (
    "thinwire dgs",
    "thinwire dgs, bfloat16",
    "thinwire dgs, overlap",
    f"thinwire bsp, {_LOCAL_STEPS} local steps",
    "thinwire bsp, overlap",
)
_WIDE_PEERS = (
    "MXNet dist_sync",
    "torch DDP",
    "torch DDP, PowerSGD",
    "torchft LocalSGD",
    f"Flower, {_LOCAL_STEPS} local steps",
)
for _name in _WIDE_OURS:
    OURS[f"{_name}, wide"] = dataclasses.replace(OURS[_name], model=work.WIDE)
OURS["thinwire dgs, bfloat16, 0.3 %, wide"] = OwnWay(
    ("--method=dgs", _PLAIN, *_BFLOAT16, "--compression_rate=0.003"), model=work.WIDE
)
OURS["thinwire fedavg, 4 bits, wide"] = OwnWay(
    (*_averaged(_LOCAL_STEPS, "momentum"), _PLAIN),
    model=work.WIDE,
    round_steps=_LOCAL_STEPS,
)


def _torch_peers() -> Sequence[Contender]:
    """Return the peers that train the decoder."""
    decoder, steps = (work.DECODER, _LOCAL_STEPS), _LOCAL_STEPS
    return [
        Contender("torchft DiLoCo", "among workers", False, _TORCH, _torchft("diloco"), *decoder),
        Contender(
            "torchft LocalSGD", "among workers", False, _TORCH, _torchft("localsgd"), *decoder
        ),
        Contender(
            "hivemind, local updates", "among workers", False, _HIVEMIND, _hivemind, *decoder
        ),
        Contender("Flower FedAvg, AdamW", "federated", False, _FLOWER, _flower(steps), *decoder),
    ]


def _listed() -> Sequence[Contender]:
    ours = {name: way.contender(name) for name, way in OURS.items()}
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
            round_steps=_LOCAL_STEPS,
        ),
        Contender(
            "Flower, one local epoch",
            "federated",
            False,
            _FLOWER,
            _flower(_EPOCH_STEPS),
            round_steps=_EPOCH_STEPS,
        ),
        *_torch_peers(),
    ]
    named = {contender.name: contender for contender in peers}
    peers += [_wide(name, named) for name in _WIDE_PEERS]
    dense = named["torch DDP"]
    peers.append(dataclasses.replace(dense, name=f"{dense.name}, decoder", model=work.DECODER))
    # Alternate Thinwire and peers, so that a disturbance of the machine affects both equally.
    mixed: list[Contender] = []
    for pair in itertools.zip_longest(ours.values(), peers):
        mixed += [contender for contender in pair if contender is not None]
    return mixed


CONTENDERS: Mapping[str, Contender] = {contender.name: contender for contender in _listed()}


def over_emulated_link(name: str, mbps: float) -> Contender:
    """Return a Thinwire contender that emulates links of `mbps`, for runs without root.

    Raises:
        KeyError: The name is not a key of `OURS`.
    """
    return OURS[name].contender(name, mbps)


def environment_of(node: PeerNode) -> dict[str, str]:
    """Return the environment variables of a node's process."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "GRPC_VERBOSITY": "ERROR"}
    # With PYTHONDONTWRITEBYTECODE, every start would compile a peer's modules again.
    left_out = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    return inherited | quiet | {"PYTHONUNBUFFERED": "1"} | dict(node.environment)
