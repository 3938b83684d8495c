"""A script's server or worker locks its run directory, as main.py's nodes do."""

import gc

import numpy as np
import pytest

from tests.thinwire import toy
from thinwire import PS, Worker, init_server
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.directory import lock_of
from thinwire.runtime.run.lock import LockOwner, owner_of

IN_USE = "checkpoints/{} is in use .*PS 0, pid"


def settings(folder):
    return {"run_dir": str(folder), "nb_workers": 1, "kernels": "numpy", "port": 0}


def test_a_second_server_is_refused_until_the_first_has_ended(tmp_path):
    given = settings(tmp_path)
    with init_server(given, toy.build()) as server:
        assert owner_of(lock_of(tmp_path, "PS", 0).path).role == "PS"
        before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
        assert before
        for second in (init_server, PS):
            with pytest.raises(ConfigurationError, match=IN_USE.format("ps-0")):
                second(given, toy.build())
        assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before
        assert server.stop_reason is None
    with init_server(given, toy.build()):
        pass


@pytest.mark.product
def test_a_server_that_is_never_started_frees_its_directory(tmp_path):
    with pytest.raises(ConfigurationError, match="epochs"):
        init_server(settings(tmp_path), toy.build(), epochs=1)
    server = init_server(settings(tmp_path), toy.build())
    with pytest.raises(ConfigurationError, match=IN_USE.format("ps-0")):
        init_server(settings(tmp_path), toy.build())
    del server
    gc.collect()
    with init_server(settings(tmp_path), toy.build()):
        pass


def test_a_second_worker_is_refused(tmp_path):
    examples = np.zeros((20, 6), np.float32), np.zeros(20, np.int32)
    with (
        lock_of(tmp_path, "Worker", 1).take(LockOwner.here("PS", 0)),
        pytest.raises(ConfigurationError, match=IN_USE.format("worker-1")),
    ):
        Worker(examples, settings(tmp_path), toy.build(), batch_size=5)
