"""Certificates for tests: an authority, a foreign authority, and each node's files."""

import pathlib

from thinwire.proto.security import certificates
from thinwire.proto.security.credentials import (
    PART_OF_SUPERVISOR,
    CredentialFiles,
    part_of_shard,
    part_of_worker,
)
from thinwire.runtime.run.credentials import Credentials

TOKEN = b"a token that nobody can guess"
HOSTS = ("127.0.0.1", "localhost")
SHARD, WORKER, OTHER_WORKER = part_of_shard(0), part_of_worker(1), part_of_worker(2)
SUPERVISOR = PART_OF_SUPERVISOR


class Papers:
    """One authority and the certificates that it has issued."""

    def __init__(self) -> None:
        self.issuer = certificates.authority(days=1)
        self.authority = self.issuer.pem()[0]
        self.by_name = {
            holder.name: certificates.issue(self.issuer, holder, days=1)
            for holder in certificates.holders(HOSTS, num_shards=2, num_workers=2)
        }

    def of(self, name: str, token: bytes = b"") -> Credentials:
        """Return a node's credentials."""
        return self.with_certificate(self.by_name[name], token)

    def with_certificate(
        self, issued: certificates.IssuedCertificate, token: bytes = b""
    ) -> Credentials:
        return Credentials(*issued.pem(), self.authority, token)

    def expired(self, name: str, part: str) -> certificates.IssuedCertificate:
        """Return a certificate that was good until a moment ago."""
        return certificates.issue(
            self.issuer, certificates.CertificateHolder(name, part, HOSTS), days=-1e-3
        )

    def write(
        self, folder: pathlib.Path, name: str, issued: certificates.IssuedCertificate
    ) -> CredentialFiles:
        """Write a certificate, its key and the authority; return where they are."""
        certificate, key = issued.pem()
        paths = [folder / f"{name}.crt", folder / f"{name}.key", folder / "ca.crt"]
        for path, content in zip(paths, (certificate, key, self.authority), strict=True):
            path.write_bytes(content)
            path.chmod(0o600)
        return CredentialFiles(*map(str, paths))
