"""Credentials of a node, and the protection they give its connections; no files, no sockets."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Protection:
    """Protection of a connection against processes that are not nodes of this run."""

    encrypted: bool = False  # True with TLS
    authenticated: bool = False  # True if a client must show a certificate or the token


NOT_PROTECTED = Protection()


@dataclasses.dataclass(frozen=True)
class Credentials:
    """A node's certificate, private key, trusted authority and token; empty if not configured.

    `repr` hides every field, so that no log shows a secret.
    """

    certificate: bytes = dataclasses.field(default=b"", repr=False)  # PEM, with its chain
    key: bytes = dataclasses.field(default=b"", repr=False)  # PEM private key
    authority: bytes = dataclasses.field(default=b"", repr=False)  # PEM
    token: bytes = dataclasses.field(default=b"", repr=False)

    @property
    def protection(self) -> Protection:
        """Protection of a server that listens with these credentials."""
        encrypted = bool(self.certificate)
        return Protection(encrypted, (encrypted and bool(self.authority)) or bool(self.token))


NO_CREDENTIALS = Credentials()
