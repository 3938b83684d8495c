"""A real S3-compatible server (moto) in this process, and storages that fail on request."""

import contextlib
import logging
import os
import threading
import urllib.request

from thinwire.runtime.persistence.object_store import ObjectStore, StorageError

BUCKET = "bucket"
SECRET = "nobody-may-read-this-secret"


def credentials(port):
    """Return the environment of processes that use the server."""
    return {
        "AWS_ACCESS_KEY_ID": "reader",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextlib.contextmanager
def s3_server():
    """Run a server with one bucket; yield the environment of its users."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    environment = credentials(port)
    session = boto3.Session(
        environment["AWS_ACCESS_KEY_ID"], SECRET, region_name=environment["AWS_DEFAULT_REGION"]
    )
    client = session.client("s3", endpoint_url=environment["AWS_ENDPOINT_URL"])
    try:
        client.create_bucket(Bucket=BUCKET)
        yield environment
    finally:
        client.close()
        # The stored objects belong to this process, not to the server.
        reset = f"{environment['AWS_ENDPOINT_URL']}/moto-api/reset"
        urllib.request.urlopen(urllib.request.Request(reset, method="POST")).close()
        server.stop()


class HeldWrites:
    """Requests that write to the server; one request may be held until its sender is dead.

    Attributes:
        is_held: Set while a request is held.
    """

    def __init__(self):
        self.is_held, self._go = threading.Event(), threading.Event()
        self._left, self._before, self._lock = 0, False, threading.Lock()

    @contextlib.contextmanager
    def hold(self, number, before):
        """Hold the request of this number from now on, then let it go.

        Args:
            number: From 1.
            before: Hold it before it takes effect, which it then never does; else its reply.
        """
        self.is_held.clear()
        self._go.clear()
        with self._lock:
            self._left, self._before = number, before
        try:
            yield
        finally:
            self._go.set()

    def handle(self, handle, is_write):
        """Handle a request; a held request is handled later."""
        with self._lock:
            self._left -= is_write
            holds = is_write and self._left == 0
        if holds and self._before:
            self._wait()
            raise ConnectionAbortedError("its sender is dead")
        result = handle()
        if holds:
            self._wait()
        return result

    def _wait(self):
        self.is_held.set()
        self._go.wait(600)


@contextlib.contextmanager
def held_writes():
    """Let a test hold requests that write to the server."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication

    call, writes = DomainDispatcherApplication.__call__, HeldWrites()

    def held(self, environ, start_response):
        is_write = environ["REQUEST_METHOD"] in ("PUT", "POST", "DELETE")
        return writes.handle(lambda: call(self, environ, start_response), is_write)

    DomainDispatcherApplication.__call__ = held
    try:
        yield writes
    finally:
        DomainDispatcherApplication.__call__ = call


@contextlib.contextmanager
def environment_of(variables):
    """Set variables of this process, and put them back."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class FailingObjects(ObjectStore):
    """A storage that dies at its N-th request that writes, before or after it took effect."""

    def __init__(self, store, most_writes, is_lost_reply=False):
        self._store, self._left, self._is_lost_reply = store, [most_writes], is_lost_reply
        self.address = store.address

    def _write(self, call):
        self._left[0] -= 1
        if self._left[0] == 0 and self._is_lost_reply:
            call()
        if self._left[0] <= 0 and not (self._left[0] < 0 and self._is_lost_reply):
            raise StorageError("the storage is gone")
        call()

    def put(self, name, data):
        self._write(lambda: self._store.put(name, data))

    def create(self, name, data):
        self._write(lambda: self._store.create(name, data))

    def get(self, name):
        return self._store.get(name)

    def names(self):
        return self._store.names()

    def remove(self, names):
        for name in names:
            self._write(lambda each=name: self._store.remove([each]))

    def below(self, name):
        below = FailingObjects(self._store.below(name), 0, self._is_lost_reply)
        below._left = self._left
        return below
