"""TLS and the token: reads the files, opens protected channels, proves and judges who speaks.

A certificate names its holder's part in a run by a URI among its subject's other names
(`part_of_worker` and its like); see `proto.certificates`, which makes them. The token is never
sent: each side shows by an HMAC over fresh random numbers of both that it has it.
"""

from __future__ import annotations

import dataclasses
import hmac
import secrets
from collections.abc import Sequence
from typing import Any

import grpc

from ops.credentials import Credentials
from proto import thinwire_pb2 as pb

#: Metadata of a Session call and of its first answer.
NONCE, PROOF = "thinwire-nonce-bin", "thinwire-proof-bin"
_NONCE_BYTES = 32
_PREFIX = "thinwire://"
#: What gRPC says when the other end's certificate does not do; trying again does not help.
_UNTRUSTED = ("handshake failed", "verification check failed")
#: What it says of a server that does not take our certificate, or no plain text.
_HUNG_UP = ("socket closed", "connection reset")
_WHY_SECONDS = 0.2


class NotTrusted(Exception):
    """The other end does not prove to be of this run, or does not take us for it."""


def part_of_worker(worker: int) -> str:
    """Return the URI of a worker's part."""
    return f"{_PREFIX}worker/{worker}"


def part_of_shard(shard: int) -> str:
    """Return the URI of a PS's part."""
    return f"{_PREFIX}ps/{shard}"


PART_OF_SUPERVISOR = f"{_PREFIX}supervisor"


def is_part(name: str) -> bool:
    """Return whether a URI among a certificate's names is that of a part."""
    return name.startswith(_PREFIX)


def part_of(hello: pb.Hello) -> str:
    """Return the URI of the part that a Hello claims."""
    if hello.role == pb.ROLE_WORKER:
        return part_of_worker(hello.id)
    return part_of_shard(hello.id) if hello.role == pb.ROLE_SHARD else PART_OF_SUPERVISOR


def server_name_of_worker(worker: int) -> str:
    """Return the name that a worker's certificate has instead of its host's.

    Peers look for it, wherever the worker runs; and as it holds no host's name, nobody takes this
    worker for a PS.
    """
    return f"worker-{worker}.thinwire.internal"


# -- channels ----------------------------------------------------------------------------------


def open_channel(
    address: str,
    credentials: Credentials,
    options: Sequence[tuple[str, Any]],
    server_name: str | None = None,
) -> grpc.Channel:
    """Return a channel, encrypted where an authority is given.

    Args:
        address: ``host:port``.
        credentials: Of this node.
        options: Of gRPC.
        server_name: What the other end's certificate must name; None: the host of `address`.
    """
    if not credentials.authority:
        return grpc.insecure_channel(address, options=options)
    if server_name is not None:
        options = [*options, ("grpc.ssl_target_name_override", server_name)]
    secure = grpc.ssl_channel_credentials(
        credentials.authority, credentials.key or None, credentials.certificate or None
    )
    return grpc.secure_channel(address, secure, options=options)


def add_port(server: grpc.Server, address: str, credentials: Credentials) -> int:
    """Let a server listen, encrypted where it has a certificate; return the port.

    With an authority too, clients must have certificates of it.

    Raises:
        RuntimeError: The address cannot be bound.
    """
    if not credentials.certificate:
        return int(server.add_insecure_port(address))
    secure = grpc.ssl_server_credentials(
        [(credentials.key, credentials.certificate)],
        root_certificates=credentials.authority or None,
        require_client_auth=bool(credentials.authority),
    )
    return int(server.add_secure_port(address, secure))


def why_unreachable(channel: grpc.Channel, method: str) -> str:
    """Return what gRPC says of a channel that does not become ready."""
    call = channel.stream_stream(method)(iter(()), timeout=_WHY_SECONDS)
    try:
        call.initial_metadata()
        return str(call.details() or "")
    finally:
        call.cancel()


def is_distrust(reason: str) -> bool:
    """Whether that reason is a certificate, which will be the same the next time."""
    return any(word in reason.lower() for word in _UNTRUSTED)


def is_hung_up(reason: str) -> bool:
    """Whether somebody listens there who ends connections before they stand."""
    return any(word in reason.lower() for word in _HUNG_UP)


# -- the token ---------------------------------------------------------------------------------


def new_nonce() -> bytes:
    """Return a random number that is used once."""
    return secrets.token_bytes(_NONCE_BYTES)


def server_proof(token: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return what a server shows before the client has said anything."""
    return _mac(token, "server", client_nonce, server_nonce, ())


def client_proof(
    token: bytes, client_nonce: bytes, server_nonce: bytes, words: Sequence[str]
) -> bytes:
    """Return what a client shows in its first message; `words` are what it claims there."""
    return _mac(token, "client", client_nonce, server_nonce, words)


def words_of(hello: pb.Hello) -> tuple[str, ...]:
    """Return what of a Hello its proof holds for."""
    numbers = (hello.shard, hello.num_shards, hello.incarnation)
    return (part_of(hello), hello.run_id, hello.peer_address, *map(str, numbers))


def _mac(
    token: bytes, end: str, client_nonce: bytes, server_nonce: bytes, words: Sequence[str]
) -> bytes:
    """Authenticate parts of known number, each behind its length."""
    parts = [b"thinwire.v1", end.encode(), client_nonce, server_nonce]
    parts += [word.encode() for word in words]
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(token, text, "sha256")


# -- judging -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What a server knows of a stream before its first message."""

    parts: tuple[str, ...] = ()  # that the client's certificate names
    client_nonce: bytes = b""
    server_nonce: bytes = b""


def meet(
    context: grpc.ServicerContext, credentials: Credentials
) -> tuple[Evidence, tuple[tuple[str, bytes], ...]]:
    """Return what is known of a new call, and the metadata that answers it."""
    known = context.auth_context().get("peer_uri", ())
    parts = tuple(part.decode(errors="replace") for part in known)
    if not credentials.token:
        return Evidence(parts), ()
    given = {name: value for name, value in context.invocation_metadata() if name == NONCE}
    evidence = Evidence(parts, given.get(NONCE, b""), new_nonce())
    answer: tuple[tuple[str, bytes], ...] = ((NONCE, evidence.server_nonce),)
    if len(evidence.client_nonce) == _NONCE_BYTES:
        proof = server_proof(credentials.token, evidence.client_nonce, evidence.server_nonce)
        answer += ((PROOF, proof),)
    return evidence, answer


def refusal(
    evidence: Evidence, credentials: Credentials, part: str, proof: bytes, words: Sequence[str]
) -> tuple[int, str] | None:
    """Judge who says to play a part.

    Args:
        evidence: Of its stream.
        credentials: Of this server.
        part: What the client claims to be.
        proof: That it has the token.
        words: What that proof must hold for.

    Returns:
        (reason, message) of a refusal; None where nothing speaks against it.
    """
    if credentials.certificate and credentials.authority and part not in evidence.parts:
        named = ", ".join(evidence.parts) or "no part at all"
        return pb.REASON_IDENTITY, (
            f"the client says that it is {part}, and its certificate names {named:.200}; give each "
            "node the certificate that was made for it (--tls_cert, --tls_key)."
        )
    if not credentials.token:
        return None
    nonces = evidence.client_nonce, evidence.server_nonce
    expected = client_proof(credentials.token, *nonces, words)
    if len(nonces[0]) != _NONCE_BYTES or not hmac.compare_digest(expected, proof):
        return pb.REASON_TOKEN, (
            "the client does not prove that it has this run's token; give all nodes the same "
            "--token_file, or the same THINWIRE_TOKEN in their environment."
        )
    return None


def check_server(
    address: str, credentials: Credentials, nonce: bytes, answer: dict[str, Any]
) -> bytes:
    """Return the server's nonce, once it has proved that it has our token.

    Args:
        address: For the message.
        credentials: Of this node.
        nonce: That it sent.
        answer: Metadata of the server's answer.

    Raises:
        NotTrusted: It has not.
    """
    theirs = answer.get(NONCE, b"")
    if not credentials.token:
        return theirs
    expected = server_proof(credentials.token, nonce, theirs)
    if not (theirs and hmac.compare_digest(expected, answer.get(PROOF, b""))):
        raise NotTrusted(
            f"{address} does not prove that it has this run's token; give all nodes the same "
            "--token_file, or the same THINWIRE_TOKEN in their environment"
        )
    return theirs
