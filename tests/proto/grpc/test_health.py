"""The health check of a node in every phase, with and without certificates, and its limits."""

import contextlib
import socket
import subprocess
import sys
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.certificates import HOSTS, TOKEN, Papers
from tests.chaos.process_cast import wait_until
from tests.ps.streams import Shard
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc.common import SERVICE
from thinwire.proto.grpc.health import HealthCheckFailed, probe
from thinwire.proto.grpc.session import ClientSession
from thinwire.proto.security.connection_guard import ConnectionGuard
from thinwire.ps.core import events
from thinwire.runtime.run.credentials import Credentials
from thinwire.tools import health

WAIT_SECONDS = 20.0


@contextlib.contextmanager
def listening(guard=None):
    shard = Shard()
    if guard is not None:
        shard.server.guard = guard
    identity, shard.server.identity = shard.server.identity, None
    port = shard.server.listen("127.0.0.1", 0)
    shard.open = lambda: shard.server.open_for(identity, "{}")
    try:
        yield shard, f"127.0.0.1:{port}"
    finally:
        shard.server.server.stop()


def test_a_shard_tells_in_each_phase_whether_it_takes_work():
    with listening() as (shard, address):
        assert probe(address, WAIT_SECONDS) == "NOT_SERVING"  # the shard has not reached shard 0
        shard.open()
        assert probe(address, WAIT_SECONDS) == "SERVING"  # though workers have yet to come
        shard.server.writer.perform(shard.core.handle(events.Stop("max_seconds"), 1.0))
        assert probe(address, WAIT_SECONDS) == "NOT_SERVING"
    with pytest.raises(HealthCheckFailed, match="nothing answers at 127"):
        probe(address, 5.0)


def test_a_token_is_not_asked_for_and_nothing_else_is_told():
    with listening(ConnectionGuard(Credentials(token=TOKEN))) as (shard, address):
        shard.open()
        assert probe(address, WAIT_SECONDS) == "SERVING"
        assert shard.server.guard.refused == {}


def test_with_an_authority_only_its_holders_are_told(tmp_path, capsys):
    papers = Papers()
    with listening(ConnectionGuard(papers.of("ps-0"))) as (shard, address):
        shard.open()
        assert probe(address, WAIT_SECONDS, papers.of("supervisor-0")) == "SERVING"
        for stranger in (Credentials(), Credentials(authority=papers.authority)):
            with pytest.raises(HealthCheckFailed):
                probe(address, 2.0, stranger)
        files = papers.write(tmp_path, "worker-1", papers.by_name["worker-1"])
        flags = [
            f"--tls_cert={files.certificate}",
            f"--tls_key={files.key}",
            f"--tls_ca={files.authority}",
        ]
        assert health.main([address.replace("127.0.0.1", HOSTS[1]), *flags]) == 0
        assert capsys.readouterr().out == "SERVING\n"


def test_the_command_ends_with_a_code_for_each_answer(capsys, tmp_path):
    with listening() as (_, address):
        assert health.main([address]) == 1
        assert capsys.readouterr().out == "NOT_SERVING\n"
    assert health.main([address, "--seconds=2"]) == 3
    assert address in capsys.readouterr().err
    assert health.main([address, f"--tls_ca={tmp_path}/none"]) == 2
    assert f"--tls_ca={tmp_path}/none cannot be read" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        health.main([address, "--tls_cert=x"])


GRPC_WORDS = ("UNAVAILABLE", "DEADLINE", "SSL_ERROR", "ipv4:", "subchannel", "Handshaker", "E0000")


@pytest.mark.parametrize(
    ("file", "is_pem"),
    [("/etc/passwd", False), ("/dev/null", False), ("/", False), ("broken", True)],
)
def test_a_file_that_is_no_authority_is_named_before_anybody_is_asked(
    file, is_pem, tmp_path, capfd
):
    (tmp_path / "broken").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----")
    path = str(tmp_path / file)
    assert health.main(["127.0.0.1:1", f"--tls_ca={path}"]) == 2
    told = capfd.readouterr().err
    assert told.startswith(f"--tls_ca={path}") and told.count("\n") == 1 and "expected" in told
    assert not any(word in told for word in GRPC_WORDS)


def test_a_key_of_another_is_named(tmp_path, capfd):
    papers = Papers()
    files = papers.write(tmp_path, "worker-1", papers.by_name["worker-1"])
    flags = [f"--tls_cert={files.certificate}", f"--tls_ca={files.authority}"]
    assert health.main(["127.0.0.1:1", "--tls_key=/etc/passwd", *flags]) == 2
    assert "--tls_key=/etc/passwd" in capfd.readouterr().err
    (tmp_path / "other").mkdir()
    other = papers.write(tmp_path / "other", "worker-2", papers.by_name["worker-2"])
    assert health.main(["127.0.0.1:1", f"--tls_key={other.key}", *flags]) == 2
    assert f"--tls_key={other.key}" in capfd.readouterr().err


def test_why_nobody_answers_is_said_in_plain_words(tmp_path, capfd):
    papers = Papers()
    files = papers.write(tmp_path, "worker-1", papers.by_name["worker-1"])
    plain = ("status", "stop", "health")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert health.main([address, "--seconds=0.5"]) == 3
        assert "within 0.5 s" in capfd.readouterr().err
    with listening() as (shard, address):
        shard.open()
        assert health.main([address, f"--tls_ca={files.authority}", "--seconds=5"]) == 3
        told = [capfd.readouterr().err]
        for tool in plain:
            words = [address, f"--tls_ca={files.authority}", "--seconds=3"]
            done = subprocess.run(
                [sys.executable, "-m", "thinwire", tool, *words],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            whole = done.stdout + done.stderr
            assert done.returncode in (3, 4) and whole.count("\n") <= 2, whole
            assert not any(word in done.stderr for word in GRPC_WORDS), whole
    for host in ("127.0.0.1:1", "nowhere.invalid:1"):
        assert health.main([host, "--seconds=5"]) == 3
        told.append(capfd.readouterr().err)
    with listening(ConnectionGuard(papers.of("ps-0"))) as (shard, address):
        assert health.main([address, "--seconds=5"]) == 3
        told.append(capfd.readouterr().err)
    for text in (text.splitlines()[-1] for text in told):  # gRPC's log is louder in this process
        assert any(hint in text for hint in ("?", "check", "--tls_ca")), text
        assert not any(word in text for word in GRPC_WORDS), text


def test_whoever_watches_does_not_lock_workers_out():
    with listening() as (shard, address):
        shard.open()
        with grpc.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            calls = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(60)]
            codes, inside = [], []
            for call in calls:
                try:
                    assert next(call).status == health_pb2.HealthCheckResponse.SERVING
                    inside.append(call)
                except grpc.RpcError as error:
                    codes.append(error.code())
            assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 56
            assert probe(address, WAIT_SECONDS) == "SERVING"
            session = ClientSession(address, shard.hello(id=1), 1 << 20)
            session.stream.open(WAIT_SECONDS)
            session.send_control(pb.ToServer(hello=shard.hello(id=1)))
            session.close()
            shard.server.server.set_serving(False)
            told = [next(call).status for call in inside]
            assert told == [health_pb2.HealthCheckResponse.NOT_SERVING] * 4
            for call in calls:
                call.cancel()


def answers(watch):
    """Whether one more watcher is admitted."""
    call = watch(health_pb2.HealthCheckRequest())
    try:
        return next(call).status == health_pb2.HealthCheckResponse.SERVING
    except grpc.RpcError:
        return False
    finally:
        call.cancel()


def test_watchers_that_come_and_go_do_not_stop_the_server():
    """The library's own servicer came to a standstill within ten changes of this."""
    over = threading.Event()

    def come_and_go(address):
        while not over.is_set():
            with grpc.insecure_channel(address) as channel:
                for _ in range(5):
                    call = health_pb2_grpc.HealthStub(channel).Watch(
                        health_pb2.HealthCheckRequest()
                    )
                    with contextlib.suppress(grpc.RpcError):
                        next(call)
                    call.cancel()

    with listening() as (shard, address):
        watchers = [threading.Thread(target=come_and_go, args=(address,)) for _ in range(4)]
        for watcher in watchers:
            watcher.start()
        try:
            for number in range(500):
                shard.server.server.set_serving(number % 2 == 1)
                over.wait(0.001)
            assert probe(address, WAIT_SECONDS) == "SERVING"
        finally:
            over.set()
        for watcher in watchers:
            watcher.join(WAIT_SECONDS)
            assert not watcher.is_alive()
        with grpc.insecure_channel(address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch
            wait_until(lambda: answers(watch), WAIT_SECONDS, "the place of one that has left")


def test_only_services_that_there_are_can_be_watched():
    with listening() as (_, address), grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("another", "x" * 5000):
            with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
                next(stub.Watch(health_pb2.HealthCheckRequest(service=name)))
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
