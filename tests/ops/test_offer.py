"""A script's model as a document: round trip, and each invalid offer is rejected with a reason."""

import json

import numpy as np
import pytest

from thinwire.ops.offer import (
    MAX_DOCUMENT_BYTES,
    MAX_VARIABLES,
    Described,
    LossScale,
    Offer,
    OptimizerOffer,
    read_offer,
    weights_digest,
)
from thinwire.ops.types import ConfigurationError, ModelSpec, TensorSpec

SPEC = ModelSpec((TensorSpec("dense/kernel", (4, 3)), TensorSpec("dense/bias", (3,))))
OFFER = Offer(
    spec=SPEC,
    statistics=2,
    optimizers=(
        OptimizerOffer(Described("AdamW", {"learning_rate": 0.001}), ("dense/bias",), "batches"),
    ),
    constraints={"dense/kernel": Described("NonNeg", {})},
    unused=("dense/bias",),
    loss_scale=LossScale(32768.0, 2000),
    num_examples=1000,
    weights_digest=weights_digest(np.zeros(15, np.float32)),
    script_optimizer="AdamW",
)
LIMIT = 1 << 20


def changed(**rows):
    return json.dumps(json.loads(OFFER.to_json()) | rows)


def test_an_offer_survives_the_wire():
    read = read_offer(OFFER.to_json(), LIMIT)
    assert read == OFFER
    assert read.to_json() == OFFER.to_json()
    assert read_offer(Offer(SPEC).to_json().encode(), LIMIT) == Offer(SPEC)


def test_all_scripts_have_the_rows_of_the_fingerprint_alike_but_not_the_weights():
    rows = dict(OFFER.fingerprint())
    assert all(name.startswith("script.") for name in rows)
    assert "script.optimizers" in rows
    assert not {"script.spec", "script.weights_digest", "script.format"} & set(rows)


def test_a_rate_is_compared_only_where_it_is_a_schedule():
    def rows(rate):
        described = Described("Adam", {"learning_rate": rate, "beta_1": 0.9})
        return dict(Offer(SPEC, optimizers=(OptimizerOffer(described),)).fingerprint())

    assert rows(0.1) == rows(0.05), "a callback had lowered it before the run was interrupted"
    schedules = [{"name": "CosineDecay", "config": {"decay_steps": n}} for n in (10, 20)]
    assert rows(schedules[0]) != rows(schedules[1])


ROW = json.loads(OFFER.to_json())["optimizers"][0]
SPEC_ROWS = [["a", [4, 3], "float32"], ["b", [3], "float32"]]


def test_several_optimizers_step_variables_of_their_own():
    bias, kernel = (
        OptimizerOffer(Described("SGD", {"learning_rate": 0.1}), paths=(path,))
        for path in ("dense/bias", "dense/kernel")
    )
    offer = Offer(SPEC, optimizers=(bias, kernel))
    assert read_offer(offer.to_json(), LIMIT) == offer
    assert offer.groups() == [(1,), (0,)]
    assert OFFER.groups() == [(0, 1)]
    assert Offer(SPEC).groups() == []


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("", "cannot be read"),
        ("[]", "cannot be read"),
        ("[" * 100_000, "RecursionError"),
        ("1" * 5000, "cannot be read"),
        (changed(format=1), "format 1"),
        (changed(spec=[]), "no variables"),
        (changed(spec=[SPEC_ROWS[0]] * 2), "each path once"),
        (changed(spec=[["a", [0], "float32"]]), "at least one value"),
        (changed(spec=[["a", [4], "float64"]]), "expected float32"),
        (changed(spec=[["a", [-4], "float32"]]), "whole number"),
        (changed(spec=[["a", [1.5], "float32"]]), "whole number"),
        (changed(spec=[["a", [True], "float32"]]), "whole number"),
        (changed(spec=[["a", [1] * 33, "float32"]]), "invalid shape"),
        (changed(spec=[["a", [1 << 31], "float32"]]), "invalid shape"),
        (changed(spec=[["a", [1 << 30, 1 << 30], "float32"]]), "invalid shape"),
        (changed(spec=[["a\nb", [4], "float32"]]), "printable"),
        (changed(spec=[["\ud800", [4], "float32"]]), "cannot be read"),
        (changed(spec=[["a" * 1001, [4], "float32"]]), "printable"),
        (
            changed(spec=[[f"v{number}", [], "float32"] for number in range(MAX_VARIABLES + 1)]),
            f"more than {MAX_VARIABLES}",
        ),
        (changed(spec=[["a", [1 << 20], "float32"]]), "--max_model_bytes"),
        (changed(statistics=1 << 40), "--max_model_bytes"),
        (changed(statistics=-1), "whole number"),
        (changed(unused=["nowhere"]), "'nowhere' is no variable"),
        (changed(unused="dense/bias"), "no variable"),
        (changed(constraints={"nowhere": {"name": "NonNeg", "config": {}}}), "no variable"),
        (changed(constraints={"dense/bias": "NonNeg"}), "cannot be read"),
        (changed(optimizers=[{"optimizer": {"name": "SGD", "config": []}}]), "cannot be read"),
        (changed(optimizers=[ROW] * 65), "at most 64"),
        (changed(optimizers=[ROW] * 2), "no variables"),
        (changed(optimizers=[ROW | {"paths": ["nowhere"]}]), "'nowhere' is no variable"),
        (changed(optimizers=[ROW | {"paths": ["dense/bias"]}]), "no optimizer or several"),
        (
            changed(optimizers=[ROW | {"paths": ["dense/bias", "dense/kernel"]}] * 2),
            "no optimizer or several",
        ),
        (changed(loss_scale={"initial": float("nan"), "growth_steps": 1}), "loss_scale"),
        (changed(loss_scale={"initial": 1.0, "growth_steps": 0}), "loss_scale"),
        (changed(num_examples=1 << 62), "whole number"),
        (changed(script_optimizer=7), "expected text"),
        (" " * (MAX_DOCUMENT_BYTES + 1), "at most"),
    ],
)
def test_a_lie_is_refused(document, words):
    with pytest.raises(ConfigurationError, match=words):
        read_offer(document, LIMIT)
