"""Makes the certificates of a run: an authority of its own, and one for each node.

The command ``thinwire certificates``; `_ABOUT` lists the files that it writes.
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

_ABOUT = """Makes the certificates of a run: an authority of its own, and one for each node.

thinwire certificates --out certs --hosts 10.0.0.1,ps.example --shards 2 --workers 4

The folder then holds ca.crt, ca.key, and ps-0.crt, ps-0.key, worker-1.crt ... supervisor-0.key.
Every node needs ca.crt and its own two files; ca.key makes new certificates and belongs to nobody
else. Run again with the same folder, it uses the authority there and makes what is missing.
"""
_MOST_DAYS = 36_500
#: Clocks of machines differ; a certificate is valid from so long before it was made.
_EARLIER = datetime.timedelta(hours=1)


@dataclasses.dataclass(frozen=True)
class IssuedCertificate:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def pem(self) -> tuple[bytes, bytes]:
        """Return certificate and key in PEM form."""
        _, forms = _library()
        key = self.key.private_bytes(
            forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption()
        )
        return self.certificate.public_bytes(forms.Encoding.PEM), key


@dataclasses.dataclass(frozen=True)
class CertificateHolder:
    """Whose certificate it is.

    Attributes:
        name: Of the node, such as worker-3, and of its files.
        part: URI that stands for its part in the run.
        hosts: Names and addresses at which it is dialled.
        serves: Whether anybody dials it.
    """

    name: str
    part: str
    hosts: tuple[str, ...] = ()
    serves: bool = True


def holders(hosts: Sequence[str], num_shards: int, num_workers: int) -> list[CertificateHolder]:
    """Return all nodes of a run.

    Args:
        hosts: Names and addresses of the machines with a PS.
        num_shards: PS shards.
        num_workers: Workers.
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
    """Return a new authority, which vouches for itself."""
    x509, _ = _library()
    key, name = _new_key(), _name("Thinwire run authority")
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
    builder = (
        _builder(name, name, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    return IssuedCertificate(_signed(builder, key), key)


def issue(by: IssuedCertificate, holder: CertificateHolder, days: float) -> IssuedCertificate:
    """Return a new certificate of an authority."""
    x509, _ = _library()
    key, names = _new_key(), [x509.UniformResourceIdentifier(holder.part)]
    names += [_host(host) for host in holder.hosts]
    purposes = [x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    if holder.serves:
        purposes.append(x509.ExtendedKeyUsageOID.SERVER_AUTH)
    builder = (
        _builder(_name(holder.name), by.certificate.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    )
    return IssuedCertificate(_signed(builder, by.key), key)


def make(folder: pathlib.Path, wanted: Sequence[CertificateHolder], days: float) -> list[str]:
    """Write an authority and certificates, but none that is there already.

    Returns:
        Names of the files that were written.

    Raises:
        ConfigurationError: The folder cannot be written, or holds half an authority.
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
    x509, forms = _library()
    certificate, key = folder / "ca.crt", folder / "ca.key"
    if not certificate.exists() and not key.exists():
        issuer = authority(days)
        return issuer, _write(folder, "ca", issuer)
    if not (certificate.exists() and key.exists()):
        raise ConfigurationError(
            f"--out={folder} holds one of ca.crt and ca.key; expected both, or neither for a new "
            "authority."
        )
    try:
        private: Any = forms.load_pem_private_key(key.read_bytes(), password=None)
        public = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (ValueError, TypeError) as error:  # the latter for a key that is encrypted
        raise ConfigurationError(
            f"--out={folder}: ca.crt and ca.key are no certificate and unencrypted private key in "
            "PEM form; give the folder of an authority that this command made, or an empty one."
        ) from error
    return IssuedCertificate(public, private), []


def _write(folder: pathlib.Path, name: str, issued: IssuedCertificate) -> list[str]:
    """Write a pair; nobody else may read the key, at no moment."""
    certificate, key = issued.pem()
    (folder / f"{name}.key").unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(folder / f"{name}.key", flags, 0o600), "wb") as file:
        file.write(key)
    (folder / f"{name}.crt").write_bytes(certificate)
    return [f"{name}.crt", f"{name}.key"]


# -- X.509 -------------------------------------------------------------------------------------


def _library() -> tuple[Any, Any]:
    """Return cryptography's modules for certificates and for the forms of keys.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        return (
            importlib.import_module("cryptography.x509"),
            importlib.import_module("cryptography.hazmat.primitives.serialization"),
        )
    except ImportError as error:
        raise ConfigurationError(
            "making certificates needs the package cryptography, which is not installed here; "
            "install it (it is this project's extra `tls`), or make them with openssl, with the "
            "content that docs/reference/security.md lists. Nodes do not need it."
        ) from error


def _new_key() -> ec.EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _name(text: str) -> x509.Name:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _host(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    until = now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, until) - _EARLIER)
        .not_valid_after(until)
    )


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography.hazmat.primitives import hashes

    return builder.sign(key, hashes.SHA256())


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the certificates that the command line requests; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="thinwire certificates",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", required=True, type=pathlib.Path, help="Where the files go. [folder; no default]")
    add(
        *("--hosts",),
        default="127.0.0.1,localhost",
        help="Where the PS are dialled. [names and addresses,...; default %(default)s]",
    )
    add("--shards", type=int, default=1, help="PS shards, --nb_ps. [count; default %(default)s]")
    add(
        "--workers", type=int, default=4, help="Workers, --nb_workers. [count; default %(default)s]"
    )
    add("--days", type=float, default=365.0, help="Validity. [days; default %(default)g]")
    given = parser.parse_args(arguments)
    hosts = [host.strip() for host in given.hosts.split(",") if host.strip()]
    if not hosts or given.shards < 1 or given.workers < 1:
        parser.error("--hosts, --shards and --workers must not be empty, 0 or less")
    if not 0 < given.days <= _MOST_DAYS:  # nor NaN
        parser.error(f"--days={given.days:g}: expected more than 0, and at most {_MOST_DAYS}")
    try:
        written = make(given.out, holders(hosts, given.shards, given.workers), given.days)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{given.out}: {', '.join(written) or 'nothing was missing'}\n")
    return 0


if __name__ == "__main__":
    with standard_streams():
        sys.exit(main())
