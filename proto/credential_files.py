"""Reads certificates, keys and the token, and says at once what is wrong with them."""

from __future__ import annotations

import dataclasses
import pathlib
import ssl
import stat
from typing import Any

from absl import logging

from ops.credentials import Credentials
from ops.types import ConfigurationError
from proto import credentials as trust

TOKEN_VARIABLE = "THINWIRE_TOKEN"
#: Whoever listens to a connection can try shorter ones out.
_SHORTEST_TOKEN_BYTES = 16
_MAX_TURNS = 10  # of a handshake; TLS needs four


@dataclasses.dataclass(frozen=True)
class Files:
    """Where a node's credentials are; None where a flag was not given."""

    certificate: str | None = None
    key: str | None = None
    authority: str | None = None
    token: str | None = None


def read(files: Files, token_in_environment: str, part: str, serves: bool) -> Credentials:
    """Return a node's credentials.

    Args:
        files: Their files.
        token_in_environment: Value of THINWIRE_TOKEN; empty: not set.
        part: URI of the node's part, which its certificate must name if it shows it to others.
        serves: Whether the node listens first of all; else it dials.

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


def _check_together(files: Files, serves: bool) -> None:
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


def _content(path: str, flag: str, secret: bool) -> bytes:
    """Return a file's bytes.

    Raises:
        ConfigurationError: It cannot be read.
    """
    try:
        if secret and stat.S_IMODE(pathlib.Path(path).stat().st_mode) & 0o077:
            logging.warning("--%s=%s can be read by other users; chmod 600 it", flag, path)
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"--{flag}={path} cannot be read ({error.strerror}); expected a file that this user "
            "may read."
        ) from error


def _pem(path: str | None, flag: str, kind: str, secret: bool = False) -> bytes:
    if path is None:
        return b""
    content = _content(path, flag, secret)
    if b"-----BEGIN" not in content or f"{kind}-----".encode() not in content:
        raise ConfigurationError(
            f"--{flag}={path} holds no {kind.lower()} in PEM form; expected a text with "
            f"-----BEGIN {kind}-----."
        )
    return content


def _token(path: str | None, in_environment: str) -> bytes:
    token, where = in_environment.strip().encode(), TOKEN_VARIABLE
    if path is not None:
        token, where = _content(path, "token_file", secret=True).strip(), f"--token_file={path}"
    if not token and path is None:
        return b""
    if len(token) < _SHORTEST_TOKEN_BYTES:
        raise ConfigurationError(
            f"{where}: the token has {len(token)} bytes; expected at least "
            f"{_SHORTEST_TOKEN_BYTES} that nobody can guess, such as `openssl rand -hex 32` makes."
        )
    return token


# -- certificates ------------------------------------------------------------------------------


def _check_certificate(files: Files, found: Credentials, part: str, serves: bool) -> None:
    """Shake hands with oneself, as the others will do it.

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
            "proto.certificates)."
        ) from error
    named = [value for kind, value in seen.get("subjectAltName", ()) if kind == "URI"]
    # Those who dial a PS look at its host's name; made elsewhere, its certificate may name no part.
    if part not in named and (not serves or any(trust.is_part(name) for name in named)):
        raise ConfigurationError(
            f"{where} names {', '.join(named) or 'no part in a run'}, and this node is {part}; "
            "give it its own certificate ({node} in the path stands for its name)."
        )
    if found.authority:
        _check_chain(files, found, serves)


def _check_chain(files: Files, found: Credentials, serves: bool) -> None:
    """Warn of a certificate that is not of the authority: others probably trust the same one."""
    contexts = _context(files, ssl.PROTOCOL_TLS_SERVER), _context(files, ssl.PROTOCOL_TLS_CLIENT)
    try:
        _show(contexts, found.authority, serves, whole_chain=True)
    except ssl.SSLCertVerificationError as error:
        logging.warning(
            "--tls_cert=%s does not stand the test of --tls_ca=%s (%s); nodes that trust that "
            "authority alone will refuse this one", files.certificate, files.authority,
            error.verify_message,
        )  # fmt: skip


def _check_authority(path: str, authority: bytes) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=_text(authority))
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"--tls_ca={path}: {_reason(error)}; expected certificates in PEM form."
        ) from error


def _context(files: Files, side: int) -> ssl.SSLContext:
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
    """Let one side show the certificate and the other judge it; return what it saw there.

    Args:
        ours: Server and client, both with the certificate.
        trusted: Certificates that the other side trusts.
        serves: Whether it is the server that shows it.
        whole_chain: Whether what is trusted must end a chain, and not stand somewhere in it.

    Raises:
        ssl.SSLError: It does not pass.
    """
    judge = ours[1] if serves else ours[0]
    if not whole_chain:
        judge.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    judge.load_verify_locations(cadata=_text(trusted))
    judge.verify_mode = ssl.CERT_REQUIRED
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
