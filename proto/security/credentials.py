"""TLS and the token: protected channels, mutual authentication, and the credential files.

A URI in a certificate's subject alternative names identifies the role and id of its holder in the
run, for example worker 3 (`part_of_worker`). `thinwire.proto.security.certificates` creates
certificates. The run's token is never sent: client and server prove by an HMAC over fresh random
numbers of both sides that they have the token. The function `read` loads a node's certificate, key
and token, and rejects unusable files before the node connects.
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

#: Keys of the gRPC metadata of a Session call and of the server's first answer, for a random number
#: and a proof.
NONCE, PROOF = "thinwire-nonce-bin", "thinwire-proof-bin"
#: Key of the gRPC metadata of a Session call whose value shows that the client has the token,
#: before the server lets the stream wait for the client's Hello.
PASS = "thinwire-pass-bin"
_NONCE_BYTES = 32
_PREFIX = "thinwire://"
#: Parts of gRPC's error message if the peer's certificate is rejected; a retry does not help.
_UNTRUSTED = ("handshake failed", "verification check failed")
#: Part of gRPC's error message if the peer does not speak TLS.
_NO_TLS = "wrong_version_number"
#: Pattern of OpenSSL's reason for rejecting a certificate, in gRPC's error message.
_VERIFICATION = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([a-zA-Z ]+)")
#: Parts of gRPC's error message if the server rejects the client's certificate or requires TLS.
_HUNG_UP = ("socket closed", "connection reset")
# Time limit in seconds of the gRPC call that fetches the reason of a failed connection.
_WHY_SECONDS = 0.2
TOKEN_VARIABLE = "THINWIRE_TOKEN"
#: Minimum size of a token. From the proofs on the network, an eavesdropper could find a shorter
#: token by brute force.
_SHORTEST_TOKEN_BYTES = 16
_MAX_TURNS = 10  # maximum rounds of the TLS handshake in a certificate's check; TLS needs four


class UntrustedPeer(Exception):
    """Error: the peer does not prove that it belongs to this run, or rejects this node's proof."""


def part_of_worker(worker: int) -> str:
    """Return the URI that identifies a worker of the run in its certificate."""
    return f"{_PREFIX}worker/{worker}"


def part_of_shard(shard: int) -> str:
    """Return the URI that identifies a PS of the run in its certificate."""
    return f"{_PREFIX}ps/{shard}"


PART_OF_SUPERVISOR = f"{_PREFIX}supervisor"


def part_of(hello: pb.Hello) -> str:
    """Return the URI of the role and id that a client claims in its Hello message."""
    if hello.role in (pb.ROLE_WORKER, pb.ROLE_SCRIPT):
        return part_of_worker(hello.id)
    return part_of_shard(hello.id) if hello.role == pb.ROLE_SHARD else PART_OF_SUPERVISOR


def server_name_of_worker(worker: int) -> str:
    """Return the server name in a worker's certificate, which replaces the host name.

    Peers check the server name in a worker's certificate instead of its host name, so a worker may
    move to another host. Because a worker's certificate contains no host name, a worker cannot
    pretend to be the PS on a host.
    """
    return f"worker-{worker}.thinwire.internal"


# -- channels ----------------------------------------------------------------------------------


def open_channel(
    address: str,
    credentials: Credentials,
    options: Sequence[tuple[str, Any]],
    server_name: str | None = None,
) -> grpc.Channel:
    """Return a gRPC channel to a server, encrypted if the credentials have an authority.

    Args:
        address: ``host:port`` of the server.
        credentials: This node's certificate, key and token.
        options: gRPC options of the new channel.
        server_name: Host name that the server's certificate must contain; None for the host of
            `address`.
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
    """Add a port to a gRPC server, encrypted if the node has a certificate; return the port.

    If the server's credentials have an authority, clients need a certificate that the authority
    signed.

    Args:
        server: gRPC server that will listen on the port.
        address: ``host:port`` at which the server listens.
        credentials: This node's certificate, key and token.

    Raises:
        RuntimeError: The server cannot listen at the address.
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
    """Return True if gRPC's reason for a failed connection is a rejected certificate."""
    return any(word in reason.lower() for word in _UNTRUSTED)


def explain_distrust(reason: str) -> str:
    """Return an error text with the cause of a rejected certificate and the remedy."""
    if _NO_TLS in reason.lower():
        return (
            "it does not use TLS; omit --tls_ca, --tls_cert and --tls_key, or start it with "
            "certificates"
        )
    cause = _VERIFICATION.search(reason)
    what = "" if cause is None else f"{cause[1].strip().lower()}; "
    return f"{what}its certificate must name this address and be signed by --tls_ca's authority"


def is_hung_up(reason: str) -> bool:
    """Return True if a server accepts connections and closes them during the handshake."""
    return any(word in reason.lower() for word in _HUNG_UP)


# -- the token ---------------------------------------------------------------------------------


def new_nonce() -> bytes:
    """Return a random number of 32 bytes that is used once."""
    return secrets.token_bytes(_NONCE_BYTES)


def server_proof(token: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return the proof (HMAC) that a server has the token, which it sends before the first
    message.
    """
    return _mac(token, "server", client_nonce, server_nonce, ())


def client_pass(token: bytes, client_nonce: bytes) -> bytes:
    """Return a value that shows, when a client opens a stream, that the client has the run's
    token.
    """
    return _mac(token, "opening", client_nonce, b"", ())


def client_proof(
    token: bytes, client_nonce: bytes, server_nonce: bytes, claims: Sequence[str]
) -> bytes:
    """Return the proof (HMAC) for a client's Hello, which covers the claims in the Hello."""
    return _mac(token, "client", client_nonce, server_nonce, claims)


def claims_of(hello: pb.Hello) -> tuple[str, ...]:
    """Return the claims of a Hello message that the client's proof covers."""
    numbers = (hello.shard, hello.num_shards, hello.incarnation, hello.generation)
    return (part_of(hello), hello.run_id, hello.peer_address, *map(str, numbers))


def _mac(
    token: bytes, end: str, client_nonce: bytes, server_nonce: bytes, claims: Sequence[str]
) -> bytes:
    """Return the HMAC of the given byte strings under the run's token."""
    # In the HMAC's input, each part follows its length. Without lengths, different parts could have
    # equal concatenations, and a proof for one claim would be valid for another claim. The argument
    # `end` makes the proofs of client and server different, so that a client cannot send back a
    # server's proof as its own.
    parts = [b"thinwire.v1", end.encode(), client_nonce, server_nonce]
    parts += [claim.encode() for claim in claims]
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(token, text, "sha256")


# -- authentication ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PeerEvidence:
    """Evidence about a client that a server has before the stream's first message.

    Attributes:
        parts: URIs in the client's certificate that identify a role and id; empty without a
            certificate.
        client_nonce: Random number that the client sent for the proofs; empty if no token is in
            use.
        server_nonce: Random number that the server sent for the proofs; empty if no token is in
            use.
        shows_token: True if the client's metadata show that it has the token. An eavesdropper can
            copy the client's metadata, so with True the client may only wait for admission.
    """

    parts: tuple[str, ...] = ()
    client_nonce: bytes = b""
    server_nonce: bytes = b""
    shows_token: bool = False


def begin_handshake(
    context: grpc.ServicerContext, credentials: Credentials
) -> tuple[PeerEvidence, tuple[tuple[str, bytes], ...]]:
    """Return the evidence about the client of a new gRPC call, and the answer's initial
    metadata.
    """
    known = cast("Mapping[str, Iterable[bytes]]", context.auth_context()).get("peer_uri", ())
    parts = tuple(part.decode(errors="replace") for part in known)
    if not credentials.token:
        return PeerEvidence(parts), ()
    metadata = cast("Iterable[tuple[str, bytes]]", context.invocation_metadata())
    client_nonce, shown = dict(metadata).get(NONCE, b""), shows_token(metadata, credentials)
    evidence = PeerEvidence(parts, client_nonce, new_nonce(), shown)
    answer: tuple[tuple[str, bytes], ...] = ((NONCE, evidence.server_nonce),)
    if len(evidence.client_nonce) == _NONCE_BYTES:
        proof = server_proof(credentials.token, evidence.client_nonce, evidence.server_nonce)
        answer += ((PROOF, proof),)
    return evidence, answer


def shows_token(metadata: Iterable[tuple[str, bytes]], credentials: Credentials) -> bool:
    """Return True if a call's metadata show that the client has the token, or if no token is in
    use.
    """
    if not credentials.token:
        return True
    client_metadata = dict(metadata)
    if PASS not in client_metadata:
        return False
    expected = client_pass(credentials.token, client_metadata.get(NONCE, b""))
    return hmac.compare_digest(expected, client_metadata[PASS])


def check_client(
    evidence: PeerEvidence,
    credentials: Credentials,
    part: str,
    proof: bytes,
    claims: Sequence[str],
) -> tuple[pb.Reason, str] | None:
    """Check that a client really has the role and id in the run that its Hello claims.

    Args:
        evidence: Evidence about the client from its stream: certificate names, random numbers,
            token.
        credentials: This server's certificate, key and token.
        part: URI of the role and id in the run that the client claims.
        proof: The client's proof that it has the token.
        claims: Claims of the client's Hello that the proof must cover.

    Returns:
        (reason, message) of the client's refusal. None if the client is accepted.
    """
    if credentials.certificate and credentials.authority and part not in evidence.parts:
        named = ", ".join(evidence.parts) or "no part in a run"
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
    """Check that a server has proved that it has this run's token.

    Args:
        address: ``host:port`` of the server, for the error message.
        credentials: This node's certificate, key and token; without a token, nothing is checked.
        nonce: Random number that this client sent to the server.
        answer: Initial gRPC metadata of the server's answer.

    Raises:
        UntrustedPeer: The server has not proved that it has the token.
    """
    server_nonce = answer.get(NONCE, b"")
    if not credentials.token:
        return
    expected = server_proof(credentials.token, nonce, server_nonce)
    if not (server_nonce and hmac.compare_digest(expected, answer.get(PROOF, b""))):
        raise UntrustedPeer(
            f"{address} does not prove that it has this run's token; give all nodes the same "
            "--token_file, or the same THINWIRE_TOKEN in their environment"
        )


# -- the files ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CredentialFiles:
    """Paths of a node's credential files; None for a file whose flag is not given.

    Attributes:
        certificate: Path of the node's certificate (--tls_cert).
        key: Path of the certificate's private key (--tls_key).
        authority: Path of the certificate of the run's certificate authority (--tls_ca).
        token: Path of the run's token (--token_file).
    """

    certificate: str | None = None
    key: str | None = None
    authority: str | None = None
    token: str | None = None


def read(
    files: CredentialFiles, token_in_environment: str, part: str | None, serves: bool
) -> Credentials:
    """Return a node's credentials from its files and its environment.

    Args:
        files: Paths of the node's credential files.
        token_in_environment: Value of the environment variable THINWIRE_TOKEN; empty if it is not
            set.
        part: URI of the node's role and id, which its certificate must contain; None for any role
            and id.
        serves: True for a node that mainly listens for clients, False for a node that mainly
            connects to servers.

    Raises:
        ConfigurationError: A credential file is missing, unreadable or unusable, or a flag of a
            credential file is given without another flag that it needs.
    """
    _check_together(files, serves)
    credentials = Credentials(
        certificate=_pem(files.certificate, "tls_cert", "CERTIFICATE"),
        key=_pem(files.key, "tls_key", "PRIVATE KEY", secret=True),
        authority=_pem(files.authority, "tls_ca", "CERTIFICATE"),
        token=_token(files.token, token_in_environment),
    )
    if files.authority:
        try:
            authority = _text(credentials.authority)
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=authority)
        except ssl.SSLError as error:
            raise ConfigurationError(
                f"--tls_ca={files.authority}: {_reason(error)}; expected certificates in PEM form."
            ) from error
    if files.certificate:
        _check_certificate(files, credentials, part, serves)
    return credentials


def _check_together(files: CredentialFiles, serves: bool) -> None:
    if bool(files.certificate) != bool(files.key):
        raise ConfigurationError(
            f"--tls_cert={files.certificate} and --tls_key={files.key}: expected both, or neither."
        )
    if serves and files.authority and not files.certificate:
        raise ConfigurationError(
            f"--tls_ca={files.authority} without --tls_cert and --tls_key: a PS needs a "
            "certificate to accept TLS connections; give both flags, or omit --tls_ca."
        )
    if not serves and files.certificate and not files.authority:
        raise ConfigurationError(
            f"--tls_cert={files.certificate} without --tls_ca: this node contacts other nodes and "
            "must know which certificates to trust; set --tls_ca to the authority's certificate."
        )


def _content(path: str, flag: str) -> bytes:
    """Return the bytes of a credential file.

    Raises:
        ConfigurationError: The credential file cannot be read.
    """
    try:
        return read_bounded(path)
    except OSError as error:
        raise ConfigurationError(
            f"--{flag}={path} cannot be read ({error.strerror}); expected a file that this user "
            "may read, of at most 1 MiB."
        ) from error


def _warn_if_others_read(path: str, flag: str) -> None:
    """Warn about a credential file with a secret that other users can read."""
    with contextlib.suppress(OSError):
        if stat.S_IMODE(pathlib.Path(path).stat().st_mode) & 0o077:
            logging.warning("file --%s=%s is readable by others; run chmod 600 on it", flag, path)


def _pem(path: str | None, flag: str, kind: str, secret: bool = False) -> bytes:
    """Return a credential file with a certificate or a private key in PEM form; empty for None.

    Args:
        path: Path of the file; None if its flag is not given.
        flag: Name of the flag.
        kind: Name of the expected PEM object, CERTIFICATE or PRIVATE KEY.
        secret: True to warn if other users can read the file.

    Raises:
        ConfigurationError: The credential file does not hold the expected certificate or key.
    """
    if path is None:
        return b""
    content = _content(path, flag)
    if b"-----BEGIN" not in content or f"{kind}-----".encode() not in content:
        raise ConfigurationError(
            f"--{flag}={path} contains no {kind.lower()} in PEM form; expected a text with "
            f"-----BEGIN {kind}-----."
        )
    if secret:
        _warn_if_others_read(path, flag)
    return content


def _token(path: str | None, in_environment: str) -> bytes:
    token, where = in_environment.strip().encode(), TOKEN_VARIABLE
    if path is not None:
        token, where = _content(path, "token_file").strip(), f"--token_file={path}"
    if not token and path is None:
        return b""
    if len(token) < _SHORTEST_TOKEN_BYTES:
        raise ConfigurationError(
            f"{where}: the token has {len(token)} bytes; expected at least "
            f"{_SHORTEST_TOKEN_BYTES} random bytes, for example from `openssl rand -hex 32`."
        )
    if path is not None:
        _warn_if_others_read(path, "token_file")
    return token


# -- certificates ------------------------------------------------------------------------------


def _check_certificate(
    files: CredentialFiles, found: Credentials, part: str | None, serves: bool
) -> None:
    """Run a TLS handshake within this process, to detect an unusable certificate before the run.

    A certificate that the node's authority did not sign is only logged: peers would reject it.

    Raises:
        ConfigurationError: The key does not belong to the certificate, or the certificate is
            invalid or for another role or id.
    """
    where = f"--tls_cert={files.certificate}"
    try:
        _context(files, ssl.PROTOCOL_TLS_SERVER)
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"{where} and --tls_key={files.key}: {_reason(error)}; expected a certificate and the "
            "unencrypted private key that belongs to it."
        ) from error
    try:
        seen = _show(files, found.certificate, serves)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(
            f"{where} is not usable: {_reason(error)}; create a new certificate (thinwire "
            "certificates)."
        ) from error
    named = [value for kind, value in seen.get("subjectAltName", ()) if kind == "URI"]
    # Clients of a PS check the host name in the PS's certificate, so a certificate that another
    # tool created need not contain the URI of the PS's role and id.
    is_other = part is not None and part not in named
    if is_other and (not serves or any(name.startswith(_PREFIX) for name in named)):
        raise ConfigurationError(
            f"{where} names {', '.join(named) or 'no part in a run'}, but this node is {part}; "
            "give the node its own certificate ({node} in the path is replaced by its name)."
        )
    if not found.authority:
        return
    try:
        _show(files, found.authority, serves, whole_chain=True)
    except ssl.SSLCertVerificationError as error:
        logging.warning(
            "--tls_cert=%s is not valid under the authority in --tls_ca=%s (%s); nodes that trust "
            "only this authority will reject this node",
            files.certificate,
            files.authority,
            error.verify_message,
        )


def _context(files: CredentialFiles, side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    # With an empty password, an encrypted key raises an error. Without the callback, OpenSSL would
    # prompt at the terminal.
    context.load_cert_chain(str(files.certificate), files.key, password=lambda: b"")
    return context


def _show(
    files: CredentialFiles, trusted: bytes, serves: bool, whole_chain: bool = False
) -> dict[str, Any]:
    """Run a TLS handshake in which one side presents a certificate; return its content as a dict.

    Args:
        files: Paths of the certificate and its key.
        trusted: Certificates in PEM form that the verifying side of the handshake trusts.
        serves: True if the server presents the certificate, False if the client does.
        whole_chain: True if the trusted certificate must be the root of the certificate chain;
            False if it may be any certificate of the chain.

    Raises:
        ssl.SSLError: The verifying side of the handshake rejected the certificate.
    """
    accepting = _context(files, ssl.PROTOCOL_TLS_SERVER)
    connecting = _context(files, ssl.PROTOCOL_TLS_CLIENT)
    verifier = connecting if serves else accepting
    if not whole_chain:
        verifier.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    verifier.load_verify_locations(cadata=_text(trusted))
    verifier.verify_mode = ssl.CERT_REQUIRED
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = connecting.wrap_bio(down, up)
    server = accepting.wrap_bio(up, down, server_side=True)
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
    """Return the reason of a TLS error as a phrase for an error message."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if "PEM" in str(error):
        return "one of them is damaged or encrypted"
    return str(getattr(error, "reason", "") or error).replace("_", " ").lower()
