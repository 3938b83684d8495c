"""One filled-in message of every kind; the golden bytes are made once from these messages.

``python -m tests.proto.samples`` writes the files that are missing and touches no other.
"""

import struct
from pathlib import Path

from google.protobuf.message import Message

from thinwire.proto import peers_pb2 as peers
from thinwire.proto import thinwire_pb2 as pb

GOLDEN = Path(__file__).parent / "golden"

_BLOCKS = [
    pb.Block(slot=0, count=3, coding=pb.INDEX_CODING_RICE, coding_parameter=6, index_bytes=4),
    pb.Block(slot=2, count=2, value_dtype=pb.VALUE_DTYPE_INT8, scale=0.125),
]
_CHUNK = pb.Chunk(data=b"\x00\xff" * 5)
_HALT = pb.Halt(cause="iter_max")
_REPORT = pb.Report(document='{"loss": 0.5}')
_TWO_FLOATS = b"\0\0\x80?\0\0\0@"


def samples() -> dict[str, Message]:
    """Return {file name without ending: message}, one for each body of both envelopes."""
    return (
        _to_server()
        | _pushes()
        | _to_client()
        | _replies()
        | _memberships()
        | _of_scripts()
        | _among_workers()
    )


def _of_scripts() -> dict[str, Message]:
    """Return what only the scripts of users bring about."""
    offer = pb.Offer(document='{"format": 1}', payload_bytes=44)
    slots = pb.Slots(document='{"arrays": []}', payload_bytes=8)
    scaled = pb.Push(step=41, loss_scale=32768.0, sets_rate=True, learning_rate=0.01)
    several = pb.Push(step=43, optimizer=2, repeats_batch=True)
    of_batch = pb.Push(step=44, samples=9, batch_parts=3)
    counts = pb.Reply(version=44, schedule_counts=[44, 220])
    overflow = pb.Push(step=42, loss_scale=65536.0, overflow=True)
    no_model = pb.Refusal(reason=pb.REASON_NO_MODEL, message="this PS has no model yet")
    opened = pb.Barrier(name="fit-2-end", cause="returned_early")
    layout = pb.Layout(variables=[0, 2], starts=[0, 8], stops=[16, 44])
    begun = pb.FitBegun(fit=2, validates=True, variables=[0, 1, 4], num_weights=5, shards=[layout])
    metrics = [
        pb.Metric(name="loss", values=[0.5]),
        pb.Metric(name="f1", values=[0.25, 1.0], shape=[2]),
    ]
    evaluated = pb.Evaluated(fit=2, epoch=3, answers=True, versions=[7, 8], metrics=metrics)
    nobody = pb.Evaluated(fit=2, epoch=3, answers=True, nobody="the evaluator has ended")
    ended = pb.FitEnded(fit=2, history='{"epoch": [0], "history": {"loss": [0.5]}}')
    return {
        "to_server_fit_begun": pb.ToServer(fit_begun=begun),
        "to_client_fit_begun": pb.ToClient(fit_begun=begun),
        "to_server_epoch_ended": pb.ToServer(epoch_ended=pb.EpochEnded(fit=2, epoch=3)),
        "to_client_epoch_ended": pb.ToClient(epoch_ended=pb.EpochEnded(fit=2, epoch=3)),
        "to_server_evaluated": pb.ToServer(evaluated=evaluated),
        "to_client_evaluated": pb.ToClient(evaluated=nobody),
        "to_server_evaluator": pb.ToServer(evaluator=pb.Evaluator(message="it has crashed")),
        "to_server_fit_ended": pb.ToServer(fit_ended=ended),
        "to_client_fit_ended": pb.ToClient(fit_ended=ended),
        "to_server_hello_script": pb.ToServer(hello=pb.Hello(role=pb.ROLE_SCRIPT, id=3)),
        "to_server_offer": pb.ToServer(offer=offer),
        "to_server_barrier": pb.ToServer(barrier=pb.Barrier(name="fit-2-end")),
        "to_server_barrier_passed": pb.ToServer(
            barrier=pb.Barrier(name="fit-2-end", passed=["fit-1-begin", "fit-1-end"])
        ),
        "to_client_finished": pb.ToClient(finished=pb.Finished()),
        "to_client_halt_message": pb.ToClient(
            halt=pb.Halt(cause="script_failed", message="worker 2 failed: KeyError: 'x'")
        ),
        "to_server_finished": pb.ToServer(finished=pb.Finished(failed=True, message="KeyError")),
        "to_server_slots": pb.ToServer(slots=pb.SlotsRequest()),
        "to_server_slots_weights": pb.ToServer(slots=pb.SlotsRequest(weights=True)),
        "to_server_switch": pb.ToServer(switch=pb.Switch()),
        "to_server_stop_fit": pb.ToServer(stop_fit=pb.StopFit(fit=3)),
        "to_client_stop_fit": pb.ToClient(stop_fit=pb.StopFit(fit=3)),
        "to_server_epoch_meeting": pb.ToServer(
            epoch_meeting=pb.EpochMeeting(
                fit=2,
                epoch=4,
                waits=True,
                states=[pb.MetricState(name="0/loss", values=struct.pack("<dd", 2.5, 64))],
            )
        ),
        "to_client_epoch_meeting": pb.ToClient(
            epoch_meeting=pb.EpochMeeting(fit=2, epoch=4, after_callbacks=True, epochs=5)
        ),
        "to_client_chief": pb.ToClient(chief=pb.Chief(worker=2)),
        "to_server_push_scaled": pb.ToServer(push=scaled),
        "to_server_push_overflow": pb.ToServer(push=overflow),
        "to_server_push_several": pb.ToServer(push=several),
        "to_server_push_parts": pb.ToServer(push=of_batch),
        "to_client_reply_counts": pb.ToClient(reply=counts),
        "to_client_refusal_no_model": pb.ToClient(refusal=no_model),
        "to_client_reply_scaled": pb.ToClient(reply=pb.Reply(version=42, loss_scale=32768.0)),
        "to_client_barrier": pb.ToClient(barrier=opened),
        "to_client_slots": pb.ToClient(slots=slots),
    }


def _to_server() -> dict[str, Message]:
    hello = pb.Hello(
        protocol_version=2,
        role=pb.ROLE_WORKER,
        id=3,
        run_id="run-1",
        fingerprint=[pb.Setting(name="codec.compression_rate", value="0.01")],
        model=[pb.Tensor(path="dense/kernel", shape=[28, 10], dtype="float32")],
        incarnation=2**63 + 7,
        link=pb.EmulatedLink(mbps=100, delay_ms=2.5, loss=0.01, seed=9),
        shard=1,
        num_shards=2,
    )
    pull = pb.Pull(base_version=40, has_base=True, generation=1, observe=True)
    query = pb.Query(
        incarnation=2**63 + 7,
        step=41,
        local_steps=3,
        step_seconds=0.25,
        age_seconds=0.01,
        query_seconds=0.002,
    )
    return {
        "to_server_hello": pb.ToServer(hello=hello),
        "to_server_hello_bulk": pb.ToServer(hello=pb.Hello(protocol_version=2, bulk=True)),
        "to_server_hello_peer": pb.ToServer(hello=pb.Hello(id=3, peer_address="10.0.0.3:2300")),
        "to_server_pull": pb.ToServer(pull=pull),
        "to_server_query": pb.ToServer(query=query),
        "to_server_chunk": pb.ToServer(chunk=_CHUNK),
        "to_server_heartbeat": pb.ToServer(heartbeat=pb.Heartbeat()),
        "to_server_leave": pb.ToServer(leave=pb.Leave(cause="done")),
        "to_server_report": pb.ToServer(report=_REPORT),
        "to_server_halt": pb.ToServer(halt=_HALT),
        "to_server_datagrams": pb.ToServer(datagrams=pb.Datagrams(size=2, data=b"\1\2\3\4")),
    }


def _pushes() -> dict[str, Message]:
    push = pb.Push(
        incarnation=2**63 + 7,
        step=41,
        base_version=40,
        generation=1,
        epoch=2,
        kind=pb.UPDATE_KIND_DELTA,
        samples=64,
        local_steps=4,
        learning_rate=0.02,
        loss=0.5,
        blocks=_BLOCKS,
        payload_bytes=18,
        payload=bytes(range(18)),
    )
    values = pb.Push(step=41, base_version=40, kind=pb.UPDATE_KIND_VALUES, samples=64)
    coded = pb.Block(count=3, coding=pb.INDEX_CODING_BITMAP, index_bytes=1, value_bytes=14)
    coded.value_coding = pb.VALUE_CODING_EXPONENTS
    few_bits = pb.Block(count=3, coding=pb.INDEX_CODING_BITMAP, index_bytes=1, value_bytes=5)
    few_bits.value_dtype, few_bits.value_coding = pb.VALUE_DTYPE_INT2, pb.VALUE_CODING_CODES
    few_bits.chunk, few_bits.chunk_first = 4096, 7
    spanning = pb.Block(slot=1, count=3, coding=pb.INDEX_CODING_BITMAP, index_bytes=1, slots=4)
    with_aux = pb.Push(step=41, aux_count=2, payload_bytes=8, payload=_TWO_FLOATS)
    changed = pb.Push(
        step=41,
        blocks=[pb.Block(count=1)],
        changes=[pb.Block(count=1, coding=pb.INDEX_CODING_BITMAP, index_bytes=1)],
        change_bytes=5,
        payload_bytes=9,
        payload=bytes(range(9)),
    )
    checked = pb.Push(step=1000, base_version=40, base_checksum=2**32 - 2)
    manifest = pb.Manifest(
        channels=[pb.Announced(channel=1, first=2**32 - 1, count=3)],
        k=0.5,
        num_blocks=10,
        num_skipped=1,
        num_reliable=5,
        num_dropped=1,
    )
    return {
        "to_server_push": pb.ToServer(push=push),
        "to_server_push_changes": pb.ToServer(push=changed),
        "to_server_push_aux": pb.ToServer(push=with_aux),
        "to_server_push_exponents": pb.ToServer(push=pb.Push(step=41, blocks=[coded])),
        "to_server_push_few_bits": pb.ToServer(push=pb.Push(step=41, blocks=[few_bits])),
        "to_server_push_spanning": pb.ToServer(push=pb.Push(step=41, blocks=[spanning])),
        "to_server_push_checksum": pb.ToServer(push=checked),
        "to_server_push_parted": pb.ToServer(push=pb.Push(step=41, manifest=manifest, more=True)),
        "to_server_push_values": pb.ToServer(push=values),
    }


def _to_client() -> dict[str, Message]:
    bulk = pb.BulkSession(port=51000, number=bytes(range(16)), key=bytes(range(32)))
    welcome = pb.Welcome(
        run_id="run-1",
        incarnation=2**63 + 7,
        last_applied_step=40,
        knows_worker=True,
        epoch=2,
        generation=1,
        version=42,
        lease_seconds=10.5,
        document='{"seed": 1}',
    )
    session = pb.DatagramSession(session=2**63 + 9, key=bytes(range(32)), ports=[40_001, 40_002])
    refusal = pb.Refusal(reason=pb.REASON_FULL, message="no room", step=41, epoch=2)
    return {
        "to_client_welcome": pb.ToClient(welcome=welcome),
        "to_client_welcome_bulk": pb.ToClient(welcome=pb.Welcome(bulk=bulk)),
        "to_client_switch": pb.ToClient(switch=pb.Switch()),
        "to_client_welcome_datagrams": pb.ToClient(welcome=pb.Welcome(datagrams=session)),
        "to_client_refusal": pb.ToClient(refusal=refusal),
        "to_client_answer": pb.ToClient(answer=pb.Answer(step=41, local_steps=3, ready=True)),
        "to_client_chunk": pb.ToClient(chunk=_CHUNK),
        "to_client_waiting": pb.ToClient(waiting=pb.Waiting()),
        "to_client_halt": pb.ToClient(halt=_HALT),
        "to_client_report": pb.ToClient(report=_REPORT),
        "to_client_report_rounds": pb.ToClient(report=pb.Report(rounds='{"rows": []}', worker=3)),
    }


def _replies() -> dict[str, Message]:
    reply = pb.Reply(
        version=42,
        generation=1,
        epoch=2,
        operation=pb.OPERATION_SET,
        learning_rate=0.004,
        samples=2**40,
        stop=True,
        step=41,
        blocks=_BLOCKS,
        payload_bytes=18,
        payload=bytes(range(18)),
    )
    among = pb.Reply(
        version=42,
        members=[pb.Member(worker=3, incarnation=2**63 + 7, address="10.0.0.3:2300")],
    )
    rest = pb.Reply(version=42, step=41, operation=pb.OPERATION_SET_REST)
    relayed = pb.Reply(
        version=42,
        step=41,
        operation=pb.OPERATION_RELAY,
        rounds=[
            pb.RelayedRound(num_blocks=[1, 0], rate=-0.75, own=2),
            pb.RelayedRound(num_blocks=[1], rate=-1.0),
        ],
        blocks=[pb.Block(count=1, coding=pb.INDEX_CODING_BITMAP, index_bytes=1)] * 2,
        payload_bytes=10,
        payload=bytes(range(1, 11)),
    )
    held = pb.Reply(version=42, step=41, held_seconds=0.75, staleness=3)
    mean_aux = pb.Reply(step=41, aux_count=2, payload_bytes=8, payload=_TWO_FLOATS)
    came = pb.DatagramOutcome(announced=3, arrived=2, late=1, fresh=0.5, filled=0.75, bitmap=b"\5")
    return {
        "to_client_reply": pb.ToClient(reply=reply),
        "to_client_reply_held": pb.ToClient(reply=held),
        "to_client_reply_reception": pb.ToClient(reply=pb.Reply(step=41, outcome=came)),
        "to_client_reply_rest": pb.ToClient(reply=rest),
        "to_client_reply_rounds": pb.ToClient(reply=relayed),
        "to_client_reply_members": pb.ToClient(reply=among),
        "to_client_reply_aux": pb.ToClient(reply=mean_aux),
    }


def _memberships() -> dict[str, Message]:
    groups = [pb.Group(workers=[1, 3]), pb.Group(workers=[2])]
    members = pb.Membership(epoch=2, groups=groups, started=True)
    formed = [pb.Group(workers=[1, 4], steps=[41, 0]), pb.Group(workers=[2, 3], steps=[7, 1])]
    regrouped = pb.Membership(epoch=9, groups=groups, started=True, formed=formed, formed_epoch=7)
    return {
        "to_client_membership": pb.ToClient(membership=members),
        "to_client_membership_formed": pb.ToClient(membership=regrouped),
    }


def _among_workers() -> dict[str, Message]:
    greeting = peers.Greeting(protocol_version=2, run_id="run-1", worker=3)
    part = peers.Part(
        view=2**63 + 5, generation=1, round=41, number=2, payload_bytes=4, payload=b"\0\0\x80?"
    )
    holding = peers.Holding(
        standing=peers.STANDING_STEPPED,
        version=40,
        generation=1,
        payload_bytes=4,
        payload=b"\0\0\x80?",
    )
    query = peers.ModelQuery(generation=1, version=40, digest=b"0123456789abcdef")
    refusal = pb.Refusal(reason=pb.REASON_RUN, message="another run")
    return {
        "to_peer_greeting": peers.ToPeer(greeting=greeting),
        "to_peer_query": peers.ToPeer(query=query),
        "to_peer_part": peers.ToPeer(part=part),
        "to_peer_chunk": peers.ToPeer(chunk=_CHUNK),
        "from_peer_refusal": peers.FromPeer(refusal=refusal),
        "from_peer_holding": peers.FromPeer(holding=holding),
        "from_peer_chunk": peers.FromPeer(chunk=_CHUNK),
    }


if __name__ == "__main__":
    for file_name, message in samples().items():
        path = GOLDEN / f"{file_name}.bin"
        if not path.exists():
            path.write_bytes(message.SerializeToString())
