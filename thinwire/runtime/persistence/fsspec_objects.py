"""Objects at any address of `fsspec`: ``s3://bucket/folder`` and the like.

`fsspec` and the package of the protocol are imported here alone, and only for such an address.
Credentials come from where the protocol's own tools look for them (for S3: the variables
``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_ENDPOINT_URL``, a profile, the machine's
role), never from the address, which logs and files of flags hold.

Two writers are kept apart by a conditional request, which the storage must decide on; so only
protocols are taken whose `fsspec` package sends one. Listings are never cached.
"""

from __future__ import annotations

import contextlib
import os
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from thinwire.ops.types import ConfigurationError
from thinwire.runtime.persistence.object_store import (
    LocalObjects,
    ObjectExistsError,
    ObjectMissingError,
    ObjectStore,
    StorageError,
)

#: Protocol -> the package that speaks it, and that creates an object only if there is none.
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
}
#: Time until an attempt counts as failed, in seconds, and attempts, while a node starts; later.
_AT_START: Mapping[str, Any] = {"connect_timeout": 3, "read_timeout": 10}
_LATER: Mapping[str, Any] = {"connect_timeout": 5, "read_timeout": 60}
_ATTEMPTS_AT_START = 2
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSWORD|CREDENTIAL|ACCESS_KEY|ACCOUNT_KEY", re.IGNORECASE)
_LEAST_SECRET = 6
_LARGEST_REQUEST = 5 << 30  # of S3, in bytes


def open_objects(address: str, flag: str, is_start: bool = False) -> ObjectStore:
    """Return the storage at an address; nothing is read or written there.

    Args:
        address: A folder, or an address of `fsspec`.
        flag: That names it, for messages.
        is_start: Give up soon where it cannot be reached.

    Raises:
        ConfigurationError: Nothing can be kept there.
    """
    scheme = _SCHEME.match(address)
    protocol = scheme[1].lower() if scheme else "file"
    if protocol in ("file", "local"):
        return LocalObjects(address[scheme.end() :] if scheme else address)
    parts = urllib.parse.urlsplit(address)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigurationError(
            f"--{flag}={protocol}://...: an address holds no name, password, query or fragment "
            "here, for logs show it; expected protocol://bucket/folder. Give credentials where the "
            "protocol's own tools look for them, such as AWS_ACCESS_KEY_ID."
        )
    if protocol not in PACKAGES:
        raise ConfigurationError(
            f"--{flag}={address}: the protocol {protocol} is unknown, or creates no object only if "
            f"there is none; expected a folder, or {', '.join(f'{name}://' for name in PACKAGES)}"
        )
    if not parts.netloc or not parts.path.strip("/"):
        raise ConfigurationError(
            f"--{flag}={address}: expected a bucket and a folder of this run's own in it, such as "
            f"{protocol}://bucket/runs/first."
        )
    files = _filesystem(address, protocol, flag, is_start)
    # Above this size s3fs would upload an object in pieces, which a killed process leaves behind.
    options = {"chunksize": _LARGEST_REQUEST} if PACKAGES[protocol] == "s3fs" else {}
    return FsspecObjects(files, address.rstrip("/"), options)


def _filesystem(address: str, protocol: str, flag: str, is_start: bool) -> Any:
    package = PACKAGES[protocol]
    try:
        import fsspec

        chosen = fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise ConfigurationError(
            f"--{flag}={address} needs the packages fsspec and {package}: pip install "
            f"{'thinwire[s3]' if package == 's3fs' else f'fsspec {package}'}."
        ) from error
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if package == "s3fs":
        limits = _AT_START if is_start else _LATER
        options["config_kwargs"] = {**limits, "retries": {"max_attempts": 1}}
    try:
        filesystem = chosen(**options)
    except Exception as error:
        raise ConfigurationError(f"--{flag}={address}: {without_secrets(error)}.") from error
    if is_start and package == "s3fs":
        filesystem.retries = _ATTEMPTS_AT_START
    return filesystem


def without_secrets(error: BaseException) -> str:
    """Return the text of an error without queries of addresses and values of secret variables."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"(\w+://[^\s?\"']*)\?[^\s\"']*", r"\1", text)
    text = re.sub(r"(\w+://)[^\s/@\"']*@", r"\1", text)
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= _LEAST_SECRET:
            text = text.replace(value, "***")
    return text


class FsspecObjects(ObjectStore):
    """Objects of a file system of `fsspec`; each is one request, so it is there whole or not.

    Args:
        filesystem: That does not cache listings.
        address: Of the folder, with its protocol.
        options: Of a request that writes.
    """

    def __init__(
        self, filesystem: Any, address: str, options: Mapping[str, Any] | None = None
    ) -> None:
        self._files, self.address, self._options = filesystem, address, dict(options or {})
        self._root = str(filesystem._strip_protocol(address)).rstrip("/")

    def put(self, name: str, data: bytes) -> None:
        """See ObjectStore."""
        self._send(name, data, "overwrite")

    def create(self, name: str, data: bytes) -> None:
        """See ObjectStore."""
        self._send(name, data, "create")

    def get(self, name: str) -> bytes:
        """See ObjectStore."""
        with self._failures("read", name):
            try:
                return bytes(self._files.cat_file(self._path(name)))
            except FileNotFoundError as error:
                raise ObjectMissingError(name) from error

    def names(self) -> list[str]:
        """See ObjectStore."""
        with self._failures("list", ""):
            self._files.invalidate_cache()
            found = self._files.find(self._root)
            start = len(self._root) + 1
            return sorted(path[start:] for path in found if path.startswith(f"{self._root}/"))

    def remove(self, names: Iterable[str]) -> None:
        """See ObjectStore."""
        for name in names:
            with self._failures("remove", name), contextlib.suppress(FileNotFoundError):
                self._files.rm_file(self._path(name))

    def below(self, name: str) -> FsspecObjects:
        """See ObjectStore."""
        return FsspecObjects(self._files, f"{self.address}/{name}", self._options)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _send(self, name: str, data: bytes, mode: str) -> None:
        with self._failures("write", name):
            try:
                self._files.pipe_file(self._path(name), data, mode=mode, **self._options)
            except FileExistsError as error:
                raise ObjectExistsError(name) from error

    @contextlib.contextmanager
    def _failures(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        except (ObjectExistsError, ObjectMissingError, StorageError):
            raise
        except Exception as error:
            where = f"{self.address}/{name}" if name else self.address
            raise StorageError(f"cannot {verb} {where}: {without_secrets(error)}") from error
