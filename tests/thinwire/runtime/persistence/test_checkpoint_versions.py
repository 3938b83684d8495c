"""A valid checkpoint of another version is an error; no older checkpoint replaces it."""

import numpy as np
import pytest

from thinwire.ops.types import ConfigurationError
from thinwire.runtime.persistence import checkpoint
from thinwire.runtime.persistence.checkpoint import Checkpoints


def test_the_checkpoint_of_another_version_is_kept_and_named(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, {"w": np.ones(4, np.float32)})
    with monkeypatch.context() as later:
        later.setattr(checkpoint, "FORMAT_VERSION", checkpoint.FORMAT_VERSION + 1)
        newest = checkpoints.save(2, {"w": np.zeros(4, np.float32)})
        assert checkpoints.load_latest()[0] == 2
    words = rf"{newest.name} has format 2, but this version of Thinwire reads format 1"
    with pytest.raises(ConfigurationError, match=words):
        checkpoints.load_latest()
    assert newest.exists()
