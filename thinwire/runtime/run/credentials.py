"""What a node shows to its peers, and what it requires of them; no files, no sockets."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Protection:
    """How far a connection is protected from others than this run's nodes."""

    encrypted: bool = False  # TLS
    authenticated: bool = False  # nobody is let in without a certificate or the token


NOT_PROTECTED = Protection()


@dataclasses.dataclass(frozen=True)
class Credentials:
    """One node's certificate, key, trusted authority and token; empty where there is none.

    `repr` shows none of them, so that they get into no log.
    """

    certificate: bytes = dataclasses.field(default=b"", repr=False)  # PEM, with its chain
    key: bytes = dataclasses.field(default=b"", repr=False)  # PEM
    authority: bytes = dataclasses.field(default=b"", repr=False)  # PEM
    token: bytes = dataclasses.field(default=b"", repr=False)

    @property
    def protection(self) -> Protection:
        """What protects those who listen with these."""
        encrypted = bool(self.certificate)
        return Protection(encrypted, (encrypted and bool(self.authority)) or bool(self.token))


NO_CREDENTIALS = Credentials()
