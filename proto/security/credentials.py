"""TLS and the token: protected channels, mutual authentication, and the files behind both.

A certificate names its holder's part in a run by a URI among its subject's other names
(`part_of_worker` and its like); see `thinwire.proto.security.certificates`, which makes them. The
token is never sent: each side proves by an HMAC over fresh random numbers of both that it has it.
`read` loads a node's certificate, key and token and rejects unusable ones before it connects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import pathlib
import re
import secrets
import ssl
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import grpc
from absl import logging

from thinwire.ops.types import ConfigurationError
from thinwire.proto import thinwire_pb2 as pb
from thinwire.runtime.run.credentials import Credentials
from thinwire.runtime.run.files import read_bounded

#: Metadata of a Session call and of its first answer.
NONCE, PROOF = "thinwire-nonce-bin", "thinwire-proof-bin"
#: Metadata of a call alone: shows that its client has the token, before it gets a place.
PASS = "thinwire-pass-bin"
_NONCE_BYTES = 32
_PREFIX = "thinwire://"
#: gRPC's message when the other end's certificate is not accepted; trying again does not help.
_UNTRUSTED = ("handshake failed", "verification check failed")
#: Part of its message where the other end answers a TLS greeting with something else.
_NO_TLS = "wrong_version_number"
#: In its message, what a certificate lacks: OpenSSL's words.
_VERIFICATION = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([a-zA-Z ]+)")
#: Its message for a server that does not accept our certificate, or no plain text.
_HUNG_UP = ("socket closed", "connection reset")
_WHY_SECONDS = 0.2
TOKEN_VARIABLE = "THINWIRE_TOKEN"
#: Whoever listens to a connection can try shorter ones out.
_SHORTEST_TOKEN_BYTES = 16
_MAX_TURNS = 10  # of a handshake; TLS needs four


class UntrustedPeer(Exception):
    """The other end does not prove to be of this run, or does not accept our proof."""


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
    if hello.role in (pb.ROLE_WORKER, pb.ROLE_SCRIPT):
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
    """Return gRPC's reason why a channel does not become ready."""
    call = channel.stream_stream(method, request_serializer=None, response_deserializer=None)(
        iter(()), timeout=_WHY_SECONDS
    )
    try:
        call.initial_metadata()
        return str(call.details() or "")
    finally:
        call.cancel()  # type: ignore[no-untyped-call]  # without annotations in grpc's stubs


def is_distrust(reason: str) -> bool:
    """Whether that reason is a certificate, which will be the same the next time."""
    return any(word in reason.lower() for word in _UNTRUSTED)


def explain_distrust(reason: str) -> str:
    """Return what that reason comes from, and what to do: gRPC explains neither."""
    if _NO_TLS in reason.lower():
        return (
            "it has no TLS; leave --tls_ca, --tls_cert and --tls_key out, or start it with "
            "certificates"
        )
    cause = _VERIFICATION.search(reason)
    what = "" if cause is None else f"{cause[1].strip().lower()}; "
    return f"{what}its certificate must name this address and be of the authority in --tls_ca"


def is_hung_up(reason: str) -> bool:
    """Whether somebody listens there who ends connections before they stand."""
    return any(word in reason.lower() for word in _HUNG_UP)


# -- the token ---------------------------------------------------------------------------------


def new_nonce() -> bytes:
    """Return a random number that is used once."""
    return secrets.token_bytes(_NONCE_BYTES)


def server_proof(token: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return the proof that a server sends before the client's first message."""
    return _mac(token, "server", client_nonce, server_nonce, ())


def client_pass(token: bytes, client_nonce: bytes) -> bytes:
    """Return what a client shows when it opens a stream."""
    return _mac(token, "opening", client_nonce, b"", ())


def client_proof(
    token: bytes, client_nonce: bytes, server_nonce: bytes, claims: Sequence[str]
) -> bytes:
    """Return the proof that a client sends in its first message, over what it claims there."""
    return _mac(token, "client", client_nonce, server_nonce, claims)


def claims_of(hello: pb.Hello) -> tuple[str, ...]:
    """Return the claims of a Hello that its proof covers."""
    numbers = (hello.shard, hello.num_shards, hello.incarnation, hello.generation)
    return (part_of(hello), hello.run_id, hello.peer_address, *map(str, numbers))


def _mac(
    token: bytes, end: str, client_nonce: bytes, server_nonce: bytes, claims: Sequence[str]
) -> bytes:
    """Authenticate parts of known number, each behind its length."""
    parts = [b"thinwire.v1", end.encode(), client_nonce, server_nonce]
    parts += [claim.encode() for claim in claims]
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(token, text, "sha256")


# -- authentication ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PeerEvidence:
    """What a server knows of a stream before its first message.

    Attributes:
        parts: That the client's certificate names.
        client_nonce: Its random number.
        server_nonce: Ours.
        shows_token: Whether it knows the token, or has seen a stream of a client that does: enough
            for a place to wait in, and for nothing else.
    """

    parts: tuple[str, ...] = ()
    client_nonce: bytes = b""
    server_nonce: bytes = b""
    shows_token: bool = False


def begin_handshake(
    context: grpc.ServicerContext, credentials: Credentials
) -> tuple[PeerEvidence, tuple[tuple[str, bytes], ...]]:
    """Return the evidence about a new call's client, and the metadata that answers it."""
    known = cast("Mapping[str, Iterable[bytes]]", context.auth_context()).get("peer_uri", ())
    parts = tuple(part.decode(errors="replace") for part in known)
    if not credentials.token:
        return PeerEvidence(parts), ()
    metadata = cast("Iterable[tuple[str, bytes]]", context.invocation_metadata())
    given = {name: value for name, value in metadata if name == NONCE}
    shown = shows_token(metadata, credentials)
    evidence = PeerEvidence(parts, given.get(NONCE, b""), new_nonce(), shown)
    answer: tuple[tuple[str, bytes], ...] = ((NONCE, evidence.server_nonce),)
    if len(evidence.client_nonce) == _NONCE_BYTES:
        proof = server_proof(credentials.token, evidence.client_nonce, evidence.server_nonce)
        answer += ((PROOF, proof),)
    return evidence, answer


def shows_token(metadata: Iterable[tuple[str, bytes]], credentials: Credentials) -> bool:
    """Return whether the metadata of a call show that its client has the token, if there is one."""
    if not credentials.token:
        return True
    given = {name: value for name, value in metadata if name in (NONCE, PASS)}
    if PASS not in given:
        return False
    expected = client_pass(credentials.token, given.get(NONCE, b""))
    return hmac.compare_digest(expected, given[PASS])


def check_client(
    evidence: PeerEvidence,
    credentials: Credentials,
    part: str,
    proof: bytes,
    claims: Sequence[str],
) -> tuple[pb.Reason, str] | None:
    """Check that a client is the part of the run that it claims to be.

    Args:
        evidence: Of its stream.
        credentials: Of this server.
        part: The URI of the part that it claims.
        proof: That it has the token.
        claims: What that proof must cover.

    Returns:
        (reason, message) of a refusal; None where the client is accepted.
    """
    if credentials.certificate and credentials.authority and part not in evidence.parts:
        named = ", ".join(evidence.parts) or "no part at all"
        return pb.REASON_IDENTITY, (
            f"the client claims to be {part}, and its certificate names {named:.200}; give each "
            "node the certificate that was made for it (--tls_cert, --tls_key)."
        )
    if not credentials.token:
        return None
    nonces = evidence.client_nonce, evidence.server_nonce
    expected = client_proof(credentials.token, *nonces, claims)
    if len(nonces[0]) != _NONCE_BYTES or not hmac.compare_digest(expected, proof):
        return pb.REASON_TOKEN, (
            "the client does not prove that it has this run's token; give all nodes the same "
            "--token_file, or the same THINWIRE_TOKEN in their environment."
        )
    return None


def check_server(
    address: str, credentials: Credentials, nonce: bytes, answer: dict[str, Any]
) -> None:
    """Check that a server has proved that it has our token.

    Args:
        address: For the message.
        credentials: Of this node.
        nonce: That it sent.
        answer: Metadata of the server's answer.

    Raises:
        UntrustedPeer: It has not.
    """
    theirs = answer.get(NONCE, b"")
    if not credentials.token:
        return
    expected = server_proof(credentials.token, nonce, theirs)
    if not (theirs and hmac.compare_digest(expected, answer.get(PROOF, b""))):
        raise UntrustedPeer(
            f"{address} does not prove that it has this run's token; give all nodes the same "
            "--token_file, or the same THINWIRE_TOKEN in their environment"
        )


# -- the files ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CredentialFiles:
    """Where a node's credentials are; None where a flag was not given."""

    certificate: str | None = None
    key: str | None = None
    authority: str | None = None
    token: str | None = None


def read(
    files: CredentialFiles, token_in_environment: str, part: str | None, serves: bool
) -> Credentials:
    """Return a node's credentials.

    Args:
        files: Their files.
        token_in_environment: Value of THINWIRE_TOKEN; empty: not set.
        part: URI of the node's part, which its certificate must name if it shows it to others;
            None: any part.
        serves: Whether the node mainly listens; else it dials.

    Raises:
        ConfigurationError: A file that is missing, unreadable or of no use, or flags that need
            each other.
    """
    _check_together(files, serves)
    found = Credentials(
        certificate=_pem(files.certificate, "tls_cert", "CERTIFICATE"),
        key=_pem(files.key, "tls_key", "PRIVATE KEY", secret=True),
        authority=_pem(files.authority, "tls_ca", "CERTIFICATE"),
        token=_token(files.token, token_in_environment),
    )
    if files.authority:
        _check_authority(files.authority, found.authority)
    if files.certificate:
        _check_certificate(files, found, part, serves)
    return found


def _check_together(files: CredentialFiles, serves: bool) -> None:
    if bool(files.certificate) != bool(files.key):
        raise ConfigurationError(
            f"--tls_cert={files.certificate} and --tls_key={files.key}: expected both, or neither."
        )
    if serves and files.authority and not files.certificate:
        raise ConfigurationError(
            f"--tls_ca={files.authority} without --tls_cert and --tls_key: a PS needs a "
            "certificate of its own to be reached by TLS; give both, or leave --tls_ca out."
        )
    if not serves and files.certificate and not files.authority:
        raise ConfigurationError(
            f"--tls_cert={files.certificate} without --tls_ca: this node dials others and must "
            "know whose certificates to trust; name the authority's certificate."
        )


def _content(path: str, flag: str) -> bytes:
    """Return a file's bytes.

    Raises:
        ConfigurationError: It cannot be read.
    """
    try:
        return read_bounded(path)
    except OSError as error:
        raise ConfigurationError(
            f"--{flag}={path} cannot be read ({error.strerror}); expected a file that this user "
            "may read, of at most a MiB."
        ) from error


def _warn_if_others_read(path: str, flag: str) -> None:
    """Warn of a secret that other users can read, once the file is known to hold one."""
    with contextlib.suppress(OSError):
        if stat.S_IMODE(pathlib.Path(path).stat().st_mode) & 0o077:
            logging.warning("--%s=%s can be read by other users; chmod 600 it", flag, path)


def _pem(path: str | None, flag: str, kind: str, secret: bool = False) -> bytes:
    if path is None:
        return b""
    content = _content(path, flag)
    _check_pem(content, f"--{flag}={path}", kind)
    if secret:
        _warn_if_others_read(path, flag)
    return content


def _check_pem(content: bytes, where: str, kind: str) -> None:
    """Check that a file holds what a flag wants of it.

    Args:
        content: Of the file.
        where: The flag and the path, for the message.
        kind: CERTIFICATE or PRIVATE KEY.

    Raises:
        ConfigurationError: It does not.
    """
    if b"-----BEGIN" not in content or f"{kind}-----".encode() not in content:
        raise ConfigurationError(
            f"{where} holds no {kind.lower()} in PEM form; expected a text with "
            f"-----BEGIN {kind}-----."
        )


def _token(path: str | None, in_environment: str) -> bytes:
    token, where = in_environment.strip().encode(), TOKEN_VARIABLE
    if path is not None:
        token, where = _content(path, "token_file").strip(), f"--token_file={path}"
    if not token and path is None:
        return b""
    if len(token) < _SHORTEST_TOKEN_BYTES:
        raise ConfigurationError(
            f"{where}: the token has {len(token)} bytes; expected at least "
            f"{_SHORTEST_TOKEN_BYTES} that nobody can guess, such as `openssl rand -hex 32` makes."
        )
    if path is not None:
        _warn_if_others_read(path, "token_file")
    return token


# -- certificates ------------------------------------------------------------------------------


def _check_certificate(
    files: CredentialFiles, found: Credentials, part: str | None, serves: bool
) -> None:
    """Run a TLS handshake between the two ends of this process, as the others will do it.

    Raises:
        ConfigurationError: The key is another one's, or nobody can accept the certificate.
    """
    where = f"--tls_cert={files.certificate}"
    try:
        ours = _context(files, ssl.PROTOCOL_TLS_SERVER), _context(files, ssl.PROTOCOL_TLS_CLIENT)
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"{where} and --tls_key={files.key}: {_reason(error)}; expected a certificate and the "
            "unencrypted private key that it was made for."
        ) from error
    try:
        seen = _show(ours, found.certificate, serves)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(
            f"{where} is of no use: {_reason(error)}; make a new one (python -m "
            "thinwire.proto.security.certificates)."
        ) from error
    named = [value for kind, value in seen.get("subjectAltName", ()) if kind == "URI"]
    # Those who dial a PS look at its host's name; made elsewhere, its certificate may name no part.
    is_other = part is not None and part not in named
    if is_other and (not serves or any(is_part(name) for name in named)):
        raise ConfigurationError(
            f"{where} names {', '.join(named) or 'no part in a run'}, and this node is {part}; "
            "give it its own certificate ({node} in the path stands for its name)."
        )
    if found.authority:
        _check_chain(files, found, serves)


def _check_chain(files: CredentialFiles, found: Credentials, serves: bool) -> None:
    """Warn of a certificate that is not of the authority: others probably trust the same one."""
    contexts = _context(files, ssl.PROTOCOL_TLS_SERVER), _context(files, ssl.PROTOCOL_TLS_CLIENT)
    try:
        _show(contexts, found.authority, serves, whole_chain=True)
    except ssl.SSLCertVerificationError as error:
        logging.warning(
            "--tls_cert=%s does not stand the test of --tls_ca=%s (%s); nodes that trust that "
            "authority alone will refuse this one",
            files.certificate,
            files.authority,
            error.verify_message,
        )


def _check_authority(path: str, authority: bytes) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=_text(authority))
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"--tls_ca={path}: {_reason(error)}; expected certificates in PEM form."
        ) from error


def _context(files: CredentialFiles, side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    # Without a password an encrypted key is an error, and no question at the terminal.
    context.load_cert_chain(str(files.certificate), files.key, password=lambda: b"")
    return context


def _show(
    ours: tuple[ssl.SSLContext, ssl.SSLContext],
    trusted: bytes,
    serves: bool,
    whole_chain: bool = False,
) -> dict[str, Any]:
    """Let one side present the certificate and the other verify it; return what it contains.

    Args:
        ours: Server and client, both with the certificate.
        trusted: Certificates that the other side trusts.
        serves: Whether the server presents it.
        whole_chain: Whether the trusted certificate must be the last of the chain, not any of it.

    Raises:
        ssl.SSLError: It does not pass.
    """
    verifier = ours[1] if serves else ours[0]
    if not whole_chain:
        verifier.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    verifier.load_verify_locations(cadata=_text(trusted))
    verifier.verify_mode = ssl.CERT_REQUIRED
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ours[1].wrap_bio(down, up)
    server = ours[0].wrap_bio(up, down, server_side=True)
    waiting = [client, server]
    for _ in range(_MAX_TURNS):
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                continue
    return dict((client if serves else server).getpeercert() or {})


def _text(pem: bytes) -> str:
    return pem.decode("ascii", errors="replace").replace("\N{REPLACEMENT CHARACTER}", "?")


def _reason(error: Exception) -> str:
    """Return what is wrong in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if "PEM" in str(error):
        return "one of them is damaged or encrypted"
    return str(getattr(error, "reason", "") or error).replace("_", " ").lower()
