"""A shard without a model accepts the first worker's offer and rejects invalid offers."""

import concurrent.futures
import dataclasses
import json
import threading
import time
import types

import numpy as np
import pytest

from tests.certificates import TOKEN
from tests.threads.offered import OFFER, SGD, offered_run, weights_of
from tests.worker_steps import exchange
from thinwire.ops.offer import Described
from thinwire.ops.optimizers import rates
from thinwire.ops.types import ConfigurationError
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import frame
from thinwire.proto.grpc import ClientStream, StreamLost
from thinwire.proto.grpc.session import RequestRejected
from thinwire.proto.security.connection_guard import ConnectionGuard
from thinwire.proto.security.credentials import PeerEvidence
from thinwire.ps import role
from thinwire.ps.scripts.initial_model import offered_bytes
from thinwire.ps.scripts.offering import NobodyAdmitted, OfferStage
from thinwire.ps.service.dialogues.offer import ReceivedOffer
from thinwire.ps.service.stream_state import ClientStreamState
from thinwire.runtime.run.credentials import NO_CREDENTIALS, Credentials
from thinwire.runtime.run.settings import EXIT_DIVERGED
from thinwire.tools import observer


def begin(*workers):
    """Return the weights that all begin with; a run starts when all have joined."""
    with concurrent.futures.ThreadPoolExecutor() as threads:
        return [weights.copy() for weights in threads.map(lambda each: each.begin(), workers)]


def join_all(*workers):
    with concurrent.futures.ThreadPoolExecutor() as threads:
        list(threads.map(lambda each: each.join(), workers))


def leave_all(*workers):
    for worker in workers:
        worker.leave("done")


def test_the_first_worker_s_weights_are_everybody_s(tmp_path):
    with offered_run(tmp_path) as run:
        run.listen()
        workers = [run.worker(1), run.worker(2)]
        for worker in workers:
            worker.join()
        for weights in begin(*workers):
            np.testing.assert_array_equal(weights, weights_of(1))
        leave_all(*workers)


@pytest.mark.parametrize("nb_ps", [1, 2])
def test_workers_that_come_together_get_the_same_weights(tmp_path, nb_ps):
    with offered_run(tmp_path, nb_ps=nb_ps) as run:
        for shard in range(nb_ps):
            run.listen(shard)
        workers = [run.worker(1), run.worker(2)]
        join_all(*workers)
        one, two = begin(*workers)
        np.testing.assert_array_equal(one, two)
        assert any(np.array_equal(one, weights_of(number)) for number in (1, 2))
        leave_all(*workers)
        digests = {shard.served.offer.weights_digest for shard in run.shards.values()}
        assert len(run.shards) == nb_ps and len(digests) == 1


def test_moving_statistics_come_with_the_weights_and_only_to_shard_0(tmp_path):
    offer = dataclasses.replace(OFFER, statistics=5)
    with offered_run(tmp_path, "--nb_workers=1", nb_ps=2) as run:
        run.listen(0)
        run.listen(1)
        worker = run.worker(1, offer)
        worker.join()
        begin(worker)
        np.testing.assert_array_equal(worker.core.statistics, np.ones(5, np.float32))
        worker.leave("done")


def test_a_shard_takes_no_weights_of_another_worker_than_shard_0(tmp_path):
    """Worker 2 comes to shard 1 first: it must wait there for worker 1."""
    with offered_run(tmp_path, nb_ps=2) as run:
        run.listen(0)
        run.listen(1)
        first, second = run.worker(1), run.worker(2)
        leader, other = first.exchange.shards
        welcome = leader.connect()
        other.hello.run_id, other.hello.incarnation = welcome.run_id, welcome.incarnation
        waits = threading.Thread(target=second.join, daemon=True)
        waits.start()
        waits.join(0.5)
        assert waits.is_alive() and 1 not in run.shards
        other.connect()
        waits.join(20)
        assert not waits.is_alive()
        for weights in begin(first, second):
            np.testing.assert_array_equal(weights, weights_of(1))
        leave_all(first, second)


# -- invalid offers ----------------------------------------------------------------------------


def with_rows(**rows):
    return lambda document, payload: (json.dumps(json.loads(document) | rows), payload)


NAN = b"\0\0\xc0\x7f"
LIES = {
    "no_document": (lambda document, payload: ("", payload), "cannot be read"),
    "deep": (lambda document, payload: ("[" * 10_000, payload), "RecursionError"),
    "short": (lambda document, payload: (document, payload[4:]), "expected"),
    "long": (lambda document, payload: (document, payload + payload), "expected"),
    "nothing": (lambda document, payload: (document, b""), "announces 0 bytes"),
    "nan": (lambda document, payload: (document, NAN + payload[4:]), "NaN or infinity"),
    "huge": (with_rows(spec=[["w", [1 << 20, 1 << 20], "float32"]]), "--max_model_bytes"),
    "statistics": (with_rows(statistics=1 << 40), "--max_model_bytes"),
    "infinite": (with_rows(num_examples=float("inf")), "whole number"),
    "beyond": (with_rows(num_examples=10**400), "whole number"),
    "nameless": (with_rows(spec=[["", [1], "float32"]]), "printable"),
    "control": (with_rows(spec=[["a\x1b[2Jb\n", [1], "float32"]]), "printable"),
    "long_name": (with_rows(spec=[["a" * 1001, [1], "float32"]]), "printable"),
    "twice": (with_rows(spec=[["a", [1], "float32"]] * 2), "each path once"),
    "digest": (with_rows(weights_digest="a" * 900_000), "64 hexadecimal digits"),
    "classes": (with_rows(script_optimizer="Adam\nINFO"), "names of classes"),
    "scale": (with_rows(loss_scale={"initial": 1e308, "growth_steps": 1}), "loss_scale"),
    "scale_text": (with_rows(loss_scale={"initial": "5", "growth_steps": 1}), "loss_scale"),
    "scale_true": (with_rows(loss_scale={"initial": True, "growth_steps": 1}), "loss_scale"),
    "nested": (with_rows(constraints={"dense/bias": {"name": "NonNeg", "config": [[[]]]}}), "conf"),
}


def test_lying_offers_are_refused_and_the_next_one_is_taken(tmp_path):
    with offered_run(tmp_path, "--nb_workers=1") as run:
        stage = run.listen()
        for number, (lie, words) in enumerate(LIES.values()):
            with pytest.raises(RequestRejected, match=words) as refusal:
                run.worker(1, lie=lie).join()
            assert refusal.value.reason == pb.REASON_OFFER
            assert stage.guard.refused == {"offer": number + 1}
            assert not run.shards
        honest = run.worker(1)
        honest.join()
        np.testing.assert_array_equal(begin(honest)[0], weights_of(1))
        honest.leave("done")


FALSE_OPTIMIZERS = {
    "class": ({"name": "os.system", "config": {"learning_rate": 0.1}}, "os.system"),
    "argument": ({"name": "SGD", "config": {"learning_rate": 0.1, "command": "rm"}}, "command"),
    "lambda": (
        {"name": "SGD", "config": {"learning_rate": {"name": "function", "config": {}}}},
        "function",
    ),
    "nan": ({"name": "SGD", "config": {"learning_rate": float("nan")}}, "learning_rate"),
    "list": ({"name": "Adam", "config": {"learning_rate": 0.1, "beta_1": [1]}}, "beta_1"),
    "huge": ({"name": "SGD", "config": {"learning_rate": 1e308}}, "learning_rate"),
    "restarts": (
        {
            "name": "SGD",
            "config": {
                "learning_rate": {
                    "name": "CosineDecayRestarts",
                    "config": {
                        "initial_learning_rate": 0.1,
                        **{"first_decay_steps": 1e-9, "t_mul": -1, "m_mul": 1e18, "alpha": -1e18},
                    },
                }
            },
        },
        "CosineDecayRestarts.*learning rate of nan at step 0",
    ),
}


def test_an_optimizer_that_is_no_good_is_refused_and_a_good_worker_trains_afterwards(tmp_path):
    given = json.loads(OFFER.to_json())["optimizers"][0]
    with offered_run(tmp_path, "--nb_workers=1") as run:
        stage = run.listen()
        for number, (optimizer, words) in enumerate(FALSE_OPTIMIZERS.values()):
            lie = with_rows(optimizers=[given | {"optimizer": optimizer}])
            with pytest.raises(RequestRejected, match=words) as refusal:
                run.worker(1, lie=lie).join()
            assert refusal.value.reason == pb.REASON_OFFER
            assert stage.guard.refused == {"offer": number + 1}
            assert not run.shards
        good = run.worker(1)
        good.join()
        before = good.begin().copy()
        assert push(good) and not np.array_equal(good.core.weights, before)
        assert read_status(run).version == 1
        good.leave("done")


def push(worker):
    """Push one gradient, and wait for the reply; return True if the run continues."""
    gradient = np.ones(OFFER.spec.num_parameters, np.float32)
    exchange(worker, gradient)
    return not worker.core.stop_reason


def read_status(run):
    address = f"127.0.0.1:{run.ports[0]}"
    return observer.read_status(observer.Contact(address, NO_CREDENTIALS, 20.0))


# A schedule that has a finite rate at every step that is sampled, and none at step 3.
SLIPS = {
    "name": "InverseTimeDecay",
    "config": {"initial_learning_rate": 0.1, "decay_steps": 3.0, "decay_rate": -1.0},
}


def test_a_rate_that_slips_ends_the_run_as_diverged_and_every_document_can_be_made(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(rates, "sample_steps", lambda described, first, last: [first])
    slips = dataclasses.replace(SGD, optimizer=Described("SGD", {"learning_rate": SLIPS}))
    slips = dataclasses.replace(slips, clock="steps")
    with offered_run(tmp_path, "--nb_workers=1", "--linger_seconds=5") as run:
        run.listen()
        worker = run.worker(1, dataclasses.replace(OFFER, optimizers=(slips,)))
        worker.join()
        worker.begin()
        assert all(push(worker) for _ in range(3))
        theta = run.shards[0].core.model.theta.copy()
        assert read_status(run).learning_rate == 0.0
        assert not push(worker)
        status = read_status(run)
        assert (status.version, status.stop_reason) == (3, "diverged")
        assert status.rejected_pushes == {"no_rate": 1}
        np.testing.assert_array_equal(run.shards[0].core.model.theta, theta)
        assert run.shards[0].server.guard.refused.get("internal", 0) == 0
        worker.leave("done")
    assert run.codes[0] == EXIT_DIVERGED
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["stop_reason"] == "diverged"


def test_a_run_with_an_offer_that_an_earlier_version_accepted_is_refused_in_one_line(
    tmp_path, monkeypatch
):
    with monkeypatch.context() as earlier, offered_run(tmp_path, "--nb_workers=1") as run:
        earlier.setattr(rates, "sample_steps", lambda described, first, last: [])
        run.listen()
        name, config = "CosineDecayRestarts", dict(first_decay_steps=1e-9, t_mul=-1.0)
        nan = {"name": name, "config": {"initial_learning_rate": 0.1, **config}}
        bad = dataclasses.replace(SGD, optimizer=Described("SGD", {"learning_rate": nan}))
        worker = run.worker(1, dataclasses.replace(OFFER, optimizers=(bad,)))
        worker.join()
        worker.begin()
        run.interrupt()
        worker.leave("done")
    settings, _, _ = run.settings("--id_ps=0", "--type_node=PS")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(ConfigurationError, match=f"{name}.*--run_dir, or --overwrite") as refused:
        role.main(settings)
    assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_epochs_need_the_size_of_the_training_set(tmp_path):
    flags = ("--nb_workers=1", "--epochs=2")
    with offered_run(tmp_path, *flags) as run:
        run.listen()
        with pytest.raises(RequestRejected, match="--epochs=2.*--iter_max"):
            run.worker(1, dataclasses.replace(OFFER, num_examples=0)).join()
        worker = run.worker(1)
        worker.join()
        begin(worker)
        assert run.shards[0].core.config.budget.examples == 2000
        worker.leave("done")


def test_a_larger_model_than_allowed_is_refused_by_the_flag_s_name(tmp_path):
    with offered_run(tmp_path, "--max_model_bytes=1000") as run:
        run.listen()
        with pytest.raises(RequestRejected, match="at most 1,000.*--max_model_bytes"):
            run.worker(1).join()


# -- streams --------------------------------------------------------------------------------------


class Stranger:
    """A worker's stream with arbitrary messages."""

    def __init__(self, run, number=1):
        worker = run.worker(number)
        self.shard = worker.exchange.shards[0]
        self.stream = ClientStream(self.shard.address)
        self.stream.open(5.0)
        self.send(pb.ToServer(hello=self.shard.hello))

    def send(self, message):
        self.stream.send((frame(message),))

    def refusal(self):
        while True:
            message = pb.ToClient.FromString(self.stream.receive(10.0))
            if message.WhichOneof("body") == "refusal":
                return message.refusal

    def is_over(self):
        with pytest.raises(StreamLost):
            while True:
                self.stream.receive(10.0)
        return True


def held(stage, run):
    """Return the stream of worker 2, once the shard has it wait."""
    stream, deadline = Stranger(run, 2), time.monotonic() + 10
    while not stage._held and time.monotonic() < deadline:
        pass
    return stream


def test_one_worker_offers_at_a_time_and_its_turn_ends_with_its_stream(tmp_path):
    with offered_run(tmp_path) as run:
        stage = run.listen()
        first = Stranger(run, 1)
        assert first.refusal().reason == pb.REASON_NO_MODEL
        second = held(stage, run)
        first.stream.close()
        refusal = second.refusal()
        assert refusal.reason == pb.REASON_STARTING and refusal.retry_after_seconds > 0
        assert second.is_over()
        third = Stranger(run, 2)
        assert third.refusal().reason == pb.REASON_NO_MODEL
        third.stream.close()


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def test_a_worker_that_offers_nothing_loses_its_turn(tmp_path):
    clock = Clock()
    with offered_run(tmp_path) as run:
        stage = run.listen(clock=clock)
        silent = Stranger(run, 1)
        assert silent.refusal().reason == pb.REASON_NO_MODEL
        clock.now += 30
        assert silent.is_over()
        assert stage.guard.refused == {"silent": 1}
        other = Stranger(run, 2)
        assert other.refusal().reason == pb.REASON_NO_MODEL
        other.stream.close()


def test_who_waits_is_held_and_then_sent_away(tmp_path):
    clock = Clock()
    with offered_run(tmp_path) as run:
        stage = run.listen(clock=clock)
        first = Stranger(run, 1)
        assert first.refusal().reason == pb.REASON_NO_MODEL
        second = held(stage, run)
        clock.now += 6
        assert second.refusal().reason == pb.REASON_STARTING
        first.stream.close()


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (pb.ToServer(pull=pb.Pull()), "pull; expected offer"),
        (pb.ToServer(push=pb.Push(payload_bytes=100)), "no payload is expected"),
        (pb.ToServer(hello=pb.Hello()), "hello; expected offer"),
        (pb.ToServer(chunk=pb.Chunk(data=b"x")), "without a header"),
    ],
)
def test_only_an_offer_may_follow(tmp_path, message, words):
    with offered_run(tmp_path) as run:
        stage = run.listen()
        client = Stranger(run)
        client.refusal()
        client.send(message)
        refusal = client.refusal()
        assert refusal.reason == pb.REASON_MALFORMED and words in refusal.message
        assert stage.guard.refused == {"malformed": 1}


def test_a_hello_is_checked_before_anybody_may_offer(tmp_path):
    cases = [
        ({"id": 9}, pb.REASON_ID_RANGE, "1..2"),
        ({"run_id": "old"}, pb.REASON_RUN, "a new run"),
        ({"num_shards": 2}, pb.REASON_TOPOLOGY, "PS 0 of 1"),
        ({"fingerprint": []}, pb.REASON_FINGERPRINT, "differs"),
        ({"protocol_version": 99}, pb.REASON_PROTOCOL_VERSION, "99"),
    ]
    with offered_run(tmp_path) as run:
        stage = run.listen()
        for number, (changes, reason, words) in enumerate(cases):
            shard = run.worker(1).exchange.shards[0]
            for name, value in changes.items():
                shard.hello.ClearField(name)
                if value:
                    setattr(shard.hello, name, value)
            with pytest.raises(RequestRejected) as refusal:
                shard.connect()
            assert refusal.value.reason == reason and words in str(refusal.value)
            assert stage.guard.refused == {"hello": number + 1}


def test_a_supervisor_that_only_looks_is_not_kept(tmp_path):
    with offered_run(tmp_path) as run:
        run.listen()
        stream = ClientStream(f"127.0.0.1:{run.ports[0]}")
        stream.open(5.0)
        hello = pb.Hello(protocol_version=messages.PROTOCOL_VERSION, role=pb.ROLE_SUPERVISOR)
        stream.send((frame(pb.ToServer(hello=hello)),))
        refusal = pb.ToClient.FromString(stream.receive(10.0)).refusal
        assert refusal.reason == pb.REASON_STARTING and refusal.retry_after_seconds == 0
        stream.close()


# -- ends -----------------------------------------------------------------------------------------


def test_a_shard_whose_workers_are_all_refused_ends(tmp_path):
    clock = Clock()
    with offered_run(tmp_path, "--start_timeout_seconds=60") as run:
        run.listen(clock=clock)
        with pytest.raises(RequestRejected):
            run.worker(1, flags=["--seed=5"]).join()
        clock.now += 61
        run.threads[0].join(20)
        assert isinstance(run.failures[0], NobodyAdmitted)
        assert "1 for hello" in str(run.failures[0])


def test_a_shard_to_which_nobody_came_goes_on_waiting(tmp_path):
    clock = Clock()
    with offered_run(tmp_path, "--start_timeout_seconds=60", "--nb_workers=1") as run:
        run.listen(clock=clock)
        clock.now += 1000
        worker = run.worker(1)
        worker.join()
        worker.exchange.close("done")


def test_an_interrupted_shard_ends(tmp_path):
    with offered_run(tmp_path) as run:
        stage = run.listen()
        stage.interrupt()
        run.threads[0].join(20)
        assert not run.threads[0].is_alive() and not run.shards and not run.failures


class HeldStream:
    """The part of a worker's stream that a stage uses."""

    peer, lost, closed, evidence = "here", False, False, PeerEvidence()

    def send(self, frames, counted):
        del frames, counted

    def close(self):
        self.closed = True


def stage_at(run, now):
    settings, own, _ = run.settings("--id_ps=0", "--type_node=PS")
    return OfferStage(settings, own, lambda: now[0])


def reader_of(number):
    return types.SimpleNamespace(stream=HeldStream(), worker=number, progress_at=0.0)


def test_nobody_is_late_whose_model_is_being_built(tmp_path):
    """Building a model may take longer than a lease; the worker has nothing more to send."""
    with offered_run(tmp_path) as run:
        now = [0.0]
        stage, reader = stage_at(run, now), reader_of(1)
        assert stage.claim(reader)
        stage.receive(ReceivedOffer(OFFER, memoryview(b""), 1, reader.stream))
        now[0] = 1000.0
        stage.tick()
        assert not reader.stream.closed and not stage.guard.refused
        stage.forget(reader.stream)  # which has brought its model, and is still the one
        assert not stage.claim(reader_of(3))
        received = stage._came.get_nowait()
        stage.refuse(received, "it is no good")
        assert stage.claim(other := reader_of(2))
        stage.tick()
        assert other.stream.closed and stage.guard.refused["silent"] == 1


def test_the_place_of_the_worker_that_offers_ends_with_its_own_stream(tmp_path):
    with offered_run(tmp_path) as run:
        stage = stage_at(run, [0.0])
        first, second = reader_of(1), reader_of(2)
        assert stage.claim(first) and not stage.claim(second)
        assert stage.hold(second.stream)
        stage.forget(second.stream)
        assert not stage.claim(second)
        stage.forget(first.stream)
        assert stage.claim(second)
        stage.close(has_model=True)
        assert not stage.claim(first)


def test_a_stream_offers_a_model_or_is_held(tmp_path):
    with offered_run(tmp_path) as run:
        stage = stage_at(run, [0.0])
        offering, held = (stage.reader_of(HeldStream()) for _ in range(2))
        for number, reader in ((1, offering), (2, held)):
            hello = run.worker(number).exchange.shards[0].hello
            assert reader.receive(frame(pb.ToServer(hello=hello)))
        assert offering.state is ClientStreamState.OFFERING
        assert held.state is ClientStreamState.HELD and len(stage._held) == 1
        size = offered_bytes(stage.run, 0, OFFER)
        offer = pb.Offer(document=OFFER.to_json(), payload_bytes=size)
        assert offering.receive(frame(pb.ToServer(offer=offer)))
        assert offering.state is ClientStreamState.OFFERING, "the payload has not arrived"
        assert offering.receive(frame(pb.ToServer(chunk=pb.Chunk(data=bytes(size)))))
        assert offering.state is ClientStreamState.OFFERED
        assert stage._came.get_nowait().worker == 1
        held.forget()
        assert len(stage._held) == 0


@pytest.mark.parametrize("number", [0, 1])
def test_who_has_no_token_offers_no_model(tmp_path, number):
    """A following shard must not accept it either, because its weights would be the client's."""
    with offered_run(tmp_path, nb_ps=2) as run:
        settings, own, _ = run.settings(f"--id_ps={number}", "--type_node=PS")
        stage, stream = OfferStage(settings, own), HeldStream()
        stage.guard = ConnectionGuard(Credentials(token=TOKEN))
        hello = run.worker(1).exchange.shards[number].hello
        reader = stage.reader_of(stream)
        assert not reader.receive(pb.ToServer(hello=hello).SerializeToString())
        assert sum(stage.guard.refused.values()) == 1
        assert stage.claim(reader_of(2)) == (number == 0)  # the place is free
        stage.guard = ConnectionGuard()
        assert stage.reader_of(HeldStream()).receive(pb.ToServer(hello=hello).SerializeToString())
