"""Credentials of a node (TLS certificate, token), and how they protect the node's connections."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Protection:
    """Whether TLS encryption and authentication protect a connection against other processes."""

    encrypted: bool = False  # True if the connection uses TLS
    authenticated: bool = False  # True if a client must present a certificate or the token


NOT_PROTECTED = Protection()


@dataclasses.dataclass(frozen=True)
class Credentials:
    """A node's TLS certificate, private key, trusted CA and token; empty if not configured.

    `repr` hides every field of the credentials, so that no log shows a secret.
    """

    certificate: bytes = dataclasses.field(default=b"", repr=False)  # certificate chain, PEM
    key: bytes = dataclasses.field(default=b"", repr=False)  # private key of the node, PEM
    authority: bytes = dataclasses.field(default=b"", repr=False)  # trusted CA's certificate, PEM
    token: bytes = dataclasses.field(default=b"", repr=False)

    @property
    def protection(self) -> Protection:
        """Protection (TLS, authentication) of connections to a server with these credentials."""
        encrypted = bool(self.certificate)
        return Protection(encrypted, (encrypted and bool(self.authority)) or bool(self.token))


NO_CREDENTIALS = Credentials()
