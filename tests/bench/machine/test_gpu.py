"""The device check of all ops runs on the processor too and reports each wrong op."""

import dataclasses

import numpy as np
import pytest

from bench.machine import gpu
from thinwire.ops.kernels import device, tensorflow_ops, tensorflow_select

SIZE = 5_000


def test_every_body_is_measured_and_equal():
    measured = list(gpu.measure("/CPU:0", SIZE))
    assert {each.name: each.error for each in measured} == dict.fromkeys(
        (each.name for each in measured), ""
    )
    assert all(each.seconds > 0 and each.share > 0 for each in measured)
    bodies = {op.body for op in gpu.ops(SIZE)}
    modules = (device, tensorflow_ops, tensorflow_select)
    found = (each for module in modules for each in vars(module).values())
    assert bodies == {each for each in found if hasattr(each, "python_function")}


@pytest.mark.parametrize("name", ["put", "to_int8", "contribution"])
def test_what_differs_is_told(name):
    (op,) = (each for each in gpu.ops(SIZE) if each.name == name)
    wrong = [np.array(each) for each in op.expected]
    wrong[-1].flat[3] += 2
    assert "differs by up to" in gpu.difference(op, wrong)
    cut = dataclasses.replace(op, expected=[each[:-1] for each in op.expected])
    assert "shape" in gpu.difference(cut, op.expected)
