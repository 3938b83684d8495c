"""Any offer of a worker is accepted or rejected in words, without imports or large allocations."""

import json
import random
import tracemalloc

import pytest
from absl import logging
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.offer_targets import MOST_BYTES, honest, offer_to, rows
from tests.threads.offered import OFFER
from thinwire.ops.offer import MAX_DOCUMENT_BYTES
from thinwire.proto import thinwire_pb2 as pb

SIZE = 4 * OFFER.spec.num_parameters
#: Content of one offer: its frames, its document as Python values, and its payload.
LIMIT = 64 << 20


@pytest.fixture(autouse=True)
def quiet():
    before = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    yield
    logging.set_verbosity(before)


NUMBERS = (-1, 0, 0.5, 1e308, float("nan"), float("inf"), 1 << 31, 1 << 62, 10**400)
WORDS = (
    *("", "float32", "lambda x: x", "os.system", "__import__", "builtins.eval", "a" * 2000),
    *("\x00", "\ud800", "../../etc", "keras.layers.Lambda", "SGD"),
)
NESTED = (
    *([], {}, [[[]]], {"": {}}, {"name": "SGD", "config": {}}),
    {"class_name": "Lambda", "config": {"function": "x"}},
)
ODD = st.sampled_from([None, True, *NUMBERS, *WORDS, *NESTED])
ANY = st.recursive(
    ODD,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "config", "module", "registered_name", "learning_rate"]), inner
        )
    ),
    max_leaves=6,
)


def places(value, place=()):
    """Yield the place of every value within a document."""
    yield place
    if isinstance(value, dict):
        inner = value.items()
    else:
        inner = enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*place, key))


PLACES = list(places(rows()))[1:]


def with_value(place, value):
    """Return the honest document with another value at a place."""
    document = rows()
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return json.dumps(document).encode()


@settings(max_examples=300, deadline=None)
@given(place=st.sampled_from(PLACES), value=ANY, number=st.integers(0, 2))
def test_a_document_with_one_odd_value_is_refused_or_taken(place, value, number):
    stream = offer_to(number, with_value(place, value), None, [bytes(SIZE)])
    assert all(message.refusal.message for message, _ in stream.received)


@settings(max_examples=100, deadline=None)
@given(document=ANY, sizes=st.lists(st.integers(0, 2000), max_size=4), announced=st.integers(0))
def test_any_document_and_any_payload_are_refused(document, sizes, announced):
    offer_to(0, json.dumps(document).encode(), announced, [bytes(size) for size in sizes])


def test_an_honest_offer_is_taken():
    for number in (0, 1, 2):
        assert honest(number).reasons == [pb.REASON_NO_MODEL]


LARGE = {
    "spec": [[f"v{number}", [1], "float32"] for number in range(3000)],
    "unused": ["dense/bias"] * 50_000,
    "script_optimizer": "x" * 900_000,
    "num_examples": 10**4000,
}


@pytest.mark.parametrize("name", sorted(LARGE))
def test_large_documents_take_little_memory(name):
    document = with_value((name,), LARGE[name])
    assert len(document) < MAX_DOCUMENT_BYTES
    check_memory(document, [bytes(SIZE)])


def test_deep_and_long_documents_take_little_memory():
    for text in (b"[" * 900_000, b"[" * 450_000 + b"]" * 450_000, b"[[],[],[]," * 90_000 + b"1]"):
        check_memory(text, [])


def test_a_payload_is_allocated_only_if_its_model_is_allowed():
    spec = [["w", [1 << 20, 1 << 10], "float32"]]
    check_memory(with_value(("spec",), spec), [bytes(1 << 19)], announced=1 << 32)
    allowed = [["w", [MOST_BYTES // 4], "float32"]]
    check_memory(with_value(("spec",), allowed), [bytes(1 << 19)] * 2, announced=MOST_BYTES)


def check_memory(document, pieces, announced=None):
    for number in (0, 1, 2):
        honest(number)  # the offer is not charged for first allocations
    tracemalloc.start()
    try:
        for number in (0, 2):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            offer_to(number, document, announced, pieces)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < LIMIT
    finally:
        tracemalloc.stop()


def test_spoilt_bytes_are_refused_in_words():
    dice, good = random.Random(5), json.dumps(rows()).encode()
    for _ in range(300):
        spoilt = bytearray(good)
        for _ in range(dice.randint(1, 4)):
            spoilt[dice.randrange(len(spoilt))] = dice.randrange(256)
        offer_to(dice.randrange(3), bytes(spoilt), None, [bytes(SIZE)])
