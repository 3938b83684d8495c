"""Fuzz targets: offers of models to a shard without a model, from any client."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
from typing import Any

import keras
import numpy as np

from tests.fuzz.target import FOLDER, Reader, Target, joined
from tests.ps.streams import Stream
from tests.threads.offered import OFFER, OfferedRun
from thinwire.ops.offer import Described, LossScale, OptimizerOffer
from thinwire.ops.optimizers.base import Moment
from thinwire.ops.optimizers.script import ScriptUpdate
from thinwire.ops.types import ConfigurationError
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import frame
from thinwire.ps.flags import PsFlags
from thinwire.ps.scripts.initial_model import InitialModel, model_of_offer, offered_bytes
from thinwire.ps.scripts.offering import OfferStage
from thinwire.runtime.run.settings import Run

#: Limits of the fuzzed shard.
MOST_BYTES = 1 << 20
_FLAGS = (
    (f"--max_model_bytes={MOST_BYTES}", "--method=bsp"),
    (f"--max_model_bytes={MOST_BYTES}", "--method=dgs"),
    (f"--max_model_bytes={MOST_BYTES}", "--method=bsp", "--nb_ps=2", "--placement=speed"),
)
#: Packages that a shard may import for the names of an offer. A shard imports Keras only for an
#: optimizer of the allow-list with steps before the run, because the offer holds its slots.
_ALLOWED = frozenset({"keras", "tensorflow", "thinwire"})


@functools.cache
def _settings(number: int) -> tuple[Run, PsFlags, pb.Hello]:
    """Return a shard's settings, and the Hello of a worker of its run."""
    flags = _FLAGS[number]
    nb_ps = 2 if "--nb_ps=2" in flags else 1
    ports = tuple(range(2223, 2223 + nb_ps))
    offered = OfferedRun(FOLDER.path, *flags, ports=ports)
    run, own, _ = offered.settings("--type_node=PS")
    return run, own, offered.worker(1, _of(number)).exchange.shards[0].hello


def _of(number: int) -> Any:
    """Return an honest offer to a shard of these settings."""
    return OFFER if "--method=dgs" not in _FLAGS[number] else _WITHOUT_OPTIMIZER


_WITHOUT_OPTIMIZER = type(OFFER)(OFFER.spec, script_optimizer="Adam")


class _Stream(Stream):
    """A stream with complete frames that the offering stage may store."""

    def __init__(self, sent: list[bytes]) -> None:
        super().__init__(None, sent)

    def incoming(self) -> Any:
        yield from self.frames

    @property
    def reasons(self) -> list[int]:
        return [message.refusal.reason for message, _ in self.received]


def offer_to(number: int, document: bytes, announced: int | None, pieces: list[bytes]) -> _Stream:
    """Offer a document and payload to a shard, and check the invariants.

    Args:
        number: Number of the shard's settings.
        document: The offer's document, UTF-8 or not.
        announced: Length of the payload; None: of the pieces.
        pieces: Pieces of the offer's payload.
    """
    run, own, hello = _settings(number)
    stage = OfferStage(run, own)
    offer = pb.ToServer(offer=pb.Offer(document=document.decode(errors="replace")))
    size = sum(map(len, pieces)) if announced is None else announced
    offer.offer.payload_bytes = size % (1 << 32)
    sent = [frame(pb.ToServer(hello=hello)), offer.SerializeToString()]
    sent += [frame(pb.ToServer(chunk=pb.Chunk(data=piece))) for piece in pieces]
    before = set(sys.modules)
    stream = _Stream(sent)
    stage.read(stream)
    assert stream.reasons[0] == pb.REASON_NO_MODEL
    received = None if stage._came.empty() else stage._came.get_nowait()
    if received is None:
        assert set(stream.reasons[1:]) <= {pb.REASON_OFFER, pb.REASON_MALFORMED}
    else:
        assert len(received.payload) == size <= MOST_BYTES
        try:
            model = model_of_offer(run, own.id_ps, received.offer, received.payload)
            assert 4 * len(model.weights) <= MOST_BYTES
            _check_rates(model)
        except ConfigurationError as error:
            stage.refuse(received, str(error))
    imported = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert imported <= _ALLOWED, imported
    return stream


def _check_rates(model: InitialModel) -> None:
    """Check that the optimizers of an offer that was taken have rates that a status can hold."""
    server = model.method.server
    updates = getattr(server, "updates", (server,))
    for update in (each for each in updates if isinstance(each, ScriptUpdate)):
        state = update.init(np.empty(0, np.float32))  # a shard without variables of the model
        assert all(
            math.isfinite(update.rate(Moment(0.0, batches=batches), state).value)
            for batches in (0, 1)
        )


def offer(data: bytes) -> None:
    """Offer a document and a payload in pieces."""
    source = Reader(data)
    number, kind = source.number() % len(_FLAGS), source.number()
    announced = None if kind < 128 else source.interesting()
    document = source.piece()
    pieces = [piece for piece in source.pieces() if piece]
    offer_to(number, document, announced, pieces)


def _seeds() -> list[bytes]:
    assert keras.optimizers  # imported before any offer is read
    clipped = Described("AdamW", {"learning_rate": 0.1, "clipnorm": 1.0, "use_ema": True})
    cosine = {"name": "CosineDecay", "config": {"initial_learning_rate": 0.1, "decay_steps": 5}}
    restarts = {"initial_learning_rate": 0.1, "first_decay_steps": 1e-9, "t_mul": -1.0}
    nan = {"name": "CosineDecayRestarts", "config": restarts}
    paths = tuple(tensor.path for tensor in OFFER.spec.tensors)
    replace = functools.partial(type(OFFER), OFFER.spec)
    offers = [
        OFFER,
        _WITHOUT_OPTIMIZER,
        replace(optimizers=(OptimizerOffer(clipped, ("dense/bias",)),), num_examples=100),
        replace(optimizers=(OptimizerOffer(clipped, iterations=7, has_slots=True),)),
        replace(optimizers=(OptimizerOffer(Described("SGD", {"learning_rate": nan})),)),
        replace(
            optimizers=(
                OptimizerOffer(clipped, paths=paths[:1]),
                OptimizerOffer(clipped, iterations=7, paths=paths[1:], has_slots=True),
            )
        ),
        replace(
            optimizers=(OptimizerOffer(Described("SGD", {"learning_rate": cosine})),),
            constraints={"dense/kernel": Described("NonNeg", {})},
            unused=("out/kernel",),
            loss_scale=LossScale(32768.0, 2000),
            statistics=2,
        ),
    ]
    found = []
    for number in range(len(_FLAGS)):
        run, own, _ = _settings(number)
        for each in offers:
            size = 0
            with contextlib.suppress(ConfigurationError):
                size = offered_bytes(run, own.id_ps, each)
            found.append(bytes([number, 0]) + joined([each.to_json().encode(), bytes(size)]))
    return [*found, bytes([0, 0]) + joined([b"[" * 2000]), bytes([0, 200, 1]) + joined([b"{}"])]


def honest(number: int) -> _Stream:
    """Offer a valid model to a shard."""
    run, own, _ = _settings(number)
    given = _of(number)
    payload = bytes(offered_bytes(run, own.id_ps, given))
    return offer_to(number, given.to_json().encode(), None, [payload])


def rows() -> dict[str, Any]:
    """Return the honest document as JSON values."""
    document: dict[str, Any] = json.loads(OFFER.to_json())
    return document


TARGETS = {"offer": Target("offers to a PS without model", offer, _seeds, longest=8192)}
