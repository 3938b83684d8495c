"""The command ``thinwire certificates``: creates a run's authority and a certificate for each node.

The constant `_ABOUT` lists the files that ``thinwire certificates`` writes.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import ipaddress
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from thinwire.ops.types import ConfigurationError
from thinwire.proto.security.credentials import (
    PART_OF_SUPERVISOR,
    part_of_shard,
    part_of_worker,
    server_name_of_worker,
)
from thinwire.runtime.run.streams import standard_streams

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

_ABOUT = """Creates the certificates of a run: a new authority, and a certificate for each node.

thinwire certificates --out certs --hosts 10.0.0.1,ps.example --shards 2 --workers 4

The folder then holds ca.crt, ca.key, and ps-0.crt, ps-0.key, worker-1.crt ... supervisor-0.key.
Every node needs ca.crt and its own two files. Keep ca.key secret: its owner can create new
certificates. Run again with the same folder, the command uses the folder's authority and creates
the missing certificates.
"""
_MOST_DAYS = 36_500
#: Time by which a certificate is valid before its creation. Without this margin, a machine with a
#: slow clock would reject a new certificate.
_EARLIER = datetime.timedelta(hours=1)


@dataclasses.dataclass(frozen=True)
class IssuedCertificate:
    """An X.509 certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def pem(self) -> tuple[bytes, bytes]:
        """Return the certificate and its private key in PEM form."""
        _, forms, *_ = _library()
        key = self.key.private_bytes(
            forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption()
        )
        return self.certificate.public_bytes(forms.Encoding.PEM), key


@dataclasses.dataclass(frozen=True)
class CertificateHolder:
    """A node of the run that needs a certificate.

    Attributes:
        name: Name of the node and of its files, for example worker-3.
        part: URI in the certificate that names the node's role and id in the run.
        hosts: Host names and addresses at which clients connect to the node.
        serves: True if clients connect to the node, as they connect to a PS.
    """

    name: str
    part: str
    hosts: tuple[str, ...] = ()
    serves: bool = True


def holders(hosts: Sequence[str], num_shards: int, num_workers: int) -> list[CertificateHolder]:
    """Return the nodes of a run, which all need a certificate.

    Args:
        hosts: Host names and addresses of the machines on which a parameter server (PS) runs.
        num_shards: Number of PS shards of the run.
        num_workers: Number of workers of the run.
    """
    shards = [
        CertificateHolder(f"ps-{j}", part_of_shard(j), tuple(hosts)) for j in range(num_shards)
    ]
    workers = [
        CertificateHolder(f"worker-{n}", part_of_worker(n), (server_name_of_worker(n),))
        for n in range(1, num_workers + 1)
    ]
    return [*shards, *workers, CertificateHolder("supervisor-0", PART_OF_SUPERVISOR, serves=False)]


def authority(days: float) -> IssuedCertificate:
    """Return a new certificate authority, self-signed and valid for a number of ``days``."""
    x509, *_ = _library()
    usage = x509.KeyUsage(
        key_cert_sign=True,
        crl_sign=True,
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    extensions = [(x509.BasicConstraints(ca=True, path_length=0), True), (usage, True)]
    return _signed("Thinwire run authority", None, days, extensions)


def issue(by: IssuedCertificate, holder: CertificateHolder, days: float) -> IssuedCertificate:
    """Return a new certificate for a node, signed by the run's certificate authority."""
    x509, *_ = _library()
    names = [x509.UniformResourceIdentifier(holder.part), *map(_host, holder.hosts)]
    purposes = [x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    if holder.serves:
        purposes.append(x509.ExtendedKeyUsageOID.SERVER_AUTH)
    extensions = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.SubjectAlternativeName(names), False),
        (x509.ExtendedKeyUsage(purposes), False),
    ]
    return _signed(holder.name, by, days, extensions)


def make(folder: pathlib.Path, wanted: Sequence[CertificateHolder], days: float) -> list[str]:
    """Write a certificate authority and certificates to a folder; keep existing files.

    Args:
        folder: Folder for the certificate files, created if necessary.
        wanted: Nodes that need a certificate.
        days: Validity of new certificates, in days.

    Returns:
        Names of the files that were written.

    Raises:
        ConfigurationError: The folder cannot be written, or holds only one of the two files
            (certificate and key) of the authority.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        issuer, written = _authority_in(folder, days)
        for holder in wanted:
            if not (folder / f"{holder.name}.crt").exists():
                written += _write(folder, holder.name, issue(issuer, holder, days))
    except OSError as error:
        raise ConfigurationError(
            f"--out={folder} cannot be written ({error}); choose another folder."
        ) from error
    return written


def _authority_in(folder: pathlib.Path, days: float) -> tuple[IssuedCertificate, list[str]]:
    x509, forms, *_ = _library()
    certificate, key = folder / "ca.crt", folder / "ca.key"
    if not certificate.exists() and not key.exists():
        issuer = authority(days)
        return issuer, _write(folder, "ca", issuer)
    if not (certificate.exists() and key.exists()):
        raise ConfigurationError(
            f"--out={folder} contains only one of the files ca.crt and ca.key; expected both "
            "files, or neither for a new certificate authority."
        )
    try:
        private: Any = forms.load_pem_private_key(key.read_bytes(), password=None)
        public = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (ValueError, TypeError) as error:  # an encrypted key file raises TypeError
        raise ConfigurationError(
            f"--out={folder}: ca.crt and ca.key are no certificate and unencrypted private key in "
            "PEM form; give the folder of a CA that this command created, or an empty folder."
        ) from error
    return IssuedCertificate(public, private), []


def _write(folder: pathlib.Path, name: str, issued: IssuedCertificate) -> list[str]:
    """Write a certificate and its private key to a folder; return the names of both files."""
    # O_EXCL with mode 0600 creates the key file unreadable for other users. With a chmod after the
    # write, another user could read the key before the chmod.
    certificate, key = issued.pem()
    (folder / f"{name}.key").unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(folder / f"{name}.key", flags, 0o600), "wb") as file:
        file.write(key)
    (folder / f"{name}.crt").write_bytes(certificate)
    return [f"{name}.crt", f"{name}.key"]


# -- X.509 -------------------------------------------------------------------------------------


def _library() -> tuple[Any, ...]:
    """Return the package cryptography's modules x509, serialization, hashes and ec.

    Raises:
        ConfigurationError: The package cryptography is not installed.
    """
    primitives = "cryptography.hazmat.primitives"
    names = "serialization", "hashes", "asymmetric.ec"
    try:
        return (
            importlib.import_module("cryptography.x509"),
            *(importlib.import_module(f"{primitives}.{name}") for name in names),
        )
    except ImportError as error:
        raise ConfigurationError(
            "creating certificates needs the package cryptography, which is not installed; "
            "install it (thinwire's extra `tls`), or create certificates with openssl, with the "
            "content that docs/reference/security.md lists. Nodes do not need the package."
        ) from error


def _host(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _signed(
    holder: str, issuer: IssuedCertificate | None, days: float, extensions: list[tuple[Any, bool]]
) -> IssuedCertificate:
    """Return a new certificate with a new key.

    Args:
        holder: Name of the holder.
        issuer: Authority that signs the certificate; None for a self-signed certificate.
        days: Validity of the certificate, in days.
        extensions: Pairs of an extension of the certificate and True if it is critical.
    """
    x509, _, hashes, ec = _library()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, holder)])
    now = datetime.datetime.now(datetime.UTC)
    until = now + datetime.timedelta(days=days)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name if issuer is None else issuer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, until) - _EARLIER)
        .not_valid_after(until)
    )
    for extension, is_critical in extensions:
        builder = builder.add_extension(extension, critical=is_critical)
    signing_key = key if issuer is None else issuer.key
    return IssuedCertificate(builder.sign(signing_key, hashes.SHA256()), key)


def main(arguments: Sequence[str] | None = None) -> int:
    """Create the certificates that the command line requests; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="thinwire certificates",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", required=True, type=pathlib.Path, help="Output folder. [folder; no default]")
    add(
        *("--hosts",),
        default="127.0.0.1,localhost",
        help="Hosts of the PS. [names and addresses,...; default %(default)s]",
    )
    add("--shards", type=int, default=1, help="PS shards, --nb_ps. [count; default %(default)s]")
    add(
        "--workers",
        type=int,
        default=4,
        help="Workers, --nb_workers. [count; default %(default)s]",
    )
    add("--days", type=float, default=365.0, help="Time of validity. [days; default %(default)g]")
    options = parser.parse_args(arguments)
    hosts = [host.strip() for host in options.hosts.split(",") if host.strip()]
    if not hosts or options.shards < 1 or options.workers < 1:
        parser.error("--hosts must not be empty, and --shards and --workers must be at least 1")
    if not 0 < options.days <= _MOST_DAYS:  # the comparison is False for NaN, too
        parser.error(f"--days={options.days:g}: expected more than 0 and at most {_MOST_DAYS} days")
    try:
        written = make(options.out, holders(hosts, options.shards, options.workers), options.days)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{options.out}: {', '.join(written) or 'nothing was missing'}\n")
    return 0


if __name__ == "__main__":
    with standard_streams():
        sys.exit(main())
