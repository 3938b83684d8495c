"""Object storage at an address of `fsspec`, for example ``s3://bucket/folder``.

Only the module `fsspec_objects` imports `fsspec` and the package of a storage protocol, and only
for an address with a remote protocol. Storage credentials come from the places where the protocol's
own tools look for credentials (for S3: the variables ``AWS_ACCESS_KEY_ID``,
``AWS_SECRET_ACCESS_KEY`` and ``AWS_ENDPOINT_URL``, a profile, the host's role). A storage address
never holds credentials, because logs and flag files show the address.

A conditional request ("create this object unless it exists") keeps two processes from writing the
same object. Thinwire supports only storage protocols whose `fsspec` package sends such conditional
requests. Listings of the storage's objects are never cached.
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

#: Protocol of an address -> package that implements the protocol with conditional requests.
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
}
#: Time limits of a storage request while a node starts, in seconds. The limits are short, so that a
#: wrong address fails soon.
_AT_START: Mapping[str, Any] = {"connect_timeout": 3, "read_timeout": 10}
#: Time limits of a storage request after a node has started, in seconds.
_LATER: Mapping[str, Any] = {"connect_timeout": 5, "read_timeout": 60}
#: Number of attempts of a storage request while a node starts.
_ATTEMPTS_AT_START = 2
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSWORD|CREDENTIAL|ACCESS_KEY|ACCOUNT_KEY", re.IGNORECASE)
#: Length of the shortest secret that is masked in messages, in characters. Masking a shorter secret
#: would garble the messages.
_LEAST_SECRET = 6
_LARGEST_REQUEST = 5 << 30  # largest upload that S3 accepts in one request, in bytes


def open_objects(address: str, flag: str, is_start: bool = False) -> ObjectStore:
    """Return the object store at an address, without reading or writing an object.

    Args:
        address: Path of a folder, or address of `fsspec` such as ``s3://bucket/folder``.
        flag: Name of the flag that holds the address, for messages.
        is_start: True while a node starts, to use short time limits and few attempts.

    Raises:
        ConfigurationError: The storage address is malformed, or its protocol is not supported.
    """
    scheme = _SCHEME.match(address)
    protocol = scheme[1].lower() if scheme else "file"
    if protocol in ("file", "local"):
        return LocalObjects(address[scheme.end() :] if scheme else address)
    parts = urllib.parse.urlsplit(address)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigurationError(
            f"--{flag}={protocol}://...: the address must contain no user name, password, query or "
            "fragment, because logs show it; expected protocol://bucket/folder. Set credentials "
            "where the protocol's own tools look for them, for example in AWS_ACCESS_KEY_ID."
        )
    if protocol not in PACKAGES:
        raise ConfigurationError(
            f"--{flag}={address}: the protocol {protocol} is unknown, or cannot create an object "
            "on the condition that no object of this name exists; expected a folder, or "
            f"{', '.join(f'{name}://' for name in PACKAGES)}"
        )
    if not parts.netloc or not parts.path.strip("/"):
        raise ConfigurationError(
            f"--{flag}={address}: expected a bucket and a folder that only this run uses, for "
            f"example {protocol}://bucket/runs/first."
        )
    files = _filesystem(address, protocol, flag, is_start)
    # s3fs would upload an object larger than the chunk size in several requests, and a process
    # killed between two requests would leave an unfinished upload in the storage.
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
    """Return an error's text without URL queries, credentials and secret variables' values."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"(\w+://[^\s?\"']*)\?[^\s\"']*", r"\1", text)
    text = re.sub(r"(\w+://)[^\s/@\"']*@", r"\1", text)
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= _LEAST_SECRET:
            text = text.replace(value, "***")
    return text


class FsspecObjects(ObjectStore):
    """Object store in a file system of `fsspec`, where one request writes a whole object.

    Args:
        filesystem: File system of `fsspec` that does not cache listings.
        address: Address of the objects' folder, with the storage protocol.
        options: Options that every write request passes to the file system.
    """

    def __init__(
        self, filesystem: Any, address: str, options: Mapping[str, Any] | None = None
    ) -> None:
        self._files, self.address, self._options = filesystem, address, dict(options or {})
        self._root = str(filesystem._strip_protocol(address)).rstrip("/")

    def put(self, name: str, data: bytes) -> None:
        """Write an object (a byte string) under a name; replace an existing object of the name."""
        self._send(name, data, "overwrite")

    def create(self, name: str, data: bytes) -> None:
        """Write an object (a byte string) under a new name, or raise ObjectExistsError."""
        self._send(name, data, "create")

    def get(self, name: str) -> bytes:
        """Return the bytes of the object with a name, or raise ObjectMissingError."""
        with self._failures("read", name):
            try:
                return bytes(self._files.cat_file(self._path(name)))
            except FileNotFoundError as error:
                raise ObjectMissingError(name) from error

    def names(self) -> list[str]:
        """Return the names of all objects in the store, sorted."""
        with self._failures("list", ""):
            self._files.invalidate_cache()
            paths = self._files.find(self._root)
            start = len(self._root) + 1
            return sorted(path[start:] for path in paths if path.startswith(f"{self._root}/"))

    def remove(self, names: Iterable[str]) -> None:
        """Remove the objects with the given names; ignore missing objects."""
        for name in names:
            with self._failures("remove", name), contextlib.suppress(FileNotFoundError):
                self._files.rm_file(self._path(name))

    def below(self, name: str) -> FsspecObjects:
        """Return an object store of this store's objects with names that start with ``name/``."""
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
