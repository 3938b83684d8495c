"""A real S3-compatible server in this process, moto's, and storages that fail where a test says."""

import contextlib
import logging
import os
import time
import urllib.request

from thinwire.ops.persistence.object_store import ObjectStore, StorageError

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
        # What it holds belongs to this process, not to the server.
        reset = f"{environment['AWS_ENDPOINT_URL']}/moto-api/reset"
        urllib.request.urlopen(urllib.request.Request(reset, method="POST")).close()
        server.stop()


@contextlib.contextmanager
def slow_writes(seconds):
    """Let the server take so long before and after each object that it writes."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication

    handle = DomainDispatcherApplication.__call__

    def slowly(self, environ, start_response):
        is_write = environ["REQUEST_METHOD"] == "PUT"
        time.sleep(seconds if is_write else 0.0)
        result = handle(self, environ, start_response)
        time.sleep(seconds if is_write else 0.0)
        return result

    DomainDispatcherApplication.__call__ = slowly
    try:
        yield
    finally:
        DomainDispatcherApplication.__call__ = handle


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
