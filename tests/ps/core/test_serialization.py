"""The form of a push in files: flat, as journals and checkpoints have always had it."""

import numpy as np

from tests.pushes import push_event
from thinwire.ops.types import Update
from thinwire.ps.core.serialization import from_plain, to_plain

NUMBERS = {
    "worker": 2,
    "incarnation": 7,
    "step": 5,
    "base_version": 3,
    "generation": 1,
    "epoch": 4,
    "samples": 6,
    "local_steps": 2,
    "loss": 1.5,
    "num_bytes": 99,
    "lag": 1,
    "learning_rate": 0.25,
    "loss_scale": 8.0,
    "overflow": True,
    "optimizer": 1,
    "repeats_batch": True,
    "batch_parts": 3,
    "settings": (0.5, 0.25),
    "without_gradient": (2,),
}
OTHERS = {"aux": None, "base_checksum": None, "change": None, "blocks": None}


def document(update, **numbers):
    plain = {"type": "Update", "of": {"indices": None, "values": update.values}}
    lists = {name: values for name, values in numbers.items() if isinstance(values, tuple)}
    numbers |= {name: {"type": "tuple", "of": list(values)} for name, values in lists.items()}
    return {"type": "Push", "of": {**numbers, **OTHERS, "update": plain}}


def test_a_push_in_a_file_is_flat():
    update = Update(None, np.ones(3, np.float32))
    push = push_event(update=update, schedule_rate=0.1, **NUMBERS)
    stored = document(update, **NUMBERS)
    assert to_plain(push) == stored
    assert to_plain(from_plain(stored)) == stored


def test_a_number_that_an_older_file_lacks_has_its_default():
    update = Update(None, np.ones(3, np.float32))
    numbers = {name: value for name, value in NUMBERS.items() if name != "batch_parts"}
    push = from_plain(document(update, **numbers))
    assert (push.head.batch_parts, push.head.loss_scale, push.origin.lag) == (0, 8.0, 1)
